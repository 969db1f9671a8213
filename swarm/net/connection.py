"""One QUIC connection carrying one session: plumbing between `Session`, `QuicConnection` and the callers that wait.

QUIC is told of one address that never changes. Where its datagrams really go is `path`, which may change under it (`paths`).

An exchange of the session is one bidirectional QUIC stream: exchange e is stream 4 * (e // 2) + e % 2, so even ones are
the client's and odd ones the server's, as QUIC numbers them. All rules are in `swarm.wire.session`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    IdentityMismatch,
    RemoteProtocolError,
    SwarmError,
    UserError,
    VersionRefused,
)
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress, format_address, literal_address
from swarm.net.answer import Answer
from swarm.net.path_monitor import PathMonitor
from swarm.net.paths import Path
from swarm.net.quic_driver import QuicDriver
from swarm.wire import events as e
from swarm.wire import messages as m
from swarm.wire import session as s
from swarm.wire.frames import printable
from swarm.wire.greetings import State

logger = logging.getLogger(__name__)

# uvloop's loop.time() moves in whole milliseconds, too coarse for QUIC's round trips and pacing (a 12 KB answer took 4.0
# instead of 1.5 ms).
clock = time.monotonic
# Bytes of answers that may wait to be sent or acknowledged before the next bulky one is made. As much as is ever under way
# (certificate.MAX_DATA), so that waiting costs no throughput.
MAX_UNSENT_BYTES = 8 << 20
DRAIN_TIMEOUT_S = 60.0  # guessed: an 88 MB block at 12 Mbit/s
# Given to QUIC since, or held at, the last count before what is unsent is counted again: small dispatches pay nothing for it.
COUNT_FROM_BYTES = 16 << 10
_RTT_GAIN = 0.125  # RFC 6298's smoothing
# While a timer fires within this time, the session is not asked whether it wants something sooner: what a message brings it is
# due after PING_AFTER_S at the earliest, but for a shorter deadline of a request.
TIMER_SLACK_S = s.PING_AFTER_S / 2
# A stream opens all lower ones (RFC 9000 section 2.1) and aioquic keeps an object for each until it is finished; it also
# doubles its own limit as streams are used. The session counts those that carry data; this bounds the rest.
MAX_STREAMS = s.MAX_SKIPPED + 4 * s.MAX_EXCHANGES
MAX_WARNED = 8  # different warnings of one process that strangers can bring about; guessed
_warned: set[str] = set()


class Connection:
    """A live link to one node. Made by an Endpoint; closed by either side, silence, or a violation."""

    def __init__(
        self,
        driver: QuicDriver,
        session: s.Session | None,
        *,
        make_session: Callable[[NodeId | None], s.Session],
        expected: NodeId | None,
        path: Path,
        send: Callable[[Path, list[bytes]], None],
        send_copy: Callable[[Path, bytes], None],
        on_request: Callable[[Connection, int, m.Request], None],
        on_cancel: Callable[[Connection, int], None],
        on_open: Callable[[Connection], None],
        on_gone: Callable[[Connection], None],
        on_unsent: Callable[[Connection, int, int], None],
        on_cid: Callable[[Connection, bytes, bool], None],
    ) -> None:
        self.driver = driver
        self.quic = driver.quic
        self.path = path  # in use now
        self.monitor: PathMonitor | None = None  # of its paths, once there is a second one
        self.why_relayed = ""  # why no direct path works, for people; empty: nothing is known of that
        # What datagrams of `path` come from: an address, or the path itself if it is a relay's.
        self.source: Any = path if path.is_relayed else path.address
        self._quic_address = path.address  # what QUIC takes the other side's address for
        self.is_client = driver.quic.configuration.is_client
        self.rtt_s: float | None = None  # smoothed round trip of a ping, seconds
        self.address: SocketAddress | None = None  # as a client: where it was dialled; None: through a relay
        self.observed_address: str | None = None  # as a client: where the server sees us
        self.remote_address: str | None = None  # as a server: the IP address that the client was first seen at
        self._session = session
        self._make_session = make_session
        self._expected = expected
        self._send = send
        self._send_copy = send_copy
        self._on_request = on_request
        self._on_cancel = on_cancel
        self._on_open = on_open
        self._on_gone = on_gone
        self._on_unsent = on_unsent
        self._on_cid = on_cid
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, Answer] = {}
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._opened.add_done_callback(_seen)  # a server has nobody who awaits it
        self._gone = asyncio.Event()
        self._drained = asyncio.Event()
        self.on_end: Callable[[SwarmError], None] | None = None  # told at once when it ends, and why
        self.turn = asyncio.Lock()  # held while a bulky request of the other side is answered
        self._error: SwarmError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # when `_timer` fires
        self._is_flush_due = self._is_flush_forced = False
        self._has_news = False  # since the last flush
        self._is_receiving = False  # in a tick that `received` ends
        self._next_ping = 1
        self._pings: dict[int, float] = {}
        self._n_answered = 0  # requests of ours
        self._n_given = self._n_given_at_count = 0  # bytes handed to QUIC's streams since the start
        self._n_unsent = 0  # when counted last
        # A server's session, with its own deadline, exists only once the handshake is done. A client's dial has one.
        self._handshake_deadline = None if self.is_client else clock() + s.GREETING_DEADLINE_S

    # For callers

    @property
    def remote(self) -> NodeId:
        """Who is there, proved. Only after `wait_open`."""
        if self._session is None or self._session.remote is None:
            raise ConnectionLost("the greetings are not done")
        return self._session.remote

    @property
    def version(self) -> int | None:
        """The wire version that both ends use; None before the greetings are done."""
        return None if self._session is None else self._session.version

    @property
    def nonce(self) -> bytes:
        """The nonce of the greetings, known to both ends alone."""
        assert self._session is not None
        return self._session.nonce

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent now."""
        return self._error is None and self._session is not None and self._session.state is State.OPEN

    async def wait_open(self) -> None:
        """Return when the greetings are done; raises what ended them."""
        await asyncio.shield(self._opened)

    async def wait_gone(self) -> None:
        """Return when the connection is over."""
        await self._gone.wait()

    async def request(self, message: m.Request, *, timeout_s: float, max_answer_bytes: int | None = None) -> m.Response:
        """Return the answer to `message`: `start`, waited for. Who is cancelled meanwhile gives the request up."""
        return await self.start(message, timeout_s=timeout_s, max_answer_bytes=max_answer_bytes)

    def start(
        self, message: m.Request, *, timeout_s: float, max_answer_bytes: int | None = None
    ) -> asyncio.Future[m.Response]:
        """Send a request in this tick, and return the future of its answer, which comes within `timeout_s` or fails.

        For who asks many at once: a task for each would cost as much as the request. To cancel the future, at any time, gives
        the request up: the other side is told to stop, and what it still sends is passed over. A future that fails and that
        nobody looks at is forgotten without a word.

        Args:
            max_answer_bytes: of the answer's body, where the caller knows; a larger one ends the connection on its header.

        Raises:
            ConnectionLost, or what else ended the connection: it is not open. Nothing was sent.
            Overloaded: too many requests wait on this connection. Nothing was sent.
            RemoteRefused: the other side's program is too old to know this request. Nothing was sent.

        The future fails with:
            RemoteRefused: the other side answered with an error.
            DeadlineExceeded, ConnectionLost, RemoteProtocolError: no answer.
        """
        if self._error is not None or self._session is None or not self.is_open:
            # Without its old traceback, which would grow with each request on a dead connection.
            raise (self._error or ConnectionLost("the connection is not open")).with_traceback(None)
        now = clock()
        exchange = self._session.request(message, deadline=now + timeout_s, now=now, max_answer_bytes=max_answer_bytes)
        answer = self._answers[exchange] = Answer(loop=self._loop)
        answer.exchange = exchange
        answer.add_done_callback(self._on_answer_done)
        self._flush_first()
        if timeout_s < TIMER_SLACK_S:
            self._set_timer_anew(now)
        if self.monitor is not None:
            self.monitor.wake()
        return answer

    def _on_answer_done(self, answer: asyncio.Future[m.Response]) -> None:
        assert isinstance(answer, Answer)
        if not answer.cancelled():
            answer.exception()  # seen: the caller may be cancelled in the tick in which it fails
        elif self._answers.pop(answer.exchange, None) is not None and self._session is not None:
            self._session.cancel(answer.exchange)
            self.flush_soon()

    async def wait_drained(self) -> None:
        """Return when the other side has taken enough of what was sent that more may be buffered.

        Raises:
            DeadlineExceeded: it has not within DRAIN_TIMEOUT_S; the caller should close.
        """
        if self.n_unsent_bytes() <= MAX_UNSENT_BYTES:
            return
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while self._error is None and self.n_unsent_bytes() > MAX_UNSENT_BYTES:
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"the other side has not taken its answers for {DRAIN_TIMEOUT_S:g} s") from None

    def n_unsent_bytes(self) -> int:
        """Return how many bytes wait to be sent or acknowledged."""
        return self.driver.n_unsent_bytes() + (self._session.n_outgoing_bytes if self._session is not None else 0)

    def respond(self, exchange: int, message: m.Response | m.Refusal) -> None:
        """Answer a request that `on_request` was told of; silently too late if nobody waits any more."""
        if self._session is not None and self._session.respond(exchange, message):
            self._flush_first()

    def close(self, error: SwarmError | None = None) -> None:
        """Close at once; what waits fails with `error` (default: ConnectionLost)."""
        try:
            self._end(error or ConnectionLost("closed by this side"))
            self.flush()
        except Exception as failure:
            self._break(failure)

    # For the endpoint

    def receive(self, flight: Sequence[bytes], now: float) -> None:
        """Take in datagrams, whatever path they came on. `received` follows, once for all datagrams of a tick."""
        try:
            self.driver.receive(flight, self._quic_address, now)
        except Exception as failure:
            self._break(failure)

    def received(self, now: float) -> None:
        """Act on the datagrams that `receive` took in, and flush in this tick if there may be something to send."""
        self._has_news = True
        self._is_receiving = not self._is_flush_due
        try:
            self._pump(now)
            self._drained.set()
            n_streams = self.driver.n_streams()
            if n_streams > MAX_STREAMS:
                self._end(RemoteProtocolError(f"too many streams: got {n_streams}, expected {MAX_STREAMS}"))
        except Exception as failure:
            self._break(failure)
        if self._is_receiving:
            self._is_receiving = self._is_flush_due = False
        if self._has_news:  # mostly not where what came was a request: its answer has taken along what else there was
            self.flush_soon(is_forced=False)

    def use(self, path: Path, rtt_s: float | None) -> None:
        """Send on `path` from now on, and ping there: the acknowledgement shows QUIC what the former one has lost.

        `rtt_s`: the path's round trip, where it is known.
        """
        self.path, self.rtt_s = path, rtt_s
        self.source = path if path.is_relayed else path.address
        if self.is_open:
            self._ping()
            self.flush_soon()

    def n_requests(self) -> tuple[int, int]:
        """Return how many of our requests wait for an answer, and how many have been answered."""
        return self._session.n_waiting if self._session is not None else 0, self._n_answered

    def connect(self) -> None:
        """As a client: begin the handshake."""
        self.quic.connect(self._quic_address, now=clock())
        self.flush()

    def flush_soon(self, *, is_forced: bool = True) -> None:
        """Flush once in this tick of the loop, however often it is asked for.

        `is_forced` false: only if the session has something to send, or QUIC may have.
        """
        self._is_flush_forced |= is_forced
        self._has_news = True
        if not self._is_flush_due and not self._is_receiving:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_once)

    def _flush_first(self) -> None:
        """Flush at once, if nothing was sent in this tick: a star's first member works while the others' bytes are made.

        What more comes in this tick goes together at its end.
        """
        if self._is_flush_due:
            self._is_flush_forced = self._has_news = True
            return
        self._is_flush_due = True
        try:
            self.flush()
        except Exception as failure:
            self._break(failure)
        if not self._is_receiving:
            self._loop.call_soon(self._flush_once)  # if nothing more comes, that has nothing to do

    def _flush_once(self) -> None:
        self._is_flush_due = False
        if not self._has_news:
            return
        try:
            has_data = self._hand_over()
            if has_data or self._is_flush_forced or not self.is_open or self.driver.wants_flush():
                self._flush(has_data)
            else:
                self._has_news = False
                self._count_unsent()
                self._set_timer(clock())
        except Exception as failure:
            self._break(failure)

    def flush(self) -> None:
        """Hand the session's bytes to QUIC, QUIC's datagrams to the socket, and set the timer anew."""
        self._flush(self._hand_over())

    def _flush(self, has_data: bool) -> None:
        self._is_flush_forced = self._has_news = False
        now = clock()
        self._send_all(now, has_data)
        if not self.is_open:
            self._pump(now)  # sending can end the closing period
            if self._has_news:
                self.flush_soon(is_forced=False)
        self._count_unsent()
        self._set_timer(now)

    # Inside

    def _send_all(self, now: float, has_data: bool) -> None:
        """Give the socket what QUIC has to send: by slices, since the driver makes the next one only when it is asked."""
        for flight in self.driver.flush(now, has_data=has_data):
            self._send(self.path, flight)

    def _count_unsent(self) -> None:
        """Tell the endpoint what is held here, once per tick while that is worth it."""
        if self._n_unsent or self._n_given - self._n_given_at_count >= COUNT_FROM_BYTES:
            n_unsent = self.n_unsent_bytes()
            self._n_given_at_count = self._n_given
            n_unsent = n_unsent if n_unsent >= COUNT_FROM_BYTES else 0
            if n_unsent != self._n_unsent:
                self._n_unsent = n_unsent
                self._on_unsent(self, self._n_given, n_unsent)

    def _hand_over(self) -> bool:
        """Return whether QUIC got anything to send on streams."""
        if self._session is None:
            return False
        has_data = False
        for out in self._session.take_outgoing():
            has_data = True
            stream = 4 * (out.exchange // 2) + out.exchange % 2
            try:
                if out.is_reset:
                    self.driver.abandon_stream(stream)
                else:
                    self.driver.send_stream_data(stream, out.data, out.is_end)
                    self._n_given += len(out.data)
            except (ValueError, RuntimeError) as error:
                # QUIC has forgotten the stream, or the other side stopped it in this tick: nobody waits for these bytes.
                logger.debug("nothing sent on exchange %d: %s", out.exchange, error)
        if self._session.wants_ping:
            self._session.wants_ping = False
            self._ping()
            has_data = True
        return has_data

    def _ping(self) -> None:
        if len(self._pings) < 16:  # unanswered ones of a dead path need not pile up
            self._pings[self._next_ping] = clock()
            self.quic.send_ping(self._next_ping)
            self._next_ping += 1

    def _next_deadline(self) -> float | None:
        """Return when something must be done next, if nothing else happens."""
        if self._gone.is_set():
            return None
        at = self.driver.next_deadline()
        if self._error is not None:
            return at  # QUIC alone has something left to do: its closing period
        deadline = self._session.next_deadline() if self._session is not None else self._handshake_deadline
        return deadline if at is None else at if deadline is None else min(at, deadline)

    def _set_timer(self, now: float) -> None:
        if (
            self._timer is None
            or self._timer_at > now + TIMER_SLACK_S
            or self.driver.has_deadline_before(self._timer_at, now)
        ):
            self._set_timer_anew(now)

    def _set_timer_anew(self, now: float) -> None:
        at = self._next_deadline()
        if at is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None or at < self._timer_at:
            # A timer that is set for earlier stays: most deadlines move away with each packet, and to fire in vain once is
            # cheaper than a new timer each time.
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(max(0.0, at - now), self._on_timer)
            self._timer_at = at

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self._act_on_time()
        except Exception as failure:
            self._break(failure)

    def _act_on_time(self) -> None:
        now = clock()
        at = self._next_deadline()
        if at is not None and now < at:  # moved away: of a busy connection nearly always
            self._set_timer(now)
            return
        self.driver.handle_timer(now)
        for data in self.driver.copies(now):
            self._send_copy(self.path, data)
        if self._session is not None:
            self._handle(self._session.handle_timeout(now))
        elif self._handshake_deadline is not None and now >= self._handshake_deadline:
            self._end(DeadlineExceeded(f"no handshake within {s.GREETING_DEADLINE_S:g} s"))
        self._pump(now)
        self.flush()

    def _pump(self, now: float) -> None:
        quic_events = self.driver.events
        while (event := self.driver.next_event()) is not None:
            if isinstance(event, quic_events.StreamDataReceived):
                if self._session is None or event.stream_id % 4 > 1:
                    self._end(RemoteProtocolError(f"data on stream {event.stream_id} which this protocol does not use"))
                    continue
                exchange = 2 * (event.stream_id // 4) + event.stream_id % 4
                self._handle(self._session.receive(exchange, event.data, event.end_stream, now=now))
            elif isinstance(event, (quic_events.StreamReset, quic_events.StopSendingReceived)):
                if self._session is not None and event.stream_id % 4 <= 1:
                    exchange = 2 * (event.stream_id // 4) + event.stream_id % 4
                    self._handle(self._session.receive_reset(exchange))
            elif isinstance(event, quic_events.PingAcknowledged):
                sent = self._pings.pop(event.uid, None)
                if sent is not None:
                    rtt = now - sent
                    self.rtt_s = rtt if self.rtt_s is None else self.rtt_s + _RTT_GAIN * (rtt - self.rtt_s)
                if self._session is not None:
                    self._session.heard(now)
            elif isinstance(event, quic_events.ConnectionIdIssued):
                self._on_cid(self, event.connection_id, True)
            elif isinstance(event, quic_events.ConnectionIdRetired):
                self._on_cid(self, event.connection_id, False)
            elif isinstance(event, quic_events.HandshakeCompleted):
                self._on_handshake()
            elif isinstance(event, quic_events.ConnectionTerminated):
                self._on_terminated(event)

    def _on_handshake(self) -> None:
        if not self.is_client:
            self._session = self._make_session(None)
            self.flush_soon()
            return
        try:
            presented = self.driver.presented_node_id()
            if self._expected is not None and presented != self._expected:
                raise IdentityMismatch(f"another node answered: got {presented.short}, expected {self._expected.short}")
        except IdentityMismatch as error:
            self._end(error)
            return
        self._session = self._make_session(presented)

    def _on_terminated(self, event: Any) -> None:
        if self._error is None:
            # Application codes are ours (RemoteProtocolError.code); the reason is for people and untrusted: cut it.
            reason = printable(event.reason_phrase[:200]) or f"code 0x{event.error_code:x}"
            is_version = event.frame_type is None and event.error_code == VersionRefused.code
            kind = VersionRefused if is_version else ConnectionLost
            self._end(kind(f"the connection ended: {reason}"))
        self._finish()

    def _handle(self, events: list[e.Event]) -> None:
        if events:
            self._has_news = True  # until a flush, which what follows may bring
        for event in events:
            if isinstance(event, e.Answered):
                self._n_answered += 1
                self._settle(event.exchange, event.response)
            elif isinstance(event, e.RequestReceived):
                self._on_request(self, event.exchange, event.request)
            elif isinstance(event, e.RequestFailed):
                self._settle(event.exchange, event.error)
            elif isinstance(event, e.RequestCancelled):
                self._on_cancel(self, event.exchange)
            elif isinstance(event, e.Opened):
                self.observed_address = _literal(event.observed_address)
                if not self._opened.done():
                    self._opened.set_result(None)
                self._on_open(self)
                self._ping()
                self.flush_soon()
            elif isinstance(event, e.Closed):
                self._end(event.error)

    def _settle(self, exchange: int, outcome: m.Response | SwarmError) -> None:
        answer = self._answers.pop(exchange, None)
        if answer is None or answer.done():
            return
        if isinstance(outcome, SwarmError):
            answer.set_exception(outcome)
        else:
            answer.remove_done_callback(self._on_answer_done)  # nothing is left to do
            answer.give(outcome)

    def _end(self, error: SwarmError) -> None:
        """Stop using the connection: fail what waits, and tell the other side why."""
        if self._error is not None:
            return
        self._error = error
        self._drained.set()
        for exchange in list(self._answers):  # first: what follows may fail, and they have no other deadline
            self._settle(exchange, error)
        if not self._opened.done():
            self._opened.set_exception(error)
        if self.on_end is not None:
            self.on_end(error)
        if self._session is not None:
            self._handle(self._session.close(error))
            self._hand_over()  # a refusal of the greeting still goes out, before QUIC drops all but its CONNECTION_CLOSE
            self._send_all(clock(), True)
        code = error.code if isinstance(error, RemoteProtocolError) else 0
        self.quic.close(error_code=code, reason_phrase=str(error)[:200] if code else "")
        self.flush_soon()
        if isinstance(error, VersionRefused) and not self.is_client:  # a client's caller is told
            _warn_once(str(error))
        elif isinstance(error, RemoteProtocolError):
            logger.info("closed a connection: %s", error)

    def _break(self, failure: Exception) -> None:
        """End this connection, and no other, because QUIC, one of its parsers or we failed on what came or fell due.

        Without it nobody would set the timer again, and who waits would wait for ever.
        """
        logger.debug("a connection failed", exc_info=failure)
        is_closing = self._error is not None
        try:
            self._end(RemoteProtocolError(f"QUIC failed: {type(failure).__name__}"))
        except Exception:
            logger.debug("and cannot be closed in good order", exc_info=True)
            is_closing = True
        if is_closing:  # there is no telling whether its closing period would end
            self._finish()

    def _finish(self) -> None:
        if not self._gone.is_set():
            self._gone.set()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self.monitor is not None:
                self.monitor.close()
            self._on_gone(self)


def _literal(address: str | None) -> str | None:
    """Return where the other side says that it sees us; None: nothing that could be announced, or offered to others."""
    try:
        return None if address is None else format_address(literal_address(address))
    except UserError:
        return None


def _seen(future: asyncio.Future[Any]) -> None:
    """Look at a future's error, so that asyncio does not complain if nobody else does."""
    if not future.cancelled():
        future.exception()


def _warn_once(text: str) -> None:
    """Tell a person what only a person can mend: each thing once, and no more of them than anybody reads."""
    if text not in _warned and len(_warned) < MAX_WARNED:
        _warned.add(text)
        logger.warning("cannot talk to a node: %s", text)
