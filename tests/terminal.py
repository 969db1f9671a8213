"""A program on a terminal of its own, and what a person sees there: for tests of what people are shown, and recordings.

async with Terminal.running(command, environment) as terminal:
    await terminal.until("Join? [Y/n]")
    terminal.type("y")
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import termios
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import pyte

COLUMNS, ROWS = 100, 40
LIMIT_S = 60.0  # of a wait, on a busy machine


class Terminal:
    """One program and its screen."""

    def __init__(self, process: asyncio.subprocess.Process, fd: int) -> None:
        self.process = process
        self._fd = fd
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._changed = asyncio.Event()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, command: Sequence[str], environment: Mapping[str, str]) -> AsyncIterator[Terminal]:
        """Run a program; at the end it is killed, if it still runs."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env={**environment, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)},
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        terminal = cls(process, ours)
        try:
            yield terminal
        finally:
            await terminal.kill()
            asyncio.get_running_loop().remove_reader(ours)
            os.close(ours)

    @property
    def lines(self) -> list[str]:
        """What stands on the screen, without empty lines at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip().splitlines()

    @property
    def text(self) -> str:
        """The same as one text."""
        return "\n".join(self.lines)

    async def until(self, text: str, *, within_s: float = LIMIT_S) -> None:
        """Return when this stands on the screen."""
        deadline = time.monotonic() + within_s
        while text not in self.text:
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                raise AssertionError(f"{text!r} never came:\n{self.text}") from None

    async def until_gone(self, text: str, *, within_s: float = LIMIT_S) -> None:
        """Return when this stands on the screen no more."""
        deadline = time.monotonic() + within_s
        while text in self.text:
            assert time.monotonic() < deadline, f"{text!r} stays:\n{self.text}"
            await asyncio.sleep(0.02)

    def type(self, line: str) -> None:
        """Type a line, with its end."""
        os.write(self._fd, line.encode() + b"\n")

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    async def kill(self) -> None:
        """End the program as `kill -9` does."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65_536)
        except BlockingIOError:
            return
        except OSError:  # the program's end of the terminal is closed
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
        else:
            self._stream.feed(data)
        self._changed.set()
