"""Runs a coroutine in the very ticks in which it can go on: its beginning at once, what follows a `TakenFuture` as that is given.

An asyncio task begins in the loop's next round, goes on in the round after its future is set, and tells of its end in one more.
At the end of a layer's dispatch the engine's thread waits, and each round is some microseconds of that layer's way.

It is no task: `asyncio.current_task()` is whoever's tick it is. So the coroutine itself may not use `asyncio.timeout` or a
TaskGroup; tasks that it starts may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from swarm.net.answer import TakenFuture

T = TypeVar("T")


class EagerTask(Generic[T]):
    """One coroutine on its way; on the loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], on_done: Callable[[EagerTask[T]], None]) -> None:
        """`on_done` is called once, in the tick in which the coroutine ends, perhaps within `start`; it must not raise."""
        self._coroutine = coroutine
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._awaited: asyncio.Future[Any] | None = None
        self._must_cancel = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_done = False

    def start(self) -> None:
        """Run the coroutine up to where it waits for something; once."""
        self._go_on(None)

    def cancel(self) -> None:
        """Let the coroutine end with CancelledError where it waits, or before it begins; does nothing once it has ended."""
        if not self._is_done and (self._awaited is None or not self._awaited.cancel()):
            self._must_cancel = True

    def result(self) -> T:
        """Return what the coroutine returned, or raise what it raised, CancelledError too; only once it has ended."""
        assert self._is_done
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # a T, as there is no error

    def _go_on(self, _awaited: asyncio.Future[Any] | None) -> None:
        self._awaited = None
        try:
            if self._must_cancel:
                self._must_cancel = False
                awaited = self._coroutine.throw(asyncio.CancelledError())
            else:
                awaited = self._coroutine.send(None)
        except StopIteration as end:
            self._value = end.value
        except BaseException as error:  # whoever waits for the result gets it
            self._error = error
        else:
            self._wait_for(awaited)
            return
        self._is_done = True
        self._on_done(self)
        if isinstance(self._error, KeyboardInterrupt | SystemExit):
            raise self._error  # the loop's, too, as from an asyncio task: else a Ctrl-C in here would end one layer, and no more

    def _wait_for(self, awaited: asyncio.Future[Any] | None) -> None:
        if awaited is None:  # of sleep(0): one round
            self._loop.call_soon(self._go_on, None)
            return
        awaited._asyncio_future_blocking = False  # as asyncio.Task: else the future takes it for a forgotten await
        self._awaited = awaited
        if isinstance(awaited, TakenFuture) and awaited.taker is None:
            awaited.taker = self._go_on
        awaited.add_done_callback(self._go_on)
        if self._must_cancel and awaited.cancel():
            self._must_cancel = False
