"""Steps with drafts over a real engine with local experts. The draw is scripted where a test needs certain tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from swarm.architectures.generator import Variant, write_model
from swarm.architectures.recipes import RECIPES
from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.requests import SamplingParams
from swarm.errors import ExpertUnavailable
from swarm.native.llama import Sampler
from swarm.speculation.accept import DraftStats
from tests.swarm.backbone.local_experts import LocalExperts, SplitModel, split

N_BATCH = 64
CONFIG = EngineConfig(n_ctx=256, n_batch=N_BATCH, n_ubatch=N_BATCH, n_threads=1)
LOOP = [11, 12, 13, 14] * 3  # of which every step drafts 11, 12, 13, 14, 11, ...
N_LAYERS = 6
GONE = ExpertUnavailable(2, (4, 5), "no live peer holds them")
COPIED = "   * ``json.dumps()``, ``json.loads()``\n" * 3


@pytest_asyncio.fixture
async def engine(tiny: SplitModel, experts: LocalExperts) -> AsyncIterator[Engine]:
    engine = Engine(tiny.backbone, tiny.spec, CONFIG, experts)
    await engine.start()
    yield engine
    await engine.close()


def scripted(tokens: list[int]) -> Callable[[int], int]:
    """Return a draw of these tokens, one after the other, whatever the logits."""
    left: Iterator[int] = iter(tokens)
    return lambda row: next(left)


async def begun(engine: Engine, drawn: list[int], **options: Any) -> Continuation:
    """Return a continuation of LOOP that has drawn its first token and will draw the others."""
    continuation = Continuation(engine, scripted(drawn), n_batch=N_BATCH, **({"n_draft": 4} | options))
    await continuation.start(LOOP)
    await continuation.first()
    return continuation


def rows(experts: LocalExperts) -> list[int]:
    """Return the rows of each step after the prompt, as layer 0 saw them."""
    return [len(call.x) for call in experts.calls if call.layer == 0][1:]


async def next_logits(engine: Engine, tokens: list[int]) -> np.ndarray:
    """Return the logits after all these tokens, of which all but the last are in the cache."""
    await engine.call(lambda: engine.decode(tokens[-1:], len(tokens) - 1, "last"))
    return await engine.call(lambda: engine.context.logits(-1))


async def fresh_logits(engine: Engine, tokens: list[int]) -> np.ndarray:
    await engine.call(engine.context.clear)
    await engine.call(lambda: engine.decode(tokens[:-1], 0, "none"))
    return await next_logits(engine, tokens)


async def test_accepted_drafts_share_a_round_trip(engine: Engine, experts: LocalExperts) -> None:
    continuation = await begun(engine, [11, 12, 13, 14, 11, 12])
    assert await continuation.step(100) == [12, 13, 14, 11, 12]
    assert rows(experts) == [5]
    assert len(experts.calls) == 2 * N_LAYERS
    assert (continuation.stats.n_drafted, continuation.stats.n_accepted) == (4, 4)


@pytest.mark.parametrize("n_accepted", [0, 1, 3, 4])
async def test_after_a_refused_draft_the_cache_holds_what_was_drawn_and_no_more(
    engine: Engine, n_accepted: int
) -> None:
    drawn = [*[12, 13, 14, 11][:n_accepted], 99]
    continuation = await begun(engine, [11, *drawn])
    assert await continuation.step(100) == drawn
    tokens = [*LOOP, 11, *drawn]
    found = await next_logits(engine, tokens)
    np.testing.assert_allclose(found, await fresh_logits(engine, tokens), atol=0.05)  # kernels differ with the rows
    if n_accepted < 4:
        wrong = await fresh_logits(engine, [*LOOP, 11, 12, 13, 14, 11, 99])
        assert np.abs(found - wrong).max() > 0.5, "the comparison would not notice a draft that stayed"


@pytest.mark.parametrize("n_most", [1, 2, 4, 5, 100])
async def test_a_step_never_gives_more_than_there_is_room_for(
    engine: Engine, experts: LocalExperts, n_most: int
) -> None:
    continuation = await begun(engine, [11, 12, 13, 14, 11, 12])
    n = min(n_most, 5)
    assert await continuation.step(n_most) == [12, 13, 14, 11, 12][:n]
    assert rows(experts) == [n]


async def test_drafts_fit_the_batch_and_the_last_place_of_the_context(engine: Engine, experts: LocalExperts) -> None:
    continuation = Continuation(engine, lambda row: 7, n_batch=16, n_draft=1000)
    prompt = [7] * 200
    await continuation.start(prompt)
    room = engine.context.n_ctx - len(prompt)
    assert [token async for token in continuation.tokens(room)] == [7] * room
    sizes = [len(call.x) for call in experts.calls if call.layer == 0]
    assert max(sizes) == 16
    assert sum(sizes) == engine.context.n_ctx - 1, "every token but the last is computed once"


async def test_no_draft_goes_past_an_end_of_generation(engine: Engine, experts: LocalExperts) -> None:
    eos = engine.model.eos_token
    assert eos is not None
    continuation = Continuation(engine, scripted([12, 13, eos]), n_batch=N_BATCH, n_draft=4)
    await continuation.start([10, 11, 12, 13, eos, 15, 10, 11])
    await continuation.first()
    experts.reset()
    assert await continuation.step(100) == [13, eos]
    assert len(experts.calls[0].x) == 2  # 12 and the draft 13, not what once came after the end


async def test_text_that_does_not_repeat_costs_nothing(engine: Engine, experts: LocalExperts) -> None:
    continuation = Continuation(engine, scripted([20, 21, 22, 23]), n_batch=N_BATCH, n_draft=8)
    await continuation.start([1, 2, 3])
    assert [token async for token in continuation.tokens(4)] == [20, 21, 22, 23]
    assert rows(experts) == [1, 1, 1]
    assert continuation.stats.accept_length == 1.0


async def test_drafts_are_off_unless_asked_for(engine: Engine, experts: LocalExperts) -> None:
    continuation = await begun(engine, [11, 12], n_draft=0)
    assert await continuation.step(100) == [12]
    assert rows(experts) == [1]


async def test_a_failed_step_leaves_everything_as_it_was(engine: Engine, experts: LocalExperts) -> None:
    draws: list[int] = []

    def draw(row: int) -> int:
        draws.append(row)
        return [11, 12, 13, 14, 11, 12][len(draws) - 1]

    continuation = Continuation(engine, draw, n_batch=N_BATCH, n_draft=4)
    await continuation.start(LOOP)
    await continuation.first()
    experts.reset()

    def fail(number: int) -> None:
        if number == 3:
            raise GONE

    experts.at_result = fail
    with pytest.raises(ExpertUnavailable) as caught:
        await continuation.step(100)
    assert caught.value is GONE
    assert draws == [-1], "nothing may be drawn from a failed step: a seeded sampler would have moved"
    experts.reset()
    assert await continuation.step(100) == [12, 13, 14, 11, 12]  # the same drafts once more
    tokens = [*LOOP, 11, 12, 13, 14, 11, 12]
    np.testing.assert_allclose(await next_logits(engine, tokens), await fresh_logits(engine, tokens), atol=0.05)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.4, top_k=40, seed=3),
        SamplingParams(temperature=0.4, top_p=0.9, min_p=0.02, seed=4),
        SamplingParams(temperature=0.2, seed=5, frequency_penalty=0.05, presence_penalty=0.05),
    ],
    ids=["greedy", "top_k", "top_p", "penalties"],
)
async def test_the_text_is_the_same_token_for_token_with_and_without_drafts(
    engine: Engine, sampling: SamplingParams
) -> None:
    """Q8_0 kernels give one row and several the same logits, but for one row in sixty (docs/drafts.md): no near-tie here."""
    prompt = engine.model.tokenize(COPIED, add_special=True, parse_special=False)
    texts = []
    stats = DraftStats()
    for n_draft in (0, 6):
        with Sampler(sampling, engine.model.n_vocab) as sampler:
            continuation = Continuation(
                engine,
                lambda row, sampler=sampler: sampler.sample(engine.context, row),  # type: ignore[misc]
                n_batch=N_BATCH,
                n_draft=n_draft,
                stats=stats if n_draft else None,
            )
            await continuation.start(prompt)
            texts.append([token async for token in continuation.tokens(80)])
    assert texts[0] == texts[1]
    assert stats.n_accepted > 5, "drafts were hardly ever accepted: the test shows nothing"


class Recurrent:
    """An engine whose memory cannot forget a part; notes what is decoded."""

    def __init__(self) -> None:
        self.decoded: list[tuple[list[int], int]] = []
        self.context = SimpleNamespace(n_ctx=100, remove=self.remove)
        self.model = SimpleNamespace(is_end_of_generation=lambda token: False)

    async def call(self, step: Callable[[], Any]) -> Any:
        return step()

    def remove(self, sequence: int, position: int) -> bool:
        if position == 0:
            self.decoded.clear()
        return position == 0

    def decode(self, tokens: list[int], position: int, logits: str, *, sequence: int) -> None:
        self.decoded.append((list(tokens), position))


async def test_a_memory_that_cannot_go_back_is_computed_anew_and_drafts_end() -> None:
    engine = Recurrent()
    continuation = Continuation(engine, scripted([11, 12, 99, 11, 12, 13]), n_batch=8, n_draft=4)  # type: ignore[arg-type]
    await continuation.start(LOOP)
    await continuation.first()
    assert await continuation.step(100) == [12, 99]
    assert engine.decoded == [([11, 12, 13, 14, 11, 12, 13, 14], 0), ([11, 12, 13, 14, 11, 12], 8)]
    assert await continuation.step(100) == [11]
    assert await continuation.step(100) == [12]
    assert await continuation.step(100) == [13]
    assert engine.decoded[2:] == [([99], 14), ([11], 15), ([12], 16)], "(11, 12) stood there before: a draft"


@pytest.mark.parametrize("architecture", ["jamba", "qwen3next"])
async def test_a_hybrid_model_goes_on_rightly_after_a_refused_draft_and_drafts_no_more(
    architecture: str, tmp_path: Path
) -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.architecture == architecture)
    write_model(tmp_path / "hybrid.gguf", recipe, Variant(name="plain"))
    model = split(tmp_path / "hybrid.gguf", tmp_path)
    experts = LocalExperts(model)
    engine = Engine(model.backbone, model.spec, CONFIG, experts)
    await engine.start()
    try:
        assert engine.model.has_recurrent_state
        drawn = [11, 12, 13, 40, 11, 12, 13]
        continuation = await begun(engine, drawn)
        assert await continuation.step(100) == [12, 13, 40], "two of four drafts are right"
        for token in (11, 12, 13):
            assert await continuation.step(100) == [token]
        assert continuation.stats.n_drafted == 4, "(11, 12) stood there before: there was a draft"
        tokens = [*LOOP, *drawn]
        found, expected = await next_logits(engine, tokens), await fresh_logits(engine, tokens)
        np.testing.assert_allclose(found, expected, atol=1e-3)
    finally:
        await engine.close()
        experts.ffn.close()


async def test_two_texts_of_one_engine_do_not_meet(tiny: SplitModel, experts: LocalExperts) -> None:
    config = EngineConfig(n_ctx=256, n_batch=N_BATCH, n_ubatch=N_BATCH, n_threads=1, n_sequences=2)
    engine = Engine(tiny.backbone, tiny.spec, config, experts)
    await engine.start()

    def greedy(sequence: int, **options: Any) -> Continuation:
        return Continuation(
            engine,
            lambda row: int(engine.context.logits(row).argmax()),
            n_batch=N_BATCH,
            sequence=sequence,
            **options,
        )

    prompts = [engine.model.tokenize(text, add_special=True, parse_special=False) for text in (COPIED, "The module")]
    alone = []
    for prompt in prompts:
        continuation = greedy(0)
        await continuation.start(prompt)
        alone.append([token async for token in continuation.tokens(24)])
    both = [greedy(0, n_draft=6), greedy(1)]
    texts = []
    for continuation, prompt in zip(both, prompts, strict=True):
        await continuation.start(prompt)
        texts.append([await continuation.first()])
    while any(len(text) < 24 for text in texts):
        for continuation, text in zip(both, texts, strict=True):
            if len(text) < 24:
                text += await continuation.step(24 - len(text))
    await engine.close()
    assert texts == alone
    assert both[0].stats.n_accepted > 0
