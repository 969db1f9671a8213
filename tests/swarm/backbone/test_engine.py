"""The engine's thread and its bridge, with a real backbone file and experts in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from swarm.backbone.engine import Engine, EngineConfig, StepPart
from swarm.errors import ConnectionLost, EngineError, ExpertUnavailable
from swarm.speculation.costs import StepTrips
from tests.swarm.backbone.local_experts import LocalExperts, SplitModel

CONFIG = EngineConfig(n_ctx=128, n_batch=64, n_ubatch=64, n_threads=1)
PROMPT = np.random.default_rng(6).integers(1, 2000, 20).tolist()
N_LAYERS = 6
PROMPT_END = 5.0  # seconds that something prompt may take on a busy machine; it takes milliseconds
UNAVAILABLE = ExpertUnavailable(3, (7, 9), "no live peer holds them")


@pytest_asyncio.fixture
async def engine(tiny: SplitModel, experts: LocalExperts) -> AsyncIterator[Engine]:
    engine = Engine(tiny.backbone, tiny.spec, CONFIG, experts)
    await engine.start()
    yield engine
    await engine.close()
    assert experts.n_waiting == 0, "a dispatch outlived its engine"
    assert not engine_threads()


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


async def logits(engine: Engine, tokens: list[int], position: int) -> npt.NDArray[np.uint32]:
    """Return the bits of the tokens' logits."""

    def step() -> npt.NDArray[np.uint32]:
        engine.decode(tokens, position, "all")
        return engine.context.all_logits().view(np.uint32)

    return await engine.call(step)


def failing_at(number: int, error: BaseException) -> Callable[[int], None]:
    def fail(at: int) -> None:
        if at >= number:
            raise error

    return fail


async def test_a_step_runs_on_the_engines_thread_and_returns_or_raises(engine: Engine) -> None:
    assert await engine.call(lambda: threading.current_thread().name) == "engine"
    error = KeyError("mine")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        await engine.call(fail)
    assert caught.value is error


async def test_steps_run_one_at_a_time_in_the_order_they_came(engine: Engine) -> None:
    order: list[int] = []
    await asyncio.gather(*(engine.call(lambda i=i: order.append(i)) for i in range(20)))  # type: ignore[misc]
    assert order == list(range(20))


async def test_a_failure_in_prefill_is_the_callers_and_leaves_no_trace(engine: Engine, experts: LocalExperts) -> None:
    expected = await logits(engine, PROMPT, 0)
    await engine.call(engine.context.clear)
    experts.reset()
    experts.at_result = failing_at(3, UNAVAILABLE)
    with pytest.raises(ExpertUnavailable) as caught:
        await logits(engine, PROMPT, 0)
    assert caught.value is UNAVAILABLE
    assert [call.layer for call in experts.calls] == [0, 1, 2, 3], "nobody is asked after a failure"
    experts.reset()
    # No clear here: the engine itself has rolled the failed step back.
    np.testing.assert_array_equal(await logits(engine, PROMPT, 0), expected)


@pytest.mark.parametrize("layer", [0, 3, 5])
async def test_a_failure_in_decode_rolls_that_step_back_and_no_other(
    engine: Engine, experts: LocalExperts, layer: int
) -> None:
    steps = [(PROMPT, 0), ([11], 20), ([12], 21), ([13], 22), ([14], 23)]
    expected = [await logits(engine, *step) for step in steps]
    await engine.call(engine.context.clear)
    experts.reset()
    for step, bits in zip(steps[:3], expected, strict=False):
        np.testing.assert_array_equal(await logits(engine, *step), bits)
    experts.at_result = failing_at(3 * N_LAYERS + layer, UNAVAILABLE)
    for _ in range(2):  # again, as a client would
        n_before = len(experts.calls)
        with pytest.raises(ExpertUnavailable):
            await logits(engine, *steps[3])
        if n_before == 3 * N_LAYERS:
            assert len(experts.calls) == n_before + layer + 1
    experts.reset()
    for step, bits in zip(steps[3:], expected[3:], strict=True):
        np.testing.assert_array_equal(await logits(engine, *step), bits)


async def test_a_failure_of_an_unexpected_kind_is_an_engine_error(engine: Engine, experts: LocalExperts) -> None:
    expected = await logits(engine, PROMPT, 0)
    await engine.call(engine.context.clear)
    experts.reset()
    experts.at_result = failing_at(2, KeyError("layer"))
    with pytest.raises(EngineError, match="a layer failed: KeyError") as caught:
        await logits(engine, PROMPT, 0)
    assert isinstance(caught.value.__cause__, KeyError)
    experts.reset()
    np.testing.assert_array_equal(await logits(engine, PROMPT, 0), expected)


@pytest.mark.parametrize(
    "tokens", [[], [1] * 65, [5, 99_999], [5, -1]], ids=["empty", "too many", "no such token", "negative token"]
)
async def test_a_step_that_llama_cpp_cannot_take_changes_nothing(
    engine: Engine, experts: LocalExperts, tokens: list[int]
) -> None:
    expected = await logits(engine, PROMPT, 0), await logits(engine, [5], 20)
    await engine.call(engine.context.clear)
    np.testing.assert_array_equal(await logits(engine, PROMPT, 0), expected[0])
    experts.reset()
    with pytest.raises(EngineError):
        await logits(engine, tokens, 20)
    assert not experts.calls
    np.testing.assert_array_equal(await logits(engine, [5], 20), expected[1])


async def test_a_step_beyond_the_context_changes_nothing(engine: Engine, experts: LocalExperts) -> None:
    end = engine.context.n_ctx - 2
    tokens = np.random.default_rng(1).integers(1, 2000, end).tolist()
    for start in range(0, end, 64):
        await logits(engine, tokens[start : start + 64], start)
    with pytest.raises(EngineError, match="does not fit the context"):
        await logits(engine, [1, 2, 3], end)
    assert (await logits(engine, [1, 2], end)).shape == (2, 2048)


async def test_a_layer_waits_on_the_loop_without_blocking_it(engine: Engine, experts: LocalExperts) -> None:
    experts.held = 2
    step = asyncio.create_task(logits(engine, PROMPT, 0))
    await asyncio.wait_for(experts.is_waiting.wait(), PROMPT_END)
    assert not step.done()
    experts.release.set()
    assert (await asyncio.wait_for(step, PROMPT_END)).shape == (20, 2048)


async def test_a_cancelled_caller_ends_its_step_at_once(engine: Engine, experts: LocalExperts) -> None:
    expected = await logits(engine, PROMPT, 0)
    await engine.call(engine.context.clear)
    experts.reset()
    experts.held = 2
    step = asyncio.create_task(logits(engine, PROMPT, 0))
    await asyncio.wait_for(experts.is_waiting.wait(), PROMPT_END)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(step, PROMPT_END)
    assert len(experts.calls) == 3, "no layer was begun after the cancellation"
    assert experts.n_waiting == 0
    experts.reset()
    np.testing.assert_array_equal(await logits(engine, PROMPT, 0), expected)


async def test_a_caller_cancelled_between_layers_gets_no_further_one(engine: Engine, experts: LocalExperts) -> None:
    is_in_step, may_go_on = threading.Event(), threading.Event()

    def step() -> None:
        is_in_step.set()
        may_go_on.wait(PROMPT_END)
        engine.decode(PROMPT, 0)

    task = asyncio.create_task(engine.call(step))
    await asyncio.to_thread(is_in_step.wait, PROMPT_END)
    task.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PROMPT_END)
    assert not experts.calls


async def test_a_caller_cancelled_twice_still_waits_for_its_step_and_leaves_the_engine_usable(
    engine: Engine, experts: LocalExperts
) -> None:
    """The second cancellation comes while the first still waits; callers free what a step uses right afterwards."""
    is_in_step, may_end = threading.Event(), threading.Event()
    ended: list[str] = []

    def step() -> None:
        is_in_step.set()
        may_end.wait(PROMPT_END)
        ended.append("step")

    async def caller() -> None:
        try:
            await engine.call(step)
        finally:
            ended.append("caller")

    task = asyncio.create_task(caller())
    await asyncio.to_thread(is_in_step.wait, PROMPT_END)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PROMPT_END)
    assert ended == ["step", "caller"]
    assert (await logits(engine, PROMPT, 0)).shape == (20, 2048)


async def test_a_caller_cancelled_in_line_is_dropped_and_disturbs_nobody(engine: Engine, experts: LocalExperts) -> None:
    experts.held = 2
    first = asyncio.create_task(logits(engine, PROMPT, 0))
    await asyncio.wait_for(experts.is_waiting.wait(), PROMPT_END)
    ran: list[str] = []
    dropped = asyncio.create_task(engine.call(lambda: ran.append("dropped")))
    third = asyncio.create_task(engine.call(lambda: ran.append("third")))
    await asyncio.sleep(0)
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(dropped, PROMPT_END)
    experts.release.set()
    assert (await asyncio.wait_for(first, PROMPT_END)).shape == (20, 2048)
    await asyncio.wait_for(third, PROMPT_END)
    assert ran == ["third"]


async def test_the_step_after_a_cancelled_one_is_computed(engine: Engine, experts: LocalExperts) -> None:
    """It waits in line already, so the engine's thread takes it before the loop hears of the first one's end."""
    expected = await logits(engine, PROMPT, 0)
    await engine.call(engine.context.clear)
    experts.reset()
    experts.held = 2
    first = asyncio.create_task(logits(engine, PROMPT, 0))
    await asyncio.wait_for(experts.is_waiting.wait(), PROMPT_END)
    second = asyncio.create_task(logits(engine, PROMPT, 0))
    await asyncio.sleep(0)
    first.cancel()
    np.testing.assert_array_equal(await asyncio.wait_for(second, PROMPT_END), expected)
    assert first.cancelled()


async def test_closing_gives_up_the_layer_under_way_and_what_waits(tiny: SplitModel, experts: LocalExperts) -> None:
    engine = Engine(tiny.backbone, tiny.spec, CONFIG, experts)
    await engine.start()
    experts.held = 1
    running = asyncio.create_task(logits(engine, PROMPT, 0))
    await asyncio.wait_for(experts.is_waiting.wait(), PROMPT_END)
    ran: list[str] = []
    waiting = asyncio.create_task(engine.call(lambda: ran.append("late")))
    await asyncio.sleep(0)
    await asyncio.wait_for(engine.close(), PROMPT_END)
    for task in (running, waiting):
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(task, PROMPT_END)
    assert not ran
    assert len(experts.calls) == 2
    assert experts.n_waiting == 0
    assert not engine_threads()


async def test_a_closed_engine_refuses_everything_and_closes_again(tiny: SplitModel, experts: LocalExperts) -> None:
    engine = Engine(tiny.backbone, tiny.spec, CONFIG, experts)
    with pytest.raises(EngineError):
        await engine.call(lambda: None)
    await engine.close()  # before it was started
    await engine.start()
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError):
        await engine.call(lambda: None)
    with pytest.raises(EngineError):
        _ = engine.model
    with pytest.raises(EngineError):
        _ = engine.context


@pytest.mark.parametrize("content", [None, b"", b"GGUF" + bytes(200)], ids=["missing", "empty", "damaged"])
async def test_a_file_that_cannot_be_loaded_is_an_error_and_leaves_no_thread(
    tiny: SplitModel, experts: LocalExperts, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "backbone.gguf"
    if content is not None:
        path.write_bytes(content)
    engine = Engine(path, tiny.spec, CONFIG, experts)
    with pytest.raises(EngineError, match=r"backbone\.gguf"):
        await engine.start()
    assert not engine_threads()


async def test_a_context_that_cannot_be_made_is_an_error_and_leaves_no_thread(
    tiny: SplitModel, experts: LocalExperts
) -> None:
    engine = Engine(tiny.backbone, tiny.spec, EngineConfig(n_ctx=-1), experts)
    with pytest.raises(EngineError, match="n_ctx"):
        await engine.start()
    assert not engine_threads()


async def test_the_context_is_the_models_own_up_to_4096_tokens_unless_chosen(
    tiny: SplitModel, experts: LocalExperts
) -> None:
    engine = Engine(tiny.backbone, tiny.spec, EngineConfig(), experts)
    await engine.start()
    assert engine.context.n_ctx == engine.model.n_ctx_train == 1024
    await engine.close()


async def test_a_lane_uses_anothers_weights_and_leaves_them_when_it_closes(
    tiny: SplitModel, experts: LocalExperts
) -> None:
    first = Engine(tiny.backbone, tiny.spec, CONFIG, experts)
    await first.start()
    expected = await logits(first, PROMPT, 0)
    second = Engine(tiny.backbone, tiny.spec, replace(CONFIG, n_sequences=3), experts, shares=first)
    await second.start()
    assert second.model is first.model
    assert second.n_ctx == second.context.n_ctx // 3 >= CONFIG.n_ctx
    np.testing.assert_array_equal(await logits(second, PROMPT, 0), expected)
    await second.close()
    await first.call(first.context.clear)
    np.testing.assert_array_equal(await logits(first, PROMPT, 0), expected)
    await first.close()


async def test_a_failed_step_of_several_tells_who_needed_what_is_gone_and_leaves_nothing(
    tiny: SplitModel, experts: LocalExperts
) -> None:
    engine = Engine(tiny.backbone, tiny.spec, replace(CONFIG, n_sequences=2), experts)
    await engine.start()

    def parts(origin: int) -> list[StepPart]:
        return [
            StepPart(
                tokens=PROMPT[sequence : sequence + 9], first_position=0, sequence=sequence, origin=origin + sequence
            )
            for sequence in range(2)
        ]

    def fail(number: int) -> None:
        if number == 2:
            raise ExpertUnavailable(2, experts.calls[2].ids[0].tolist(), "no live peer holds them")

    def step(origin: int) -> list[float]:
        engine.decode_parts(parts(origin))
        return [float(engine.context.logits(row)[0]) for row in (8, 17)]

    experts.at_result = fail
    with pytest.raises(ExpertUnavailable) as caught:
        await engine.call(lambda: step(50))
    ids = experts.calls[2].ids  # rows 0 to 8 are the first sequence's
    needed = np.isin(ids, caught.value.experts).any(axis=1)
    assert engine.concerned(caught.value) == {
        50 + sequence for sequence in range(2) if needed[9 * sequence :][:9].any()
    }
    assert engine.concerned(EngineError("of another kind")) == set()
    assert await engine.call(lambda: engine.roll_back(parts(50))) == []
    experts.reset()
    again = await engine.call(lambda: step(60))
    await engine.call(engine.context.clear)
    assert await engine.call(lambda: step(70)) == again
    await engine.close()


async def test_what_a_step_asked_of_the_network_is_counted(tiny: SplitModel, experts: LocalExperts) -> None:
    kept = {0: np.ones(tiny.spec.n_expert, np.bool_), 1: np.zeros(tiny.spec.n_expert, np.bool_)}
    engine = Engine(tiny.backbone, tiny.spec, CONFIG, experts, kept=kept.get)
    await engine.start()
    assert engine.trips.n_trips == 0

    def step() -> StepTrips:
        engine.context.clear()
        engine.decode(PROMPT, 0, "last")
        return engine.trips

    found = [await engine.call(step) for _ in range(2)]
    await engine.close()
    for trips in found:
        assert (trips.n_skipped, trips.n_trips) == (1, len(tiny.spec.moe_layers) - 1)
        assert trips.trip_s > 0
