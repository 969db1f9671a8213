"""What a benchmark's child process hears from the one that started it."""

from __future__ import annotations

import asyncio
import sys


async def standard_input() -> asyncio.StreamReader:
    """Return this process's standard input, a pipe; its end means that whoever started the process wants it no more."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader
