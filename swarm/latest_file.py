"""A file of which only the latest content counts, written in a thread, so that no loop waits for a disk.

    write(a) -> a is being written;   write(b), write(c) -> c waits, b is never written;   a is whole -> c is being written

One content is written at a time and one waits, so what is there in the end is what came last. The file appears whole or not at
all (`files`). The thread lives while there is something to write, and keeps no process from ending: who leaves waits for the
future that `write` returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from swarm.files import write_atomically


class LatestFile:
    """One file; `write` may be called from any thread. Its folder is made where it is not there."""

    def __init__(
        self, path: Path, *, mode: int = 0o644, on_failure: Callable[[Exception], None] = lambda error: None
    ) -> None:
        """`on_failure`: called in the thread, before a future fails."""
        self.path = path
        self._mode = mode
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._waiting: tuple[bytes, Future[None]] | None = None
        self._is_writing = False

    def write(self, data: bytes) -> Future[None]:
        """Return at once; the future is done when this content, or a later one, is written. It fails with OSError.

        Cancelling it changes nothing: the content is written.
        """
        with self._lock:
            future = Future[None]() if self._waiting is None else self._waiting[1]
            if future.cancelled():
                future = Future()
            self._waiting = data, future
            if self._is_writing:
                return future
            self._is_writing = True
        try:
            threading.Thread(target=self._run, name=f"writing {self.path.name}", daemon=True).start()
        except RuntimeError:  # this machine has no thread left
            self._run()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None:
                    self._is_writing = False
                    return
                data, future = self._waiting
                self._waiting = None
            is_wanted = future.set_running_or_notify_cancel()  # from here on nobody can cancel it
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, data, mode=self._mode)
            except Exception as error:
                self._on_failure(error)
                if is_wanted:
                    future.set_exception(error)
            else:
                if is_wanted:
                    future.set_result(None)


async def until_written(writing: Future[None], timeout_s: float) -> None:
    """Return when a writing has ended, well or not, or after `timeout_s`: for whoever leaves, whose threads end with it."""
    ended = asyncio.wrap_future(writing)
    ended.add_done_callback(lambda each: each.cancelled() or each.exception())  # told already
    await asyncio.wait([ended], timeout=timeout_s)
    ended.cancel()  # of no use any more: the loop may be gone when it ends
