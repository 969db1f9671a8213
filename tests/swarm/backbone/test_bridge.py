"""The bridge between an engine's thread and the loop, with a thread of the test's own and a dispatcher that answers on demand."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from swarm.backbone.bridge import Bridge, Crossing, EngineStep, HandOver
from swarm.errors import ConnectionLost, ExpertUnavailable
from swarm.net.answer import TakenFuture

Rows = npt.NDArray[np.float32]
X = np.arange(8, dtype=np.float32).reshape(2, 4)
IDS = np.array([[1, 2], [3, 0]], np.int32)
WEIGHTS = np.full((2, 2), 0.5, np.float32)


class Dispatcher:
    """Answers a layer with what `answer` is given, plus its number."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.n_ended = 0
        self.has_begun = asyncio.Event()
        self.answers: list[TakenFuture[Rows]] = []

    async def dispatch(self, layer: int, x: Rows, *_: object) -> Rows:
        answer = TakenFuture[Rows](loop=asyncio.get_running_loop())
        self.layers.append(layer)
        self.answers.append(answer)
        self.has_begun.set()
        try:
            return await answer + np.float32(layer)
        finally:
            self.n_ended += 1

    async def begun(self) -> TakenFuture[Rows]:
        await self.has_begun.wait()
        self.has_begun.clear()
        return self.answers[-1]


def bridge_to(dispatcher: Dispatcher) -> Bridge:
    bridge = Bridge(dispatcher, asyncio.get_running_loop(), None)
    bridge.enter(EngineStep(lambda: None, asyncio.get_running_loop().create_future()))
    bridge.begin_step()
    return bridge


def on_thread(work: Callable[[], Rows]) -> Awaitable[Rows]:
    """Run what an engine's thread does."""
    return asyncio.get_running_loop().run_in_executor(None, work)


def is_cancelled(work: Callable[[], Rows]) -> Awaitable[bool]:
    """Return whether it ends as a cancelled layer does: an executor would take that for its own cancellation."""

    def run() -> bool:
        try:
            work()
        except concurrent.futures.CancelledError:
            return True
        return False

    return asyncio.get_running_loop().run_in_executor(None, run)


async def test_a_layer_begins_on_the_loop_and_its_thread_gets_the_answer_of_the_same_tick() -> None:
    dispatcher = Dispatcher()
    bridge = bridge_to(dispatcher)
    rows = on_thread(lambda: bridge.begin(3, X, IDS, WEIGHTS).result())
    answer = await dispatcher.begun()
    answer.give(X)
    assert dispatcher.n_ended == 1  # before the loop's next round
    np.testing.assert_array_equal(await rows, X + 3)
    assert bridge.trips.n_trips == 1


async def test_an_answer_that_comes_first_is_not_waited_for_and_the_hand_overs_say_so() -> None:
    dispatcher = Dispatcher()
    bridge = bridge_to(dispatcher)
    told: list[HandOver] = []
    bridge.on_hand_over = told.append
    waits = on_thread(lambda: bridge.begin(0, X, IDS, WEIGHTS).result())
    (await dispatcher.begun()).give(X)
    await waits
    late = bridge.begin(1, X, IDS, WEIGHTS)
    (await dispatcher.begun()).give(X)
    await on_thread(late.result)
    assert [each.is_waited for each in told][1:] == [False]
    for each in told:
        assert each.asked_s <= each.began_s <= each.done_s <= each.taken_s
        assert each.asked_s <= each.awaited_s <= each.taken_s


async def test_a_layers_rows_are_freed_once_they_are_taken_without_a_collection() -> None:
    dispatcher = Dispatcher()
    bridge = bridge_to(dispatcher)
    gc.disable()  # of a long prompt, each layer's rows would be kept until one came by
    try:
        rows = on_thread(lambda: weakref.ref(bridge.begin(0, X, IDS, WEIGHTS).result()))
        (await dispatcher.begun()).give(X)
        dispatcher.answers.clear()
        assert (await rows)() is None
    finally:
        gc.enable()


async def test_a_layer_can_be_given_up_in_the_moment_in_which_its_rows_are_taken() -> None:
    class TakenMeanwhile(Crossing):
        """The engine's thread takes the rows after whatever looks for the task has seen it."""

        _seen: Any = None

        @property
        def _task(self) -> Any:
            seen, self._seen = self._seen, None
            return seen

        @_task.setter
        def _task(self, task: Any) -> None:
            self._seen = task

    class Ended:
        n_cancelled = 0

        def cancel(self) -> None:
            self.n_cancelled += 1

    crossing, task = TakenMeanwhile(lambda _: None), Ended()
    crossing._task = task
    crossing.cancel()
    assert task.n_cancelled == 1
    crossing.cancel()  # afterwards


async def test_a_failure_is_raised_where_the_thread_waits() -> None:
    dispatcher = Dispatcher()
    bridge = bridge_to(dispatcher)
    rows = on_thread(lambda: bridge.begin(0, X, IDS, WEIGHTS).result())
    (await dispatcher.begun()).set_exception(ExpertUnavailable(0, (1,), "gone"))
    with pytest.raises(ExpertUnavailable):
        await rows


async def test_two_lanes_share_a_dispatcher_and_each_gets_its_own() -> None:
    dispatcher = Dispatcher()
    first, second = bridge_to(dispatcher), bridge_to(dispatcher)
    one = on_thread(lambda: first.begin(1, X, IDS, WEIGHTS).result())
    first_answer = await dispatcher.begun()
    two = on_thread(lambda: second.begin(2, X, IDS, WEIGHTS).result())
    (await dispatcher.begun()).give(X)
    np.testing.assert_array_equal(await two, X + 2)
    first_answer.give(X)
    np.testing.assert_array_equal(await one, X + 1)


@pytest.mark.parametrize("is_closing", [False, True])
async def test_a_layer_given_up_ends_and_wakes_its_thread_with_the_reason_kept(is_closing: bool) -> None:
    dispatcher = Dispatcher()
    bridge = Bridge(dispatcher, asyncio.get_running_loop(), None)
    step = EngineStep(lambda: None, asyncio.get_running_loop().create_future())
    assert bridge.enter(step)
    ends = is_cancelled(lambda: bridge.begin(0, X, IDS, WEIGHTS).result())
    answer = await dispatcher.begun()
    reason = ConnectionLost("enough")
    if is_closing:
        bridge.end(reason)
    else:
        assert bridge.give_up(step, reason)
    assert await ends
    assert answer.cancelled()
    assert bridge.reason is reason
    with pytest.raises(ConnectionLost, match="enough"):
        bridge.begin(1, X, IDS, WEIGHTS)
    assert dispatcher.layers == [0]


async def test_a_layer_given_up_before_the_loop_has_begun_it_ends_too() -> None:
    dispatcher = Dispatcher()
    bridge = Bridge(dispatcher, asyncio.get_running_loop(), None)
    step = EngineStep(lambda: None, asyncio.get_running_loop().create_future())
    bridge.enter(step)
    crossing = bridge.begin(0, X, IDS, WEIGHTS)  # on the loop's own thread, so it cannot begin in between
    assert bridge.give_up(step, ConnectionLost("enough"))
    assert await is_cancelled(crossing.result)
    assert dispatcher.n_ended == len(dispatcher.layers)


async def test_a_loop_that_is_gone_is_an_error_and_nobody_waits() -> None:
    def other_loop() -> Bridge:
        async def make() -> Bridge:
            return bridge_to(Dispatcher())

        return asyncio.run(make())

    bridge = await asyncio.get_running_loop().run_in_executor(None, other_loop)
    with pytest.raises(RuntimeError, match="closed"):
        bridge.begin(0, X, IDS, WEIGHTS)
