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

The session is bounded: exchanges in each direction, bytes of incomplete frames, a deadline on each request and on the
greeting, and silence on a link that owes an answer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalProtocolError,
    NetworkError,
    Overloaded,
    RemoteProtocolError,
    RemoteRefused,
    SwarmError,
    VersionRefused,
)
from swarm.identity import Identity, is_valid_signature
from swarm.ids import NodeId
from swarm.wire import messages as m
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

WIRE_VERSIONS: tuple[int, ...] = (1,)  # stays (1,) until the first release
ALPN = "swarm/1"
GREETING_EXCHANGE = 1

GREETING_DEADLINE_S = 5.0  # guessed: ten round trips of 500 ms
MAX_EXCHANGES = 256  # in each direction; guessed: 64 layers' worth of batches in flight
MAX_BUFFERED_BYTES = 256 << 20  # incomplete incoming frames of one link, all exchanges together; guessed
PING_AFTER_S = 0.5  # of silence while an answer is owed
LOST_AFTER_S = (
    3.0  # of silence while an answer is owed: keeps a dead peer's request under 5 s, with room for a busy machine
)
KEEPALIVE_S = 5.0  # the client pings this often on a quiet link, and gives it up LOST_AFTER_S later


def hello_statement(*, server: NodeId, nonce: bytes, client: NodeId, versions: tuple[int, ...]) -> bytes:
    """Return what a client signs: bound to this server and this connection's nonce, so it cannot be replayed elsewhere."""
    return (
        b"swarm hello 1\0"
        + server.raw
        + nonce
        + client.raw
        + struct.pack(f"<B{len(versions)}H", len(versions), *versions)
    )


class State(Enum):
    """Where a session stands."""

    GREETING = auto()
    WELCOMING = auto()
    OPEN = auto()
    CLOSED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The greetings are done: `remote` is who is there, proved."""

    remote: NodeId
    version: int
    observed_address: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReceived:
    """The other side wants an answer on `exchange`."""

    exchange: int
    request: m.Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The other side no longer wants the answer on `exchange`."""

    exchange: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Our request on `exchange` has its answer."""

    exchange: int
    response: m.Response


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """Our request on `exchange` ended without an answer."""

    exchange: int
    error: SwarmError


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The session is over. All requests that waited have failed with `error` in the events before."""

    error: SwarmError


Event = Opened | RequestReceived | RequestCancelled | Answered | RequestFailed | Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """Bytes for the link to send on an exchange; `is_end` closes our half; `is_reset` abandons both halves."""

    exchange: int
    data: bytes = b""
    is_end: bool = False
    is_reset: bool = False


@dataclass(slots=True)
class _Incoming:
    """The bytes of one exchange that have not become a message yet."""

    buffer: bytearray = field(default_factory=bytearray)
    frame_type: FrameType | None = None
    size: int = -1  # of the frame with its header, once that is known; -1 before
    n_to_skip: int = 0  # of a frame that may be ignored
    is_done: bool = False


@dataclass(slots=True)
class _Waiting:
    expected: type[m.Response]
    deadline: float


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
    ) -> None:
        """Start a session.

        Args:
            expected: as a client, the server's node id, already proved by the link (its certificate).
            nonce: as a server, 32 fresh random bytes.
            observed_address: as a server, where the client is seen, told to it.
            serves: the requests that we answer; all others are refused before memory is taken for them.
        """
        if not is_client and len(nonce) != 32:
            raise LocalProtocolError(f"a server's nonce has a wrong length: got {len(nonce)} bytes, expected 32")
        self.state = State.GREETING
        self.is_client = is_client
        self.remote = expected
        self._identity = identity
        self._versions = versions
        self._nonce = nonce
        self._observed_address = observed_address
        self._serves = {FRAME_TYPE_OF[request]: m.RESPONSE_TO[request] for request in serves}
        self._incoming: dict[int, _Incoming] = {}
        self._n_buffered = 0
        self._waiting: dict[int, _Waiting] = {}
        self._serving: dict[int, type[m.Response]] = {}
        self._next_exchange = 0 if is_client else 3
        self._greeting_deadline = now + GREETING_DEADLINE_S
        self._last_heard = now
        self._last_ping = now
        self.wants_ping = False
        self._outgoing: list[Outgoing] = []
        if not is_client:
            challenge = m.Challenge(nonce=nonce, versions=versions, observed_address=observed_address)
            self._outgoing.append(Outgoing(exchange=GREETING_EXCHANGE, data=encode(challenge)))

    # What goes out

    def take_outgoing(self) -> list[Outgoing]:
        """Return what the link must send now, in order, and forget it."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def request(self, message: m.Request, *, deadline: float, now: float) -> int:
        """Return the exchange on which the answer will come. `deadline` is on the caller's clock, like `now`.

        Raises:
            LocalProtocolError: the session is not open.
            Overloaded: too many answers are outstanding; nothing was sent.
        """
        if self.state is not State.OPEN:
            raise LocalProtocolError(f"request in the wrong state: got {self.state.name}, expected OPEN")
        if len(self._waiting) >= MAX_EXCHANGES:
            raise Overloaded(f"too many requests wait on one link: got {len(self._waiting)}", retry_after_s=0.1)
        data = encode(message)
        exchange = self._next_exchange
        self._next_exchange += 2
        if not self._waiting:  # silence counts only while an answer is owed
            self._last_heard = self._last_ping = now
        self._waiting[exchange] = _Waiting(m.RESPONSE_TO[type(message)], deadline)
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
        if not isinstance(message, expected | m.Refusal):
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
        try:
            return self._receive(exchange, data, is_end)
        except RemoteProtocolError as error:
            return self.close(error)

    def receive_reset(self, exchange: int) -> list[Event]:
        """Return what it means that the other side abandoned an exchange."""
        if self.state is State.CLOSED:
            return []
        self._forget_incoming(exchange)
        if exchange == GREETING_EXCHANGE and self.state is not State.OPEN:
            return self.close(RemoteProtocolError("the greeting was reset"))
        if self._waiting.pop(exchange, None) is not None:
            error = ConnectionLost(f"the other side reset exchange {exchange}")
            return [RequestFailed(exchange=exchange, error=error)]
        if self._serving.pop(exchange, None) is not None:
            return [RequestCancelled(exchange=exchange)]
        return []

    def close(self, error: SwarmError) -> list[Event]:
        """End the session; what waited fails with `error`."""
        if self.state is State.CLOSED:
            return []
        self.state = State.CLOSED
        events: list[Event] = [RequestFailed(exchange=exchange, error=error) for exchange in self._waiting]
        events += [RequestCancelled(exchange=exchange) for exchange in self._serving]
        self._waiting.clear()
        self._serving.clear()
        self._incoming.clear()
        self._n_buffered = 0
        events.append(Closed(error=error))
        return events

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
        late = [exchange for exchange, waiting in self._waiting.items() if now >= waiting.deadline]
        for exchange in late:
            self.cancel(exchange)
        return [RequestFailed(exchange=x, error=DeadlineExceeded("no answer within the deadline")) for x in late]

    # Inside

    def _longest_silence(self) -> float:
        return LOST_AFTER_S if self._waiting else KEEPALIVE_S + LOST_AFTER_S

    def _receive(self, exchange: int, data: bytes, is_end: bool) -> list[Event]:
        is_ours = exchange % 2 == (0 if self.is_client else 1) and exchange != GREETING_EXCHANGE
        if exchange != GREETING_EXCHANGE:
            if self.state is not State.OPEN:
                raise RemoteProtocolError(f"exchange {exchange} before the greetings are done")
            if is_ours and exchange not in self._waiting and exchange not in self._incoming:
                return []  # given up by us; its last bytes may still be on their way
        incoming = self._incoming.get(exchange)
        if incoming is None:
            if not data:
                return []  # only the end of an exchange that was answered before it came
            if len(self._incoming) >= 2 * MAX_EXCHANGES:
                raise RemoteProtocolError(f"too many exchanges at once: expected at most {MAX_EXCHANGES}")
            incoming = self._incoming[exchange] = _Incoming()
        events: list[Event] = []
        view = memoryview(data)
        while view:
            if incoming.is_done and not incoming.n_to_skip:
                raise RemoteProtocolError(f"exchange {exchange} goes on after its message")
            view = self._fill(exchange, incoming, view)
            if incoming.size >= 0 and len(incoming.buffer) == incoming.size and not incoming.n_to_skip:
                events += self._complete(exchange, incoming)
                if self.state is State.CLOSED:
                    return events
        if is_end and exchange in self._incoming:
            if incoming.buffer or incoming.n_to_skip or not (incoming.is_done or exchange == GREETING_EXCHANGE):
                raise RemoteProtocolError(f"exchange {exchange} ended within a message")
            if is_ours:
                self._forget_incoming(exchange)
        return events

    def _fill(self, exchange: int, incoming: _Incoming, view: memoryview) -> memoryview:
        """Take from `view` what the current frame still lacks; check its header as soon as that is whole."""
        if incoming.n_to_skip:
            n = min(incoming.n_to_skip, len(view))
            incoming.n_to_skip -= n
            return view[n:]
        n_wanted = HEADER.size if incoming.size < 0 else incoming.size
        piece, view = view[: n_wanted - len(incoming.buffer)], view[n_wanted - len(incoming.buffer) :]
        self._n_buffered += len(piece)
        if self._n_buffered > MAX_BUFFERED_BYTES:
            raise RemoteProtocolError(f"too many bytes of incomplete messages: expected at most {MAX_BUFFERED_BYTES}")
        incoming.buffer += piece
        if incoming.size < 0 and len(incoming.buffer) == HEADER.size:
            code, size = HEADER.unpack(incoming.buffer)
            if code >= IGNORABLE_FROM:
                self._n_buffered -= len(incoming.buffer)
                incoming.buffer.clear()
                incoming.n_to_skip = size
                return view
            incoming.frame_type = frame_type_of(code)
            if size > LIMITS[incoming.frame_type]:
                limit = LIMITS[incoming.frame_type]
                raise RemoteProtocolError(f"{incoming.frame_type.name} too large: got {size}, expected at most {limit}")
            if not self._is_welcome(exchange, incoming.frame_type):
                incoming.is_done = True
                incoming.n_to_skip = size
                self._n_buffered -= len(incoming.buffer)
                incoming.buffer.clear()
                return view
            incoming.size = HEADER.size + size
        return view

    def _is_welcome(self, exchange: int, frame_type: FrameType) -> bool:
        """Return whether a frame's body may be taken in, judged by its header. A refused request is answered here."""
        if exchange == GREETING_EXCHANGE:
            return True
        waiting = self._waiting.get(exchange)
        if waiting is not None:
            if frame_type not in (FRAME_TYPE_OF[waiting.expected], FrameType.REFUSAL):
                raise RemoteProtocolError(f"wrong answer: got {frame_type.name}, expected {waiting.expected.__name__}")
            return True
        if frame_type not in REQUEST_TYPES:
            raise RemoteProtocolError(f"not a request: got {frame_type.name}")
        if frame_type in self._serves:
            return True
        refusal = m.Refusal(code=m.ErrorCode.NOT_ALLOWED, detail=f"this node does not serve {frame_type.name}")
        self._outgoing.append(Outgoing(exchange=exchange, data=encode(refusal), is_end=True))
        return False

    def _complete(self, exchange: int, incoming: _Incoming) -> list[Event]:
        assert incoming.frame_type is not None
        body = memoryview(bytes(incoming.buffer))[HEADER.size :]
        self._n_buffered -= len(incoming.buffer)
        incoming.buffer = bytearray()
        incoming.size = -1
        message = decode(incoming.frame_type, body)
        if exchange == GREETING_EXCHANGE:
            return self._greet(message)
        incoming.is_done = True
        waiting = self._waiting.get(exchange)
        if waiting is not None:
            del self._waiting[exchange]
            if isinstance(message, m.Refusal):
                error = RemoteRefused(f"refused: {message.detail}", remote_code=message.code)
                return [RequestFailed(exchange=exchange, error=error)]
            assert isinstance(message, waiting.expected)  # by _is_welcome
            return [Answered(exchange=exchange, response=message)]
        assert isinstance(message, m.Request)
        self._serving[exchange] = self._serves[incoming.frame_type]
        return [RequestReceived(exchange=exchange, request=message)]

    def _greet(self, message: m.Message) -> list[Event]:
        if self.is_client and self.state is State.GREETING and isinstance(message, m.Challenge):
            if self.remote is None:
                raise LocalProtocolError("a client must know the server's proved identity before the greetings")
            self._observed_address = message.observed_address
            statement = hello_statement(
                server=self.remote, nonce=message.nonce, client=self._identity.node_id, versions=self._versions
            )
            hello = m.Hello(
                node_id=self._identity.node_id, versions=self._versions, signature=self._identity.sign(statement)
            )
            self._outgoing.append(Outgoing(exchange=GREETING_EXCHANGE, data=encode(hello), is_end=True))
            self.state = State.WELCOMING
            return []
        if self.is_client and self.state is State.WELCOMING and isinstance(message, m.Welcome):
            if message.version not in self._versions:
                raise VersionRefused(f"wire version: got {message.version}, expected one of {self._versions}")
            return self._open(message.version, self._observed_address)
        if self.is_client and self.state is State.WELCOMING and isinstance(message, m.Refusal):
            kind = VersionRefused if message.code == m.ErrorCode.VERSION else RemoteProtocolError
            raise kind(f"the other side refused the greeting: {message.detail}")
        if not self.is_client and self.state is State.GREETING and isinstance(message, m.Hello):
            return self._check_hello(message)
        raise RemoteProtocolError(f"wrong greeting: got {type(message).__name__} in state {self.state.name}")

    def _check_hello(self, hello: m.Hello) -> list[Event]:
        statement = hello_statement(
            server=self._identity.node_id, nonce=self._nonce, client=hello.node_id, versions=hello.versions
        )
        if not is_valid_signature(hello.node_id, hello.signature, statement):
            raise RemoteProtocolError(f"the hello's signature is not that of node {hello.node_id.short}")
        common = set(hello.versions) & set(self._versions)
        if not common:
            detail = f"wire versions: got {sorted(hello.versions)}, expected one of {sorted(self._versions)}"
            refusal = m.Refusal(code=m.ErrorCode.VERSION, detail=detail)
            self._outgoing.append(Outgoing(exchange=GREETING_EXCHANGE, data=encode(refusal), is_end=True))
            return self.close(VersionRefused(detail))
        self.remote = hello.node_id
        version = max(common)
        self._outgoing.append(
            Outgoing(exchange=GREETING_EXCHANGE, data=encode(m.Welcome(version=version)), is_end=True)
        )
        return self._open(version, None)

    def _open(self, version: int, observed_address: str | None) -> list[Event]:
        assert self.remote is not None
        self.state = State.OPEN
        return [Opened(remote=self.remote, version=version, observed_address=observed_address)]

    def _forget_incoming(self, exchange: int) -> None:
        incoming = self._incoming.pop(exchange, None)
        if incoming is not None:
            self._n_buffered -= len(incoming.buffer)


def is_network_failure(error: SwarmError) -> bool:
    """Return whether the link, rather than the answer, failed: another path or a new connection may help."""
    return isinstance(error, NetworkError | RemoteProtocolError)
