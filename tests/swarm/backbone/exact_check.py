"""Run in a process of its own, with exact kernels: prints as JSON what must be bit-identical to stock llama.cpp.

Arguments: a folder to work in, then model files. The experts are computed here, in one slice of the whole file.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.generate import Backbone
from swarm.backbone.requests import GenerationRequest, SamplingParams
from swarm.backbone.stock import StockModel
from swarm.native import library
from swarm.native.llama import LlamaContext, LlamaModel
from tests.swarm.backbone.local_experts import LocalExperts, SplitModel, split

# n_ubatch is below the longest prompt: it arrives as three graphs, the last of them short.
CONFIG = EngineConfig(n_ctx=400, n_batch=384, n_ubatch=128, n_threads=1, exact_kernels=True)
N_DECODED = 20


class AlwaysComplete:
    """The holders of a swarm in which nothing is ever missing."""

    def missing(self) -> dict[int, tuple[int, ...]]:
        return {}


async def compare(model: SplitModel, engine: Engine, stock: StockModel, n_prompt: int) -> dict[str, Any]:
    """Return how many rows were compared, and how many differ in some bit, in prefill and in decode."""
    rng = np.random.default_rng(n_prompt)
    tokens = rng.integers(1, stock.n_vocab, n_prompt).tolist()
    await engine.call(engine.context.clear)
    stock.clear()
    counts = {"prefill": [0, 0], "decode": [0, 0]}
    position = 0
    for step in range(1 + N_DECODED):
        await engine.call(functools.partial(engine.decode, tokens, position, "all"))
        ours = await engine.call(engine.context.all_logits)
        theirs = stock.logits(tokens, position)
        assert ours.shape == theirs.shape
        count = counts["prefill" if step == 0 else "decode"]
        count[0] += len(ours)
        count[1] += int((ours.view(np.uint32) != theirs.view(np.uint32)).any(axis=1).sum())
        position += len(tokens)
        tokens = [int(theirs[-1].argmax())]
    return counts


async def last_row_differs(path: Path, engine: Engine) -> bool:
    """Return whether the last row differs in some bit when only its logits are asked for: T shrinks in the last layer."""
    tokens = np.random.default_rng(9).integers(1, engine.model.n_vocab, 300).tolist()
    await engine.call(engine.context.clear)
    await engine.call(lambda: engine.decode(tokens, 0, "last"))
    ours = await engine.call(lambda: engine.context.logits(-1))
    sizes = {name: getattr(CONFIG, name) for name in ("n_ctx", "n_batch", "n_ubatch", "n_threads")}
    with LlamaModel(path, exact_kernels=True) as model, LlamaContext(model, **sizes) as context:
        context.decode(tokens, first_position=0, logits="last")  # fewer rows take other kernels: asked for alike
        theirs = context.logits(-1)
    return bool((ours.view(np.uint32) != theirs.view(np.uint32)).any())


async def greedy(engine: Engine, stock: StockModel, n_tokens: int) -> dict[str, Any]:
    """Return a greedy answer of our generator and of stock llama.cpp, as bytes in hex."""
    prompt = np.random.default_rng(7).integers(1, stock.n_vocab, 50).tolist()
    request = GenerationRequest(
        prompt=tuple(prompt), max_tokens=n_tokens, sampling=SamplingParams(temperature=0), stop=()
    )
    async with Backbone(engine, AlwaysComplete(), "check@00000000") as backbone:  # type: ignore[arg-type]
        ours = "".join([delta.text async for delta in backbone.generate(request)])
    stock.clear()
    pieces, tokens, position = [], prompt, 0
    for _ in range(n_tokens):
        token = int(stock.logits(tokens, position)[-1].argmax())
        if engine.model.is_end_of_generation(token):
            break
        pieces.append(engine.model.piece(token))
        position += len(tokens)
        tokens = [token]
    return {"ours": ours, "stock": b"".join(pieces).decode(errors="replace")}


async def check(path: Path, folder: Path) -> dict[str, Any]:
    model = split(path, folder)
    experts = LocalExperts(model)
    engine = Engine(model.backbone, model.spec, CONFIG, experts)
    await engine.start()
    try:
        with StockModel(path, CONFIG) as stock:
            result: dict[str, Any] = {str(n): await compare(model, engine, stock, n) for n in (1, 37, 300)}
            result["n_assignments"] = sum(call.ids.size for call in experts.calls)
            result["n_layers"] = len(model.spec.moe_layers)
            result["last_differs"] = await last_row_differs(path, engine)
            result["greedy"] = await greedy(engine, stock, 60)
            experts.reset()
            await compare(model, engine, stock, 37)
            first = experts.calls[0]
            # A weight of the down projection: one before the activation can vanish in the requantised hidden row.
            experts.ffn.flip_byte(first.layer, int(first.ids[0, 0]), 20)
            result["after_a_flip"] = await compare(model, engine, stock, 37)
        return result
    finally:
        await engine.close()


async def main(folder: Path, paths: list[Path]) -> None:
    print(json.dumps({path.stem: await check(path, folder) for path in paths}))


if __name__ == "__main__":
    library.use_exact_kernels()
    asyncio.run(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
