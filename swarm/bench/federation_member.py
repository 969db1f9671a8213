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

from swarm import event_loop
from swarm.backbone.assembly import BackboneConfig, open_backbone
from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.prepared import prepare_model
from swarm.bench.standard_input import standard_input
from swarm.errors import SwarmError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.registry.client import parse_registry
from swarm.wire.rows import parse_wire

COVER_TIMEOUT_S = 60.0
N_PROMPT = 16  # tokens before those that are decoded
N_DECODED = 1500  # tokens of one answer; then another begins
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """How a member is started; paths are text, for it travels as JSON.

    Attributes:
        port: its UDP port, so that the emulator knows it.
        n_streams: sequences at once, each on an engine of its own, all over one dispatcher.
        allowed_peers: the node ids of the only peers to use; empty: all.
    """

    registry: str
    folder: str
    model: str
    wire: str
    port: int
    phase: str
    n_streams: int
    n_prompt_tokens: int
    allowed_peers: tuple[str, ...] = ()


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
            allowed_peers=frozenset(map(NodeId.parse, options.allowed_peers)) if options.allowed_peers else None,
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


class _Stream:
    """One sequence, or one prompt after another, on an engine of its own."""

    def __init__(self, engine: Engine, n_prompt_tokens: int, seed: int) -> None:
        self._engine = engine
        self._n_prompt_tokens = n_prompt_tokens
        self._rng = np.random.default_rng(seed)
        self._answer: Continuation | None = None
        self._n_left = 0

    async def prepare(self, phase: str) -> None:
        """Compute the prompt of what is decoded, unless an answer is under way."""
        if phase == "decode" and not self._n_left:
            self._answer = await self._prompted(N_PROMPT)
            await self._answer.first()
            self._n_left = N_DECODED

    async def work(self, job: Job) -> list[Step]:
        """Do a job; its last step ends after its time is over."""
        steps: list[Step] = []
        while time.monotonic() < job.until:
            began = time.monotonic()
            if job.phase == "prefill":
                await self._prompted(self._n_prompt_tokens)
                self._answer, self._n_left = None, 0  # the engine's cache holds the prompt now
                n_tokens = self._n_prompt_tokens
            else:
                await self.prepare("decode")
                assert self._answer is not None
                n_tokens = len(await self._answer.step(1))
                self._n_left -= 1
            steps.append(Step(n_tokens=n_tokens, began=began, ended=time.monotonic()))
        return steps

    async def _prompted(self, n_tokens: int) -> Continuation:
        engine = self._engine
        continuation = Continuation(
            engine, lambda row: int(engine.context.logits(row).argmax()), n_batch=max(512, self._n_prompt_tokens)
        )
        await continuation.start([int(token) for token in self._rng.integers(1, engine.model.n_vocab, n_tokens)])
        return continuation


async def _serve(options: MemberOptions) -> None:
    reader = await standard_input()
    async with _engines(options) as engines:
        streams = [_Stream(engine, options.n_prompt_tokens, SEED + index) for index, engine in enumerate(engines)]
        await asyncio.gather(*(stream.prepare(options.phase) for stream in streams))
        print(json.dumps({"event": "ready"}), flush=True)
        while line := await reader.readline():
            job = Job(**json.loads(line))
            found = await asyncio.gather(*(stream.work(job) for stream in streams), return_exceptions=True)
            steps = [asdict(step) for each in found if isinstance(each, list) for step in each]
            errors = [str(each) for each in found if isinstance(each, SwarmError)]
            for each in found:
                if isinstance(each, BaseException) and not isinstance(each, SwarmError):
                    raise each
            print(json.dumps({"steps": steps, "errors": errors}), flush=True)


def main() -> None:
    """Run a member; its options are the first argument."""
    options = MemberOptions(**json.loads(sys.argv[1]))
    event_loop.run(_serve(options))


if __name__ == "__main__":
    main()
