"""A session over one TLS stream, beside the QUIC connection with the same node: for dispatches on short, clean paths.

    asyncio's transport (TLS 1.3 over TCP, or over a Unix socket)
      data_received -> RecordReader -> Session -> futures of requests, or the endpoint's handler
      start, respond -> Session -> records -> one write

It is never the only way to a node. A request that it cannot finish goes over the other link, by `retry`: when this one ends,
and when an answer is later than its like have been: TCP repairs the loss of a last packet after 200 ms at the earliest, and a
path that is cut says nothing at all. Until something arrives again the link is *stalled*: what is new had better go elsewhere.

On a path that loses packets small dispatches go over a `second` link of the same kind as well, where the peer computes them once
(`link_copies`): TCP repairs a loss in a round trip at best, and the other stream has mostly lost nothing.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import math
import socket
from collections.abc import Callable
from typing import Any, cast

from swarm.errors import ConnectionLost, Overloaded, RemoteProtocolError, SwarmError
from swarm.ids import NodeId
from swarm.net.answer import Answer
from swarm.net.byte_counts import MAX_RECORD_BYTES, Amount, ByteCounts, PathKind, n_tls_records, tls_bytes
from swarm.net.connection import clock
from swarm.net.link_copies import is_copied
from swarm.net.patience import MOST_LATE_S, RTT_GAIN, Patience, size_of
from swarm.net.tcp_losses import Packets, packets, payload, queued
from swarm.net.tls_records import (
    COPIES_ALPN,
    MAX_EXCHANGE,
    RecordKind,
    RecordReader,
    encode_exchange,
    encode_record,
)
from swarm.wire import events as e
from swarm.wire import messages as m
from swarm.wire import session as s
from swarm.wire.greetings import State

logger = logging.getLogger(__name__)

# Not taken by the kernel yet; beyond, requests are refused and answers end the link. Room for 512 rows of D=7168 in f32 of two
# lanes: with 4 MB, answers to two long prompts ended links, and all was computed again.
MAX_UNSENT_BYTES = 32 << 20
# Written at once; the rest waits here. uvloop encrypts a whole write into memory that it keeps for as long as the link lives:
# a prompt of 512 tokens left 9 MB in each (measured, D=2048 in f32).
WRITE_BYTES = 256 << 10
MAX_PONGS = 64  # that wait here unread; four times as many pings as an honest side has unanswered
PONG_S = 0.1  # for the pong, where no ping was sent before an answer was overdue; guessed: a busy machine's loop and a short path
N_STRIKES = 3  # stalls of MOST_LATE_S in a row, nothing answered in between, after which the link is given up
STALLED_S = (
    1.0  # so is one from which nothing has come for so long, though it was asked; guessed: TCP's second repair is over
)
BEATEN_S = 3.0  # and one whose every answer came over its second link first, as long; guessed: a session's silence
OnRequest = Callable[["TlsLink", int, m.Request], None]
Retry = Callable[[], "asyncio.Future[m.Response]"]


class _Asked(Answer):
    """A request under way, and its answer.

    Attributes:
        retry: asks the same over another link; None: its failure is its asker's.
        size: the order of magnitude of its work.
        late_at: when to do that; overdue_at: also if there are too many such.
        is_small: its bytes are few, so that a copy costs little.
        probe: the number of the ping sent since it is late; None: none was.
        moved: `TlsLink._moved` then, or when it was looked at since.
        other: the answer over the other link, once that was asked.
        copy: the answer over the second link, if it went there as well.
    """

    __slots__ = ("copy", "exchange", "late_at", "other", "overdue_at", "retry", "sent_at", "size")

    def __init__(self, loop: asyncio.AbstractEventLoop, exchange: int, retry: Retry | None) -> None:
        super().__init__(loop=loop)
        self.exchange = exchange
        self.retry = retry
        self.size = 0
        self.is_small = True
        self.probe: int | None = None
        self.moved = (0, 0)
        self.sent_at = self.late_at = self.overdue_at = 0.0
        self.other: asyncio.Future[m.Response] | None = None
        self.copy: asyncio.Future[m.Response] | None = None


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
        on_lost: Callable[[TlsLink], None] = lambda link: None,
        on_unsent: Callable[[TlsLink, int, int], None] = lambda link, n_given, n_held: None,
        check: Callable[[asyncio.Transport], None] | None = None,
        counts: ByteCounts | None = None,
    ) -> None:
        """`check`: of a client's link, whether the right node has answered; raises IdentityMismatch.

        `counts`: count this link's bytes as well.

        `on_open` returns whether this side goes on with whom it is. `on_gone` is told at once when it ends, `on_lost` when its
        socket is closed, which the other side can put off (`tls_links.SHUTDOWN_TIMEOUT_S`). `on_unsent` is told how many bytes
        were written since the start and how many of them are held here, while the other side takes them slowly.
        """
        self._make_session = make_session
        self._on_request, self._on_cancel = on_request, on_cancel
        self._on_open, self._on_gone, self._on_lost = on_open, on_gone, on_lost
        self._on_unsent = on_unsent
        self._is_paused = False  # the transport holds more than it likes to
        self._unwritten: collections.deque[bytes] = collections.deque()
        self._n_unwritten = 0  # bytes of these
        self._n_pongs_unwritten = 0  # since nothing waited last
        self._check = check
        self._counts = counts
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
        self._patience = Patience()
        self._n_strikes = 0
        self._stalled_at: float | None = None  # since when an answer is late and nothing has come
        self._is_struck = False  # it counts among the strikes
        self._gone = 0  # the second of `_moved`, when it was looked at last
        self._pings: dict[int, float] = {}
        self._next_ping = 1
        self.rtt_s: float | None = None
        self.bytes_sent = self.bytes_received = 0  # of records, without what TLS and TCP add
        self._n_tls_sent = self._n_tls_received = 0  # TLS records that these took; received, the fewest they can be
        self._wire = Amount()
        self._socket: socket.socket | None = None
        self._path_kind = PathKind.TLS
        self.n_retried = 0  # requests that went over the other link
        self.takes_copies = False  # the other side knows them
        self.second: TlsLink | None = None  # of the same node; ends with this one
        self.is_copying = False  # small dispatches go there as well
        self._beaten_at: float | None = None  # since when answers came there first, and nothing here
        self.copy_number: int | None = None  # what the record before this one says
        # Is told what was answered, once a request with a number came.
        self.on_answered: Callable[[TlsLink, int, m.Response | m.Refusal], None] | None = None

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

    @property
    def is_stalled(self) -> bool:
        """Whether an answer is late, and nothing has come since."""
        return self._stalled_at is not None

    @property
    def is_prompt(self) -> bool:
        """Whether requests can be sent now, and none of them is known to wait for a loss."""
        return self._stalled_at is None and self.is_open

    def packets(self) -> Packets | None:
        """Return how many packets the link had and lost so far; None where nobody tells: on a Unix socket none is lost."""
        connected = self._transport.get_extra_info("socket") if self._transport is not None else None
        return packets(connected) if connected is not None else None

    @property
    def path_kind(self) -> PathKind:
        """What carries it."""
        return self._path_kind

    def wire_bytes(self) -> Amount:
        """Return what it sent and received so far, all that TLS adds included.

        What was written and the kernel has not sent yet counts as sent; the other way round, what the kernel sent again.
        """
        sent = tls_bytes(self.bytes_sent, self._n_tls_sent)
        received = tls_bytes(self.bytes_received, self._n_tls_received)
        if self._transport is not None and not self._transport.is_closing():  # else its socket may be somebody else's
            told = payload(self._socket) if self._socket is not None else None
            if told is not None:
                sent, received = max(sent, told[0]), max(received, told[1])
        self._wire = Amount(max(sent, self._wire.sent), max(received, self._wire.received))
        return self._wire

    def start(
        self,
        message: m.Request,
        *,
        timeout_s: float,
        max_answer_bytes: int | None = None,
        retry: Retry | None = None,
        copy_of: int | None = None,
    ) -> asyncio.Future[m.Response]:
        """Send a request and return the future of its answer, as `Connection.start`.

        `retry`: asks the same elsewhere; it is called at most once, if this link ends or is late. Then the first answer counts.
        `copy_of`: the number of the first link's exchange, of which this is the copy.

        Raises:
            ConnectionLost, or what else ended the link; Overloaded. Nothing was sent.
        """
        session = self._session
        if session is None or self._error is not None or session.state is not State.OPEN:
            raise (self._error or ConnectionLost("the link is not open")).with_traceback(None)
        if self._is_paused and self._n_unsent() > MAX_UNSENT_BYTES:
            raise Overloaded("too many bytes wait on one link", retry_after_s=0.1)
        now = clock()
        exchange = session.request(message, deadline=now + timeout_s, now=now, max_answer_bytes=max_answer_bytes)
        second = self.second if self.is_copying and copy_of is None else None
        is_doubled = second is not None and second.is_open and is_copied(message)
        self._flush(exchange if is_doubled else copy_of)
        if self._error is not None:  # it has just used up its numbers
            raise self._error.with_traceback(None)
        # What follows is done while the other side works already.
        asked = self._asked[exchange] = _Asked(self._loop, exchange, retry)
        asked.sent_at = now
        asked.size, asked.is_small = size_of(message), is_copied(message)
        late_s, overdue_s = self._patience.asked(asked.size)
        asked.late_at, asked.overdue_at = now + late_s, now + overdue_s
        asked.add_done_callback(self._on_answer_done)
        if is_doubled:  # later: the first must not wait until the second is encrypted
            self._loop.call_soon(self._send_copy, asked, message, timeout_s, max_answer_bytes)
        # Else it is soon enough; a peer that is known to take seconds is pinged as any other.
        if self._timer is None or self._timer_at > now + min(timeout_s, late_s, s.PING_AFTER_S):
            self._set_timer(now)
        return asked

    async def request(self, message: m.Request, *, timeout_s: float, max_answer_bytes: int | None = None) -> m.Response:
        """Return the answer to `message`."""
        return await self.start(message, timeout_s=timeout_s, max_answer_bytes=max_answer_bytes)

    def respond(self, exchange: int, message: m.Response | m.Refusal) -> None:
        """Answer a request; silently too late if nobody waits any more."""
        if self._session is None or self._transport is None or not self._session.respond(exchange, message):
            return
        self._flush()
        if self._error is not None:  # it does not take its answers
            return
        if self.on_answered is not None:
            self.on_answered(self, exchange, message)

    def close(self, error: SwarmError | None = None) -> None:
        """Close at once; what waits goes elsewhere, or fails with `error`."""
        self._end(error or ConnectionLost("closed by this side"))

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS is done."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES)
        tls = transport.get_extra_info("ssl_object")
        self.takes_copies = tls is not None and tls.selected_alpn_protocol() == COPIES_ALPN
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None and self._socket.family == getattr(socket, "AF_UNIX", None):
            self._path_kind = PathKind.UNIX
        if self._counts is not None:
            self._counts.begin(self)
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
        self._stalled_at = self._beaten_at = None
        n_bytes, is_partial = len(data), False
        self.bytes_received += n_bytes
        self._n_tls_received += 1 if n_bytes <= MAX_RECORD_BYTES else n_tls_records(n_bytes)
        try:
            for number, kind, piece in self._reader.feed(data):
                if kind is RecordKind.END:
                    self._handle(self._session.receive(number, piece, True, now=now), now)
                    self.copy_number = None
                elif kind is RecordKind.DATA:
                    self._handle(self._session.receive(number, piece, False, now=now), now)
                    self.copy_number, is_partial = None, True
                elif kind is RecordKind.RESET:
                    self._handle(self._session.receive_reset(number), now)
                elif kind is RecordKind.COPY:
                    self.copy_number = number
                elif kind is RecordKind.PING:
                    self._pong(number)
                else:
                    self._on_pong(number, now)
        except RemoteProtocolError as error:
            self._end(error)
        except Exception as failure:  # a mistake of ours must not leave who waits waiting
            logger.exception("a TLS link failed")
            self._end(RemoteProtocolError(f"the link failed: {type(failure).__name__}"))
        if self._error is None:
            self._flush()
            if is_partial and self._timer is None:  # as a server: what arrives has a deadline now
                self._set_timer(now)

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The other side has taken most of it."""
        self._is_paused = False
        self._write_on()
        self._on_unsent(self, self.bytes_sent, self._n_unsent() if self._is_paused else 0)

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone."""
        self._end(ConnectionLost(f"the stream ended: {exc or 'closed by the other side'}"))
        self._on_lost(self)

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
        if asked is None or asked.done():
            return
        if isinstance(outcome, SwarmError):
            if isinstance(outcome, ConnectionLost) and self._go_elsewhere(asked):
                return
            asked.set_exception(outcome)
            return
        asked.retry = None  # which holds the layer's rows
        self._patience.answered(asked.size, now - asked.sent_at)
        self._n_strikes = 0
        if asked.other is None:
            asked.remove_done_callback(self._on_answer_done)  # nothing is left to do
        asked.give(outcome)

    def _on_answer_done(self, answer: asyncio.Future[m.Response]) -> None:
        assert isinstance(answer, _Asked)
        if not answer.cancelled():
            answer.exception()  # seen: the caller may be cancelled in the tick in which it fails
        if answer.other is not None:
            answer.other.cancel()
        # Else its answer comes for nothing, which costs less than a reset.
        if answer.copy is not None and answer.cancelled():
            answer.copy.cancel()
        if self._asked.pop(answer.exchange, None) is not None and self._session is not None and self._error is None:
            self._session.cancel(answer.exchange)  # it was cancelled, or answered over the other link
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
        asked.other.add_done_callback(functools.partial(self._pass_on, asked))
        return True

    def _pass_on(self, asked: _Asked, other: asyncio.Future[m.Response]) -> None:
        """Let what came over the other link be the answer, if there is none yet. While this link lives, only an answer counts:
        a peer that is too busy for a copy may still answer."""
        if other.cancelled():
            if not asked.done():
                asked.cancel()
            return
        error = other.exception()
        if asked.done():
            return
        if error is None:
            asked.set_result(other.result())
        elif self._error is not None or asked.exchange not in self._asked:
            asked.set_exception(error)
        else:
            asked.other = None

    def _send_copy(self, asked: _Asked, message: m.Request, timeout_s: float, max_answer_bytes: int | None) -> None:
        second = self.second
        if second is None or not second.is_open or asked.done():
            return
        try:
            copy = second.start(message, timeout_s=timeout_s, max_answer_bytes=max_answer_bytes, copy_of=asked.exchange)
        except SwarmError:
            return
        assert isinstance(copy, _Asked)
        asked.copy = copy
        copy.taker = functools.partial(self._on_copy_answered, asked)
        copy.add_done_callback(copy.taker)

    def _on_copy_answered(self, asked: _Asked, copy: asyncio.Future[m.Response]) -> None:
        if copy.cancelled() or copy.exception() is not None or asked.done():
            return
        now = clock()
        if self._beaten_at is None:
            self._beaten_at = now
        asked.give(copy.result())
        if now - self._beaten_at >= BEATEN_S:
            self._end(ConnectionLost("nothing comes but over its second link"))

    def _flush(self, copy_of: int | None = None) -> None:
        """Write what the session has to say; `copy_of`: the number of the request that is its last word."""
        session = self._session
        if session is None:
            return
        parts: list[bytes] = []
        outgoing = session.take_outgoing()
        for out in outgoing:
            if out.exchange > MAX_EXCHANGE:
                self._end(ConnectionLost("the link has used up its numbers"))
                return
            if out.is_reset:
                parts.append(encode_record(out.exchange, RecordKind.RESET))
            else:
                if copy_of is not None and out is outgoing[-1]:
                    parts.append(encode_record(copy_of, RecordKind.COPY))
                parts += encode_exchange(out.exchange, out.data, out.is_end)
        if parts:
            # Answers, and refusals, of which no handler knows; as many resets as there were requests.
            if self._is_paused and self._n_unsent() > MAX_UNSENT_BYTES and not all(out.is_reset for out in outgoing):
                self._end(ConnectionLost("the other side does not take its answers"))
                return
            self._write(parts)
            if self._is_paused:
                self._on_unsent(self, self.bytes_sent, self._n_unsent())
        if session.wants_ping:
            session.wants_ping = False
            self._ping(clock())

    def _write(self, parts: list[bytes]) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        size = sum(map(len, parts))
        self.bytes_sent += size
        if not self._is_paused and not self._unwritten and size <= WRITE_BYTES:  # mostly: nothing waits
            self._write_now(transport, parts)
            return
        self._unwritten += parts
        self._n_unwritten += size
        self._write_on()

    def _write_on(self) -> None:
        """Write what waits, as much as the transport likes to hold."""
        transport = self._transport
        while self._unwritten and not self._is_paused and transport is not None and not transport.is_closing():
            size, parts = 0, list[bytes]()
            while self._unwritten and (not parts or size + len(self._unwritten[0]) <= WRITE_BYTES):
                parts.append(self._unwritten.popleft())
                size += len(parts[-1])
            self._n_unwritten -= size
            self._write_now(transport, parts)
        if not self._unwritten:
            self._n_pongs_unwritten = 0

    def _write_now(self, transport: asyncio.Transport, parts: list[bytes]) -> None:
        data = b"".join(parts)  # one piece: one TLS record, one call of the kernel
        self._n_tls_sent += 1 if len(data) <= MAX_RECORD_BYTES else n_tls_records(len(data))
        transport.write(data)

    def _n_unsent(self) -> int:
        """Return how many bytes the kernel has not taken yet."""
        return self._n_unwritten + (self._transport.get_write_buffer_size() if self._transport is not None else 0)

    def _ping(self, now: float) -> int:
        """Send a ping and return its number; or that of the latest, if too many have no answer."""
        if len(self._pings) < 16:  # unanswered ones of a dead path need not pile up
            self._pings[self._next_ping] = now
            self._write([encode_record(self._next_ping, RecordKind.PING)])
            self._next_ping += 1
        return self._next_ping - 1

    def _pong(self, number: int) -> None:
        """Answer a ping; raises RemoteProtocolError if too many of these answers wait to be taken."""
        if self._unwritten or self._is_paused:
            self._n_pongs_unwritten += 1
            if self._n_pongs_unwritten > MAX_PONGS:
                raise RemoteProtocolError(f"too many pings whose answers are not taken: expected at most {MAX_PONGS}")
        self._write([encode_record(number, RecordKind.PONG)])

    def _on_pong(self, number: int, now: float) -> None:
        sent = self._pings.pop(number, None)
        if sent is not None:
            rtt_s = now - sent
            self.rtt_s = rtt_s if self.rtt_s is None else self.rtt_s + RTT_GAIN * (rtt_s - self.rtt_s)
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
        if self._stalled_at is not None:
            look_at = self._stalled_at + (STALLED_S if self._is_struck else MOST_LATE_S)
            at = look_at if at is None else min(at, look_at)
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
        if self._asked:
            self._hear_of_writes(now)
        for asked in list(self._asked.values()):
            if now >= asked.late_at:
                self._on_late(asked, now)
        stalled_s = now - self._stalled_at if self._stalled_at is not None else 0.0
        if stalled_s >= MOST_LATE_S and not self._is_struck:
            self._is_struck = True
            self._n_strikes += 1
        is_dead = stalled_s >= STALLED_S
        if is_dead or self._n_strikes >= N_STRIKES:
            self._end(ConnectionLost("its answers are late"))
            return
        self._handle(self._session.handle_timeout(now), now)
        if self._error is None:
            self._flush()
            self._set_timer(now)

    def _on_late(self, asked: _Asked, now: float) -> None:
        """Ask elsewhere as well, unless too much has been asked twice; then once it is overdue."""
        is_overdue = now >= asked.overdue_at
        if not is_overdue and (self._patience.n_copies < 1.0 or not asked.is_small):
            asked.probe, asked.late_at, asked.moved = self._ping(now), asked.overdue_at, self._moved()
            return
        if is_overdue and asked.retry is not None:
            moved = self._moved()
            if asked.probe is None:
                asked.probe, asked.late_at, asked.moved = self._ping(now), now + PONG_S, moved
                return
            if asked.probe not in self._pings:  # slow, not lost; looked at again after as long
                asked.probe, asked.late_at = self._ping(now), now + (now - asked.sent_at)
                return
            if moved[0] > asked.moved[0] or moved[1] > asked.moved[1]:  # before the ping, or before its pong
                asked.late_at, asked.moved = now + PONG_S, moved
                return
        asked.late_at = math.inf
        if asked.retry is None or not self._go_elsewhere(asked):
            return
        if not is_overdue:
            self._patience.n_copies -= 1.0
        if self._stalled_at is None:  # what else is late by now waits for the same
            self._stalled_at = now
            self._is_struck = False
        # Behind what was lost, so that its pong says when the stream moves again; and TCP repairs sooner with more under way.
        self._ping(now)

    def _hear_of_writes(self, now: float) -> None:
        """Know that the other side lives while it takes what waits: a pong would come after that, on a slow line too late."""
        _, gone = self._moved()
        if gone > self._gone > 0 and self._session is not None:
            self._session.heard(now)
            if self._stalled_at is not None:  # what is new had better go elsewhere; but the link is not dead
                self._stalled_at = now
        self._gone = gone

    def _moved(self) -> tuple[int, int]:
        """Return how many bytes have come so far, and how many the other side has of what waited to go; no more wait: 0."""
        n_queued = self._n_unsent() + (queued(self._socket) if self._socket is not None else 0)
        return self.bytes_received, self.bytes_sent - n_queued if n_queued else 0

    def _end(self, error: SwarmError) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        asked, self._asked = self._asked, {}
        for each in asked.values():
            if not each.done() and not self._go_elsewhere(each):
                each.set_exception(error)
        if not self.opened.done():
            self.opened.set_exception(error)
        if self._session is not None:
            for event in self._session.close(error):
                if isinstance(event, e.RequestCancelled):
                    self._on_cancel(self, event.exchange)
            for out in self._session.take_outgoing():  # a refusal of the greeting
                if not out.is_reset:
                    self._write(encode_exchange(out.exchange, out.data, out.is_end))
        self._unwritten.clear()
        self._n_unwritten = 0
        if self._counts is not None:
            self._counts.end(self)
        if self._transport is not None:
            self._transport.close()
        if self.second is not None:
            self.second.close()
        if isinstance(error, RemoteProtocolError):
            logger.info("closed a TLS link: %s", error)
        self._on_gone(self)


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
