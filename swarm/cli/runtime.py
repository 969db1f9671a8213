"""What every command shares: where errors end, how signals end a daemon, where progress is drawn, how logs look."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from swarm import event_loop

T = TypeVar("T")

out = Console(soft_wrap=True)  # results
err = Console(stderr=True, soft_wrap=True)  # progress, logs, errors

SPIN_COUNT = (
    "1000"  # measured (DESIGN section 8): costs a lone process 5 %, keeps two busy ones from stopping each other
)

M_MMAP_THRESHOLD = -3  # of glibc's mallopt
# Larger arrays are mapped, so that they go back to the system when they are freed. glibc begins with 128 KB and moves up to
# 32 MB: a prompt of 512 tokens left 25 to 50 MB of freed rows resident in each process, at a peak 8 MB higher (measured).
MAPPED_FROM_BYTES = 1 << 20


def set_up_logging(verbosity: int) -> None:
    """Send logs to stderr: warnings, with -v information, with -vv all."""
    level = [logging.WARNING, logging.INFO, logging.DEBUG][min(verbosity, 2)]
    handler: logging.Handler = RichHandler(console=err, show_path=False, rich_tracebacks=False, markup=False)
    if not err.is_terminal:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("quic", "asyncio", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def log_as_json() -> None:
    """Write each log line from INFO on as a JSON object, for machines that read them; call after `set_up_logging`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(min(root.level, logging.INFO))


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def tame_openmp() -> None:
    """Bound how long idle OpenMP threads spin; must come before the engine library is loaded."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def give_memory_back() -> None:
    """Let large arrays go back to the system as soon as they are freed, where the C library can be told so (glibc)."""
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on uvloop where it exists. Ctrl-C and SIGTERM cancel it, so that it can clean up."""

    async def with_signals() -> T:
        task = asyncio.current_task()
        assert task is not None
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    return event_loop.run(with_signals())


def run_daemon(
    main: Coroutine[Any, Any, None], *, until_eof: bool, is_ready: Callable[[], bool] = lambda: True
) -> None:
    """Run a daemon until Ctrl-C, SIGTERM or, with `until_eof`, the end of its standard input; all three are a clean end.

    Raises:
        KeyboardInterrupt, CancelledError: that end came before `is_ready()`, so the work it was started for was not done.
    """

    async def guarded() -> None:
        was_cancelled = False
        task = asyncio.current_task()
        assert task is not None
        if until_eof:
            _on_eof(asyncio.get_running_loop(), task.cancel)
        try:
            await main
        except* asyncio.CancelledError:
            was_cancelled = True
        if was_cancelled and not is_ready():
            raise asyncio.CancelledError  # which asyncio turns into a KeyboardInterrupt after Ctrl-C

    try:
        run_async(guarded())
    except (KeyboardInterrupt, asyncio.CancelledError):
        if not is_ready():
            raise


def _on_eof(loop: asyncio.AbstractEventLoop, action: Callable[[], Any], fd: int = 0) -> None:
    """Call `action` on the loop once the file descriptor (standard input) is at its end."""

    def wait() -> None:
        # Not by sys.stdin: a thread that holds its lock when the process ends makes Python abort.
        try:
            while os.read(fd, 4096):
                pass
        except OSError:
            pass  # not even open
        try:
            loop.call_soon_threadsafe(action)
        except RuntimeError:
            pass  # the loop has ended already

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def print_json(value: object) -> None:
    """Print one JSON object on a line of its own, at once."""
    print(json.dumps(value), flush=True)


class _Amount(ProgressColumn):
    """How much is done: of bytes also how fast."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._speed, self._count = DownloadColumn(), TransferSpeedColumn(), MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        """Return it for one bar."""
        if not task.fields.get("is_bytes"):
            return self._count.render(task)
        return Text(" ").join([self._bytes.render(task), self._speed.render(task)])


class ProgressBars:
    """Progress of long work on stderr: bars on a terminal, a line now and then elsewhere. Use as a context manager."""

    _STEP = 0.25  # elsewhere than on a terminal: a line for each quarter

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, float] = {}

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None  # a later `update` begins anew
            self._tasks.clear()

    def update(self, what: str, n_done: int, n_total: int, *, is_bytes: bool = False) -> None:
        """Show that `n_done` of `n_total` are done; may be called from any thread."""
        if n_total <= 0:
            return
        if not err.is_terminal:
            share = n_done / n_total
            if share >= self._told.get(what, 0.0) + self._STEP or n_done == n_total != self._told.get(what):
                if self._told.get(what, 0.0) < 1.0:
                    print(f"{what}: {share:.0%}", file=sys.stderr, flush=True)
                self._told[what] = share
            return
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"), BarColumn(), _Amount(), TimeRemainingColumn(), console=err
            )
            self._bars.start()
        if what not in self._tasks:  # what an earlier run has done counts for no rate
            self._tasks[what] = self._bars.add_task(what, total=n_total, completed=n_done, is_bytes=is_bytes)
        self._bars.update(self._tasks[what], completed=n_done, total=n_total)
