"""The future of a request's answer, which one taker can have in the tick in which it comes.

A future's callbacks run in the loop's next round. For a layer that waits for its last answer that is one more round through
code and caches that went cold meanwhile; a taker is called by the link itself, before it returns to the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.wire import messages as m


class Answer(asyncio.Future[m.Response]):
    """An answer that is awaited.

    Attributes:
        taker: a callback of this future that is called at once when the result is there, instead of in the next round; if it
            fails or is cancelled, as any other. It must not raise.
    """

    taker: Callable[[asyncio.Future[m.Response]], None] | None = None

    def give(self, response: m.Response) -> None:
        """It has come."""
        taker = self.taker
        if taker is None:
            self.set_result(response)
            return
        self.remove_done_callback(taker)
        self.set_result(response)
        taker(self)
