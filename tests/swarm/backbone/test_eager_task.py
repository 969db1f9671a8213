"""An eager task goes on in the tick in which it can, and ends as an asyncio task would."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from swarm.backbone.eager_task import EagerTask
from swarm.net.answer import TakenFuture


class Watched:
    """An eager task and what it told of its end."""

    def __init__(self, coroutine: Coroutine[Any, Any, int]) -> None:
        self.ended: list[EagerTask[int]] = []
        self.task = EagerTask(coroutine, self.ended.append)

    async def end(self) -> None:
        for _ in range(10):  # rounds of the loop; each future here takes one
            await asyncio.sleep(0)
        assert self.ended == [self.task]


def taken() -> TakenFuture[int]:
    return TakenFuture[int](loop=asyncio.get_running_loop())


async def test_it_begins_at_once_and_ends_in_the_tick_in_which_its_future_is_given() -> None:
    steps: list[str] = []
    future = taken()

    async def work() -> int:
        steps.append("began")
        value = await future
        steps.append("went on")
        return value + 1

    watched = Watched(work())
    assert steps == []
    watched.task.start()
    assert steps == ["began"]
    future.give(4)
    assert steps == ["began", "went on"]
    assert watched.ended == [watched.task]
    assert watched.task.result() == 5
    await watched.end()  # and it is told of once


async def test_what_waits_for_nothing_ends_where_it_starts() -> None:
    async def work() -> int:
        return 7

    watched = Watched(work())
    watched.task.start()
    assert watched.ended == [watched.task]
    assert watched.task.result() == 7


async def test_other_futures_sleeps_and_a_future_that_was_given_before_are_waited_for_too() -> None:
    plain: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future = taken()
    future.give(1)

    async def work() -> int:
        await asyncio.sleep(0)
        return await plain + await future

    watched = Watched(work())
    watched.task.start()
    await asyncio.sleep(0)
    plain.set_result(2)
    assert watched.ended == []
    await watched.end()
    assert watched.task.result() == 3


async def test_of_two_that_wait_for_one_future_both_go_on() -> None:
    future = taken()

    async def work() -> int:
        return await future

    first, second = Watched(work()), Watched(work())
    first.task.start()
    second.task.start()
    future.give(9)
    await first.end()
    await second.end()
    assert (first.task.result(), second.task.result()) == (9, 9)


@pytest.mark.parametrize("where", ["at once", "after a wait", "from its future"])
async def test_a_failure_is_the_results(where: str) -> None:
    future = taken()

    async def work() -> int:
        if where == "at once":
            raise KeyError(where)
        await future
        raise KeyError(where)

    watched = Watched(work())
    watched.task.start()
    if where == "after a wait":
        future.give(1)
        assert watched.ended == [watched.task]
    elif where == "from its future":
        future.set_exception(KeyError(where))
    await watched.end()
    with pytest.raises(KeyError, match=where):
        watched.task.result()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_what_ends_the_process_ends_it_and_whoever_waits_hears_of_it(kind: type[BaseException]) -> None:
    future = taken()

    async def work() -> int:
        await future
        raise kind

    watched = Watched(work())
    watched.task.start()
    with pytest.raises(kind):
        future.give(1)
    assert watched.ended == [watched.task]
    with pytest.raises(kind):
        watched.task.result()


async def test_cancelled_where_it_waits_it_can_clean_up_and_its_future_is_cancelled() -> None:
    future = taken()
    other: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    steps: list[str] = []

    async def work() -> int:
        try:
            return await future
        finally:
            steps.append("cleaning")
            await other
            steps.append("clean")

    watched = Watched(work())
    watched.task.start()
    watched.task.cancel()
    assert future.cancelled()
    await asyncio.sleep(0)
    assert steps == ["cleaning"]
    other.set_result(None)
    await watched.end()
    assert steps == ["cleaning", "clean"]
    with pytest.raises(asyncio.CancelledError):
        watched.task.result()


async def test_cancelled_before_it_starts_it_does_nothing() -> None:
    steps: list[str] = []

    async def work() -> int:
        steps.append("began")
        return 1

    watched = Watched(work())
    watched.task.cancel()
    watched.task.start()
    assert steps == []
    assert watched.ended == [watched.task]
    with pytest.raises(asyncio.CancelledError):
        watched.task.result()


async def test_cancelled_when_its_future_is_set_but_not_told_of_it_is_cancelled_still() -> None:
    plain: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        await plain
        return await asyncio.sleep(0, 1)

    watched = Watched(work())
    watched.task.start()
    plain.set_result(1)
    watched.task.cancel()
    await watched.end()
    with pytest.raises(asyncio.CancelledError):
        watched.task.result()


async def test_cancelled_after_its_end_it_keeps_its_result() -> None:
    async def work() -> int:
        return 3

    watched = Watched(work())
    watched.task.start()
    watched.task.cancel()
    assert watched.task.result() == 3


async def test_cancelled_by_itself_it_ends_where_it_waits_next() -> None:
    tasks: list[EagerTask[int]] = []

    async def work() -> int:
        tasks[0].cancel()
        return await taken()

    watched = Watched(work())
    tasks.append(watched.task)
    watched.task.start()
    await watched.end()
    with pytest.raises(asyncio.CancelledError):
        watched.task.result()


async def test_it_waits_for_tasks_and_groups_of_tasks_as_a_layer_does() -> None:
    async def part(n: int) -> int:
        async with asyncio.timeout(5):
            await asyncio.sleep(0)
        return n

    async def work() -> int:
        tasks = [asyncio.ensure_future(part(n)) for n in (1, 2)]
        await asyncio.wait(tasks)
        return sum(task.result() for task in tasks)

    watched = Watched(work())
    watched.task.start()
    await watched.end()
    assert watched.task.result() == 3
