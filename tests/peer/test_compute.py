"""The peer's line of dispatches: bounded, in order, and deaf to those who have left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from peer import compute
from peer.batching import N_SHARED
from peer.compute import Compute
from swarm.errors import EngineError, ExpertsNotHeld, Overloaded, RemoteProtocolError
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet
from swarm.wire import messages as m
from swarm.wire.frames import FrameType
from swarm.wire.rows import RowCodec
from tests.peer.conftest import N_EMBD as D
from tests.peer.conftest import SmallModel, dispatch, wait_until

SLICE = ExpertSet.of([0, 1], [1, 2, 3])


class FakeExecutor:
    """Answers with zeros; the first call waits until it may end."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.threads: set[str] = set()
        self.is_busy, self.may_end = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.most_rows = 1000

    def run(self, layer: int, x: npt.NDArray[np.float32], *_: object) -> npt.NDArray[np.float32]:
        self.layers.append(layer)
        self.threads.add(threading.current_thread().name)
        self.is_busy.set()
        assert self.may_end.wait(5)
        if self.error is not None:
            raise self.error
        if len(x) > self.most_rows:
            raise MemoryError
        return np.zeros_like(x)


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def line(executor: FakeExecutor) -> Iterator[Compute]:
    line = Compute(executor)  # type: ignore[arg-type]
    yield line
    executor.may_end.set()
    line.close()


@pytest.fixture(scope="module")
def real_executor(small: SmallModel) -> Iterator[ExpertExecutor]:
    with ExpertFfn(small.manifest.spec, SLICE) as ffn:
        for layer, expert in SLICE:
            ffn.load(layer, expert, small.source.read_block(layer, expert))
        yield ExpertExecutor(ffn, small.manifest.spec)


@pytest.fixture
def real_line(real_executor: ExpertExecutor) -> Iterator[Compute]:
    line = Compute(real_executor)
    yield line
    line.close()


async def start(line: Compute, executor: FakeExecutor, n: int) -> list[asyncio.Future[m.Result]]:
    """Put n dispatches in line, of layers 0, 1, ...; return once the first is being computed."""
    tasks = [line.start(dispatch(layer)) for layer in range(n)]
    assert await asyncio.to_thread(executor.is_busy.wait, 5)
    return tasks


async def test_the_answer_is_the_executors_in_the_form_that_was_asked(
    real_line: Compute, real_executor: ExpertExecutor
) -> None:
    asked = dispatch()
    partial = await real_line.start(asked)
    raw = await real_line.start(dispatch(result_codec=RowCodec.EXACT, weights=None))
    assert (partial.codec, partial.rows.shape) == (RowCodec.F32, (2, D))
    assert (raw.codec, raw.rows.shape) == (RowCodec.EXACT, (3, D))
    np.testing.assert_array_equal(partial.rows, np.stack([raw.rows[0] * 0.5 + raw.rows[1] * 0.5, raw.rows[2] * 0.5]))
    assert partial.compute_us > 0
    assert real_line.stats.n_dispatches == 2
    assert real_line.stats.n_rows == 4
    assert real_line.stats.compute_s > 0
    assert real_executor.assignments().total == 6


async def test_dispatches_are_computed_in_the_order_they_came_by_one_thread(
    line: Compute, executor: FakeExecutor
) -> None:
    tasks = await start(line, executor, 5)
    assert line.n_in_line == 5
    executor.may_end.set()
    await asyncio.gather(*tasks)
    assert executor.layers == [0, 1, 2, 3, 4]
    assert len(executor.threads) == 1
    assert line.n_in_line == 0
    assert line.stats.n_dispatches == 5


async def test_waiting_is_counted_apart_from_computing(line: Compute, executor: FakeExecutor) -> None:
    tasks = await start(line, executor, 2)
    assert line.n_in_line == 2
    both_there = time.perf_counter()
    await asyncio.to_thread(sum, range(100_000))  # something measurable
    waited_us = int((time.perf_counter() - both_there) * 1e6)
    executor.may_end.set()
    first, second = await asyncio.gather(*tasks)
    assert waited_us > 10
    assert first.compute_us >= waited_us
    assert second.queue_us >= waited_us
    assert line.stats.queue_s >= waited_us / 1e6
    assert line.stats.compute_s >= waited_us / 1e6


async def test_a_full_line_refuses_and_takes_again_once_it_is_shorter(
    line: Compute, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "MAX_LINE", 3)
    tasks = await start(line, executor, 3)
    with pytest.raises(Overloaded, match="3 dispatches wait") as caught:
        await line.start(dispatch(9))
    assert caught.value.retry_after_s > 0
    executor.may_end.set()
    await asyncio.gather(*tasks)
    await line.start(dispatch(7))
    assert executor.layers == [0, 1, 2, 7]


async def test_a_cancelled_dispatch_that_waits_is_not_computed(line: Compute, executor: FakeExecutor) -> None:
    tasks = await start(line, executor, 3)
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert tasks[1].cancelled()
    assert line.n_in_line == 2
    executor.may_end.set()
    await asyncio.gather(tasks[0], tasks[2])
    assert executor.layers == [0, 2]
    assert line.stats.n_dispatches == 2


async def test_a_cancelled_dispatch_under_way_is_finished_for_nobody(line: Compute, executor: FakeExecutor) -> None:
    (task,) = await start(line, executor, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    executor.may_end.set()
    await line.start(dispatch(1))
    assert executor.layers == [0, 1]
    assert line.stats.n_dispatches == 1


async def test_a_failure_is_its_own_dispatchs_alone(line: Compute, executor: FakeExecutor) -> None:
    executor.may_end.set()
    executor.error = EngineError("ggml could not compute")
    with pytest.raises(EngineError):
        await line.start(dispatch())
    assert (line.n_in_line, line.stats.n_dispatches) == (0, 0)
    executor.error = None
    await line.start(dispatch())
    assert line.stats.n_dispatches == 1


async def test_closing_finishes_what_is_under_way_and_drops_the_rest(line: Compute, executor: FakeExecutor) -> None:
    tasks = await start(line, executor, 3)
    executor.may_end.set()
    await asyncio.to_thread(line.close)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert executor.layers[0] == 0
    assert not tasks[0].cancelled()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compute")]


async def test_the_loop_is_free_while_a_line_closes_and_need_not_wait_for_its_end(
    line: Compute, executor: FakeExecutor
) -> None:
    await start(line, executor, 1)
    closing = asyncio.create_task(line.wait_closed())
    await asyncio.sleep(0)
    assert not closing.done()
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert not executor.may_end.is_set(), "the computation is still under way"
    closing = asyncio.create_task(line.wait_closed())
    executor.may_end.set()
    await asyncio.wait_for(closing, 5)
    assert not [thread for thread in threading.enumerate() if thread.name == "compute"]


# Merging


async def held(line: Compute, executor: FakeExecutor, dispatches: list[m.Dispatch]) -> list[asyncio.Future[m.Result]]:
    """Keep the thread busy with layer 9, put the dispatches in line behind it, and return their tasks."""
    first = line.start(dispatch(9))
    assert await asyncio.to_thread(executor.is_busy.wait, 5)
    tasks = [line.start(each) for each in dispatches]
    await wait_until(lambda: line.n_in_line == 1 + len(tasks))
    return [first, *tasks]


async def test_what_waits_for_one_layer_is_one_computation(line: Compute, executor: FakeExecutor) -> None:
    tasks = await held(line, executor, [dispatch(layer) for layer in (0, 1, 0, 0, 1)])
    executor.may_end.set()
    results = await asyncio.gather(*tasks)
    assert executor.layers == [9, 0, 1]
    assert [len(result.rows) for result in results] == [2] * 6
    stats = line.stats
    assert (stats.n_dispatches, stats.n_computations, stats.n_rows) == (6, 3, 12)
    assert stats.compute_s == pytest.approx(sum(results[i].compute_us for i in (0, 1, 2)) / 1e6, abs=2e-5)
    assert line.n_in_line == 0


async def test_merged_answers_are_those_of_each_by_itself(real_line: Compute, real_executor: ExpertExecutor) -> None:
    """Bit for bit, since Q8_0 experts have no tiled kernels: as with exact kernels for all types."""
    asked = [dispatch(0, experts=experts) for experts in ((1, 2, 3), (3, 1), (2, 2, 3))]
    for number, each in enumerate(asked):
        each.rows[:] = np.random.default_rng(number).standard_normal(each.rows.shape)
    alone = [await real_line.start(each) for each in asked]
    before, n_alone = real_executor.assignments().counts, real_line.stats.n_computations
    together = await asyncio.gather(*(real_line.start(each) for each in asked))
    assert real_line.stats.n_computations == n_alone + 1
    for one, other in zip(alone, together, strict=True):
        assert one.rows.tobytes() == other.rows.tobytes()
    counted = (real_executor.assignments().counts - before)[0]
    assert counted.tolist() == [0, 2, 3, 3, 0, 0]


async def test_one_of_a_group_may_leave_before_and_during_its_computation(
    line: Compute, executor: FakeExecutor
) -> None:
    tasks = await held(line, executor, [dispatch(0), dispatch(0), dispatch(0)])
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    executor.is_busy.clear()
    executor.may_end.set()
    results = await asyncio.gather(tasks[0], tasks[2], tasks[3])
    assert executor.layers == [9, 0]
    assert [result.rows.shape for result in results] == [(2, D)] * 3
    assert line.stats.n_dispatches == 3


async def test_a_bad_dispatch_fails_alone_and_the_rest_of_its_group_is_answered(
    real_line: Compute, real_executor: ExpertExecutor
) -> None:
    before = real_executor.assignments().total
    good, strange, broken = dispatch(), dispatch(experts=(1, 2, 4)), dispatch(weights=np.full(3, np.nan, np.float32))
    outcomes = await asyncio.gather(
        *(real_line.start(each) for each in (good, strange, broken, good)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [m.Result, ExpertsNotHeld, RemoteProtocolError, m.Result]
    assert "experts 4" in str(outcomes[1])
    assert real_executor.assignments().total == before + 6


async def test_what_has_no_room_together_is_computed_one_by_one_and_the_thread_lives_on(
    line: Compute, executor: FakeExecutor
) -> None:
    executor.most_rows = 2
    tasks = await held(line, executor, [dispatch(0), dispatch(0)])
    executor.may_end.set()
    results = await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert [len(result.rows) for result in results] == [2] * 3
    assert executor.layers == [9, 0, 0, 0]
    await asyncio.wait_for(line.start(dispatch(1)), 5)


async def test_what_has_no_room_on_the_loop_fails_and_the_next_is_computed(
    line: Compute, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.may_end.set()
    await line.start(dispatch())
    monkeypatch.setattr(compute, "INLINE_S", 60.0)
    executor.most_rows = 1
    outcomes = await asyncio.wait_for(
        asyncio.gather(line.start(dispatch()), line.start(dispatch()), return_exceptions=True), 5
    )
    assert [type(outcome) for outcome in outcomes] == [MemoryError] * 2
    assert executor.threads == {"compute", "MainThread"}
    executor.most_rows = 2
    await asyncio.wait_for(line.start(dispatch()), 5)


# The loop or the thread


async def test_a_short_computation_runs_on_the_loop_and_a_long_or_unknown_one_does_not(
    line: Compute, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.may_end.set()
    await line.start(dispatch())
    assert executor.threads == {"compute"}, "how long it takes is not known yet"
    monkeypatch.setattr(compute, "INLINE_S", 60.0)
    await line.start(dispatch())
    assert executor.threads == {"compute", "MainThread"}
    monkeypatch.setattr(compute, "INLINE_S", 0.0)
    executor.threads.clear()
    await line.start(dispatch())
    assert executor.threads == {"compute"}


async def test_where_others_wait_too_the_thread_computes_and_the_loop_stays_free(
    line: Compute, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.may_end.set()
    await line.start(dispatch())
    executor.threads.clear()
    monkeypatch.setattr(compute, "INLINE_S", 60.0)
    await asyncio.gather(line.start(dispatch(0)), line.start(dispatch(1)))
    assert executor.threads == {"compute"}


async def test_the_loop_waits_for_no_computation_of_the_thread(
    line: Compute, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "INLINE_S", 60.0)
    tasks = await held(line, executor, [dispatch(0)])
    executor.may_end.set()
    await asyncio.gather(*tasks)
    assert executor.threads == {"compute"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": (1, 4)}, "layer 0, experts 4"),
        ({"experts": (1, 6)}, "bad expert ids"),
        ({"experts": (1, 65_535)}, "bad expert ids"),
        ({"layer": 2}, "no such MoE layer: got 2"),
        ({"rows": np.zeros((2, D - 1), np.float32)}, "bad rows"),
        ({"rows": np.zeros((2, D + 1), np.float32)}, "bad rows"),
        ({"rows": np.zeros((1, D), np.float32)}, "bad row counts"),
        ({"row_counts": np.array([3, 0], np.uint8)}, "bad row counts"),
        ({"row_counts": np.array([3, 3], np.uint8)}, "bad row counts"),
        ({"row_counts": np.array([1, 1], np.uint8)}, "bad expert ids"),
        ({"weights": np.array([0.5, np.nan, 0.5], np.float32)}, "bad weights"),
        ({"weights": np.array([0.5, np.inf, 0.5], np.float32)}, "bad weights"),
        ({"weights": np.array([0.5, 0.5], np.float32)}, "bad weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
async def test_a_dispatch_that_does_not_fit_the_slice_breaks_the_protocol(
    real_line: Compute, real_executor: ExpertExecutor, fields: dict[str, Any], message: str
) -> None:
    before = real_executor.assignments().total
    with pytest.raises(RemoteProtocolError, match=message):
        await real_line.start(dispatch(**fields))
    assert real_executor.assignments().total == before
    assert (real_line.n_in_line, real_line.stats.n_dispatches) == (0, 0)
    assert (await real_line.start(dispatch())).rows.shape == (2, D), "the peer goes on"


async def test_a_dispatch_whose_answer_fits_no_frame_is_refused_before_it_is_computed(
    line: Compute, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.may_end.set()
    asked = dispatch(result_codec=RowCodec.EXACT, weights=None)
    size = 20 + len(asked.expert_ids) * 4 * D
    monkeypatch.setitem(compute.LIMITS, FrameType.RESULT, size)
    await line.start(asked)
    monkeypatch.setitem(compute.LIMITS, FrameType.RESULT, size - 1)
    with pytest.raises(RemoteProtocolError, match="answer is too large"):
        await line.start(asked)
    assert line.stats.n_dispatches == 1


async def ask(line: Compute, asked: m.Dispatch, asker: object = None) -> bool:
    """Ask as a peer does; return whether the answer came at once."""
    answer = line.at_once(asked, asker)
    if answer is None:
        await line.start(asked, asker)
    return answer is not None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, executor: FakeExecutor) -> None:
    """Everything counts as short, and nothing is held up."""
    monkeypatch.setattr(compute, "INLINE_S", 60.0)
    executor.may_end.set()


@pytest.mark.usefixtures("quick")
async def test_a_short_dispatch_of_the_only_asker_is_answered_at_once(line: Compute, executor: FakeExecutor) -> None:
    assert not await ask(line, dispatch()), "how long it takes is not known yet"
    executor.threads.clear()
    answer = line.at_once(dispatch())
    assert answer is not None
    assert answer.rows.shape == (2, D)
    assert executor.threads == {"MainThread"}
    assert line.n_in_line == 0
    assert (line.stats.n_dispatches, line.stats.n_computations, line.stats.n_rows) == (2, 2, 4)


@pytest.mark.usefixtures("quick")
async def test_nothing_is_computed_at_once_in_front_of_who_waits_nor_what_may_take_long(
    line: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask(line, dispatch())
    waiting = line.start(dispatch())
    assert line.at_once(dispatch()) is None
    await waiting
    assert line.at_once(dispatch()) is not None
    monkeypatch.setattr(compute, "INLINE_S", 0.0)
    assert line.at_once(dispatch()) is None
    line.stop()
    monkeypatch.setattr(compute, "INLINE_S", 60.0)
    assert line.at_once(dispatch()) is None, "it takes up nothing more"


@pytest.mark.usefixtures("quick")
async def test_where_several_ask_they_meet_in_the_line(line: Compute) -> None:
    """Else whoever finds the thread at rest would never be charged."""
    await ask(line, dispatch(), "a")
    assert await ask(line, dispatch(), "a")
    assert not await ask(line, dispatch(), "b")
    assert not await ask(line, dispatch(), "a")
    assert not await ask(line, dispatch(), "a"), "another asked lately"
    for _ in range(N_SHARED):
        await ask(line, dispatch(), "a")
    assert await ask(line, dispatch(), "a"), "long ago"


async def test_what_fails_at_once_fails_as_in_the_line(
    real_line: Compute, real_executor: ExpertExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "INLINE_S", 60.0)
    in_line = await real_line.start(dispatch())
    at_once = real_line.at_once(dispatch())
    assert at_once is not None
    np.testing.assert_array_equal(at_once.rows, in_line.rows)
    with pytest.raises(ExpertsNotHeld):
        real_line.at_once(dispatch(experts=(1, 4)))
    with pytest.raises(RemoteProtocolError, match="bad weights"):
        real_line.at_once(dispatch(weights=np.array([0.5, np.nan, 0.5], np.float32)))
    exact = dispatch(result_codec=RowCodec.EXACT, weights=None)
    size = 20 + len(exact.expert_ids) * 4 * D
    monkeypatch.setattr(compute, "SURELY_FITS_BYTES", 0)
    monkeypatch.setitem(compute.LIMITS, FrameType.RESULT, size)
    assert real_line.at_once(exact) is not None
    monkeypatch.setitem(compute.LIMITS, FrameType.RESULT, size - 1)
    with pytest.raises(RemoteProtocolError, match="answer is too large"):
        real_line.at_once(exact)
