"""Long blocking work (hashing, loading, writing) in a thread that a cancelled task does not leave behind.

`asyncio.to_thread` returns at once when it is cancelled, and the thread works on: Ctrl-C would hash a file to its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

Check = Callable[[], None]
"""To be called often by blocking work; what it raises must be let through. It ends work whose task was cancelled."""


class Interrupted(BaseException):
    """The task that waits for this work was cancelled. No Exception, so that no handler takes it for a failure."""


def checked(check: Check, progress: Callable[[int, int], None] | None = None) -> Callable[[int, int], None]:
    """Return a progress callback (done, total) that checks first, then tells `progress`."""

    def advance(n_done: int, n_total: int) -> None:
        check()
        if progress is not None:
            progress(n_done, n_total)

    return advance


async def run_interruptibly(work: Callable[[Check], T]) -> T:
    """Return what `work(check)` returns or raises in a thread. A cancelled caller waits until the work has ended.

    It ends at its next `check()`; if it never checks, it ends when it is done.
    """
    is_cancelled = threading.Event()

    def check() -> None:
        if is_cancelled.is_set():
            raise Interrupted

    def checked() -> T:
        check()
        return work(check)

    thread = asyncio.get_running_loop().run_in_executor(None, checked)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        is_cancelled.set()
        await asyncio.wait([thread])
        thread.exception()  # looked at, so that asyncio does not report it: the cancellation says all
        raise
