"""What the kernel says of a TCP connection: its packets, how many of them were lost, its bytes, and those that wait.

Linux's `struct tcp_info` (linux/tcp.h), of which a socket returns as much as its kernel knows. A retransmission that the other
side had in vain (a tail loss probe while an acknowledgement was merely late) is told back by DSACK and not counted.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from typing import NamedTuple, Protocol

if sys.platform == "linux":
    import fcntl
    import termios

IS_TOLD = sys.platform == "linux"  # whether this system tells what a connection lost
_TOTAL_RETRANS, _SEGS_OUT, _DSACK_DUPS, _RCV_OOOPACK = 100, 136, 216, 224  # offsets, bytes; u32 each
_BYTES_RECEIVED, _BYTES_SENT = 128, 200  # u64 each
_SIZE_BYTES = 228
_U32, _U64, _I32 = struct.Struct("=I"), struct.Struct("=Q"), struct.Struct("=i")


class Socket(Protocol):
    """What is needed of one."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        """Return an option's bytes."""
        ...


class File(Protocol):
    """What is needed of a socket of any kind."""

    def fileno(self) -> int:
        """Return its number; -1: it is closed."""
        ...


class Packets(NamedTuple):
    """Since the connection began.

    Attributes:
        n: sent and received.
        n_lost: sent again, and not in vain, or received out of order, as what follows a lost one is.
    """

    n: int
    n_lost: int


def packets(connected: Socket) -> Packets | None:
    """Return what is known; None where the system does not tell, or it is no TCP socket."""
    info = _info(connected)
    if info is None:
        return None
    retrans, dups, disordered = (_U32.unpack_from(info, at)[0] for at in (_TOTAL_RETRANS, _DSACK_DUPS, _RCV_OOOPACK))
    n_out, n_in = struct.unpack_from("=II", info, _SEGS_OUT)
    return Packets(n_out + n_in, max(0, retrans - dups) + disordered)


def payload(connected: Socket) -> tuple[int, int] | None:
    """Return the bytes of payload sent, those sent again counted, and received; None as `packets`."""
    info = _info(connected)
    if info is None:
        return None
    return _U64.unpack_from(info, _BYTES_SENT)[0], _U64.unpack_from(info, _BYTES_RECEIVED)[0]


def queued(connected: File) -> int:
    """Return how many bytes wait in the kernel to be sent, or for the other side to have them; 0 where nobody tells.

    Of a Unix socket with what the kernel's memory for them adds.
    """
    if sys.platform == "linux" and connected.fileno() >= 0:
        with contextlib.suppress(OSError):
            return int(_I32.unpack(fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    return 0


def _info(connected: Socket) -> bytes | None:
    if sys.platform != "linux":
        return None
    try:
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE_BYTES)
    except OSError:
        return None
    return info if len(info) >= _SIZE_BYTES else None
