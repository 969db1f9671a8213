"""An event loop whose clock jumps to the next timer whenever nothing is ready: hours pass in milliseconds, and in order.

For code whose only outside world is timers and in-memory fakes: no threads, no sockets. Waiting for what can never happen
is an error instead of a hang.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeftToHappen(Exception):
    """Everything waits, and no timer is set."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at second 1,000, so that a time of 0 by mistake shows."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._virtual = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise NothingLeftToHappen
        self._virtual.now += timeout
        return super().select(0)


def now() -> float:
    """Return the running loop's time, seconds."""
    return asyncio.get_running_loop().time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Return what `main` returns, run in virtual time; fails when it leaves a task behind."""

    async def and_leave_nothing() -> T:
        result = await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"
        return result

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(and_leave_nothing())
