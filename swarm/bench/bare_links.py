"""The least that could carry a dispatch: a QUIC library and a UDP socket without anything of ours, to compare with.

A request is one stream (or one burst of datagrams) that begins with three u32: its size, that of the answer wanted, and the
microseconds to compute before answering. QUIC is driven as well as it can be without changing it: the socket drained, then one
flush per touched connection.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from aioquic.quic.connection import QuicConnection

from swarm.bench.busy import Busy
from swarm.identity import Identity
from swarm.net.certificate import MAX_DATAGRAM_BYTES, make_certificate
from swarm.net.quic_driver import AioquicDriver, driver_class
from swarm.net.tls_links import client_context, server_context

HEAD = struct.Struct("<III")  # bytes out, bytes back, microseconds of compute
SOCKET_BUFFER_BYTES = 4 << 20
MAX_DATAGRAMS_PER_WAKE = 64

Address = tuple[str, int]


class BareLink(ABC):
    """A client's way to one member of a star."""

    @abstractmethod
    async def echo(self, size_out: int, size_back: int, busy_us: int = 0) -> None:
        """Send a request, for which the other side computes so long, and return when its answer is whole."""


def udp_socket(port: int = 0) -> socket.socket:
    """Return a bound, non-blocking loopback socket."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setblocking(False)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    udp.bind(("127.0.0.1", port))
    return udp


def _drain(udp: socket.socket, take: Callable[[bytes, Address], None]) -> None:
    for _ in range(MAX_DATAGRAMS_PER_WAKE):
        try:
            data, address = udp.recvfrom(65_535)
        except (BlockingIOError, InterruptedError):
            return
        take(data, address)


class _Quic:
    """One connection of a bare socket."""

    def __init__(self, owner: QuicSocket, quic: Any) -> None:
        self.owner, self.quic = owner, quic
        self.open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self._heads: dict[int, bytes] = {}
        self._timer: asyncio.TimerHandle | None = None

    def pump(self) -> None:
        events = self.owner.driver.events
        while (event := self.quic.next_event()) is not None:
            if isinstance(event, events.StreamDataReceived):
                stream = event.stream_id
                if stream in self.waiting:
                    if event.end_stream:
                        self.waiting.pop(stream).set_result(None)
                    continue
                head = self._heads[stream] = (self._heads.get(stream, b"") + event.data)[: HEAD.size]
                if event.end_stream:
                    del self._heads[stream]
                    _, size_back, busy_us = HEAD.unpack(head)
                    self.owner.busy.compute(busy_us)
                    self.quic.send_stream_data(stream, bytes(size_back), True)
            elif isinstance(event, events.HandshakeCompleted) and not self.open.done():
                self.open.set_result(None)
        self.flush()

    def flush(self) -> None:
        now = time.monotonic()
        for data, address in self.quic.datagrams_to_send(now):
            try:
                self.owner.udp.sendto(data, address)
            except (BlockingIOError, InterruptedError):
                pass  # as any lost datagram
        at = self.quic.get_timer()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None and not self.owner.is_closed:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.quic.handle_timer(time.monotonic())
        self.pump()


class QuicSocket:
    """The library that SWARM_QUIC names, with its own congestion control, over one socket; client and server at once."""

    def __init__(self, busy: Busy | None = None) -> None:
        """`busy` computes for the requests that ask for it."""
        self.busy = busy or Busy()
        self.driver = driver_class()
        identity = Identity.generate()
        certificate = make_certificate(identity)
        self._configurations = {
            is_client: self.driver.configuration(identity, certificate, is_client=is_client)
            for is_client in (True, False)
        }
        self._new: Any = None
        if self.driver is AioquicDriver:
            self._configurations = {
                is_client: dataclasses.replace(each, congestion_control_algorithm="reno")
                for is_client, each in self._configurations.items()
            }
            self._new = QuicConnection
        else:
            self._new = lambda configuration, original_destination_connection_id=None: (
                self.driver(configuration, original_destination_connection_id).quic
            )
        self._by_address: dict[Address, _Quic] = {}
        self.is_closed = False
        self.udp = udp_socket()
        asyncio.get_running_loop().add_reader(self.udp, self._on_readable)

    @property
    def address(self) -> Address:
        """Where it is reached."""
        host, port = self.udp.getsockname()
        return host, port

    async def dial(self, address: Address) -> BareLink:
        """Return a link whose handshake is done."""
        connection = _Quic(self, self._new(configuration=self._configurations[True]))
        self._by_address[address] = connection
        connection.quic.connect(address, now=time.monotonic())
        connection.flush()
        await connection.open
        return _QuicLink(connection)

    def close(self) -> None:
        """Leave without a word."""
        self.is_closed = True
        asyncio.get_running_loop().remove_reader(self.udp)
        self.udp.close()

    def _on_readable(self) -> None:
        touched: dict[_Quic, None] = {}
        now = time.monotonic()

        def take(data: bytes, address: Address) -> None:
            connection = self._by_address.get(address)
            if connection is None:
                if data[0] < 192:
                    return  # of a client that has gone
                quic = self._new(
                    configuration=self._configurations[False],
                    original_destination_connection_id=data[6 : 6 + data[5]],
                )
                connection = self._by_address[address] = _Quic(self, quic)
            connection.quic.receive_datagram(data, address, now=now)
            touched[connection] = None

        _drain(self.udp, take)
        for connection in touched:
            connection.pump()


class _QuicLink(BareLink):
    def __init__(self, connection: _Quic) -> None:
        self._connection = connection

    async def echo(self, size_out: int, size_back: int, busy_us: int = 0) -> None:
        connection = self._connection
        stream = connection.quic.get_next_available_stream_id()
        connection.waiting[stream] = answer = asyncio.get_running_loop().create_future()
        connection.quic.send_stream_data(
            stream, HEAD.pack(size_out, size_back, busy_us) + bytes(size_out - HEAD.size), True
        )
        connection.flush()
        await answer


class _Tls(asyncio.Protocol):
    """One side of a bare TLS link: a request is its head and zeros, and so is an answer; one at a time."""

    def __init__(self, busy: Busy | None) -> None:
        self._busy = busy  # None: a client
        self._transport: asyncio.Transport | None = None
        self._held = bytearray()
        self._size_back = 0
        self._answer: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self._busy is None:
            if len(self._held) >= self._size_back and self._answer is not None:
                self._held.clear()
                self._answer.set_result(None)
                self._answer = None
        elif len(self._held) >= HEAD.size and len(self._held) >= HEAD.unpack_from(self._held)[0]:
            _, size_back, busy_us = HEAD.unpack_from(self._held)
            self._held.clear()
            self._busy.compute(busy_us)
            assert self._transport is not None
            self._transport.write(bytes(size_back))

    def ask(self, size_out: int, size_back: int, busy_us: int) -> asyncio.Future[None]:
        assert self._transport is not None
        self._size_back = size_back
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(HEAD.pack(size_out, size_back, busy_us) + bytes(size_out - HEAD.size))
        return self._answer


class TlsStreams:
    """TLS 1.3 over TCP with nothing of ours but the context: server and client."""

    def __init__(self, busy: Busy | None = None) -> None:
        """`busy` computes for the requests that ask for it."""
        self._busy = busy or Busy()
        self._server: asyncio.Server | None = None
        self._links: list[_Tls] = []

    async def serve(self) -> int:
        """Listen; return the port."""
        context = server_context(Identity.generate())
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Tls(self._busy), "127.0.0.1", 0, ssl=context)
        return int(self._server.sockets[0].getsockname()[1])

    async def dial(self, address: Address) -> BareLink:
        """Return a link."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(
            lambda: _Tls(None), *address, ssl=client_context(), server_hostname="swarm.invalid"
        )
        self._links.append(link)
        return _TlsLink(link)

    def close(self) -> None:
        """Close the client's links, and stop listening."""
        for link in self._links:
            if link._transport is not None:
                link._transport.close()
        if self._server is not None:
            self._server.close()


class _TlsLink(BareLink):
    def __init__(self, link: _Tls) -> None:
        self._link = link

    async def echo(self, size_out: int, size_back: int, busy_us: int = 0) -> None:
        await self._link.ask(size_out, size_back, busy_us)


class UdpSocket:
    """Bursts of datagrams, each way, without any care for loss; client and server at once."""

    def __init__(self, busy: Busy | None = None) -> None:
        """`busy` computes for the requests that ask for it."""
        self._busy = busy or Busy()
        self.udp = udp_socket()
        self._arrived: dict[Address, int] = {}
        self.waiting: dict[Address, tuple[int, asyncio.Future[None]]] = {}
        self._payload = os.urandom(MAX_DATAGRAM_BYTES)
        asyncio.get_running_loop().add_reader(self.udp, self._on_readable)

    @property
    def address(self) -> Address:
        """Where it is reached."""
        host, port = self.udp.getsockname()
        return host, port

    async def dial(self, address: Address) -> BareLink:
        """Return a link."""
        return _UdpLink(self, address)

    def close(self) -> None:
        """Close the socket."""
        asyncio.get_running_loop().remove_reader(self.udp)
        self.udp.close()

    def burst(self, address: Address, size: int, size_back: int, busy_us: int = 0) -> None:
        """Send `size` bytes."""
        while size > 0:
            n = min(size, MAX_DATAGRAM_BYTES)
            try:
                self.udp.sendto(HEAD.pack(size, size_back, busy_us) + self._payload[: max(0, n - HEAD.size)], address)
            except (BlockingIOError, InterruptedError):
                pass
            size -= n

    def _on_readable(self) -> None:
        _drain(self.udp, self._take)

    def _take(self, data: bytes, address: Address) -> None:
        left, size_back, busy_us = HEAD.unpack_from(data)
        self._arrived[address] = self._arrived.get(address, 0) + len(data)
        if left > MAX_DATAGRAM_BYTES:
            return  # not the last of its burst
        arrived = self._arrived.pop(address)
        if address not in self.waiting:
            self._busy.compute(busy_us)
            self.burst(address, size_back, 0)
        elif arrived >= self.waiting[address][0]:
            self.waiting.pop(address)[1].set_result(None)


class _UdpLink(BareLink):
    def __init__(self, owner: UdpSocket, address: Address) -> None:
        self._owner, self._address = owner, address

    async def echo(self, size_out: int, size_back: int, busy_us: int = 0) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner.waiting[self._address] = (size_back, answer)
        self._owner.burst(self._address, size_out, size_back, busy_us)
        await answer
