"""Drafts by local experts: they ask nobody, follow what is kept, and leave the sequence's memory as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from swarm.architectures.generator import Variant, write_model
from swarm.architectures.recipes import RECIPES
from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.local_drafts import LocalDrafter, Memory
from swarm.backbone.local_experts import LocalExperts
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from tests.swarm.backbone.local_experts import LocalExperts as AllExperts
from tests.swarm.backbone.local_experts import SplitModel, split

CONFIG = EngineConfig(n_ctx=128, n_batch=64, n_ubatch=64, n_threads=1, exact_kernels=False)
PROMPT = "The json module is used to read and write"


@pytest_asyncio.fixture
async def engine(tiny: SplitModel, experts: AllExperts) -> AsyncIterator[Engine]:
    engine = Engine(tiny.backbone, tiny.spec, CONFIG, experts)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def keep(tiny: SplitModel) -> Iterator[Callable[[ExpertSet], LocalExperts]]:
    kept: list[LocalExperts] = []
    with GgufFile(tiny.file) as file:
        source = GgufSource(file)

        def make(experts: ExpertSet) -> LocalExperts:
            kept.append(LocalExperts(tiny.spec))
            kept[-1].change(experts, source.read_block)
            return kept[-1]

        yield make
        for each in kept:
            each.close()


async def begun(engine: Engine) -> list[int]:
    """Return the prompt's tokens, all but the last of which are computed."""
    tokens = engine.model.tokenize(PROMPT, add_special=True, parse_special=False)
    await engine.call(lambda: engine.decode(tokens[:-1], 0, "none"))
    return tokens


async def greedy(engine: Engine, tokens: list[int], n: int) -> list[int]:
    """Return what the whole model says."""
    drawn: list[int] = []
    for position in range(len(tokens) - 1, len(tokens) - 1 + n):
        token = [*tokens, *drawn][-1]
        await engine.call(lambda token=token, position=position: engine.decode([token], position))  # type: ignore[misc]
        drawn.append(int((await engine.call(lambda: engine.context.logits(-1))).argmax()))
    return drawn


async def propose(drafter: LocalDrafter, engine: Engine, tokens: list[int], n: int) -> list[int]:
    return await engine.call(lambda: drafter.propose(tokens, n))


async def test_with_all_experts_here_it_says_what_the_model_says_and_asks_nobody(
    engine: Engine, experts: AllExperts, tiny: SplitModel, keep: Any
) -> None:
    tokens = await begun(engine)
    experts.reset()
    drafter = LocalDrafter(engine, 0, keep(tiny.spec.all_experts), least_reach=0.0)
    drafts = await propose(drafter, engine, tokens, 6)
    assert experts.calls == []
    assert drafts == await greedy(engine, tokens, 6)
    assert len(experts.calls) == 6 * len(tiny.spec.moe_layers), "the usual experts are asked again"


@pytest.mark.parametrize("n_kept", [4, 8, 16])
async def test_the_router_takes_only_what_is_kept(
    engine: Engine, tiny: SplitModel, keep: Any, n_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(n_kept)
    kept = ExpertSet(
        {layer: frozenset(rng.permutation(tiny.spec.n_expert)[:n_kept].tolist()) for layer in tiny.spec.moe_layers}
    )
    local = keep(kept)
    chosen: list[tuple[int, set[int]]] = []
    compute = local.compute_choice

    def watched(layer: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        chosen.append((layer, set(ids.ravel().tolist())))
        return compute(layer, x, ids, weights)  # type: ignore[no-any-return]

    monkeypatch.setattr(local, "compute_choice", watched)
    tokens = await begun(engine)
    drafts = await propose(LocalDrafter(engine, 0, local, least_reach=0.0), engine, tokens, 5)
    assert len(drafts) == 5
    assert len(chosen) == 5 * len(tiny.spec.moe_layers)
    for layer, ids in chosen:
        assert ids <= kept.by_layer[layer]


async def test_the_sequence_goes_on_as_if_nothing_had_been_drafted(engine: Engine, tiny: SplitModel, keep: Any) -> None:
    tokens = await begun(engine)
    expected = await greedy(engine, tokens, 8)
    await engine.call(engine.context.clear)
    await begun(engine)
    drafter = LocalDrafter(engine, 0, keep(ExpertSet.of(tiny.spec.moe_layers, range(8))), least_reach=0.0)
    for _ in range(3):
        assert len(await propose(drafter, engine, tokens, 7)) == 7
    assert await greedy(engine, tokens, 8) == expected


async def test_it_drafts_no_further_than_there_is_room_and_than_it_is_sure(
    engine: Engine, tiny: SplitModel, keep: Any
) -> None:
    tokens = await begun(engine)
    local = keep(tiny.spec.all_experts)
    room = engine.context.n_ctx - len(tokens)
    sure = LocalDrafter(engine, 0, local, least_reach=0.0)
    assert len(await propose(sure, engine, tokens, 10_000)) <= room
    assert await propose(sure, engine, tokens, 0) == []
    assert await propose(LocalDrafter(engine, 0, local, least_reach=1.01), engine, tokens, 8) == []


async def test_with_too_few_experts_it_says_nothing(
    engine: Engine, experts: AllExperts, tiny: SplitModel, keep: Any
) -> None:
    tokens = await begun(engine)
    few = ExpertSet.of(tiny.spec.moe_layers, range(tiny.spec.n_expert_used - 1))
    experts.reset()
    assert await propose(LocalDrafter(engine, 0, keep(few)), engine, tokens, 8) == []
    one_layer = ExpertSet.of(tiny.spec.moe_layers[:1], range(20))
    assert await propose(LocalDrafter(engine, 0, keep(one_layer)), engine, tokens, 8) == []
    assert experts.calls == []


async def test_a_memory_that_cannot_forget_is_put_back_and_drafts_no_more(
    engine: Engine, tiny: SplitModel, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = await begun(engine)
    expected = await greedy(engine, tokens, 4)
    await engine.call(engine.context.clear)
    await begun(engine)
    remove = engine.context.remove
    monkeypatch.setattr(
        engine.context, "remove", lambda sequence, position: position == 0 and remove(sequence, position)
    )
    local, memory = keep(tiny.spec.all_experts), Memory()
    drafter = LocalDrafter(engine, 0, local, memory=memory, least_reach=0.0)
    assert await propose(drafter, engine, tokens, 4) == []
    assert memory.can_forget is False
    monkeypatch.undo()
    again = LocalDrafter(engine, 0, local, memory=memory)
    assert await propose(again, engine, tokens, 4) == [], "no sequence of this engine tries again"
    assert await greedy(engine, tokens, 4) == expected


async def test_a_hybrid_model_gets_its_state_back_and_no_drafts(tmp_path: Path) -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.architecture == "qwen3next")
    write_model(tmp_path / "hybrid.gguf", recipe, Variant(name="plain"))
    model = split(tmp_path / "hybrid.gguf", tmp_path)
    experts = AllExperts(model)
    engine = Engine(model.backbone, model.spec, CONFIG, experts)
    await engine.start()
    try:
        tokens = list(range(5, 25))
        await engine.call(lambda: engine.decode(tokens[:-1], 0, "none"))
        expected = await greedy(engine, tokens, 4)
        await engine.call(engine.context.clear)
        await engine.call(lambda: engine.decode(tokens[:-1], 0, "none"))
        with GgufFile(model.file) as file:
            local, memory = LocalExperts(model.spec), Memory()
            local.change(model.spec.all_experts, GgufSource(file).read_block)
        drafter = LocalDrafter(engine, 0, local, memory=memory, least_reach=0.0)
        assert await propose(drafter, engine, tokens, 4) == []
        assert memory.can_forget is False
        assert await greedy(engine, tokens, 4) == expected
        local.close()
    finally:
        await engine.close()
        experts.ffn.close()


async def test_it_says_how_likely_it_thinks_each_token_and_all_before_it(
    engine: Engine, tiny: SplitModel, keep: Any
) -> None:
    tokens = await begun(engine)
    drafter = LocalDrafter(engine, 0, keep(tiny.spec.all_experts), least_reach=0.0)
    drafts = await propose(drafter, engine, tokens, 6)
    assert len(drafter.reaches) == len(drafts) == 6
    assert drafter.reaches == sorted(drafter.reaches, reverse=True)
    assert 0 < drafter.reaches[-1] < drafter.reaches[0] < 1
