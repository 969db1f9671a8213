"""UDP sockets that stand for others on loopback: a *front* for a server, and behind it a *back* for each client.

client a -> front -> (path) -> back of a -> server          server -> back of a -> (path) -> front -> client a
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from swarm.emulation.path import OneWay

HEADERS_BYTES = 28  # IPv4 and UDP: links carry them too
MAX_BATCH = 16  # packets read from one socket before what is due elsewhere is looked at again
MAX_CLIENTS = 256  # of one front; packets of more are dropped
SOCKET_BUFFER_BYTES = 4 << 20  # asked for; the kernel caps it (net.core.rmem_max)
MAX_STAMP_AGE_NS = 1_000_000_000  # an older stamp is a sign of a stepped clock

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the message is a timespec of the wall clock
_SO_MEMINFO, _MEMINFO_WORDS, _MEMINFO_DROPS = 55, 9, 8  # asm-generic/socket.h, linux/sock_diag.h
_TIMESPEC = struct.Struct("qq")

Send = Callable[[bytes], object]
Offer = Callable[[OneWay, Send, bytes, int, int], None]  # way, where it comes out, data, size of the packet, time
Register = Callable[[socket.socket, Callable[[], None]], None]  # call this whenever that socket is readable

_buffer = memoryview(bytearray(65_536))  # of this process, which has one thread


class Front:
    """Stands for one server; `server` may change at any time, None drops what is for it."""

    def __init__(self, forth: OneWay, back: OneWay, *, offer: Offer, register: Register) -> None:
        self.server: Any = None
        self.n_missed = 0  # datagrams that found no server, or no room for another client
        self._ways = forth, back
        self._own_ways: dict[int, tuple[OneWay, OneWay]] = {}  # of clients that have a path of their own, by port
        self._offer, self._register = offer, register
        self._udp = _open()
        self._backs: list[socket.socket] = []
        self._to_server: dict[Any, Send] = {}  # by client address
        register(self._udp, lambda: _receive(self._udp, self._from_client))

    @property
    def address(self) -> tuple[str, int]:
        """What clients dial."""
        host, port = self._udp.getsockname()
        return host, port

    def give_path(self, client_port: int, forth: OneWay, back: OneWay) -> None:
        """Let the client on this port have a path of its own; before its first datagram."""
        self._own_ways[client_port] = forth, back

    def n_overflow(self) -> int:
        """Return how many datagrams the kernel dropped because we did not read them in time."""
        return sum(map(_n_overflow, (self._udp, *self._backs)))

    def _from_client(self, data: bytes, client: Any, entered_ns: int) -> None:
        forth, _ = self._own_ways.get(client[1], self._ways) if self._own_ways else self._ways
        send = self._to_server.get(client)
        if send is None:
            if self.server is None or len(self._backs) >= MAX_CLIENTS:
                self.n_missed += 1
                return
            send = self._to_server[client] = self._add_back(client)
        self._offer(forth, send, data, len(data) + HEADERS_BYTES, entered_ns)

    def _add_back(self, client: Any) -> Send:
        back = _open()
        self._backs.append(back)
        _, way_back = self._own_ways.get(client[1], self._ways)

        def to_client(data: bytes) -> None:
            self._udp.sendto(data, client)

        def to_server(data: bytes) -> None:
            back.sendto(data, self.server)

        def from_server(data: bytes, _: Any, entered_ns: int) -> None:
            self._offer(way_back, to_client, data, len(data) + HEADERS_BYTES, entered_ns)

        self._register(back, lambda: _receive(back, from_server))
        return to_server


def _open() -> socket.socket:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        udp.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    if sys.platform == "linux":
        udp.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    udp.bind(("127.0.0.1", 0))
    return udp


def _receive(udp: socket.socket, take: Callable[[bytes, Any, int], None]) -> None:
    """Give a few waiting datagrams to `take`, each with the time at which it reached the socket.

    That time is the kernel's: how late we come to read is not added to the path.
    """
    now_ns = time.monotonic_ns()
    to_monotonic_ns = now_ns - time.time_ns()
    for _ in range(MAX_BATCH):
        try:
            size, ancillary, _, address = udp.recvmsg_into([_buffer], 64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # an ICMP error of an earlier send
            continue
        entered_ns = time.monotonic_ns()
        if ancillary:
            seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
            stamp_ns = seconds * 1_000_000_000 + nanoseconds + to_monotonic_ns
            if entered_ns - MAX_STAMP_AGE_NS < stamp_ns < entered_ns:
                entered_ns = stamp_ns
        take(bytes(_buffer[:size]), address, entered_ns)


def _n_overflow(udp: socket.socket) -> int:
    if sys.platform != "linux":
        return 0
    words = udp.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4 * _MEMINFO_WORDS)
    return int(struct.unpack(f"{len(words) // 4}I", words)[_MEMINFO_DROPS])
