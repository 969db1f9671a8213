"""A few lines about a daemon that runs: redrawn where a person looks, told now and then where nobody does, JSON for machines.

    a terminal      the lines, redrawn in place when they have changed, at most once in REDRAW_S
    no terminal     one line of the log a minute
    --json          one object on stdout when the state changes, and once a minute when only figures have
    --quiet         nothing

Whoever does not read misses updates and holds nobody up: what cannot be written at once is left out; each says everything.
Knows nothing of what is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import stat
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from swarm.cli.runtime import err

if sys.platform != "win32":
    import fcntl
    import termios

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at what is to be shown; 0.25 s would be a busier screen for no more news; guessed
REDRAW_S = 0.25  # least time between two redraws, however often `soon` is called
TOLD_S = 60.0  # between two lines where nobody looks
LEAST_PIPE_BYTES = 16 << 10  # of an empty pipe, where the system does not say; macOS's


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is to be shown now.

    Attributes:
        lines: for a terminal.
        line: for the log; empty: the first of `lines`.
        state: what is news when it changes, for JSON.
        figures: what changes all the time, for JSON; no key of `state`'s.
    """

    lines: Sequence[str]
    line: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)


class LiveLines:
    """Shows a daemon's state until it is cancelled; `async with asyncio.TaskGroup` holds `run`."""

    def __init__(
        self,
        look: Callable[[], Shown],
        *,
        as_json: bool = False,
        is_quiet: bool = False,
        console: Console = err,
        stream: IO[str] | None = None,
    ) -> None:
        """`look` says what is to be shown now. `stream`: where JSON goes; None: stdout."""
        self._look = look
        self._as_json = as_json
        self._is_quiet = is_quiet
        self._console = console
        self._stream = stream
        self._soon = asyncio.Event()

    def soon(self) -> None:
        """Let what has changed be shown at once."""
        self._soon.set()

    async def run(self) -> None:
        """Show it, for ever. A terminal's lines are gone when this ends; a terminal or a reader that has gone ends nothing."""
        try:
            await self._show()
        except OSError as error:
            logger.info("the status can be shown no more: %s", error)
            await asyncio.Event().wait()

    async def _show(self) -> None:
        if self._as_json:
            await self._tell_json()
        elif self._is_quiet:
            await asyncio.Event().wait()
        elif self._console.is_terminal:
            await self._draw()
        else:
            while True:
                await asyncio.sleep(TOLD_S)
                shown = self._look()
                logger.warning("%s", shown.line or shown.lines[0])  # without -v too: this is what was asked for

    async def _draw(self) -> None:
        drawn: list[str] = []
        # What others print on the same screen goes above the lines; what goes elsewhere goes there.
        is_shared = sys.stdout.isatty()
        with Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=is_shared) as live:
            while True:
                lines = list(self._look().lines)
                if lines != drawn and can_write(self._console.file):
                    # A line that does not fit is cut: wrapped ones would move the screen.
                    live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
                    drawn = lines
                await self._pause()

    async def _tell_json(self) -> None:
        told_state: Mapping[str, Any] | None = None
        told_figures: Mapping[str, Any] = {}
        told_at = float("-inf")
        clock = asyncio.get_running_loop().time
        while True:
            shown, now = self._look(), clock()
            is_due = now >= told_at + TOLD_S and shown.figures != told_figures
            stream = self._stream or sys.stdout
            text = json.dumps({"event": "status", **shown.state, **shown.figures})
            if (shown.state != told_state or is_due) and can_write(stream, len(text) + 1):
                print(text, file=stream, flush=True)
                told_state, told_figures, told_at = dict(shown.state), dict(shown.figures), now
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(REDRAW_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S - REDRAW_S):
                await self._soon.wait()
        self._soon.clear()


def can_write(stream: IO[str], n_bytes: int = 1) -> bool:
    """Return whether so many bytes can be written now without waiting; True where there is no telling."""
    try:
        _, ready, _ = select.select([], [stream.fileno()], [], 0)
        return bool(ready) and (n_bytes <= select.PIPE_BUF or _has_room(stream.fileno(), n_bytes))
    except (OSError, ValueError):  # no file, or a system on which only sockets can be asked
        return True


def _has_room(fd: int, n_bytes: int) -> bool:
    """Return whether a pipe takes so many bytes at once: one that is said to be ready may have room for PIPE_BUF only."""
    if sys.platform == "win32" or not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return True
    (n_unread,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    size = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) if sys.platform == "linux" else LEAST_PIPE_BYTES
    return n_unread == 0 and n_bytes <= size  # pages that are read in part count as full: how much is free nobody tells
