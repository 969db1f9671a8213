"""A UDP socket's calls for several datagrams at once: a flight goes out in one, and what came together comes in by one.

Linux cuts a large buffer into datagrams itself (UDP_SEGMENT, since 4.18) and hands over those of one sender in one piece
(UDP_GRO, since 5.0). It saves calls, and, more, wake-ups: a member of a star is woken once for an answer of four packets.
Elsewhere, or where a device cannot, datagrams go one by one. What is on the wire is the same.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_UDP_SEGMENT, _UDP_GRO = 103, 104  # linux/udp.h
MAX_SEGMENTS = 64  # UDP_MAX_SEGMENTS of older kernels
MAX_BYTES = 65_507  # of UDP over IPv4: the most that one call may carry
MAX_TAKEN = 64  # datagrams, and what came with the last; then others get their turn; measured: a 49 KB answer is 40
_SEGMENT = struct.Struct("=H")
_GRO = struct.Struct("=i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_GRO.size) if hasattr(socket, "CMSG_SPACE") else 0
# What the kernel says where it, a device or a route cannot cut; anything else is as with a single datagram.
CANNOT_CUT = frozenset((errno.EINVAL, errno.EIO, errno.EMSGSIZE, errno.ENOPROTOOPT, errno.EOPNOTSUPP))


def runs(flight: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield a flight in pieces that one call can carry: datagrams of one size, of which the last may be smaller."""
    start = n_bytes = size = last = 0
    for at, data in enumerate(flight):
        n = len(data)
        if at > start and (n > size or last < size or at - start == MAX_SEGMENTS or n_bytes + n > MAX_BYTES):
            yield flight[start:at]
            start, n_bytes = at, 0
        if at == start:
            size = n
        last = n
        n_bytes += n
    if flight:
        yield flight[start:] if start else flight


class Flights(Protocol):
    """A socket's sending and receiving end."""

    def send(self, flight: Sequence[bytes], address: Any) -> None:
        """Send datagrams in order; raises OSError as soon as the socket does, and the rest is dropped."""
        ...

    def receive(self) -> list[tuple[bytes, Any]]:
        """Return the datagrams that are there, a bounded number at once, each with its sender."""
        ...


class FlightSocket:
    """A bound, non-blocking UDP socket, owned by whoever made it.

    Attributes:
        is_cutting: whether flights leave in one call; ends for good when the kernel refuses one.
    """

    def __init__(self, udp: socket.socket) -> None:
        self._udp = udp
        self.is_cutting = sys.platform == "linux"
        self._is_joining = False
        if self.is_cutting:
            try:
                udp.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
                self._is_joining = True
            except OSError as error:
                logger.debug("the kernel hands over datagrams one by one: %s", error)

    def send(self, flight: Sequence[bytes], address: Any) -> None:
        """Send datagrams in order; raises OSError as soon as the socket does, and the rest is dropped."""
        for run in runs(flight):
            if len(run) == 1:
                self._udp.sendto(run[0], address)
            elif not (self.is_cutting and self._send_cut(run, address)):
                for data in run:
                    self._udp.sendto(data, address)

    def _send_cut(self, run: Sequence[bytes], address: Any) -> bool:
        """Return whether the kernel took a run in one call."""
        ancillary = [(socket.IPPROTO_UDP, _UDP_SEGMENT, _SEGMENT.pack(len(run[0])))]
        try:
            self._udp.sendmsg(run, ancillary, 0, address)
        except OSError as error:
            if error.errno not in CANNOT_CUT:
                raise
            logger.debug("datagrams leave one by one from here on: %s", error)
            self.is_cutting = False
            return False
        return True

    def receive(self) -> list[tuple[bytes, Any]]:
        """Return the datagrams that are there, about MAX_TAKEN at most, each with its sender."""
        arrived: list[tuple[bytes, Any]] = []
        ancillary: list[tuple[int, int, bytes]] = []
        for _ in range(MAX_TAKEN):
            try:
                if self._is_joining:
                    data, ancillary, _, address = self._udp.recvmsg(MAX_BYTES, _ANCILLARY_BYTES)
                else:
                    data, address = self._udp.recvfrom(MAX_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:  # an ICMP error of an earlier send; QUIC notices by its timers
                logger.debug("receive failed: %s", error)
                continue
            if ancillary:
                (size,) = _GRO.unpack(ancillary[0][2])
                arrived += [(data[at : at + size], address) for at in range(0, len(data), size)]
            else:
                arrived.append((data, address))
            if len(arrived) >= MAX_TAKEN:
                break
        return arrived
