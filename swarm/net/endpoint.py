"""One UDP socket that is client and server at once: receives in batches, flushes each touched connection once a tick.

Datagrams whose first byte is below 64 are not QUIC (RFC 9443) and are dropped here for now. Bounded: connections in all,
half-open ones (`admission`), requests being served, in all and by connection, bytes of requests (`wire/byte_budget`) and of
answers (`answer_budget`) that are held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Self

from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.packet import QuicHeader, QuicPacketType, encode_quic_retry, pull_quic_header
from aioquic.quic.retry import QuicRetryTokenHandler

from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    Overloaded,
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
from swarm.net.quic_driver import QuicDriver, driver_class
from swarm.wire import messages as m
from swarm.wire import session as s
from swarm.wire.byte_budget import ByteBudget

logger = logging.getLogger(__name__)

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
_BUSY = m.Refusal(code=m.ErrorCode.BUSY, detail="too many requests, try again")


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
            handler: answers the requests named in `serves`; may raise SwarmError, which becomes a refusal.
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
        self._serving: dict[tuple[Connection, int], asyncio.Task[None]] = {}
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
        self._socket = udp
        asyncio.get_running_loop().add_reader(udp, self._on_readable)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._is_closing = True
        for task in list(self._serving.values()):
            task.cancel()
        for connection in list(self._connections):
            connection.close()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
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
            on_open=self._admission.end,
            on_gone=self._on_gone,
            on_unsent=self._on_unsent,
            on_cid=self._on_cid,
        )
        self._connections.add(connection)
        self._cids[connection] = set()
        self._on_cid(connection, driver.quic.host_cid, True)
        return connection

    def _on_readable(self) -> None:
        assert self._socket is not None
        now = clock()
        touched: dict[Connection, None] = {}
        for _ in range(MAX_DATAGRAMS_PER_WAKE):
            try:
                data, address = self._socket.recvfrom(65_535)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:  # an ICMP error of an earlier send; the connection notices by its timers
                logger.debug("receive failed: %s", error)
                continue
            self.bytes_received += len(data)
            connection = self._connection_for(data, address)
            if connection is not None:
                connection.receive(data, address, now)
                touched[connection] = None
        for connection in touched:
            connection.flush_soon(is_forced=False)

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
        self._send(retry, address)

    def _send(self, data: bytes, address: Any) -> None:
        if self._try_to_send(data, address):
            self.bytes_sent += len(data)

    def _send_copy(self, data: bytes, address: Any) -> None:
        if self._try_to_send(data, address):
            self.repair_bytes += len(data)

    def _try_to_send(self, data: bytes, address: Any) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.sendto(data, address)
            return True
        except (BlockingIOError, InterruptedError):
            self.n_send_drops += 1
        except OSError as error:
            self.n_send_drops += 1
            logger.debug("send to %s failed: %s", address, error)
        return False

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
        serve = self._serve_in_turn if is_bulky else self._serve
        task = self._tasks.create_task(serve(self._handler, connection, exchange, request))
        self._serving[connection, exchange] = task
        for key in (None, connection):
            counts[key] += 1

        def is_done(_: asyncio.Task[None]) -> None:
            self._serving.pop((connection, exchange), None)
            for key in (None, connection):
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]

        task.add_done_callback(is_done)

    def _on_cancel(self, connection: Connection, exchange: int) -> None:
        task = self._serving.get((connection, exchange))
        if task is not None:
            task.cancel()

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
                    await self._serve(handler, connection, exchange, request)
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

    async def _serve(self, handler: Handler, connection: Connection, exchange: int, request: m.Request) -> None:
        """Answer one request. Nothing may escape: this task shares a group with all others."""
        answer: m.Response | m.Refusal
        try:
            answer = await handler(connection, request)
        except asyncio.CancelledError:
            # By the other side, or as the endpoint closes: then this answer goes nowhere. Else by something in the handler.
            connection.respond(exchange, m.Refusal(code=m.ErrorCode.INTERNAL, detail="the request was cancelled"))
            raise
        except RemoteProtocolError as error:
            connection.close(error)
            return
        except Overloaded as error:
            answer = m.Refusal(code=m.ErrorCode.BUSY, detail=str(error))
        except LookupError as error:
            answer = m.Refusal(code=m.ErrorCode.NOT_FOUND, detail=str(error.args[0]) if error.args else "not found")
        except SwarmError as error:
            answer = m.Refusal(code=m.ErrorCode.INTERNAL, detail=str(error))
        except Exception:
            logger.exception("a request of node %s failed", connection.remote.short)
            answer = m.Refusal(code=m.ErrorCode.INTERNAL, detail="internal error")
        try:
            connection.respond(exchange, answer)
        except Exception:  # an answer of the wrong type, or one that cannot be written: the asker must not wait for it
            logger.exception("the answer to a request of node %s cannot be sent", connection.remote.short)
            connection.respond(exchange, m.Refusal(code=m.ErrorCode.INTERNAL, detail="internal error"))
