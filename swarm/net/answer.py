"""Futures whose outcome one taker can have in the tick in which it comes; that of a request's answer is one.

A future's callbacks run in the loop's next round. For a layer that waits for its last answer that is one more round through
code and caches that went cold meanwhile; a taker is called by whoever gives the result, before that returns to the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from swarm.wire import messages as m

T = TypeVar("T")


class TakenFuture(asyncio.Future[T]):
    """A future to be set with `give`.

    Attributes:
        taker: a callback of this future that is called at once when the result is there, instead of in the next round; if it
            fails or is cancelled, as any other. It must not raise.
    """

    taker: Callable[[asyncio.Future[T]], None] | None = None

    def give(self, result: T) -> None:
        """It has come."""
        taker = self.taker
        if taker is None:
            self.set_result(result)
            return
        self.remove_done_callback(taker)
        self.set_result(result)
        taker(self)


class Answer(TakenFuture[m.Response]):
    """An answer that is awaited.

    Attributes:
        exchange: of its request, for whoever started that.
    """

    exchange: int
