"""One link's rules, without I/O: bytes of an exchange in -> events out, messages in -> bytes of an exchange out.

An *exchange* is one request and its answer, numbered by whoever opens it: even by the client, odd by the server. The
first one, number 1, carries the greetings. A link (QUIC stream, or a multiplexed TCP connection) carries each exchange's
bytes in order, but exchanges among each other in any order. The session knows nothing of QUIC, sockets or clocks.

    state            message            next state
    server GREETING  HELLO     in    -> OPEN
    client GREETING  CHALLENGE in    -> WELCOMING       (sends HELLO)
    client WELCOMING WELCOME   in    -> OPEN
    any but CLOSED   violation       -> CLOSED
    any but CLOSED   deadline passed -> CLOSED          (greeting; silence while answers are owed, or after a ping)

The session is bounded: exchanges in each direction, bytes that it holds for them (alone, and requests together with the
sessions that share its budget), a deadline on each request, on a request's arrival and on the greeting, and silence on a link
that owes an answer. An exchange number is used once; what still comes on an exchange that is over is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
    RemoteRefused,
    SwarmError,
)
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.wire import messages as m
from swarm.wire.byte_budget import ByteBudget
from swarm.wire.events import (
    Answered,
    Closed,
    Event,
    Opened,
    Outgoing,
    RequestCancelled,
    RequestFailed,
    RequestReceived,
)
from swarm.wire.frames import (
    FRAME_TYPE_OF,
    HEADER,
    IGNORABLE_FROM,
    LIMITS,
    REQUEST_TYPES,
    FrameType,
    decode,
    encode,
    frame_type_of,
)
from swarm.wire.greetings import Greeter, State
from swarm.wire.versions import WIRE_VERSIONS as WIRE_VERSIONS
from swarm.wire.versions import speaks

ALPN = "swarm/1"
GREETING_EXCHANGE = 1

GREETING_DEADLINE_S = 5.0  # guessed: ten round trips of 500 ms
MAX_EXCHANGES = 256  # in each direction; guessed: 64 layers' worth of batches in flight
MAX_SKIPPED = 16 * MAX_EXCHANGES  # numbers the other side passed over so far: on their way, if it is honest; guessed
# Requests of the other side, arriving or not answered yet; above, it is told BUSY. Guessed.
MAX_REQUEST_BYTES = 256 << 20
# Such bytes of all sessions that share a budget; only what has arrived counts, so that nobody fills it with announcements.
# Guessed: ten of the largest requests.
SHARED_REQUEST_BYTES = 1 << 30
ARRIVAL_DEADLINE_S = 60.0  # from a request's header to its last byte; guessed: 96 MB at 13 Mbit/s
MAX_ANSWER_BYTES = 512 << 20  # answers arriving, all exchanges together: five of the largest blocks; guessed
MAX_EARLY_BYTES = 64 << 10  # of the server's exchanges that overtake its WELCOME; guessed: a few small requests
PING_AFTER_S = 0.5  # of silence while an answer is owed
# Of silence while an answer is owed: keeps a dead peer's request under 5 s, with room for a busy machine.
LOST_AFTER_S = 3.0
_TOO_MANY_BYTES = "too many bytes of requests at once, try again"
KEEPALIVE_S = 5.0  # the client pings this often on a quiet link, and gives it up LOST_AFTER_S later


@dataclass(slots=True)
class _Incoming:
    """The bytes of one exchange that have not become a message yet."""

    buffer: bytearray = field(default_factory=bytearray)
    frame_type: FrameType | None = None
    size: int = -1  # of the frame with its header, once that is known; -1 before
    n_held: int = 0  # bytes counted against MAX_REQUEST_BYTES or MAX_ANSWER_BYTES: the size that the header says
    n_arrived: int = 0  # bytes of a request counted against the shared budget
    n_to_skip: int = 0  # of a frame that may be ignored
    is_done: bool = False


@dataclass(slots=True)
class _Waiting:
    expected: type[m.Response]
    deadline: float
    max_answer_bytes: int | None


class Session:
    """The state machine of one link."""

    def __init__(
        self,
        identity: Identity,
        *,
        is_client: bool,
        now: float,
        expected: NodeId | None = None,
        nonce: bytes = b"",
        observed_address: str = "",
        serves: Iterable[type[m.Request]] = (),
        versions: tuple[int, ...] = WIRE_VERSIONS,
        request_budget: ByteBudget | None = None,
    ) -> None:
        """Start a session.

        Args:
            expected: as a client, the server's node id, already proved by the link (its certificate).
            nonce: as a server, 32 fresh random bytes.
            observed_address: as a server, where the client is seen, told to it.
            serves: the requests that we answer; all others are refused before memory is taken for them.
            request_budget: of the bytes of requests held; shared by the sessions of an endpoint. Default: one of its own.
        """
        self._greeter = Greeter(
            identity,
            is_client=is_client,
            versions=versions,
            remote=expected,
            nonce=nonce,
            observed_address=observed_address,
        )
        self.state = State.GREETING
        self.is_client = is_client
        self.remote = expected
        self.version: int | None = None  # agreed upon, once it is open
        self._serves = {FRAME_TYPE_OF[request]: m.RESPONSE_TO[request] for request in serves}
        self._incoming: dict[int, _Incoming] = {}
        self._early: list[tuple[int, bytes | None, bool]] = []  # (exchange, bytes or None for a reset, is the end)
        self._n_held = {True: 0, False: 0}  # bytes by whether the exchange is ours
        self._request_budget = ByteBudget(SHARED_REQUEST_BYTES) if request_budget is None else request_budget
        self._arriving: dict[int, float] = {}  # requests that are not whole, and until when; oldest first
        self._waiting: dict[int, _Waiting] = {}
        self._serving: dict[int, type[m.Response]] = {}
        self._next_exchange = 0 if is_client else 3
        self._next_of_theirs = 3 if is_client else 0  # above all numbers they have used
        self._skipped: set[int] = set()  # below it, not used yet
        self._greeting_deadline = now + GREETING_DEADLINE_S
        self._last_heard = now
        self._last_ping = now
        self.wants_ping = False
        self._outgoing: list[Outgoing] = []
        if not is_client:
            self._outgoing.append(Outgoing(exchange=GREETING_EXCHANGE, data=encode(self._greeter.challenge())))

    # What goes out

    def take_outgoing(self) -> list[Outgoing]:
        """Return what the link must send now, in order, and forget it."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    @property
    def n_outgoing_bytes(self) -> int:
        """Bytes that `take_outgoing` would return now."""
        return sum(len(outgoing.data) for outgoing in self._outgoing)

    def request(self, message: m.Request, *, deadline: float, now: float, max_answer_bytes: int | None = None) -> int:
        """Return the exchange on which the answer will come. `deadline` is on the caller's clock, like `now`.

        Args:
            max_answer_bytes: of the answer's body (its frame without the header), where the asker knows; a larger one is a
                violation, found on its header. A refusal is always allowed.

        Raises:
            LocalProtocolError: the session is not open.
            Overloaded: too many answers are outstanding; nothing was sent.
            RemoteRefused: the other side's program is too old to know this request; nothing was sent.
        """
        if self.state is not State.OPEN:
            raise LocalProtocolError(f"request in the wrong state: got {self.state.name}, expected OPEN")
        if not speaks(self.version, type(message)):
            detail = f"{type(message).__name__} is unknown to the other side: it speaks wire version {self.version}"
            raise RemoteRefused(detail, remote_code=m.ErrorCode.NOT_ALLOWED)
        if len(self._waiting) >= MAX_EXCHANGES:
            raise Overloaded(f"too many requests wait on one link: got {len(self._waiting)}", retry_after_s=0.1)
        data = encode(message)
        exchange = self._next_exchange
        self._next_exchange += 2
        if not self._waiting:  # silence counts only while an answer is owed
            self._last_heard = self._last_ping = now
        self._waiting[exchange] = _Waiting(m.RESPONSE_TO[type(message)], deadline, max_answer_bytes)
        self._outgoing.append(Outgoing(exchange=exchange, data=data, is_end=True))
        return exchange

    def cancel(self, exchange: int) -> None:
        """Give up waiting for an answer and tell the other side. Does nothing when there is nothing to give up."""
        if self._waiting.pop(exchange, None) is not None:
            self._forget_incoming(exchange)
            self._outgoing.append(Outgoing(exchange=exchange, is_reset=True))

    def respond(self, exchange: int, message: m.Response | m.Refusal) -> bool:
        """Answer a request. Returns False when nobody waits for it any more.

        Raises:
            LocalProtocolError: an answer of the wrong type.
        """
        expected = self._serving.get(exchange)
        if self.state is not State.OPEN or expected is None:
            return False
        if not isinstance(message, (expected, m.Refusal)):
            raise LocalProtocolError(f"wrong answer: got {type(message).__name__}, expected {expected.__name__}")
        data = encode(message)
        del self._serving[exchange]
        self._forget_incoming(exchange)
        self._outgoing.append(Outgoing(exchange=exchange, data=data, is_end=True))
        return True

    # What comes in

    def heard(self, now: float) -> None:
        """The link received something authentic: the other side lives."""
        self._last_heard = now

    def receive(self, exchange: int, data: bytes, is_end: bool, *, now: float) -> list[Event]:
        """Return what these bytes of an exchange mean. A violation closes the session and is the last event's error."""
        if self.state is State.CLOSED:
            return []
        self._last_heard = now
        events: list[Event] = []
        try:
            if is_end and len(data) > HEADER.size and exchange not in self._incoming and self.state is State.OPEN:
                event = self._receive_whole(exchange, data)
                if event is not None:
                    return [event]
            self._receive(exchange, data, is_end, events)
        except RemoteProtocolError as error:
            events += self.close(error)
        return events

    def receive_reset(self, exchange: int) -> list[Event]:
        """Return what it means that the other side abandoned an exchange."""
        if self.state is State.CLOSED:
            return []
        events: list[Event] = []
        try:
            self._receive_reset(exchange, events)
        except RemoteProtocolError as error:
            events += self.close(error)
        return events

    def close(self, error: SwarmError) -> list[Event]:
        """End the session; what waited fails with `error`."""
        if self.state is State.CLOSED:
            return []
        self.state = State.CLOSED
        events: list[Event] = [RequestFailed(exchange=exchange, error=error) for exchange in self._waiting]
        events += [RequestCancelled(exchange=exchange) for exchange in self._serving]
        self._waiting.clear()
        self._serving.clear()
        for exchange, incoming in self._incoming.items():
            self._release(exchange, incoming)
        self._incoming.clear()
        self._arriving.clear()
        self._early.clear()
        self._skipped.clear()
        events.append(Closed(error=error))
        return events

    @property
    def nonce(self) -> bytes:
        """The server's nonce of the greetings; where the link encrypts, only both sides know it. Empty before it is known."""
        return self._greeter.nonce

    # Time

    @property
    def n_waiting(self) -> int:
        """Our requests without an answer yet."""
        return len(self._waiting)

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` must be called next, or None."""
        if self.state is State.CLOSED:
            return None
        if self.state is not State.OPEN:
            return self._greeting_deadline
        deadlines = [waiting.deadline for waiting in self._waiting.values()]
        if self._arriving:
            deadlines.append(next(iter(self._arriving.values())))
        if self._waiting:
            quiet_since = max(self._last_heard, self._last_ping)
            deadlines += [quiet_since + PING_AFTER_S, self._last_heard + LOST_AFTER_S]
        elif self.is_client:
            deadlines += [
                max(self._last_heard, self._last_ping) + KEEPALIVE_S,
                self._last_heard + self._longest_silence(),
            ]
        return min(deadlines, default=None)

    def handle_timeout(self, now: float) -> list[Event]:
        """Return what has become late by `now`. May set `wants_ping`: the link then probes the other side."""
        if self.state is State.CLOSED:
            return []
        if self.state is not State.OPEN:
            if now < self._greeting_deadline:
                return []
            return self.close(DeadlineExceeded(f"no greeting within {GREETING_DEADLINE_S:.0f} s"))
        if (self._waiting or self.is_client) and now >= self._last_heard + self._longest_silence():
            return self.close(ConnectionLost(f"silent for {now - self._last_heard:.1f} s"))
        quiet_since = max(self._last_heard, self._last_ping)
        if now >= quiet_since + (PING_AFTER_S if self._waiting else KEEPALIVE_S) and (self._waiting or self.is_client):
            self.wants_ping = True
            self._last_ping = now
        for exchange in [exchange for exchange, deadline in self._arriving.items() if now >= deadline]:
            self._refuse_rest(exchange, self._incoming[exchange], "the request did not arrive in time, try again")
        late = [exchange for exchange, waiting in self._waiting.items() if now >= waiting.deadline]
        for exchange in late:
            self.cancel(exchange)
        return [RequestFailed(exchange=x, error=DeadlineExceeded("no answer within the deadline")) for x in late]

    # Inside

    def _longest_silence(self) -> float:
        return LOST_AFTER_S if self._waiting else KEEPALIVE_S + LOST_AFTER_S

    def _is_ours(self, exchange: int) -> bool:
        return exchange % 2 == (0 if self.is_client else 1) and exchange != GREETING_EXCHANGE

    def _receive(self, exchange: int, data: bytes, is_end: bool, events: list[Event]) -> None:
        if self.state is State.WELCOMING and exchange != GREETING_EXCHANGE:
            self._keep_early(exchange, data, is_end)
            return
        incoming = self._incoming.get(exchange)
        if incoming is None:
            incoming = self._admit(exchange)
            if incoming is None:
                return
        view = memoryview(data)
        while view:
            if incoming.is_done and not incoming.n_to_skip:
                raise RemoteProtocolError(f"exchange {exchange} goes on after its message")
            view = self._fill(exchange, incoming, view)
            if len(incoming.buffer) == incoming.size:
                events += self._complete(exchange, incoming)
                if self.state is State.CLOSED:
                    return
        if is_end:
            if incoming.buffer or incoming.n_to_skip or not incoming.is_done:
                raise RemoteProtocolError(f"exchange {exchange} ended within a message")
            if exchange not in self._serving and exchange != GREETING_EXCHANGE:
                self._forget_incoming(exchange)
        if self._early and self.state is State.OPEN:
            early, self._early = self._early, []
            for exchange, late, is_end in early:
                if late is None:
                    self._receive_reset(exchange, events)
                else:
                    self._receive(exchange, late, is_end, events)

    def _receive_whole(self, exchange: int, data: bytes) -> Event | None:
        """Return what an exchange means that came in one piece and in its turn, as those of a decoded token do.

        The same checks as piece by piece, with a third of the steps and no copy. None: nothing was done, it is not one.
        """
        waiting = self._waiting.get(exchange)
        if waiting is None and (exchange != self._next_of_theirs or len(self._incoming) > MAX_EXCHANGES):
            return None
        code, size = HEADER.unpack_from(data)
        if size != len(data) - HEADER.size or code >= IGNORABLE_FROM:
            return None
        frame_type = frame_type_of(code)
        if size > LIMITS[frame_type]:
            raise RemoteProtocolError(f"{frame_type.name} too large: got {size}, expected at most {LIMITS[frame_type]}")
        if self._judge(exchange, frame_type, size) is not None:
            return None  # it is refused, as any other
        body = memoryview(data)[HEADER.size :]
        if waiting is not None:
            message = decode(frame_type, body)
            del self._waiting[exchange]
            return _ended(exchange, waiting, message)
        if not self._request_budget.take(size):
            return None
        self._next_of_theirs = exchange + 2
        self._incoming[exchange] = _Incoming(n_held=size, n_arrived=size, is_done=True)
        self._n_held[False] += size
        request = decode(frame_type, body)
        self._serving[exchange] = self._serves[frame_type]
        return RequestReceived(exchange=exchange, request=request)  # type: ignore[arg-type]  # a request, by _judge

    def _receive_reset(self, exchange: int, events: list[Event]) -> None:
        if exchange == GREETING_EXCHANGE:
            if self.state is not State.OPEN:
                raise RemoteProtocolError("the greeting was reset")
            return
        if self.state is State.WELCOMING:
            self._keep_early(exchange, None, True)
            return
        if exchange not in self._incoming:
            if self._is_ours(exchange):
                self._expect_opened(exchange)
            else:
                self._is_new(exchange)
        self._forget_incoming(exchange)
        if self._waiting.pop(exchange, None) is not None:
            error = ConnectionLost(f"the other side reset exchange {exchange}")
            events.append(RequestFailed(exchange=exchange, error=error))
        elif self._serving.pop(exchange, None) is not None:
            events.append(RequestCancelled(exchange=exchange))

    def _keep_early(self, exchange: int, data: bytes | None, is_end: bool) -> None:
        """Keep what a server sends right after its WELCOME and what has overtaken that."""
        self._early.append((exchange, data, is_end))
        if sum(64 + len(kept or b"") for _, kept, _ in self._early) > MAX_EARLY_BYTES:
            raise RemoteProtocolError(
                f"too many bytes before the greetings are done: expected at most {MAX_EARLY_BYTES}"
            )

    def _admit(self, exchange: int) -> _Incoming | None:
        """Return the place for an exchange's bytes; None if it is over and its last bytes were still on their way."""
        if exchange != GREETING_EXCHANGE:
            if self.state is not State.OPEN:
                raise RemoteProtocolError(f"exchange {exchange} before the greetings are done")
            if self._is_ours(exchange):
                self._expect_opened(exchange)
                if exchange not in self._waiting:
                    return None
            elif not self._is_new(exchange):
                return None
            # Twice the asker's own bound: its cancellations may still be on their way when their successors come.
            elif (
                len(self._incoming) > 2 * MAX_EXCHANGES
                and sum(1 for each in self._incoming if not self._is_ours(each)) > 2 * MAX_EXCHANGES
            ):
                raise RemoteProtocolError(f"too many exchanges at once: expected at most {MAX_EXCHANGES}")
        incoming = self._incoming[exchange] = _Incoming()
        return incoming

    def _expect_opened(self, exchange: int) -> None:
        if exchange >= self._next_exchange:
            raise RemoteProtocolError(f"answer on exchange {exchange}, which this side has not opened")

    def _is_new(self, exchange: int) -> bool:
        """Return whether the other side uses this number for the first time, and note that it did."""
        if exchange < self._next_of_theirs:
            if exchange not in self._skipped:
                return False
            self._skipped.remove(exchange)
            return True
        if len(self._skipped) + (exchange - self._next_of_theirs) // 2 > MAX_SKIPPED:
            raise RemoteProtocolError(f"exchange {exchange} is too far ahead: expected about {self._next_of_theirs}")
        self._skipped.update(range(self._next_of_theirs, exchange, 2))
        self._next_of_theirs = exchange + 2
        return True

    def _fill(self, exchange: int, incoming: _Incoming, view: memoryview) -> memoryview:
        """Take from `view` what the current frame still lacks; check its header as soon as that is whole."""
        if incoming.n_to_skip:
            n = min(incoming.n_to_skip, len(view))
            incoming.n_to_skip -= n
            return view[n:]
        n = (HEADER.size if incoming.size < 0 else incoming.size) - len(incoming.buffer)
        piece = view[:n]
        if exchange in self._arriving:
            if not self._request_budget.take(len(piece)):
                self._refuse_rest(exchange, incoming, _TOO_MANY_BYTES)
                return view
            incoming.n_arrived += len(piece)
        incoming.buffer += piece
        if incoming.size < 0 and len(incoming.buffer) == HEADER.size:
            self._take_header(exchange, incoming)
        return view[n:]

    def _take_header(self, exchange: int, incoming: _Incoming) -> None:
        """Judge a frame by its header, before memory is taken for its body. A refused request is answered here."""
        code, size = HEADER.unpack(incoming.buffer)
        if code >= IGNORABLE_FROM:
            incoming.buffer.clear()
            incoming.n_to_skip = size
            return
        frame_type = frame_type_of(code)
        if size > LIMITS[frame_type]:
            raise RemoteProtocolError(f"{frame_type.name} too large: got {size}, expected at most {LIMITS[frame_type]}")
        refusal = self._judge(exchange, frame_type, size)
        if refusal is not None:
            self._skip(exchange, incoming, size, refusal)
            return
        is_ours = self._is_ours(exchange)
        incoming.frame_type = frame_type
        incoming.size = HEADER.size + size
        incoming.n_held = size
        self._n_held[is_ours] += size
        if not is_ours and exchange != GREETING_EXCHANGE:
            self._arriving[exchange] = self._last_heard + ARRIVAL_DEADLINE_S

    def _refuse_rest(self, exchange: int, incoming: _Incoming, detail: str) -> None:
        """Give up a request that is not whole: tell the asker BUSY, and pass over what is still to come."""
        del self._arriving[exchange]
        self._release(exchange, incoming)
        n_missing = incoming.size - len(incoming.buffer)
        incoming.frame_type, incoming.size = None, -1
        self._skip(exchange, incoming, n_missing, m.Refusal(code=m.ErrorCode.BUSY, detail=detail))

    def _skip(self, exchange: int, incoming: _Incoming, n_bytes: int, refusal: m.Refusal) -> None:
        self._outgoing.append(Outgoing(exchange=exchange, data=encode(refusal), is_end=True))
        incoming.is_done = True
        incoming.buffer.clear()
        incoming.n_to_skip = n_bytes

    def _judge(self, exchange: int, frame_type: FrameType, size: int) -> m.Refusal | None:
        """Return None for a frame that may be taken in, else the refusal to answer it with."""
        if exchange == GREETING_EXCHANGE:
            self._greeter.expect(self.state, frame_type)
            return None
        waiting = self._waiting.get(exchange)
        if waiting is not None:
            is_refusal = frame_type in (FrameType.REFUSAL, FrameType.BUSY)
            if not is_refusal and frame_type is not FRAME_TYPE_OF[waiting.expected]:
                raise RemoteProtocolError(f"wrong answer: got {frame_type.name}, expected {waiting.expected.__name__}")
            limit = waiting.max_answer_bytes
            if limit is not None and size > limit and not is_refusal:
                raise RemoteProtocolError(
                    f"{frame_type.name} larger than asked for: got {size}, expected at most {limit}"
                )
            if self._n_held[True] + size > MAX_ANSWER_BYTES:
                raise RemoteProtocolError(f"too many bytes of answers at once: expected at most {MAX_ANSWER_BYTES}")
            return None
        if frame_type not in REQUEST_TYPES:
            raise RemoteProtocolError(f"not a request: got {frame_type.name}")
        if frame_type not in self._serves:
            detail = f"this node does not serve {frame_type.name}"
            return m.Refusal(code=m.ErrorCode.NOT_ALLOWED, detail=detail)
        if self._n_held[False] + size > MAX_REQUEST_BYTES or not self._request_budget.has_room(size):
            return m.Refusal(code=m.ErrorCode.BUSY, detail=_TOO_MANY_BYTES)
        return None

    def _complete(self, exchange: int, incoming: _Incoming) -> list[Event]:
        frame_type = incoming.frame_type
        assert frame_type is not None
        body = memoryview(bytes(incoming.buffer))[HEADER.size :]
        incoming.buffer = bytearray()
        incoming.size = -1
        message = decode(frame_type, body)
        if exchange == GREETING_EXCHANGE:
            self._release(exchange, incoming)
            events = self._greet(message)
            incoming.is_done = self.state is State.OPEN
            return events
        incoming.is_done = True
        self._arriving.pop(exchange, None)
        return [self._act(exchange, incoming, frame_type, message)]

    def _act(self, exchange: int, incoming: _Incoming, frame_type: FrameType, message: m.Message) -> Event:
        """Return what a message means that is not of the greetings."""
        waiting = self._waiting.pop(exchange, None)
        if waiting is not None:
            self._release(exchange, incoming)
            return _ended(exchange, waiting, message)
        self._serving[exchange] = self._serves[frame_type]
        return RequestReceived(exchange=exchange, request=message)  # type: ignore[arg-type]  # a request, by _judge

    def _greet(self, message: m.Message) -> list[Event]:
        step = self._greeter.take(self.state, message)
        if step.reply is not None:
            self._outgoing.append(Outgoing(exchange=GREETING_EXCHANGE, data=encode(step.reply), is_end=True))
        if step.error is not None:
            return self.close(step.error)
        self.state = step.state
        if step.version is None:
            return []
        self.remote, self.version = self._greeter.remote, step.version
        assert self.remote is not None  # by the greeter
        return [Opened(remote=self.remote, version=step.version, observed_address=self._greeter.observed_address)]

    def _forget_incoming(self, exchange: int) -> None:
        incoming = self._incoming.pop(exchange, None)
        if incoming is not None:
            self._arriving.pop(exchange, None)
            self._release(exchange, incoming)

    def _release(self, exchange: int, incoming: _Incoming) -> None:
        self._n_held[self._is_ours(exchange)] -= incoming.n_held
        self._request_budget.give_back(incoming.n_arrived)
        incoming.n_held = incoming.n_arrived = 0


def _ended(exchange: int, waiting: _Waiting, message: m.Message) -> Answered | RequestFailed:
    """Return what the answer to a request of ours means."""
    if isinstance(message, m.Refusal):
        retry_after_s = message.retry_after_ms / 1e3 if isinstance(message, m.Busy) else None
        error = RemoteRefused(f"refused: {message.detail}", remote_code=message.code, retry_after_s=retry_after_s)
        return RequestFailed(exchange=exchange, error=error)
    assert isinstance(message, waiting.expected)  # by _judge
    return Answered(exchange=exchange, response=message)
