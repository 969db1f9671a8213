"""Requests being served: who is answered now, who waits for a turn, who is told to come back, and what is said of failures.

Bounded: requests in all and by connection, bulky ones apart, and bytes of answers that are not taken yet (`answer_budget`). Knows
nothing of sockets or paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ExpertsNotHeld,
    Leaving,
    Overloaded,
    Refused,
    RemoteProtocolError,
    SwarmError,
)
from swarm.net.answer_budget import AnswerBudget
from swarm.net.connection import Connection, clock
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

# Answers a request: a coroutine, which gets a task of its own, or a future, which needs none (a dispatch saves the three
# wake-ups of a task). What is not wanted any more is cancelled. A dispatch's result may also be returned at once.
Handler = Callable[[Connection, m.Request], Awaitable[m.Response] | m.Result]

BULKY = (m.GetManifest, m.GetBlock)  # their answers can be far larger than they are
# Requests being served, all connections together; more are refused as BUSY. Bulky ones, which mostly wait (2 KB each), apart,
# so that those who wait for blocks do not keep dispatches out.
MAX_SERVING, MAX_BULKY = 1024, 4096
# The same, of one connection: it needs no more to keep a path full (peer/fetch asks for 4 blocks at a time).
MAX_SERVING_PER_CONNECTION, MAX_BULKY_PER_CONNECTION = 128, 8
N_BULKY_AT_ONCE = 4  # handlers that make a bulky answer: bounds what is made beyond the budget, at 96 MB each
ROOM_TIMEOUT_S = 30.0  # for a bulky request to get its turn and room for its answer, then BUSY; guessed
ROOM_CHECK_S = 1.0  # how often those who take their answers slowly are looked for, while others wait
HELD_ANSWER_BYTES = 512 << 20  # held for all askers; guessed: six of the largest blocks
_BUSY = m.Busy(retry_after_ms=200, detail="too many requests, try again")  # the time is a guess


class Serving:
    """The requests that one endpoint answers.

    Attributes:
        handlers: by the kind of request.
        answers: what is held of answers, by connection.
        n_short, n_bulky: how many requests are served, by connection; None: all.
    """

    def __init__(self, held_answer_bytes: int) -> None:
        """`held_answer_bytes`: not taken yet by those who asked; beyond, bulky requests wait and others are told BUSY."""
        self.handlers: dict[type[m.Request], Handler] = {}
        self.answers: AnswerBudget[Connection] = AnswerBudget(held_answer_bytes)
        self.n_short: Counter[Connection | None] = Counter()
        self.n_bulky: Counter[Connection | None] = Counter()
        self._under_way: dict[tuple[Connection, int], asyncio.Future[Any]] = {}
        self._bulky_turn = asyncio.Semaphore(N_BULKY_AT_ONCE)
        self._has_room = asyncio.Event()
        self._slow_checked_at = 0.0
        self._tasks = asyncio.TaskGroup()
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._under_way)

    def add_handler(self, serves: Iterable[type[m.Request]], handler: Handler) -> None:
        """Let `handler` answer these requests."""
        self.handlers |= dict.fromkeys(serves, handler)

    async def open(self) -> None:
        """Begin; `stop` and `wait_closed` end it."""
        await self._tasks.__aenter__()

    def stop(self) -> None:
        """Give up what is under way, and begin nothing more."""
        self._is_closing = True
        for serving in list(self._under_way.values()):
            serving.cancel()

    async def wait_closed(self) -> None:
        """Return once nothing runs any more."""
        await self._tasks.__aexit__(None, None, None)

    def forget(self, connection: Connection) -> None:
        """A connection is gone, and what is held for it."""
        self.answers.forget(connection)
        self._has_room.set()

    def note_unsent(self, connection: Connection, n_given: int, n_held: int) -> None:
        """Learn how much of its answers a connection holds."""
        self.answers.update(connection, n_given=n_given, n_held=n_held)
        if not self.answers.is_full:
            self._has_room.set()

    def begin(self, connection: Connection, exchange: int, request: m.Request) -> None:
        """Answer a request, or say BUSY."""
        is_bulky = isinstance(request, BULKY)
        if is_bulky:
            counts, limit, connection_limit = self.n_bulky, MAX_BULKY, MAX_BULKY_PER_CONNECTION
        else:
            counts, limit, connection_limit = self.n_short, MAX_SERVING, MAX_SERVING_PER_CONNECTION
        # Mostly nothing is under way: what is answered at once is not counted.
        is_busy = bool(counts) and (counts[None] >= limit or counts[connection] >= connection_limit)
        if not is_busy and not is_bulky and self.answers.n_bytes and not self.answers.has_room(connection):
            is_busy = True
            self._close_slow()
        handler = self.handlers.get(type(request))
        if is_busy or handler is None or self._is_closing:
            connection.respond(exchange, _BUSY)
            return
        serving: asyncio.Future[Any]
        if is_bulky:
            serving = self._tasks.create_task(self._serve_in_turn(handler, connection, exchange, request))
        else:
            try:
                answer = handler(connection, request)
            except Exception as error:
                self._refuse(connection, exchange, error)
                return
            if isinstance(answer, m.Result):
                self._respond(connection, exchange, answer)
                return
            if isinstance(answer, asyncio.Future):
                serving = answer
                serving.add_done_callback(functools.partial(self._on_answered, connection, exchange))
            else:
                serving = self._tasks.create_task(self._serve(answer, connection, exchange))
                if asyncio.iscoroutine(answer):  # a task that is stopped before its first step leaves it never awaited
                    serving.add_done_callback(functools.partial(_close, answer))
        self._under_way[connection, exchange] = serving
        counts[None] += 1
        counts[connection] += 1
        serving.add_done_callback(functools.partial(self._on_served, connection, exchange, counts))

    def _on_served(
        self, connection: Connection, exchange: int, counts: Counter[Connection | None], _: asyncio.Future[Any]
    ) -> None:
        self._under_way.pop((connection, exchange), None)
        for key in (None, connection):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]

    def cancel(self, connection: Connection, exchange: int) -> None:
        """Stop answering a request that nobody waits for any more."""
        serving = self._under_way.get((connection, exchange))
        if serving is not None:
            serving.cancel()

    async def _serve_in_turn(self, handler: Handler, connection: Connection, exchange: int, request: m.Request) -> None:
        """Answer one request once the asker has taken its earlier answers, and there is room for this one among all others'."""
        async with connection.turn:
            try:
                await connection.wait_drained()
            except DeadlineExceeded as error:
                connection.close(error)
                return
            try:
                async with asyncio.timeout(ROOM_TIMEOUT_S) as waiting, self._bulky_turn:
                    await self._wait_for_room()
                    waiting.reschedule(None)
                    try:
                        answer = handler(connection, request)
                    except Exception as error:
                        self._refuse(connection, exchange, error)
                        return
                    assert not isinstance(answer, m.Result)  # dispatches are not bulky
                    await self._serve(answer, connection, exchange)
            except TimeoutError:
                connection.respond(exchange, _BUSY)

    async def _wait_for_room(self) -> None:
        while self.answers.is_full:
            self._close_slow()
            self._has_room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROOM_CHECK_S):
                    await self._has_room.wait()

    def _close_slow(self) -> None:
        """End the connections that take their answers too slowly; to be called while others wait, however often."""
        now = clock()
        if now >= self._slow_checked_at + ROOM_CHECK_S:
            self._slow_checked_at = now
            for connection in self.answers.slow(now):
                connection.close(ConnectionLost("the other side does not take its answers, and others wait"))

    async def _serve(self, answer: Awaitable[m.Response], connection: Connection, exchange: int) -> None:
        """Answer one request. Nothing may escape: this task shares a group with all others."""
        try:
            self._respond(connection, exchange, await answer)
        except asyncio.CancelledError as error:
            self._refuse(connection, exchange, error)
            raise
        except Exception as error:
            self._refuse(connection, exchange, error)

    def _on_answered(self, connection: Connection, exchange: int, answer: asyncio.Future[m.Response]) -> None:
        error = asyncio.CancelledError() if answer.cancelled() else answer.exception()
        if error is not None:
            self._refuse(connection, exchange, error)
        else:
            self._respond(connection, exchange, answer.result())

    def _respond(self, connection: Connection, exchange: int, answer: m.Response) -> None:
        try:
            connection.respond(exchange, answer)
        except Exception:  # an answer of the wrong type, or one that cannot be written: the asker must not wait for it
            logger.exception("the answer to a request of node %s cannot be sent", connection.remote.short)
            connection.respond(exchange, m.Refusal(code=m.ErrorCode.INTERNAL, detail="internal error"))

    def _refuse(self, connection: Connection, exchange: int, error: BaseException) -> None:
        """Tell the asker why there is no answer; what breaks the protocol ends the connection."""
        # A node may have come back with other experts: not worth its connection.
        if isinstance(error, RemoteProtocolError) and not isinstance(error, ExpertsNotHeld):
            connection.close(error)
            return
        code, detail = m.ErrorCode.INTERNAL, "internal error"
        if isinstance(error, asyncio.CancelledError):
            # By the other side, or as the endpoint closes: then this goes nowhere. Else by something in the handler.
            detail = "the request was cancelled"
        elif isinstance(error, Overloaded):
            busy = m.Busy(detail=str(error), retry_after_ms=max(0, round(error.retry_after_s * 1e3)))
            connection.respond(exchange, busy)
            return
        elif isinstance(error, Leaving):
            code, detail = m.ErrorCode.SHUTTING_DOWN, str(error)
        elif isinstance(error, ExpertsNotHeld) or type(error) is LookupError:
            code, detail = (
                m.ErrorCode.NOT_FOUND,
                str(error),
            )  # raised on purpose; a KeyError is a bug, and may hold anything
        elif isinstance(error, Refused):
            detail = str(error)
        elif isinstance(error, SwarmError):  # its text is for the people of this machine, and may name its files
            logger.warning("a request of node %s failed: %s", connection.remote.short, error)
        else:
            logger.error("a request of node %s failed", connection.remote.short, exc_info=error)
        connection.respond(exchange, m.Refusal(code=code, detail=detail))


def _close(answer: Coroutine[Any, Any, Any], _: asyncio.Future[Any]) -> None:
    answer.close()
