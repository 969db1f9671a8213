"""One UDP socket that is client and server at once: receives in batches, flushes each touched connection once a tick.

Datagrams whose first byte is below 64 are not QUIC (RFC 9443) and are dropped here for now. Bounded: connections in all,
half-open ones (`admission`), requests being served, in all and by connection, bytes of requests (`wire/byte_budget`) and of
answers (`answer_budget`) that are held.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Self

from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.packet import QuicHeader, QuicPacketType, encode_quic_retry, pull_quic_header
from aioquic.quic.retry import QuicRetryTokenHandler

from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ExpertsNotHeld,
    Leaving,
    Overloaded,
    Refused,
    RemoteProtocolError,
    SwarmError,
    UserError,
)
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress, format_address
from swarm.net.admission import Admission, Verdict
from swarm.net.answer_budget import AnswerBudget
from swarm.net.certificate import make_certificate
from swarm.net.connection import Connection, clock
from swarm.net.flights import FlightSocket
from swarm.net.quic_driver import QuicDriver, driver_class
from swarm.net.repair import Datagram
from swarm.wire import messages as m
from swarm.wire import session as s
from swarm.wire.byte_budget import ByteBudget

logger = logging.getLogger(__name__)

# Answers a request: a coroutine, which gets a task of its own, or a future, which needs none (a dispatch saves the three
# wake-ups of a task). What is not wanted any more is cancelled.
Handler = Callable[[Connection, m.Request], Awaitable[m.Response]]

CID_BYTES = 8
MAX_DATAGRAMS_PER_WAKE = 64  # then other callbacks get their turn; measured: a 49 KB answer is 40 datagrams
SOCKET_BUFFER_BYTES = 4 << 20  # asked for; the kernel caps it (net.core.rmem_max)
MAX_CONNECTIONS = 4096
BULKY = m.GetManifest | m.GetBlock  # their answers can be far larger than they are
# Requests being served, all connections together; more are refused as BUSY. Bulky ones, which mostly wait (2 KB each), apart,
# so that those who wait for blocks do not keep dispatches out.
MAX_SERVING, MAX_BULKY = 1024, 4096
# The same, of one connection: it needs no more to keep a path full (peer/fetch asks for 4 blocks at a time).
MAX_SERVING_PER_CONNECTION, MAX_BULKY_PER_CONNECTION = 128, 8
N_BULKY_AT_ONCE = 4  # handlers that make a bulky answer: bounds what is made beyond the budget, at 96 MB each
ROOM_TIMEOUT_S = 30.0  # for a bulky request to get its turn and room for its answer, then BUSY; guessed
ROOM_CHECK_S = 1.0  # how often those who take their answers slowly are looked for, while others wait
HELD_ANSWER_BYTES = 512 << 20  # held for all askers; guessed: six of the largest blocks
DIAL_TIMEOUT_S = 4.0
_BUSY = m.Busy(retry_after_ms=200, detail="too many requests, try again")  # the time is a guess


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
        self._handler = handler
        self._serves = tuple(serves)
        self._versions = versions
        self._driver = driver_class()
        certificate = make_certificate(identity)
        self._configurations = {
            is_client: self._driver.configuration(identity, certificate, is_client=is_client)
            for is_client in (True, False)
        }
        self._connections: set[Connection] = set()
        self._by_cid: dict[bytes, Connection] = {}
        self._cids: dict[Connection, set[bytes]] = {}
        self._serving: dict[tuple[Connection, int], asyncio.Future[Any]] = {}
        self._n_serving: Counter[Connection | None] = Counter()  # not bulky; None: all
        self._n_bulky: Counter[Connection | None] = Counter()
        self._bulky_turn = asyncio.Semaphore(N_BULKY_AT_ONCE)
        self._answers: AnswerBudget[Connection] = AnswerBudget(held_answer_bytes)
        self._has_room = asyncio.Event()
        self._slow_checked_at = 0.0
        self._requests = ByteBudget(held_request_bytes)
        self._admission = Admission()
        self._retry = QuicRetryTokenHandler()
        self._socket: socket.socket | None = None
        self._flights: FlightSocket | None = None  # the same socket
        self._tasks = asyncio.TaskGroup()
        self._is_closing = False
        self.n_refused = 0  # first packets of connections for which there was no room
        self.n_retries = 0  # first packets whose sender was asked to prove its address
        self.n_send_drops = 0  # datagrams that the socket had no room for; QUIC sends their content again
        self.bytes_sent = 0  # UDP payload, without repair
        self.repair_bytes = 0  # UDP payload sent a second time in case the first copy was lost
        self.bytes_received = 0

    async def __aenter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        udp = socket.socket(family, socket.SOCK_DGRAM)
        try:
            udp.setblocking(False)
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            udp.bind((self._host, self._port))
        except OSError as error:
            udp.close()
            raise UserError(
                f"cannot use UDP {self._host}:{self._port}: {error.strerror}; choose another --port"
            ) from error
        await self._tasks.__aenter__()
        self._socket, self._flights = udp, FlightSocket(udp)
        asyncio.get_running_loop().add_reader(udp, self._on_readable)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._is_closing = True
        for serving in list(self._serving.values()):
            serving.cancel()
        for connection in list(self._connections):
            connection.close()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = self._flights = None
        for connection in list(self._connections):
            connection._finish()
        await self._tasks.__aexit__(None, None, None)

    @property
    def port(self) -> int:
        """The bound UDP port."""
        if self._socket is None:
            raise ConnectionLost("the endpoint is closed")
        return int(self._socket.getsockname()[1])

    async def dial(
        self, address: SocketAddress, *, expected: NodeId | None, timeout_s: float = DIAL_TIMEOUT_S
    ) -> Connection:
        """Return an open connection to the node at `address` (an IP literal and a port).

        Args:
            expected: the node that must answer; None takes whoever does (`.remote` tells).

        Raises:
            IdentityMismatch: another node answered.
            DeadlineExceeded, ConnectionLost, RemoteProtocolError: no connection.
        """
        if self._socket is None or self._is_closing:
            raise ConnectionLost("the endpoint is closed")
        connection = self._adopt(self._driver(self._configurations[True], None), expected, "")
        connection.address = address
        connection.quic.connect(address, now=clock())
        connection.flush()
        try:
            async with asyncio.timeout(timeout_s):
                await connection.wait_open()
        except TimeoutError:
            error = DeadlineExceeded(f"no answer from {format_address(address)} within {timeout_s:g} s")
            connection.close(error)
            raise error from None
        except asyncio.CancelledError:
            connection.close()
            raise
        return connection

    # Inside

    def _adopt(self, driver: QuicDriver, expected: NodeId | None, address: str) -> Connection:
        def make_session(remote: NodeId | None) -> s.Session:
            return s.Session(
                self.identity,
                is_client=driver.quic.configuration.is_client,
                now=clock(),
                expected=remote,
                nonce=os.urandom(32),
                observed_address=address,
                serves=self._serves,
                versions=self._versions,
                request_budget=self._requests,
            )

        connection = Connection(
            driver,
            None,
            make_session=make_session,
            expected=expected,
            send=self._send,
            send_copy=self._send_copy,
            on_request=self._on_request,
            on_cancel=self._on_cancel,
            on_open=self._admission.open,
            on_gone=self._on_gone,
            on_unsent=self._on_unsent,
            on_cid=self._on_cid,
        )
        self._connections.add(connection)
        self._cids[connection] = set()
        self._on_cid(connection, driver.quic.host_cid, True)
        return connection

    def _on_readable(self) -> None:
        assert self._flights is not None
        now, n_left = clock(), MAX_DATAGRAMS_PER_WAKE
        touched: dict[Connection, None] = {}
        try:
            while n_left > 0:
                n_left -= 1
                try:
                    datagrams, address = self._flights.receive()
                except (BlockingIOError, InterruptedError):
                    break
                except OSError as error:  # an ICMP error of an earlier send; the connection notices by its timers
                    logger.debug("receive failed: %s", error)
                    continue
                n_left -= len(datagrams) - 1
                for data in datagrams:
                    self.bytes_received += len(data)
                    connection = self._connection_for(data, address)
                    if connection is not None:
                        connection.receive(data, address, now)
                        touched[connection] = None
        finally:  # also where one of them, or a stranger's packet, made us fail: a connection ends its own failures itself
            for connection in touched:
                connection.received(now)

    def _connection_for(self, data: bytes, address: Any) -> Connection | None:
        if not data or data[0] < 64:
            return None
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
            or not self._serves
            or self._is_closing
        ):
            return None
        return self._admit(header, address)

    def _admit(self, header: QuicHeader, address: Any) -> Connection | None:
        """Return a new connection for a first packet, if there is room; its sender may have to prove its address first."""
        host, original_cid, retry_cid = str(address[0]), header.destination_cid, None
        if header.token:
            try:
                original_cid = self._retry.validate_token(
                    address=address, destination_cid=header.destination_cid, token=header.token, now=clock()
                )
            except ValueError:
                return None  # a client acts on one Retry only, so another would not help it
            retry_cid = header.destination_cid
        verdict = self._admission.judge(host, is_proved=retry_cid is not None)
        if verdict is Verdict.REFUSE or len(self._connections) >= MAX_CONNECTIONS:
            level = logging.DEBUG if self.n_refused else logging.WARNING  # a flood must not become a flood of lines
            self.n_refused += 1
            logger.log(
                level, "no room for a connection: got %d, %d half-open", len(self._connections), len(self._admission)
            )
            return None
        if verdict is Verdict.RETRY:
            self._send_retry(header, address)
            return None
        driver = self._driver(self._configurations[False], original_cid, retry_cid)
        connection = self._adopt(driver, None, format_address(address))
        connection.remote_address = host
        self._admission.begin(connection, host, is_proved=retry_cid is not None)
        self._on_cid(connection, header.destination_cid, True)  # the client's first packets use the id it chose
        return connection

    def _send_retry(self, header: QuicHeader, address: Any) -> None:
        """Tell a client to begin again with a token. Smaller than what it sent, and nothing is kept."""
        assert header.version is not None  # it is one of ours
        self.n_retries += 1
        cid = os.urandom(CID_BYTES)
        token = self._retry.create_token(
            address=address,
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
        self._send([(retry, address)])

    def _send(self, flight: Sequence[Datagram]) -> None:
        address = flight[0][1]
        if len(flight) > 1 and any(other != address for _, other in flight):  # QUIC looks for another path
            for datagram in flight:
                self._send([datagram])
        else:
            self.bytes_sent += self._try_to_send([data for data, _ in flight], address)

    def _send_copy(self, data: bytes, address: Any) -> None:
        self.repair_bytes += self._try_to_send([data], address)

    def _try_to_send(self, flight: Sequence[bytes], address: Any) -> int:
        """Return how many bytes the socket took: all, or 0; then it may have taken some all the same."""
        if self._flights is None:
            return 0
        try:
            self._flights.send(flight, address)
            return sum(map(len, flight))
        except (BlockingIOError, InterruptedError):
            self.n_send_drops += len(flight)
        except OSError as error:
            self.n_send_drops += len(flight)
            logger.debug("send to %s failed: %s", address, error)
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
        self._answers.forget(connection)
        self._has_room.set()
        for cid in self._cids.pop(connection, ()):
            self._by_cid.pop(cid, None)

    def _on_request(self, connection: Connection, exchange: int, request: m.Request) -> None:
        is_bulky = isinstance(request, BULKY)
        counts = self._n_bulky if is_bulky else self._n_serving
        limit = MAX_BULKY if is_bulky else MAX_SERVING
        connection_limit = MAX_BULKY_PER_CONNECTION if is_bulky else MAX_SERVING_PER_CONNECTION
        is_busy = counts[None] >= limit or counts[connection] >= connection_limit
        if not is_busy and not is_bulky and not self._answers.has_room(connection):
            is_busy = True
            self._close_slow()
        if self._handler is None or self._is_closing or is_busy:
            connection.respond(exchange, _BUSY)
            return
        serving: asyncio.Future[Any]
        if is_bulky:
            serving = self._tasks.create_task(self._serve_in_turn(self._handler, connection, exchange, request))
        else:
            try:
                answer = self._handler(connection, request)
            except Exception as error:
                self._refuse(connection, exchange, error)
                return
            if isinstance(answer, asyncio.Future):
                serving = answer
                serving.add_done_callback(functools.partial(self._on_answered, connection, exchange))
            else:
                serving = self._tasks.create_task(self._serve(answer, connection, exchange))
                if asyncio.iscoroutine(answer):  # a task that is stopped before its first step leaves it never awaited
                    serving.add_done_callback(functools.partial(_close, answer))
        self._serving[connection, exchange] = serving
        counts[None] += 1
        counts[connection] += 1
        serving.add_done_callback(functools.partial(self._on_served, connection, exchange, counts))

    def _on_served(
        self, connection: Connection, exchange: int, counts: Counter[Connection | None], _: asyncio.Future[Any]
    ) -> None:
        self._serving.pop((connection, exchange), None)
        for key in (None, connection):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]

    def _on_cancel(self, connection: Connection, exchange: int) -> None:
        serving = self._serving.get((connection, exchange))
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
                    await self._serve(handler(connection, request), connection, exchange)
            except TimeoutError:
                connection.respond(exchange, _BUSY)

    async def _wait_for_room(self) -> None:
        while self._answers.is_full:
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
            for connection in self._answers.slow(now):
                connection.close(ConnectionLost("the other side does not take its answers, and others wait"))

    def _on_unsent(self, connection: Connection, n_given: int, n_held: int) -> None:
        if connection in self._connections:  # not after it is gone: nobody would forget it
            self._answers.update(connection, n_given=n_given, n_held=n_held)
            if not self._answers.is_full:
                self._has_room.set()

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
