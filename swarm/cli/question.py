"""Asks the person at the terminal, while everything else goes on: connections live, and Ctrl-C is obeyed.

A plain `input()` holds the event loop, and asyncio's handler of Ctrl-C, up for as long as the person thinks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import typer

from swarm.cli.runtime import err


def is_person_there() -> bool:
    """Return whether somebody can read a question and answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


async def ask(question: str, *, default: bool = True, fd: int = 0) -> bool:
    """Return what the person at the terminal answers to a question that is written to standard error.

    An empty line is the default; the end of input is a no. `fd`: where answers come from, a whole line at a time.
    """
    while True:
        err.print(f"{question} [{'Y/n' if default else 'y/N'}]: ", end="", markup=False, highlight=False)
        line = await _read_line(fd)
        if line is None:
            err.print()
            return False
        answer = line.strip().lower()
        if answer in ("", "y", "yes", "n", "no"):
            return answer.startswith("y") or (not answer and default)
        err.print("please answer yes or no", highlight=False)


async def _read_line(fd: int) -> str | None:
    """Return the next line of a terminal; None at its end."""
    loop = asyncio.get_running_loop()
    if sys.platform == "win32":  # only sockets can be waited for there
        return await asyncio.to_thread(lambda: sys.stdin.readline() or None)
    arrived = asyncio.Event()
    loop.add_reader(fd, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(fd)
    data = os.read(fd, 4096)
    return data.decode(errors="replace") if data else None


def confirm(question: str) -> bool:
    """Return what the person answers, before anything else goes on; no where nobody is, and at the end of input.

    Ctrl-C ends the program.
    """
    if not sys.stdin.isatty():
        return False
    former = signal.getsignal(signal.SIGINT)
    try:
        # asyncio's own handler waits for its loop, which waits here.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:  # not in the main thread, where signals are not ours
        return _confirm(question)
    try:
        return _confirm(question)
    finally:
        signal.signal(signal.SIGINT, former)


def _confirm(question: str) -> bool:
    try:
        return typer.confirm(question, err=True)
    except typer.Abort as abort:  # what typer makes of both; in a task group it would be a failure of the group
        if isinstance(abort.__context__, EOFError):
            return False
        raise KeyboardInterrupt from None
