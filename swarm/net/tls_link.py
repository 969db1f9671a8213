"""A session over one TLS stream, beside the QUIC connection with the same node: for dispatches on short, clean paths.

    asyncio's transport (TLS 1.3 over TCP, or over a Unix socket)
      data_received -> RecordReader -> Session -> futures of requests, or the endpoint's handler
      start, respond -> Session -> records -> one write

It is never the only way to a node. A request that it cannot finish goes over the other link, by `retry`: when this one ends,
and when an answer is late by far: TCP repairs a loss after 200 ms at the earliest, and a path that is cut says nothing at all.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from swarm.errors import ConnectionLost, Overloaded, RemoteProtocolError, SwarmError
from swarm.ids import NodeId
from swarm.net.connection import clock
from swarm.net.tls_records import MAX_EXCHANGE, RecordKind, RecordReader, encode_exchange, encode_record
from swarm.wire import events as e
from swarm.wire import messages as m
from swarm.wire import session as s
from swarm.wire.greetings import State

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 4 << 20  # in the transport's buffer; beyond, requests are refused and answers end the link. Guessed
N_LATE, LATE_FLOOR_S = (
    3.0,
    0.2,
)  # an answer is late after max(3 srtt, srtt + 200 ms): TCP's least retransmission timeout
UNSEEN_S = 0.5  # the same before anything was answered; guessed
N_STRIKES = 3  # late answers in a row after which the link is given up
_RTT_GAIN = 0.125  # RFC 6298's
OnRequest = Callable[["TlsLink", int, m.Request], None]
Retry = Callable[[], "asyncio.Future[m.Response]"]


@dataclass(slots=True)
class _Asked:
    """A request under way.

    Attributes:
        retry: asks the same over another link; None: its failure is its asker's.
        late_at: when to do that, at the latest.
        other: the answer over the other link, once that was asked.
    """

    answer: asyncio.Future[m.Response]
    retry: Retry | None
    sent_at: float
    late_at: float
    other: asyncio.Future[m.Response] | None = None


class TlsLink(asyncio.Protocol):
    """One link. Has the part of a Connection's methods that dispatches use, with the same meaning."""

    def __init__(
        self,
        make_session: Callable[[], s.Session],
        *,
        on_request: OnRequest,
        on_cancel: Callable[[TlsLink, int], None],
        on_open: Callable[[TlsLink], bool],
        on_gone: Callable[[TlsLink], None],
        on_unsent: Callable[[TlsLink, int, int], None] = lambda link, n_given, n_held: None,
        check: Callable[[asyncio.Transport], None] | None = None,
    ) -> None:
        """`check`: of a client's link, whether the right node has answered; raises IdentityMismatch.

        `on_open` returns whether this side goes on with whom it is. `on_unsent` is told how many bytes were written since the
        start and how many of them are held here, while the other side takes them slowly.
        """
        self._make_session = make_session
        self._on_request, self._on_cancel = on_request, on_cancel
        self._on_open, self._on_gone = on_open, on_gone
        self._on_unsent = on_unsent
        self._is_paused = False  # the transport holds more than it likes to
        self._check = check
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._session: s.Session | None = None
        self._reader = RecordReader()
        self._asked: dict[int, _Asked] = {}
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.opened.add_done_callback(_seen)
        self._error: SwarmError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._service_s: float | None = None  # smoothed time from a request to its answer
        self._n_strikes = 0
        self._pings: dict[int, float] = {}
        self._next_ping = 1
        self.rtt_s: float | None = None
        self.bytes_sent = self.bytes_received = 0  # of records, without what TLS and TCP add
        self.n_retried = 0  # requests that went over the other link

    # For callers

    @property
    def remote(self) -> NodeId:
        """Who is there, proved. Only once it is open."""
        if self._session is None or self._session.remote is None:
            raise ConnectionLost("the greetings are not done")
        return self._session.remote

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent now."""
        return self._error is None and self._session is not None and self._session.state is State.OPEN

    def start(
        self,
        message: m.Request,
        *,
        timeout_s: float,
        max_answer_bytes: int | None = None,
        retry: Retry | None = None,
    ) -> asyncio.Future[m.Response]:
        """Send a request and return the future of its answer, as `Connection.start`.

        `retry`: asks the same elsewhere; it is called at most once, if this link ends or is late. Then the first answer counts.

        Raises:
            ConnectionLost, or what else ended the link; Overloaded. Nothing was sent.
        """
        if self._error is not None or self._session is None or self._transport is None or not self.is_open:
            raise (self._error or ConnectionLost("the link is not open")).with_traceback(None)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise Overloaded("too many bytes wait on one link", retry_after_s=0.1)
        now = clock()
        exchange = self._session.request(message, deadline=now + timeout_s, now=now, max_answer_bytes=max_answer_bytes)
        answer: asyncio.Future[m.Response] = self._loop.create_future()
        srtt_s = self._service_s
        late_s = UNSEEN_S if srtt_s is None else max(N_LATE * srtt_s, srtt_s + LATE_FLOOR_S)
        asked = self._asked[exchange] = _Asked(answer, retry, now, now + late_s)
        answer.add_done_callback(functools.partial(self._on_answer_done, exchange, asked))
        self._flush()
        self._set_timer(now)
        return answer

    async def request(self, message: m.Request, *, timeout_s: float, max_answer_bytes: int | None = None) -> m.Response:
        """Return the answer to `message`."""
        return await self.start(message, timeout_s=timeout_s, max_answer_bytes=max_answer_bytes)

    def respond(self, exchange: int, message: m.Response | m.Refusal) -> None:
        """Answer a request; silently too late if nobody waits any more."""
        if self._session is None or self._transport is None or not self._session.respond(exchange, message):
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close(ConnectionLost("the other side does not take its answers"))
            return
        self._flush()
        if self._is_paused:
            self._on_unsent(self, self.bytes_sent, self._transport.get_write_buffer_size())

    def close(self, error: SwarmError | None = None) -> None:
        """Close at once; what waits goes elsewhere, or fails with `error`."""
        self._end(error or ConnectionLost("closed by this side"))

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS is done."""
        self._transport = cast(asyncio.Transport, transport)
        try:
            if self._check is not None:
                self._check(self._transport)
            self._session = self._make_session()
        except SwarmError as error:
            self._end(error)
            return
        self._flush()
        self._set_timer(clock())

    def data_received(self, data: bytes) -> None:
        """Take in some of the stream; may be a stranger's."""
        if self._session is None or self._error is not None:
            return
        now = clock()
        self.bytes_received += len(data)
        try:
            for record in self._reader.feed(data):
                if record.kind <= RecordKind.END:
                    is_end = record.kind is RecordKind.END
                    self._handle(self._session.receive(record.exchange, record.data, is_end, now=now), now)
                elif record.kind is RecordKind.RESET:
                    self._handle(self._session.receive_reset(record.exchange), now)
                elif record.kind is RecordKind.PING:
                    self._write([encode_record(record.exchange, RecordKind.PONG)])
                else:
                    self._on_pong(record.exchange, now)
        except RemoteProtocolError as error:
            self._end(error)
        except Exception as failure:  # a mistake of ours must not leave who waits waiting
            logger.exception("a TLS link failed")
            self._end(RemoteProtocolError(f"the link failed: {type(failure).__name__}"))
        if self._error is None:
            self._flush()

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The other side has taken most of it."""
        self._is_paused = False
        self._on_unsent(self, self.bytes_sent, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone."""
        self._end(ConnectionLost(f"the stream ended: {exc or 'closed by the other side'}"))

    # Inside

    def _handle(self, events: list[e.Event], now: float) -> None:
        for event in events:
            if isinstance(event, e.Answered):
                self._settle(event.exchange, event.response, now)
            elif isinstance(event, e.RequestReceived):
                self._on_request(self, event.exchange, event.request)
            elif isinstance(event, e.RequestFailed):
                self._settle(event.exchange, event.error, now)
            elif isinstance(event, e.RequestCancelled):
                self._on_cancel(self, event.exchange)
            elif isinstance(event, e.Opened):
                if not self._on_open(self):
                    self._end(ConnectionLost("no link of this kind for this node"))
                elif not self.opened.done():
                    self.opened.set_result(None)
                    self._ping(now)
            elif isinstance(event, e.Closed):
                self._end(event.error)

    def _settle(self, exchange: int, outcome: m.Response | SwarmError, now: float) -> None:
        asked = self._asked.pop(exchange, None)
        if asked is None or asked.answer.done():
            return
        if isinstance(outcome, SwarmError):
            if isinstance(outcome, ConnectionLost) and self._go_elsewhere(asked):
                return
            asked.answer.set_exception(outcome)
            return
        service_s = now - asked.sent_at
        self._service_s = (
            service_s if self._service_s is None else self._service_s + _RTT_GAIN * (service_s - self._service_s)
        )
        self._n_strikes = 0
        asked.answer.set_result(outcome)

    def _on_answer_done(self, exchange: int, asked: _Asked, answer: asyncio.Future[m.Response]) -> None:
        if not answer.cancelled():
            answer.exception()  # seen: the caller may be cancelled in the tick in which it fails
        if asked.other is not None:
            asked.other.cancel()
        if self._asked.pop(exchange, None) is not None and self._session is not None and self._error is None:
            self._session.cancel(exchange)  # it was cancelled, or answered over the other link
            self._flush()

    def _go_elsewhere(self, asked: _Asked) -> bool:
        """Ask over the other link; return whether its answer will be the request's."""
        if asked.other is not None:
            return True
        if asked.retry is None:
            return False
        retry, asked.retry = asked.retry, None
        try:
            asked.other = retry()
        except SwarmError:
            return False
        self.n_retried += 1
        asked.other.add_done_callback(functools.partial(_pass_on, asked.answer))
        return True

    def _flush(self) -> None:
        if self._session is None:
            return
        parts: list[bytes] = []
        for out in self._session.take_outgoing():
            if out.exchange > MAX_EXCHANGE:
                self._end(ConnectionLost("the link has used up its numbers"))
                return
            if out.is_reset:
                parts.append(encode_record(out.exchange, RecordKind.RESET))
            else:
                parts += encode_exchange(out.exchange, out.data, out.is_end)
        if parts:
            self._write(parts)
        if self._session.wants_ping:
            self._session.wants_ping = False
            self._ping(clock())

    def _write(self, parts: list[bytes]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            data = b"".join(parts)  # one piece: one TLS record, one call of the kernel
            self.bytes_sent += len(data)
            self._transport.write(data)

    def _ping(self, now: float) -> None:
        if len(self._pings) < 16:  # unanswered ones of a dead path need not pile up
            self._pings[self._next_ping] = now
            self._write([encode_record(self._next_ping, RecordKind.PING)])
            self._next_ping += 1

    def _on_pong(self, number: int, now: float) -> None:
        sent = self._pings.pop(number, None)
        if sent is not None:
            rtt_s = now - sent
            self.rtt_s = rtt_s if self.rtt_s is None else self.rtt_s + _RTT_GAIN * (rtt_s - self.rtt_s)
        if self._session is not None:
            self._session.heard(now)

    # Time

    def _set_timer(self, now: float) -> None:
        """Look again when something may be due: a timer that is set for earlier stays, since mostly nothing is due then."""
        if self._session is None or self._error is not None:
            return
        at = self._session.next_deadline()
        if self._asked:
            late_at = min(asked.late_at for asked in self._asked.values())
            at = late_at if at is None else min(at, late_at)
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.001, at - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._session is None or self._error is not None:
            return
        now = clock()
        for asked in list(self._asked.values()):
            if now >= asked.late_at:
                asked.late_at = math.inf
                self._n_strikes += self._go_elsewhere(asked)
        if self._n_strikes >= N_STRIKES:
            self._end(ConnectionLost("its answers are late"))
            return
        self._handle(self._session.handle_timeout(now), now)
        if self._error is None:
            self._flush()
            self._set_timer(now)

    def _end(self, error: SwarmError) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        asked, self._asked = self._asked, {}
        for each in asked.values():
            if not each.answer.done() and not self._go_elsewhere(each):
                each.answer.set_exception(error)
        if not self.opened.done():
            self.opened.set_exception(error)
        if self._session is not None:
            for event in self._session.close(error):
                if isinstance(event, e.RequestCancelled):
                    self._on_cancel(self, event.exchange)
            for out in self._session.take_outgoing():  # a refusal of the greeting
                if not out.is_reset:
                    self._write(encode_exchange(out.exchange, out.data, out.is_end))
        if self._transport is not None:
            self._transport.close()
        if isinstance(error, RemoteProtocolError):
            logger.info("closed a TLS link: %s", error)
        self._on_gone(self)


def _pass_on(answer: asyncio.Future[m.Response], other: asyncio.Future[m.Response]) -> None:
    """Let what came over the other link be the answer, if there is none yet."""
    if other.cancelled():
        if not answer.done():
            answer.cancel()
        return
    error = other.exception()
    if answer.done():
        return
    if error is None:
        answer.set_result(other.result())
    else:
        answer.set_exception(error)


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
