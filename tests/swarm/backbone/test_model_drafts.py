"""A smaller model that drafts: here the same model, whose drafts must then be what the backbone says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from swarm.backbone.continuation import Continuation
from swarm.backbone.drafting import Drafting
from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.model_drafts import DraftModel
from swarm.errors import UserError
from swarm.native.llama import LlamaModel
from tests.swarm.backbone.local_experts import LocalExperts, SplitModel
from tests.synthetic_moe import write_synthetic_moe

CONFIG = EngineConfig(n_ctx=128, n_batch=64, n_ubatch=64, n_threads=1)
PROMPT = list(range(60, 90))


@pytest_asyncio.fixture
async def engine(tiny: SplitModel, experts: LocalExperts) -> AsyncIterator[Engine]:
    engine = Engine(tiny.backbone, tiny.spec, CONFIG, experts)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def model(tiny_moe: Path) -> Iterator[DraftModel]:
    with DraftModel(tiny_moe / "model-Q8_0.gguf") as model:
        yield model


async def greedy(engine: Engine, n: int, **options: object) -> tuple[list[int], Continuation]:
    continuation = Continuation(
        engine,
        lambda row: int(engine.context.logits(row).argmax()),
        n_batch=64,
        **options,  # type: ignore[arg-type]
    )
    await continuation.start(PROMPT)
    return [token async for token in continuation.tokens(n)], continuation


async def test_its_drafts_are_accepted_where_it_says_the_same(engine: Engine, model: DraftModel) -> None:
    expected, _ = await greedy(engine, 30)
    tokens, continuation = await greedy(engine, 30, n_draft=6, drafter=model.drafter(engine, 0))
    assert tokens == expected
    assert continuation.stats.accept_length > 5


async def test_it_goes_on_from_what_was_drawn_instead_of_its_drafts(engine: Engine, model: DraftModel) -> None:
    drafter = model.drafter(engine, 0)
    first = drafter.propose(PROMPT, 4)
    other = [*PROMPT, first[0], (first[1] + 1) % 200, 77]
    fresh = model.drafter(engine, 0)
    fresh._known.clear()
    expected = fresh.propose(other, 4)
    again = model.drafter(engine, 0)
    assert again.propose(PROMPT, 4) == first
    assert again.propose(other, 4) == expected
    assert again.propose(other[:-1], 2) is not None
    assert again.propose(other, 4) == expected, "a step was rolled back"


async def test_no_draft_is_longer_than_asked_or_than_there_is_room(engine: Engine, model: DraftModel) -> None:
    drafter = model.drafter(engine, 0)
    assert drafter.propose(PROMPT, 0) == []
    assert len(drafter.propose(PROMPT, 3)) <= 3
    long = (PROMPT * 20)[: drafter._context.n_ctx - 2]
    assert len(drafter.propose(long, 10)) <= 2


async def test_it_may_be_one_of_several_drafters(engine: Engine, model: DraftModel) -> None:
    drafting = Drafting(6, model=model)
    expected, _ = await greedy(engine, 40)
    for _ in range(2):  # what the first has learned, the second knows
        tokens, _ = await greedy(engine, 40, n_draft=6, drafter=drafting(engine, 0))
        assert tokens == expected
    assert drafting.experience(engine).costs["model"].token_s > 0


async def test_another_vocabulary_is_refused(engine: Engine, model: DraftModel, tmp_path: Path) -> None:
    model.require_same_vocabulary(engine.model)
    path = write_synthetic_moe(tmp_path / "other.gguf", architecture="qwen3moe", n_layers=1, seed=1)
    with LlamaModel(path) as other, pytest.raises(UserError, match="another vocabulary"):
        model.require_same_vocabulary(other)
