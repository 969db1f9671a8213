"""Several answers to one request, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from swarm.backbone.requests import TextDelta


async def merged(
    streams: Sequence[AsyncGenerator[TextDelta, None]],
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield (index of the stream, its next delta); the first stream that fails ends all. Closing it closes the streams."""
    if len(streams) == 1:  # no tasks and no queue
        async with aclosing(streams[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, TextDelta | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: AsyncGenerator[TextDelta, None]) -> None:
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    await arrived.put((index, delta))
                    if delta.finish_reason is not None:
                        break
            await arrived.put((index, None))
        except Exception as error:
            await arrived.put((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        n_open = len(streams)
        while n_open:
            index, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                n_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
