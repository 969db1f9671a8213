"""One layer under way: plumbing between its attempts, the peers, and whoever waits. Its rules are `attempts`.

    land() -> begin -> send orders ... -> an order ends  -> answered | failed -> send others
                    -> meanwhile          the timer ends -> handle_timeout    -> send others
           <- every batch has its answer, or the layer has failed

An order that ends after its layer still counts as a measurement of its peer, or as that peer's failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from swarm.dispatch.attempts import LayerAttempts, Order
from swarm.dispatch.holders import Holders
from swarm.dispatch.plan import HERE
from swarm.dispatch.replicas import Replicas
from swarm.dispatch.service_time import ServiceTimes
from swarm.errors import (
    DeadlineExceeded,
    NetworkError,
    Overloaded,
    RemoteProtocolError,
    RemoteRefused,
    SwarmError,
)
from swarm.net.answer import Answer, TakenFuture
from swarm.wire import messages as m

BUSY_RETRY_S = 0.2  # where a busy peer does not say; guessed: as long as a full line of short dispatches
LEAST_RETRY_S, MOST_RETRY_S = 0.01, 5.0  # what it says is taken within these: it may be wrong

_FAULTS = (NetworkError, RemoteProtocolError, RemoteRefused, Overloaded)  # how an order of a peer may end


class Crew(Protocol):
    """What a flight needs of its dispatcher, beside the orders' own bytes.

    Attributes:
        now: the clock.
    """

    holders: Holders
    times: ServiceTimes
    replicas: Replicas
    now: Callable[[], float]

    def await_late(self, future: asyncio.Future[m.Response]) -> None:
        """Own an answer that its layer needs no more, until it is there."""
        ...


class Flight:
    """One layer's orders."""

    def __init__(
        self,
        crew: Crew,
        attempts: LayerAttempts,
        send: Callable[[Order], asyncio.Future[m.Response]],
        check: Callable[[Order, m.Response], m.Result],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            send: starts an order; its future fails with NetworkError, RemoteProtocolError, RemoteRefused or Overloaded.
            check: returns an order's answer if it is one; else raises RemoteProtocolError.
            meanwhile: called when all have left, before the wait.
        """
        self._crew = crew
        self._attempts = attempts
        self._start: Callable[[Order], asyncio.Future[m.Response]] | None = send  # None: landed
        self._check = check
        self._meanwhile = meanwhile
        self._loop = asyncio.get_running_loop()
        self._landed: TakenFuture[None]
        self._under_way: dict[asyncio.Future[m.Response], Order] = {}
        self._results: dict[Order, m.Result] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def land(self) -> list[tuple[Order, m.Result]]:
        """Return the orders that make up the layer, each with its answer; raises ExpertUnavailable."""
        try:
            try:
                self._send(self._attempts.begin(self._crew.now()))
            finally:  # before anybody is told of an order's end, which is not within `begin`
                self._landed = TakenFuture[None](loop=self._loop)
            self._set_timer()
            if self._meanwhile is not None:
                self._meanwhile()
            await self._landed
        except BaseException:
            self._landed.cancel()  # what fails from here on is asked of nobody else
            self._leave_lines()  # now: what is cancelled may take a while to end
            await self._give_up()
            raise
        finally:
            self._landed.taker = None  # who waited, with what it made of the answers: a late one keeps this flight
            if self._timer is not None:
                self._timer.cancel()
            if self._attempts.turns.lines or self._attempts.on_turn is not None:
                self._leave_lines()
        for future in self._under_way:  # others were faster; their answers tell how much
            self._crew.await_late(future)
        landed = [(order, self._results[order]) for order in self._attempts.answers()]
        self._results.clear()  # late answers may keep this flight for a minute: without its layer's rows
        self._start = self._meanwhile = None
        return landed

    def _leave_lines(self) -> None:
        """Let those ask who wait behind this layer for a busy peer."""
        self._attempts.end(self._crew.now())

    async def _give_up(self) -> None:
        """Cancel what is under way, and return when it has ended."""
        futures = list(self._under_way)
        for future in futures:
            future.cancel()
        if futures:
            with contextlib.suppress(asyncio.CancelledError):  # cancelled already, or about to raise why it failed
                await asyncio.wait(futures)

    def _send(self, orders: Iterable[Order]) -> None:
        start, settle = self._start, self._settle
        assert start is not None
        for order in orders:
            future = start(order)
            self._under_way[future] = order
            if isinstance(future, Answer):
                future.taker = settle
            future.add_done_callback(settle)
            if order.service is not None:
                order.service.sent(order, order.sent_at)

    def _settle(self, future: asyncio.Future[m.Response]) -> None:
        """An order has ended, perhaps long after its layer."""
        order = self._under_way.pop(future)
        if future.cancelled():
            if order.service is not None:
                order.service.dropped(order)
            return
        error = future.exception()
        try:
            if error is None:
                try:
                    result = self._check(order, future.result())
                except RemoteProtocolError as wrong:
                    error = wrong
            if error is None:
                self._answered(order, result)
            else:
                self._failed(order, error)
        except Exception as failure:  # a mistake of ours: whoever waits must hear of it
            if not self._landed.done():
                self._landed.set_exception(failure)

    def _answered(self, order: Order, result: m.Result) -> None:
        crew, attempts = self._crew, self._attempts
        if order.service is not None:
            order.service.answered(order, order.n_ahead, crew.now())
            crew.holders.succeeded(order.node)
        if self._landed.done():
            return
        self._results[order] = result
        order.answered_ns = time.monotonic_ns()
        attempts.answered(order)
        if attempts.turns.lines:
            attempts.settled(order, crew.now())
        if attempts.is_done:
            self._landed.give(None)

    def _failed(self, order: Order, error: BaseException) -> None:
        crew, attempts = self._crew, self._attempts
        expected = SwarmError if order.node == HERE else _FAULTS
        if not isinstance(error, expected):
            raise error
        assert isinstance(error, SwarmError)
        now = crew.now()
        retry_after_s = _retry_after_s(error)
        if order.service is not None:
            order.service.dropped(order)
            if retry_after_s is not None:
                order.service.refused(order, retry_after_s, now)
                crew.replicas.refresh_soon()
            else:
                if isinstance(error, NetworkError) and not isinstance(error, DeadlineExceeded):
                    crew.times.forget(order.node)
                crew.holders.mark_down(order.node, error)
        if self._landed.done():
            return
        self._send(attempts.failed(order, error, now, retry_after_s=retry_after_s))
        if attempts.error is not None:
            self._landed.set_exception(attempts.error)
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        at = self._attempts.next_deadline()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            if self._attempts.turns.lines:
                self._attempts.on_turn = self._set_timer
            self._timer = self._loop.call_later(max(0.0, at - self._crew.now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._landed.done():
            return
        try:
            new = self._attempts.handle_timeout(self._crew.now())
            if new:
                self._crew.replicas.refresh_soon()
            self._send(new)
            if self._attempts.error is not None:
                self._landed.set_exception(self._attempts.error)
                return
            self._set_timer()
        except Exception as failure:
            self._landed.set_exception(failure)


def _retry_after_s(error: SwarmError) -> float | None:
    """Return when to ask a peer again that is only busy, not broken; None: it is not only busy."""
    if isinstance(error, Overloaded):
        return error.retry_after_s
    if isinstance(error, RemoteRefused) and error.remote_code == m.ErrorCode.BUSY:
        said_s = error.retry_after_s
        return BUSY_RETRY_S if said_s is None else min(max(said_s, LEAST_RETRY_S), MOST_RETRY_S)
    return None
