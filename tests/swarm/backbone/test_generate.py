"""The generator over a real engine; where a test needs certain tokens, only the draw is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from swarm.backbone import generate
from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.generate import Backbone, ServingConfig
from swarm.backbone.requests import FinishReason, GenerationRequest, Grammar, GrammarKind, SamplingParams, TextDelta
from swarm.errors import ConnectionLost, ExpertUnavailable, Overloaded, UserError
from tests.swarm.backbone.local_experts import LocalExperts, SplitModel

N_BATCH = 64
CONFIG = EngineConfig(n_ctx=256, n_batch=N_BATCH, n_ubatch=N_BATCH, n_threads=1)
GREEDY = SamplingParams(temperature=0)
PROMPT = "The :mod:`json` module provides"
N_LAYERS = 6
PROMPT_END = 5.0  # seconds that something prompt may take on a busy machine
GONE = ExpertUnavailable(2, (4, 5), "no live peer holds them")


class FakeHolders:
    """Holders that lack what they are told to, and count who waited for it."""

    def __init__(self) -> None:
        self.lacking: dict[int, tuple[int, ...]] = {}
        self.waits: list[float] = []

    def missing(self) -> dict[int, tuple[int, ...]]:
        return self.lacking

    async def wait_complete(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        for layer, experts in self.lacking.items():
            raise ExpertUnavailable(layer, experts, "no live peer holds them")


class ScriptedSampler:
    """Draws the tokens it was given, one after the other."""

    script: Sequence[int] = ()
    made: list[ScriptedSampler]

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        self._tokens = iter(self.script)
        self.is_closed = False
        self.made.append(self)

    def sample(self, context: Any, index: int = -1) -> int:
        assert not self.is_closed
        return next(self._tokens)

    def copy(self) -> ScriptedSampler:
        return object.__new__(ScriptedSampler)  # never drawn from here

    def close(self) -> None:
        self.is_closed = True


@pytest_asyncio.fixture
async def engine(tiny: SplitModel, experts: LocalExperts) -> AsyncIterator[Engine]:
    engine = Engine(tiny.backbone, tiny.spec, CONFIG, experts)
    await engine.start()
    yield engine
    await engine.close()
    assert experts.n_waiting == 0


@pytest.fixture
def holders() -> FakeHolders:
    return FakeHolders()


@pytest_asyncio.fixture
async def backbone(engine: Engine, holders: FakeHolders) -> AsyncIterator[Backbone]:
    """One request at a time, and nothing kept of a text but in its slot."""
    config = ServingConfig(cache_bytes=0)
    async with Backbone(engine, holders, "tiny@12345678", config=config) as backbone:  # type: ignore[arg-type]
        yield backbone


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Any:
    """Return a function that sets what is drawn: pieces of text that the vocabulary has, or token ids."""
    pieces = {engine.model.piece(token): token for token in range(engine.model.n_vocab)}
    ScriptedSampler.made = []

    def set_script(*drawn: str | bytes | int) -> ScriptedSampler:
        tokens = [
            each if isinstance(each, int) else pieces[each.encode() if isinstance(each, str) else each]
            for each in drawn
        ]
        monkeypatch.setattr(ScriptedSampler, "script", tokens)
        monkeypatch.setattr("swarm.backbone.drawing.Sampler", ScriptedSampler)
        return ScriptedSampler  # type: ignore[return-value]

    return set_script


def request(prompt: str | tuple[int, ...] = PROMPT, **options: Any) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, **({"sampling": GREEDY} | options))


async def collect(stream: AsyncGenerator[TextDelta, None], into: list[TextDelta] | None = None) -> list[TextDelta]:
    """Return the deltas; those before a failure are in `into`."""
    deltas = [] if into is None else into
    async for delta in stream:
        deltas.append(delta)
    return deltas


async def answer(backbone: Backbone, prompt: str | tuple[int, ...] = PROMPT, **options: Any) -> str:
    return "".join(delta.text for delta in await collect(backbone.generate(request(prompt, **options))))


# What streams


async def test_each_token_gives_a_delta_and_the_last_one_says_why(backbone: Backbone, script: Any) -> None:
    script("w", "or", "ld", "!")
    deltas = await collect(backbone.generate(request(max_tokens=3)))
    n_prompt = len(backbone.tokenize(request()))
    assert [delta.text for delta in deltas] == ["w", "or", "ld", ""]
    assert [delta.n_completion_tokens for delta in deltas] == [1, 2, 3, 3]
    assert {delta.n_prompt_tokens for delta in deltas} == {n_prompt}
    assert [delta.finish_reason for delta in deltas] == [None, None, None, FinishReason.LENGTH]


async def test_a_token_is_fed_back_only_when_another_is_wanted(
    backbone: Backbone, experts: LocalExperts, script: Any
) -> None:
    script("w", "or", "ld")
    await answer(backbone, (5, 6, 7), max_tokens=3)
    assert [len(call.x) for call in experts.calls if call.layer == 0] == [3, 1, 1]


async def test_a_long_prompt_is_prefilled_in_batches(backbone: Backbone, experts: LocalExperts) -> None:
    await answer(backbone, tuple(range(1, 151)), max_tokens=1)
    assert [len(call.x) for call in experts.calls if call.layer == 0] == [64, 64, 22]


async def test_the_end_of_generation_stops_and_is_counted_but_not_shown(
    backbone: Backbone, engine: Engine, script: Any
) -> None:
    eos = engine.model.eos_token
    assert eos is not None
    script("w", "or", eos, "ld")
    deltas = await collect(backbone.generate(request(max_tokens=10)))
    assert "".join(delta.text for delta in deltas) == "wor"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].n_completion_tokens == 3


async def test_a_stop_text_over_tokens_ends_the_answer_before_it(backbone: Backbone, script: Any) -> None:
    script("a", "b", "w", "or", "ld", "c")
    deltas = await collect(backbone.generate(request(max_tokens=10, stop=("bworl", "zzz"))))
    assert [delta.text for delta in deltas] == ["a", "", "", "", "", ""]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].n_completion_tokens == 5


async def test_what_only_began_a_stop_text_comes_with_the_last_delta(backbone: Backbone, script: Any) -> None:
    script("a", "b", "w")
    deltas = await collect(backbone.generate(request(max_tokens=3, stop=("bworl",))))
    assert [delta.text for delta in deltas] == ["a", "", "", "bw"]
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_character_over_tokens_is_shown_whole(backbone: Backbone, script: Any) -> None:
    script(b"\xc3", b"\xa9", b"\xf0", b"\x9f", b"\x8e", b"\x89", b"\xe6", b"\x97")
    deltas = await collect(backbone.generate(request(max_tokens=8)))
    assert [delta.text for delta in deltas] == ["", "\u00e9", "", "", "", "\U0001f389", "", "", "\ufffd"]


async def test_no_tokens_wanted_gives_none(backbone: Backbone, script: Any) -> None:
    script()
    (delta,) = await collect(backbone.generate(request(max_tokens=0)))
    assert (delta.text, delta.n_completion_tokens, delta.finish_reason) == ("", 0, FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [None, 1000])
async def test_an_answer_ends_where_the_context_does(
    backbone: Backbone, experts: LocalExperts, script: Any, max_tokens: int | None
) -> None:
    n_ctx = backbone.n_ctx
    script(*[50] * 100)
    deltas = await collect(backbone.generate(request(tuple([9] * (n_ctx - 5)), max_tokens=max_tokens)))
    assert deltas[-1].n_prompt_tokens + deltas[-1].n_completion_tokens == n_ctx
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert sum(len(call.x) for call in experts.calls if call.layer == 0) == n_ctx - 1


async def test_equal_seeds_draw_equal_answers(backbone: Backbone) -> None:
    def sampled(seed: int | None) -> Any:
        return answer(backbone, max_tokens=30, sampling=SamplingParams(temperature=1.0, seed=seed))

    first = await sampled(7)
    assert len(first) > 10
    assert await sampled(7) == first
    assert await sampled(8) != first
    assert await sampled(None) != await sampled(None)


# The prompt


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ((), "the prompt is empty"),
        ((5, 2048), "unknown token in the prompt: expected 0 to 2047"),
        ((-1,), "unknown token in the prompt"),
        (tuple([5] * 256), "the prompt is too long: got 256 tokens, expected at most 255"),
    ],
)
async def test_a_prompt_that_cannot_be_continued_is_the_users_mistake(
    backbone: Backbone, experts: LocalExperts, prompt: str | tuple[int, ...], message: str
) -> None:
    assert backbone.n_ctx == 256
    with pytest.raises(UserError, match=message):
        await answer(backbone, prompt)
    assert not experts.calls


async def test_the_longest_prompt_gets_one_token(backbone: Backbone) -> None:
    deltas = await collect(backbone.generate(request(tuple([5] * 255))))
    assert deltas[-1].n_completion_tokens == 1


@pytest.mark.parametrize(("doubled", "kept"), [([1, 1, 7], [1, 7]), ([1, 7, 1], [1, 7, 1]), ([7, 1, 1], [7, 1, 1])])
def test_a_template_and_the_tokeniser_write_one_bos_together(doubled: list[int], kept: list[int]) -> None:
    model = SimpleNamespace(bos_token=1, n_vocab=10, tokenize=lambda *_, **__: list(doubled))
    engine = SimpleNamespace(model=model, n_ctx=100)
    backbone = Backbone([engine], FakeHolders(), "x")  # type: ignore[list-item, arg-type]
    assert backbone.tokenize(request("text")) == kept


async def test_control_tokens_are_read_from_text_only_when_asked(backbone: Backbone, engine: Engine) -> None:
    text = "<|endoftext|>x"
    assert backbone.tokenize(request(text, parse_special=True))[0] == engine.model.eos_token
    assert engine.model.eos_token not in backbone.tokenize(request(text))


async def test_a_backbone_tells_what_a_gateway_needs(backbone: Backbone) -> None:
    assert backbone.model_name == "tiny@12345678"
    assert backbone.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    assert "messages" in (backbone.chat_template or "")


# The line


async def test_requests_are_answered_one_at_a_time_in_the_order_they_came(
    backbone: Backbone, experts: LocalExperts
) -> None:
    done: list[int] = []

    async def ask(n: int) -> None:
        await answer(backbone, (100 + n,), max_tokens=4)
        done.append(n)

    await asyncio.gather(*(ask(n) for n in range(4)))
    assert done == [0, 1, 2, 3]
    assert len(experts.calls) == 4 * 4 * N_LAYERS


async def test_a_full_line_is_refused_with_a_time_to_try_again(
    engine: Engine, holders: FakeHolders, experts: LocalExperts
) -> None:
    experts.held = 0
    config = ServingConfig(max_line=1)
    async with Backbone(engine, holders, "x", config=config) as backbone:  # type: ignore[arg-type]
        first = asyncio.create_task(answer(backbone, max_tokens=2))
        await asyncio.wait_for(experts.is_waiting.wait(), PROMPT_END)
        second = asyncio.create_task(answer(backbone, max_tokens=2))
        await asyncio.sleep(0)  # it takes its place
        with pytest.raises(Overloaded) as caught:
            await answer(backbone)
        assert caught.value.retry_after_s > 0
        second.cancel()  # one that waits leaves its place
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.create_task(answer(backbone, max_tokens=2))
        experts.release.set()
        assert await asyncio.wait_for(first, PROMPT_END) == await asyncio.wait_for(third, PROMPT_END)


async def test_a_turn_that_does_not_come_is_refused_with_a_time_to_try_again(
    backbone: Backbone, experts: LocalExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "LINE_TIMEOUT_S", 0.05)
    experts.held = 0
    first = asyncio.create_task(answer(backbone, max_tokens=2))
    await asyncio.wait_for(experts.is_waiting.wait(), PROMPT_END)
    with pytest.raises(Overloaded, match="no turn"):
        await asyncio.wait_for(answer(backbone), PROMPT_END)
    experts.release.set()
    assert await asyncio.wait_for(first, PROMPT_END)
    assert await asyncio.wait_for(answer(backbone, max_tokens=2), PROMPT_END), "the line is as it was"


async def test_closing_the_iterator_frees_the_turn(backbone: Backbone, script: Any) -> None:
    samplers = script(*["w"] * 20)
    stream = backbone.generate(request(max_tokens=20))
    assert (await anext(stream)).text == "w"
    waiting = asyncio.create_task(answer(backbone, max_tokens=2))
    await stream.aclose()
    assert await asyncio.wait_for(waiting, PROMPT_END) == "ww"
    await asyncio.wait_for(backbone.idle(), PROMPT_END)
    assert [sampler.is_closed for sampler in samplers.made] == [True, True]


async def test_cancelling_gives_up_the_layer_under_way_and_frees_the_turn(
    backbone: Backbone, experts: LocalExperts, script: Any
) -> None:
    samplers = script(*["w"] * 20)
    experts.held = 3 * N_LAYERS + 2  # in the third token after the prompt
    task = asyncio.create_task(answer(backbone, max_tokens=20))
    await asyncio.wait_for(experts.is_waiting.wait(), PROMPT_END)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PROMPT_END)
    await asyncio.wait_for(backbone.idle(), PROMPT_END)
    assert len(experts.calls) == experts.held + 1
    assert samplers.made[0].is_closed
    experts.reset()
    assert await asyncio.wait_for(answer(backbone, max_tokens=3), PROMPT_END) == "www"


# Failures


async def test_a_missing_expert_is_waited_for_and_then_named_before_anything_is_computed(
    backbone: Backbone, holders: FakeHolders, experts: LocalExperts
) -> None:
    holders.lacking = {4: (1, 2)}
    with pytest.raises(ExpertUnavailable) as caught:
        await answer(backbone)
    assert (caught.value.layer, caught.value.experts) == (4, (1, 2))
    assert holders.waits == [generate.COVER_WAIT_S]
    assert not experts.calls


async def test_nobody_waits_when_nothing_is_missing(backbone: Backbone, holders: FakeHolders) -> None:
    await answer(backbone, max_tokens=1)
    assert holders.waits == []


@pytest.mark.parametrize("n_tokens_before", [0, 3])
async def test_a_failing_layer_ends_the_answer_and_the_next_one_is_as_ever(
    backbone: Backbone, experts: LocalExperts, n_tokens_before: int
) -> None:
    expected = await answer(backbone, max_tokens=12)
    experts.reset()

    def fail(number: int) -> None:
        if number == n_tokens_before * N_LAYERS + 2:
            raise GONE

    experts.at_result = fail
    shown: list[TextDelta] = []
    with pytest.raises(ExpertUnavailable) as caught:
        await collect(backbone.generate(request(max_tokens=12)), shown)
    assert caught.value is GONE
    assert len(shown) == n_tokens_before
    assert all(delta.finish_reason is None for delta in shown)
    assert expected.startswith("".join(delta.text for delta in shown))
    experts.reset()
    assert await answer(backbone, max_tokens=12) == expected


async def test_closing_the_engine_ends_the_answer_under_way(
    backbone: Backbone, engine: Engine, experts: LocalExperts
) -> None:
    experts.held = 2 * N_LAYERS
    task = asyncio.create_task(answer(backbone, max_tokens=20))
    await asyncio.wait_for(experts.is_waiting.wait(), PROMPT_END)
    await asyncio.wait_for(engine.close(), PROMPT_END)
    with pytest.raises(ConnectionLost, match="the engine is closing"):
        await asyncio.wait_for(task, PROMPT_END)


# Drafts: `test_continuation` has the steps; here, what a request sees of them

LOOP = ("a", "b", "w", "or") * 3  # after which every step drafts what the loop goes on with


@pytest_asyncio.fixture
async def drafting(engine: Engine, holders: FakeHolders) -> AsyncIterator[Backbone]:
    config = ServingConfig(n_draft=8)
    async with Backbone(engine, holders, "tiny@12345678", config=config) as backbone:  # type: ignore[arg-type]
        yield backbone


def steps(experts: LocalExperts) -> list[int]:
    """Return the rows of each step after the prompt."""
    return [len(call.x) for call in experts.calls if call.layer == 0][1:]


async def test_drafted_tokens_stream_one_by_one_and_are_counted_once(
    drafting: Backbone, experts: LocalExperts, script: Any
) -> None:
    script(*LOOP, *LOOP)
    deltas = await collect(drafting.generate(request((5, 6, 7), max_tokens=20)))
    assert "".join(delta.text for delta in deltas) == "".join((LOOP * 2)[:20])
    assert [delta.n_completion_tokens for delta in deltas] == [*range(1, 21), 20]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    # After six tokens the loop is seen: nine rows, and then only as many as are still wanted.
    assert steps(experts) == [1, 1, 1, 1, 1, 9, 5]
    assert drafting.drafts.accept_length == 19 / 7
    assert drafting.drafts.lengths == {1: 5, 9: 1, 5: 1}


async def test_a_stop_text_inside_accepted_drafts_ends_the_answer_before_it(
    drafting: Backbone, experts: LocalExperts, script: Any
) -> None:
    script(*LOOP, "c", *LOOP, "c", *LOOP)
    deltas = await collect(drafting.generate(request((5, 6, 7), max_tokens=100, stop=("orcab",))))
    assert "".join(delta.text for delta in deltas) == "abwor" * 2 + "abw"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].n_completion_tokens == 15
    assert max(steps(experts)) == 9


async def test_an_end_of_generation_instead_of_a_draft_stops(
    drafting: Backbone, engine: Engine, experts: LocalExperts, script: Any
) -> None:
    eos = engine.model.eos_token
    assert eos is not None
    script(*LOOP[:9], eos, *LOOP)
    deltas = await collect(drafting.generate(request((5, 6, 7), max_tokens=100)))
    assert "".join(delta.text for delta in deltas) == "".join(LOOP[:9])
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].n_completion_tokens == 10
    assert steps(experts)[-1] == 9


@pytest.mark.parametrize("max_tokens", [None, 1000, 7])
async def test_drafts_never_pass_the_end_of_the_answer_or_the_context(
    drafting: Backbone, experts: LocalExperts, script: Any, max_tokens: int | None
) -> None:
    script(*[50] * 100)
    n_prompt = drafting.n_ctx - 30
    deltas = await collect(drafting.generate(request(tuple([9] * n_prompt), max_tokens=max_tokens)))
    n_expected = min(max_tokens or 30, 30)
    assert deltas[-1].n_completion_tokens == n_expected
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert sum(len(call.x) for call in experts.calls if call.layer == 0) <= n_prompt + n_expected + 8


async def test_a_failing_drafted_step_ends_the_answer_and_the_next_one_is_as_ever(
    drafting: Backbone, experts: LocalExperts, script: Any
) -> None:
    script(*LOOP, *LOOP)
    expected = await answer(drafting, max_tokens=20)
    n_before = len(steps(experts))
    experts.reset()

    def fail(number: int) -> None:
        if number == n_before * N_LAYERS + 2:  # in the last step, whose drafts were all accepted
            raise GONE

    experts.at_result = fail
    shown: list[TextDelta] = []
    with pytest.raises(ExpertUnavailable):
        await collect(drafting.generate(request(max_tokens=20)), shown)
    assert 10 < len(shown) < 20
    experts.reset()
    assert await answer(drafting, max_tokens=20) == expected


async def test_closing_the_iterator_between_accepted_tokens_frees_the_turn(drafting: Backbone, script: Any) -> None:
    samplers = script(*LOOP, *LOOP)
    stream = drafting.generate(request((5, 6, 7), max_tokens=20))
    for _ in range(9):
        await anext(stream)
    await stream.aclose()
    assert await asyncio.wait_for(answer(drafting, (5, 6, 7), max_tokens=3), PROMPT_END) == "abw"
    await asyncio.wait_for(drafting.idle(), PROMPT_END)
    assert [sampler.is_closed for sampler in samplers.made] == [True, True]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.4, seed=3)], ids=["greedy", "seeded"])
async def test_an_answer_is_the_same_with_drafts(
    backbone: Backbone, drafting: Backbone, sampling: SamplingParams
) -> None:
    prompt = "   * ``json.dumps()``, ``json.loads()``\n" * 3
    plain = await answer(backbone, prompt, max_tokens=80, sampling=sampling)
    assert await answer(drafting, prompt, max_tokens=80, sampling=sampling) == plain
    assert drafting.drafts.accept_length > 1.05
    assert backbone.drafts.accept_length == 1.0


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=0.6, seed=2, presence_penalty=0.3, frequency_penalty=0.1)],
    ids=["greedy", "penalties"],
)
async def test_an_answer_that_a_grammar_holds_is_the_same_with_drafts(
    backbone: Backbone, drafting: Backbone, sampling: SamplingParams
) -> None:
    prompt = "json, json, json, json\n" * 4
    grammar = Grammar(kind=GrammarKind.GBNF, text='root ::= word (", " word)*\nword ::= "json" | "text" | "load"')
    options = {"max_tokens": 60, "sampling": sampling, "grammar": grammar}
    plain = await answer(backbone, prompt, **options)
    assert set(plain[:20]) <= set("json, textload")
    assert await answer(drafting, prompt, **options) == plain
    assert drafting.drafts.n_accepted > 5
    assert drafting.drafts.n_accepted <= drafting.drafts.n_drafted
