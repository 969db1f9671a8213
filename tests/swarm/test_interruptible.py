"""A cancelled task takes its blocking work along, and waits for its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from swarm.interruptible import Check, Interrupted, checked, run_interruptibly


class Work:
    """Blocking work that goes on until it is told to end, or for ever."""

    def __init__(self, *, checks: bool = True) -> None:
        self._checks = checks
        self.is_running, self.may_end = threading.Event(), threading.Event()
        self.has_ended = False

    def __call__(self, check: Check) -> str:
        self.is_running.set()
        try:
            while not self.may_end.wait(0.001):
                if self._checks:
                    try:
                        check()
                    except Exception:  # as a handler would that takes everything for a failure
                        pytest.fail("an interruption is no Exception")
            return "done"
        finally:
            self.has_ended = True


async def started(work: Callable[[Check], str]) -> asyncio.Task[str]:
    task = asyncio.create_task(run_interruptibly(work))
    if isinstance(work, Work):
        assert await asyncio.to_thread(work.is_running.wait, 5)
    return task


async def test_the_result_and_the_error_come_out_as_they_are() -> None:
    assert await run_interruptibly(lambda check: 7) == 7
    error = KeyError("x")

    def fail(_: Check) -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        await run_interruptibly(fail)
    assert caught.value is error


async def test_work_ends_at_its_next_check_and_before_its_task_does() -> None:
    work = Work()
    task = await started(work)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert work.has_ended


async def test_work_that_never_checks_is_waited_for() -> None:
    work = Work(checks=False)
    task = await started(work)
    task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert work.has_ended


async def test_an_error_after_the_cancellation_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    is_running, may_fail = threading.Event(), threading.Event()

    def fail(_: Check) -> str:
        is_running.set()
        assert may_fail.wait(5)
        raise OSError("the disk is full")

    task = asyncio.create_task(run_interruptibly(fail))
    assert await asyncio.to_thread(is_running.wait, 5)
    task.cancel()
    may_fail.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    del task
    assert caplog.records == []


def test_a_checked_progress_tells_how_far_it_is_and_ends_when_the_check_does() -> None:
    told: list[tuple[int, int]] = []
    checked(lambda: None, lambda *each: told.append(each))(1, 2)
    assert told == [(1, 2)]

    def interrupted() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        checked(interrupted, lambda *each: told.append(each))(2, 2)
    assert told == [(1, 2)], "checked before it is told"
    checked(lambda: None)(1, 2)
