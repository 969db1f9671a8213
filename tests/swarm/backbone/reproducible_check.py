"""Run in a process of its own, with exact kernels: conversations that take turns on fewer slots, against stock llama.cpp.

Arguments: a folder to work in, conversations, slots, rounds, then model files. Prints as JSON, for each model,

    shared          slots share a lane, as `swarm serve` has it: stock llama.cpp makes the very steps that the lane made, with the
                    whole file. How many rows of logits have the same bits?
    reproducible    a lane for each slot, and steps of a reproducible shape: stock llama.cpp computes each answer in a fresh
                    context, in chunks of other lengths. How many answers are the same tokens?
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.generate import Backbone, ServingConfig
from swarm.backbone.requests import GenerationRequest, SamplingParams
from swarm.native import library
from swarm.native.llama import LlamaContext, LlamaModel
from tests.swarm.backbone.local_experts import LocalExperts, SplitModel, split

CONFIG = EngineConfig(n_ctx=512, n_batch=128, n_ubatch=128, n_threads=1, exact_kernels=True)
# Tokens of what all begin with, of a question, of an answer. The first is longer than a step may be.
N_SYSTEM, N_ASKED, N_ANSWERED = 90, 5, 6
SYSTEM = tuple(range(500, 500 + N_SYSTEM))
CACHE_BYTES = 64 << 20

Tokens = tuple[int, ...]
Op = tuple[str, tuple[Any, ...], Any]


class AlwaysComplete:
    """The holders of a swarm in which nothing is ever missing."""

    def missing(self) -> dict[int, tuple[int, ...]]:
        return {}


class Recorder:
    """Notes everything that a lane does with its context, and what came of it; makes it again in another."""

    def __init__(self, context: LlamaContext) -> None:
        self.ops: list[Op] = []
        for name in ("decode_parts", "remove", "copy", "save", "restore"):
            setattr(context, name, self._noting(name, getattr(context, name), context))

    def _noting(self, name: str, call: Callable[..., Any], context: LlamaContext) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            found = call(*arguments)
            self.ops.append((name, arguments, context.all_logits() if name == "decode_parts" else found))
            return found

        return noting

    def make_again(self, context: LlamaContext) -> list[int]:
        """Return how many rows of logits there were, and how many of them differ in some bit."""
        saved: dict[int, npt.NDArray[np.uint8]] = {}
        n_rows = n_different = 0
        for name, arguments, found in self.ops:
            if name == "decode_parts":
                context.decode_parts(arguments[0])
                rows = context.all_logits()
                n_rows += len(rows)
                n_different += int((rows.view(np.uint32) != found.view(np.uint32)).any(axis=1).sum())
            elif name == "save":
                saved[id(found)] = context.save(*arguments)
            elif name == "restore":
                assert context.restore(arguments[0], saved[id(arguments[1])]) == found
            else:
                assert getattr(context, name)(*arguments) == found
        return [n_rows, n_different]


@contextlib.asynccontextmanager
async def opened(
    model: SplitModel, experts: LocalExperts, n_lanes: int, n_sequences: int
) -> AsyncIterator[list[Engine]]:
    """Yield engines over one set of weights."""
    lanes: list[Engine] = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(n_lanes):
            shares = lanes[0] if lanes else None
            config = replace(CONFIG, n_sequences=n_sequences)
            lanes.append(Engine(model.backbone, model.spec, config, experts, shares=shares))
            await lanes[-1].start()
            stack.push_async_callback(lanes[-1].close)
        yield lanes


async def converse(
    backbone: Backbone, fresh: Callable[[Tokens], list[int]], piece: Callable[[int], bytes], n_talks: int, n_rounds: int
) -> list[int]:
    """Return how many answers were asked for, and how many of them are not a fresh context's.

    Each conversation asks once in a round, all of them at once, and goes on from the fresh context's answer.
    """
    rng = np.random.default_rng(8)

    def question() -> Tokens:
        return tuple(rng.integers(1, 2000, N_ASKED).tolist())

    async def answer(prompt: Tokens) -> list[bytes]:
        request = GenerationRequest(
            prompt=prompt, max_tokens=N_ANSWERED, sampling=SamplingParams(temperature=0), n_logprobs=0
        )
        return [entry.piece async for delta in backbone.generate(request) for entry in delta.logprobs]

    talks = [SYSTEM + question() for _ in range(n_talks)]
    n_different = 0
    for _ in range(n_rounds):
        answers = await asyncio.gather(*map(answer, talks))
        truths = [fresh(talk) for talk in talks]
        for pieces, truth in zip(answers, truths, strict=True):
            n_different += pieces != [piece(token) for token in truth][: len(pieces)]
        talks = [talk + tuple(truth) + question() for talk, truth in zip(talks, truths, strict=True)]
    stats = backbone.stats
    n_seen = stats.n_prompt_tokens - n_talks * (N_SYSTEM + n_rounds * N_ASKED)
    assert stats.n_kept_tokens > 0.8 * n_seen, "what was computed before was computed again: nothing is compared here"
    return [n_talks * n_rounds, n_different]


def fresh_answer(context: LlamaContext, prompt: Tokens, rng: np.random.Generator) -> list[int]:
    """Return a greedy answer in an empty context, read in chunks of random lengths, each token with the one before it."""
    context.clear()
    at = 0
    while at < len(prompt):
        n = min(int(rng.integers(2, 63)), len(prompt) - at)
        n += len(prompt) - at - n == 1  # no row stays alone
        context.decode(prompt[at : at + n], first_position=at, logits="all")
        at += n
    tokens = list(prompt)
    for _ in range(N_ANSWERED):
        tokens.append(int(context.logits(-1).argmax()))
        context.remove(0, len(tokens) - 2)
        context.decode(tokens[-2:], first_position=len(tokens) - 2, logits="all")
    return tokens[len(prompt) :]


async def check(path: Path, folder: Path, n_talks: int, n_slots: int, n_rounds: int) -> dict[str, Any]:
    model = split(path, folder)
    experts = LocalExperts(model)
    sizes = {name: getattr(CONFIG, name) for name in ("n_batch", "n_ubatch", "n_threads")}
    found: dict[str, Any] = {}
    with LlamaModel(path, exact_kernels=True) as stock:

        def piece(token: int) -> bytes:
            return stock.piece(token, special=True)

        with LlamaContext(stock, n_ctx=CONFIG.n_ctx, **sizes) as context:
            rng = np.random.default_rng(1)

            def fresh(prompt: Tokens) -> list[int]:
                return fresh_answer(context, prompt, rng)

            for name, n_lanes in (("shared", 1), ("reproducible", n_slots)):
                serving = ServingConfig(cache_bytes=CACHE_BYTES, is_reproducible=name == "reproducible")
                async with opened(model, experts, n_lanes, n_slots // n_lanes) as lanes:
                    recorders = [await lane.call(lambda lane=lane: Recorder(lane.context)) for lane in lanes]  # type: ignore[misc]
                    backbone = Backbone(
                        lanes,
                        AlwaysComplete(),  # type: ignore[arg-type]
                        "check@00000000",
                        n_slots=n_slots // n_lanes,
                        config=serving,
                    )
                    async with backbone:
                        answers = await converse(backbone, fresh, piece, n_talks, n_rounds)
                found[name] = {"answers": answers}
                if name == "shared":
                    size = CONFIG.n_ctx * n_slots
                    with LlamaContext(stock, n_ctx=size, n_seq_max=n_slots, **sizes) as again:
                        found[name]["rows"] = recorders[0].make_again(again)
    return found


async def main(folder: Path, sizes: Sequence[int], paths: Sequence[Path]) -> None:
    print(json.dumps({path.stem: await check(path, folder, *sizes) for path in paths}))


if __name__ == "__main__":
    library.use_exact_kernels()
    asyncio.run(main(Path(sys.argv[1]), [int(each) for each in sys.argv[2:5]], [Path(each) for each in sys.argv[5:]]))
