"""What is read of the kernel's words on a TCP connection."""

from __future__ import annotations

import socket
import struct
import sys

import pytest

from swarm.net.tcp_losses import packets, payload, queued


class Told:
    """A socket whose kernel says this, up to a size."""

    def __init__(self, size: int = 280, **values: int) -> None:
        info = bytearray(280)
        for name, value in values.items():
            is_long = name in ("sent", "received")
            at = {"retrans": 100, "received": 128, "out": 136, "into": 140, "sent": 200, "dups": 216, "ooo": 224}[name]
            struct.pack_into("=Q" if is_long else "=I", info, at, value)
        self.info = bytes(info[:size])

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        assert (level, name) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self.info[:size]


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


def test_what_was_sent_again_or_came_out_of_order_counts_as_lost() -> None:
    assert packets(Told(out=70, into=30)) == (100, 0)
    assert packets(Told(out=70, into=30, retrans=3, ooo=2)) == (100, 5)


def test_what_was_sent_again_in_vain_does_not() -> None:
    assert packets(Told(out=70, into=30, retrans=3, dups=3)) == (100, 0)
    assert packets(Told(out=70, into=30, retrans=1, dups=3)) == (100, 0)


def test_an_old_kernel_tells_nothing() -> None:
    assert packets(Told(size=192)) is None
    assert payload(Told(size=192)) is None


def test_bytes_are_those_sent_and_received_above_four_gigabytes_too() -> None:
    assert payload(Told(sent=5 << 30, received=7)) == (5 << 30, 7)


def test_a_unix_socket_loses_nothing_and_says_nothing() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert packets(one) is None
        assert payload(one) is None


def test_what_the_other_side_has_not_taken_is_queued() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert queued(one) == 0
        one.send(bytes(1000))
        assert queued(one) >= 1000
        other.recv(1000)
        assert queued(one) == 0
    assert queued(one) == 0
