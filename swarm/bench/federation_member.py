"""One backbone of a federation, in a process of its own: decodes or reads prompts without end for as long as it is told.

`python -m swarm.bench.federation_member JSON` prints one line when every expert has a holder. Then each line of its standard
input is a job, and each line of its output that job's steps; it ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from swarm.backbone.assembly import BackboneConfig, open_backbone
from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.prepared import prepare_model
from swarm.errors import SwarmError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.registry.client import parse_registry
from swarm.wire.rows import parse_wire

COVER_TIMEOUT_S = 60.0
N_PROMPT = 16  # tokens before those that are decoded
N_DECODED = 64  # tokens of one answer; then another begins
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """How a member is started; paths are text, for it travels as JSON.

    Attributes:
        port: its UDP port, so that the emulator knows it.
        n_streams: sequences at once, each on an engine of its own, all over one dispatcher.
    """

    registry: str
    folder: str
    model: str
    wire: str
    port: int
    n_streams: int
    n_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to do, and until when by `time.monotonic()`."""

    phase: str  # "decode" or "prefill"
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's tokens and time, seconds of `time.monotonic()`."""

    n_tokens: int
    began: float
    ended: float


@contextlib.asynccontextmanager
async def _engines(options: MemberOptions) -> AsyncIterator[list[Engine]]:
    """Yield an engine for each stream, once every expert has a holder."""
    config = EngineConfig(
        n_ctx=max(options.n_prompt_tokens, N_PROMPT + N_DECODED) + 1,
        n_batch=max(512, options.n_prompt_tokens),
        n_ubatch=max(512, options.n_prompt_tokens),
    )
    folders = Folders.below(Path(options.folder))
    with await asyncio.to_thread(prepare_model, Path(options.model), folders) as prepared:
        backbone = BackboneConfig(
            registry=parse_registry(options.registry),
            folders=folders,
            model_file=Path(options.model),
            wire=parse_wire(options.wire),
            host="127.0.0.1",
            port=options.port,
            engine=config,
            shares_histogram=False,
        )
        async with (
            open_backbone(backbone, Identity.generate(), prepared=prepared) as running,
            contextlib.AsyncExitStack() as stack,
        ):
            await running.holders.wait_complete(COVER_TIMEOUT_S)
            engines = [running.engine]
            for _ in range(options.n_streams - 1):
                engine = Engine(
                    prepared.backbone_path, prepared.manifest.spec, config, running.dispatcher, shares=running.engine
                )
                await engine.start()
                stack.push_async_callback(engine.close)
                engines.append(engine)
            yield engines


async def _work(engine: Engine, job: Job, n_prompt_tokens: int, seed: int) -> list[Step]:
    """Do a job on one engine; the last step ends after its time is over."""
    steps: list[Step] = []
    rng = np.random.default_rng(seed)

    def prompt(n_tokens: int) -> list[int]:
        return [int(token) for token in rng.integers(1, engine.model.n_vocab, n_tokens)]

    def note(n_tokens: int, began: float) -> None:
        steps.append(Step(n_tokens=n_tokens, began=began, ended=time.monotonic()))

    while time.monotonic() < job.until:
        continuation = Continuation(
            engine, lambda row: int(engine.context.logits(row).argmax()), n_batch=max(512, n_prompt_tokens)
        )
        tokens = prompt(n_prompt_tokens if job.phase == "prefill" else N_PROMPT)
        began = time.monotonic()
        await continuation.start(tokens)
        if job.phase == "prefill":
            note(len(tokens), began)
            continue
        await continuation.first()
        for _ in range(N_DECODED - 1):
            if time.monotonic() >= job.until:
                break
            began = time.monotonic()
            note(len(await continuation.step(1)), began)
    return steps


async def _serve(options: MemberOptions) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with _engines(options) as engines:
        print(json.dumps({"event": "ready"}), flush=True)
        while line := await reader.readline():
            job = Job(**json.loads(line))
            found = await asyncio.gather(
                *(_work(engine, job, options.n_prompt_tokens, SEED + index) for index, engine in enumerate(engines)),
                return_exceptions=True,
            )
            steps = [asdict(step) for each in found if isinstance(each, list) for step in each]
            errors = [str(each) for each in found if isinstance(each, SwarmError)]
            for each in found:
                if isinstance(each, BaseException) and not isinstance(each, SwarmError):
                    raise each
            print(json.dumps({"steps": steps, "errors": errors}), flush=True)


def main() -> None:
    """Run a member; its options are the first argument."""
    options = MemberOptions(**json.loads(sys.argv[1]))
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(options))
    else:
        uvloop.run(_serve(options))


if __name__ == "__main__":
    main()
