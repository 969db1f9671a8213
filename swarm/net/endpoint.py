"""One UDP socket that is client and server at once: receives in batches, flushes each touched connection once a tick.

Datagrams whose first byte is below 64 are not QUIC (RFC 9443): probes of paths, those of a relay's channel that was added here,
which carry either, and others, which are `on_other`'s. Bounded: connections in all,
half-open ones (`admission`), requests being served, in all and by connection, bytes of requests (`wire/byte_budget`) and of
answers (`answer_budget`) that are held.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.packet import QuicHeader, QuicPacketType, encode_quic_retry, pull_quic_header
from aioquic.quic.retry import QuicRetryTokenHandler

from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    RemoteProtocolError,
    UserError,
)
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.ip import plain_ip
from swarm.net.addresses import (
    SocketAddress,
    format_address,
    host_towards,
    is_loopback,
    parse_address,
    plain_address,
    socket_address,
)
from swarm.net.admission import Admission, Verdict
from swarm.net.byte_counts import ByteCounts
from swarm.net.certificate import make_certificate
from swarm.net.connection import Connection, clock
from swarm.net.flights import Flights
from swarm.net.path_monitor import PathMonitor
from swarm.net.path_probes import PONG, PROBE, PathKey, decode_probe
from swarm.net.paths import CHANNEL_BYTES, RELAY_TYPE, Path, PathPolicy
from swarm.net.quic_driver import QuicDriver, driver_class
from swarm.net.rehearsal import Rehearsal
from swarm.net.serving import HELD_ANSWER_BYTES, Handler, Serving
from swarm.wire import messages as m
from swarm.wire import session as s
from swarm.wire.byte_budget import ByteBudget

logger = logging.getLogger(__name__)

# Takes datagrams of one sender that are neither QUIC nor of a path known here.
OtherReceiver = Callable[[Sequence[bytes], Any], None]

CID_BYTES = 8
SOCKET_BUFFER_BYTES = 4 << 20  # asked for; the kernel caps it (net.core.rmem_max)
MAX_CONNECTIONS = 4096
DIAL_TIMEOUT_S = 4.0
MAX_CONTACTED = 4096  # hosts that an endpoint remembers having sent to
RELAY_HEAD_BYTES = 1 + CHANNEL_BYTES

INTERRUPTED_S = (
    0.0002  # a look at the socket takes 3 us (measured); one that takes this long was on somebody else's core
)
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Endpoint:
    """Use as `async with Endpoint(...) as endpoint`; leaving closes every connection and ends every task."""

    def __init__(
        self,
        identity: Identity,
        *,
        host: str = "0.0.0.0",
        port: int = 0,
        handler: Handler | None = None,
        serves: Iterable[type[m.Request]] = (),
        versions: tuple[int, ...] = s.WIRE_VERSIONS,
        held_request_bytes: int = s.SHARED_REQUEST_BYTES,
        held_answer_bytes: int = HELD_ANSWER_BYTES,
    ) -> None:
        """Prepare an endpoint.

        Args:
            handler: answers the requests named in `serves`; it, and what it returns, may raise Refused, Overloaded or
                LookupError, whose texts are sent; of any other exception the asker learns nothing but that there was one.
            port: 0 lets the system choose.
            held_request_bytes: of requests that arrive or are served, all connections together; beyond, askers are told BUSY.
            held_answer_bytes: not taken yet by those who asked; beyond, bulky requests wait and others are told BUSY.
        """
        self.identity = identity
        self._host, self._port = host, port
        self._serving = Serving(held_answer_bytes)
        self._is_server = False  # whether strangers may connect
        if handler is not None:
            self.add_handler(serves, handler)
            self._is_server = bool(self._serving.handlers)
        self._versions = versions
        self._driver = driver_class()
        certificate = make_certificate(identity)
        self._configurations = {
            is_client: self._driver.configuration(identity, certificate, is_client=is_client)
            for is_client in (True, False)
        }
        self._connections: set[Connection] = set()
        self._by_cid: dict[bytes, Connection] = {}
        self._keys: dict[Connection, PathKey] = {}  # of the open ones
        self._by_tag: dict[bytes, tuple[Connection, PathKey]] = {}  # of the open ones: whom a probe is for
        self._contacted: dict[str, float] = {}  # hosts that we began to send to: when; oldest first
        self._channels: dict[bytes, Path] = {}  # of relays
        self.on_other: OtherReceiver | None = None
        self.on_gone: Callable[[NodeId], None] = lambda node: None  # told of whom a connection that was open is over
        # Of a port on this machine that carries somebody else's packets (a WebSocket's), whose: bounds count that host.
        self.host_behind: Callable[[int], str | None] = lambda port: None
        self._cids: dict[Connection, set[bytes]] = {}
        self._requests = ByteBudget(held_request_bytes)
        self._admission = Admission()
        self._retry = QuicRetryTokenHandler()
        self._socket: socket.socket | None = None
        self._flights: Flights | None = None  # the same socket
        self._is_closing = False
        self.n_refused = 0  # first packets of connections for which there was no room
        self.n_retries = 0  # first packets whose sender was asked to prove its address
        self.n_send_drops = 0  # datagrams that the socket had no room for; QUIC sends their content again
        self.counts = ByteCounts()  # of this node's TLS links, too

    async def __aenter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        udp = socket.socket(family, socket.SOCK_DGRAM)
        try:
            if family == socket.AF_INET6:  # `::` takes IPv4 too, in IPv6 clothes
                udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(self._host != "::"))
            udp.setblocking(False)
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            udp.bind((self._host, self._port))
        except OSError as error:
            udp.close()
            raise UserError(
                f"cannot use UDP {self._host}:{self._port}: {error.strerror}; choose another --port"
            ) from error
        await self._serving.open()
        self._socket, self._flights = udp, self._driver.flights(udp)
        asyncio.get_running_loop().add_reader(udp, self._on_readable)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._is_closing = True
        self._serving.stop()
        for connection in list(self._connections):
            connection.close()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = self._flights = None
        for connection in list(self._connections):
            connection._finish()
        await self._serving.wait_closed()

    @property
    def port(self) -> int:
        """The bound UDP port."""
        if self._socket is None:
            raise ConnectionLost("the endpoint is closed")
        return int(self._socket.getsockname()[1])

    @property
    def bytes_sent(self) -> int:
        """Payload of UDP, without repair, and of this node's TLS links (`byte_counts`)."""
        return self.counts.udp_sent + self.counts.links().sent

    @property
    def repair_bytes(self) -> int:
        """UDP payload sent a second time in case the first copy was lost."""
        return self.counts.udp_repair

    @property
    def bytes_received(self) -> int:
        """Payload of UDP and of this node's TLS links."""
        return self.counts.udp_received + self.counts.links().received

    @property
    def families(self) -> frozenset[int]:
        """The versions of IP that the socket speaks: 4, 6."""
        if self._host == "::":
            return frozenset((4, 6))
        return frozenset((6 if ":" in self._host else 4,))

    def add_handler(self, serves: Iterable[type[m.Request]], handler: Handler) -> None:
        """Let `handler` answer these requests too, on connections that are made from now on.

        Whether strangers may connect is settled by the handler given at the start.
        """
        self._serving.add_handler(serves, handler)

    def open_connections(self) -> list[Connection]:
        """Return the connections that are open now."""
        return [connection for connection in self._connections if connection.is_open]

    def has_contacted(self, host: str, *, within_s: float) -> bool:
        """Return whether this side has begun to send to a host lately; `host`: an IP literal."""
        at = self._contacted.get(str(plain_ip(host)))
        return at is not None and clock() < at + within_s

    def _note_contact(self, address: Any) -> None:
        host = plain_address(address)[0]
        self._contacted.pop(host, None)
        while len(self._contacted) >= MAX_CONTACTED:
            del self._contacted[next(iter(self._contacted))]
        self._contacted[host] = clock()

    def sightings(self) -> list[tuple[SocketAddress, SocketAddress]]:
        """Return (a node's address, where it sees us) of those that we dialled directly and are connected to."""
        found = []
        for connection in self._connections:
            observed = connection.observed_address
            if connection.is_client and connection.is_open and connection.address is not None and observed:
                found.append((plain_address(connection.path.address), parse_address(observed)))
        return found

    # Paths

    def add_channel(self, channel: bytes, address: SocketAddress) -> Path:
        """Return the path through a relay's channel (8 bytes), for `dial`; what comes through it from now on is taken in.

        `address`: the relay's. BIND must have been sent there before.
        """
        assert len(channel) == CHANNEL_BYTES
        path = Path(address=self._to_socket(address), channel=channel)
        self._channels[channel] = path
        return path

    def remove_channel(self, channel: bytes, *, reason: str = "the relay ended the channel") -> None:
        """Forget a channel; connections that use it go on by another path, if they have one."""
        path = self._channels.pop(channel, None)
        if path is not None:
            for connection in list(self._connections):
                if connection.monitor is not None:
                    connection.monitor.remove(path, reason=reason)

    def uses_channel(self, channel: bytes) -> bool:
        """Return whether a channel is a path of some connection, in use or spare."""
        path = self._channels.get(channel)
        return path is not None and any(
            connection.path == path or (connection.monitor is not None and connection.monitor.knows(path))
            for connection in self._connections
        )

    def add_path(self, connection: Connection, path: Path | SocketAddress) -> None:
        """Try a further path for an open connection; it is used if it works and is better. Forgotten if it is not open."""
        monitor = self._monitor(connection)
        if monitor is not None:
            added = path if isinstance(path, Path) else Path(address=self._to_socket(path))
            self._note_contact(added.address)
            monitor.add(added)

    def send_raw(self, datagrams: Sequence[bytes], address: Any) -> None:
        """Send datagrams that are not QUIC's; what the socket does not take is dropped."""
        self.counts.udp_sent += self._try_to_send(Path(address=self._to_socket(address)), datagrams)

    async def dial(
        self, address: SocketAddress | Path, *, expected: NodeId | None, timeout_s: float = DIAL_TIMEOUT_S
    ) -> Connection:
        """Return an open connection to the node at `address` (an IP literal and a port), or at the end of a relay's channel.

        Args:
            expected: the node that must answer; None takes whoever does (`.remote` tells).

        Raises:
            IdentityMismatch: another node answered.
            DeadlineExceeded, ConnectionLost, RemoteProtocolError: no connection.
        """
        if self._socket is None or self._is_closing:
            raise ConnectionLost("the endpoint is closed")
        path = address if isinstance(address, Path) else Path(address=self._to_socket(address))
        if not path.is_relayed and host_towards(path.address) is None:
            raise ConnectionLost(f"this machine has no way to {path}")
        connection = self._adopt(self._driver(self._configurations[True], None), expected, "", path)
        connection.address = None if isinstance(address, Path) else address
        self._note_contact(path.address)
        connection.connect()
        try:
            async with asyncio.timeout(timeout_s):
                await connection.wait_open()
        except TimeoutError:
            error = DeadlineExceeded(f"no answer from {path} within {timeout_s:g} s")
            connection.close(error)
            raise error from None
        except asyncio.CancelledError:
            connection.close()
            raise
        return connection

    # Inside

    def _to_socket(self, address: Any) -> Any:
        """Return an address in the form that the socket takes and gives."""
        return socket_address(address) if ":" in self._host else address

    def _adopt(self, driver: QuicDriver, expected: NodeId | None, address: str, path: Path) -> Connection:
        def make_session(remote: NodeId | None) -> s.Session:
            return s.Session(
                self.identity,
                is_client=driver.quic.configuration.is_client,
                now=clock(),
                expected=remote,
                nonce=os.urandom(32),
                observed_address=address,
                serves=self._serving.handlers,
                versions=self._versions,
                request_budget=self._requests,
            )

        connection = Connection(
            driver,
            None,
            make_session=make_session,
            expected=expected,
            path=path,
            send=self._send,
            send_copy=self._send_copy,
            on_request=self._serving.begin,
            on_cancel=self._serving.cancel,
            on_open=self._on_open,
            on_gone=self._on_gone,
            on_unsent=self._on_unsent,
            on_cid=self._on_cid,
        )
        self._connections.add(connection)
        self._cids[connection] = set()
        self._on_cid(connection, driver.quic.host_cid, True)
        return connection

    @property
    def request_budget(self) -> ByteBudget:
        """Of the bytes of requests held, shared with other links to this node."""
        return self._requests

    @property
    def serving(self) -> Serving:
        """What answers requests, of other links to this node too."""
        return self._serving

    def is_connected(self, node: NodeId) -> bool:
        """Return whether a node has an open connection with this one; for what happens rarely: it looks through all."""
        return any(each.is_open and each.remote == node for each in self._connections)

    def is_connected_host(self, host: str) -> bool:
        """Return whether a node at this IP address has an open, direct connection with this one; as `is_connected`."""
        wanted = plain_ip(host)
        return any(
            each.is_open and not each.path.is_relayed and plain_ip(each.path.address[0]) == wanted
            for each in self._connections
        )

    def rehearsal(self) -> Rehearsal:
        """Return an exchange's way to go through without a socket; the caller's to close."""
        return Rehearsal(self._driver, self._configurations, self.identity)

    def watch(self, until: float) -> bool:
        """Read the socket without sleeping until something of a connection has come, and return True, or until that time.

        Nothing else of the loop runs meanwhile. Gives way to who needs the core, and ends then: to sleep is better for both.
        """
        now = clock()
        while self._flights is not None and not self._is_closing:
            if self._on_readable():
                return True
            _yield_core()
            before, now = now, clock()
            if now >= until or now - before > INTERRUPTED_S:
                return False
        return False

    def _on_readable(self) -> bool:
        """Take in what has come; return whether anything of a connection has."""
        assert self._flights is not None
        now, by_cid = clock(), self._by_cid
        touched: dict[Connection, Any] = {}  # with where they were heard from last
        others: dict[Any, list[bytes]] = {}  # what is not QUIC, by sender
        connection: Connection | None = None
        flight: list[bytes] = []  # of this connection, not given to it yet
        failure: Exception | None = None  # a stranger's packet made us fail; a connection ends its own failures itself
        for data, address in self._flights.receive():
            self.counts.udp_received += len(data)
            if not data or data[0] < 64:
                others.setdefault(address, []).append(data)
                continue
            if data[0] < 128:  # a short header, as most have: the connection's id follows (RFC 9000 section 17.3)
                found = by_cid.get(data[1 : 1 + CID_BYTES])
            else:
                try:
                    found = self._connection_for(data, address)
                except Exception as error:
                    failure = error  # later: the socket has what came with it no more
                    continue
            if found is None:
                continue
            if found is not connection:
                if connection is not None:
                    connection.receive(flight, now)
                connection, flight = found, []
            touched[found] = address
            flight.append(data)
        for address, datagrams in others.items():
            try:
                self._receive_other(datagrams, address, touched, now)
            except Exception as error:
                failure = error
        if connection is not None:
            connection.receive(flight, now)
        self._received(touched, now)
        if failure is not None:
            raise failure
        return bool(touched)

    def _received(self, touched: dict[Connection, Any], now: float) -> None:
        for connection, source in touched.items():
            if source != connection.source:
                self._on_other_source(connection, source)
            connection.received(now)

    def _receive_other(
        self, datagrams: Sequence[bytes], address: Any, touched: dict[Connection, Any], now: float
    ) -> None:
        """Take in a sender's datagrams that are not QUIC."""
        others: list[bytes] = []
        for data in datagrams:
            if not data:
                continue
            kind = data[0]
            if kind == RELAY_TYPE and (path := self._channels.get(data[1:RELAY_HEAD_BYTES])) is not None:
                if path.address == address and len(data) > RELAY_HEAD_BYTES:
                    self.counts.relayed_received += len(data)
                    self._receive_relayed(data[RELAY_HEAD_BYTES:], path, touched, now)
            elif kind in (PROBE, PONG):
                self._on_probe(data, Path(address=address))
            else:
                others.append(data)
        if others and self.on_other is not None:
            self.on_other(others, address)

    def _receive_relayed(self, data: bytes, path: Path, touched: dict[Connection, Any], now: float) -> None:
        if data[0] in (PROBE, PONG):
            self._on_probe(data, path)
        elif data[0] >= 64:
            connection = self._connection_for(data, path)
            if connection is not None:
                connection.receive((data,), now)
                touched[connection] = path

    def _on_probe(self, data: bytes, path: Path) -> None:
        try:
            probe = decode_probe(data)
        except RemoteProtocolError:
            return
        found = self._by_tag.get(probe.tag)
        if found is None or not found[1].is_authentic(data):
            return
        connection = found[0]
        if connection.monitor is None and path == connection.path and probe.is_pong:
            return
        monitor = self._monitor(connection)
        if monitor is not None:
            monitor.receive(probe, path)

    def _on_other_source(self, connection: Connection, source: Any) -> None:
        """Something of a connection came from elsewhere: another path, or its node has another address now."""
        path = source if isinstance(source, Path) else Path(address=source)
        if connection.monitor is not None:
            connection.monitor.heard(path)
        elif connection.is_open:
            monitor = self._monitor(connection)
            if monitor is not None:
                monitor.heard(path)

    def _monitor(self, connection: Connection) -> PathMonitor | None:
        """Return the watch over a connection's paths, made when it is first needed; None: it is not open."""
        if connection.monitor is None and connection.is_open and connection in self._keys:
            policy = PathPolicy(connection.path, leads=connection.is_client, now=clock())
            connection.monitor = PathMonitor(
                policy,
                self._keys[connection],
                clock=clock,
                name=f"node {connection.remote.short}",
                send=self._send_probe,
                use=connection.use,
                n_requests=connection.n_requests,
            )
        return connection.monitor if connection.is_open else None

    def _send_probe(self, path: Path, data: bytes) -> None:
        self._send(path, (data,))

    def _on_open(self, connection: Connection) -> None:
        self._admission.open(connection)
        ours, theirs = self.identity.node_id, connection.remote
        server, client = (theirs, ours) if connection.is_client else (ours, theirs)
        key = PathKey(connection.nonce, server=server, client=client, is_client=connection.is_client)
        self._keys[connection] = key
        self._by_tag[key.tag] = connection, key

    def _connection_for(self, data: bytes, source: Any) -> Connection | None:
        """Return whose a QUIC datagram is; `source`: the address it came from, or the path through a relay."""
        if data[0] < 128:  # a short header: the connection's id follows (RFC 9000 section 17.3)
            return self._by_cid.get(data[1 : 1 + CID_BYTES])
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=CID_BYTES)
        except ValueError:
            return None
        connection = self._by_cid.get(header.destination_cid)
        if connection is not None:
            return connection
        # RFC 9000 section 14.1: a first packet is at least 1200 bytes. Unknown connections' other packets are dropped.
        configuration = self._configurations[False]
        if (
            header.packet_type is not QuicPacketType.INITIAL
            or len(data) < 1200
            or header.version not in configuration.supported_versions
            or not self._is_server
            or self._is_closing
        ):
            return None
        return self._admit(header, source if isinstance(source, Path) else Path(address=source))

    def real_host(self, source: SocketAddress) -> str:
        """Return the host, an IP literal, that is to be counted for what comes from `source`."""
        host = str(source[0])
        return (self.host_behind(int(source[1])) or host) if is_loopback(host) else host

    def _admit(self, header: QuicHeader, path: Path) -> Connection | None:
        """Return a new connection for a first packet, if there is room; its sender may have to prove its address first."""
        address = plain_address(path.address)
        host, original_cid, retry_cid = str(address[0]), header.destination_cid, None
        if header.token:
            try:
                original_cid = self._retry.validate_token(
                    address=address, destination_cid=header.destination_cid, token=header.token, now=clock()
                )
            except ValueError:
                return None  # a client acts on one Retry only, so another would not help it
            retry_cid = header.destination_cid
        counted = self.real_host(address)
        verdict = self._admission.judge(counted, is_proved=retry_cid is not None)
        if verdict is Verdict.REFUSE or len(self._connections) >= MAX_CONNECTIONS:
            level = logging.DEBUG if self.n_refused else logging.WARNING  # a flood must not become a flood of lines
            self.n_refused += 1
            logger.log(
                level, "no room for a connection: got %d, %d half-open", len(self._connections), len(self._admission)
            )
            return None
        if verdict is Verdict.RETRY:
            self._send_retry(header, path)
            return None
        driver = self._driver(self._configurations[False], original_cid, retry_cid)
        connection = self._adopt(driver, None, "" if path.is_relayed else format_address(address), path)
        connection.remote_address = host
        self._admission.begin(connection, counted, is_proved=retry_cid is not None)
        self._on_cid(connection, header.destination_cid, True)  # the client's first packets use the id it chose
        return connection

    def _send_retry(self, header: QuicHeader, path: Path) -> None:
        """Tell a client to begin again with a token. Smaller than what it sent, and nothing is kept."""
        assert header.version is not None  # it is one of ours
        self.n_retries += 1
        cid = os.urandom(CID_BYTES)
        token = self._retry.create_token(
            address=plain_address(path.address),
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=cid,
            now=clock(),
        )
        retry = encode_quic_retry(
            version=header.version,
            source_cid=cid,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=token,
        )
        self._send(path, [retry])

    def _send(self, path: Path, flight: Sequence[bytes]) -> None:
        n_sent = self._try_to_send(path, flight)
        self.counts.udp_sent += n_sent
        if path.channel:
            self.counts.relayed_sent += n_sent

    def _send_copy(self, path: Path, data: bytes) -> None:
        n_sent = self._try_to_send(path, (data,))
        self.counts.udp_repair += n_sent
        if path.channel:
            self.counts.relayed_repair += n_sent

    def _try_to_send(self, path: Path, flight: Sequence[bytes]) -> int:
        """Return how many bytes the socket took: all, or 0; then it may have taken some all the same."""
        if self._flights is None:
            return 0
        if path.channel:
            head = path.head
            flight = [head + data for data in flight]
        try:
            self._flights.send(flight, path.address)
            return sum(map(len, flight))
        except (BlockingIOError, InterruptedError):
            self.n_send_drops += len(flight)
        except OSError as error:
            self.n_send_drops += len(flight)
            logger.debug("send to %s failed: %s", path, error)
        return 0

    def _on_cid(self, connection: Connection, cid: bytes, is_issued: bool) -> None:
        cids = self._cids.get(connection)
        if cids is None:
            return  # gone; QUIC may still report ids while it is flushed for the last time
        if is_issued:
            self._by_cid[cid] = connection
            cids.add(cid)
        elif cid in cids:
            del self._by_cid[cid]
            cids.remove(cid)

    def _on_gone(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._admission.end(connection)
        self._serving.forget(connection)
        key = self._keys.pop(connection, None)
        if key is not None:
            self._by_tag.pop(key.tag, None)
        for cid in self._cids.pop(connection, ()):
            self._by_cid.pop(cid, None)
        if key is not None:
            self.on_gone(connection.remote)

    def _on_unsent(self, connection: Connection, n_given: int, n_held: int) -> None:
        if connection in self._connections:  # not after it is gone: nobody would forget it
            self._serving.note_unsent(connection, n_given, n_held)
