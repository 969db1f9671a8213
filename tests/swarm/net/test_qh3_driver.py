"""qh3's socket: what of a flight the kernel refuses to cut goes one by one, once. Real ones are in tests/e2e/net/test_qh3."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("qh3", reason="needs qh3: pip install 'moe-swarm[fast]'")

from qh3 import _hazmat

from swarm.net.qh3_driver import Qh3Driver, Qh3Socket

ADDRESS = ("192.0.2.1", 5)
FLIGHT = [b"aa", b"bb", b"c"]


class FakeState:
    """A native socket that refuses what it is told to after it has sent `n_sent` datagrams of a call."""

    def __init__(self, fd: int) -> None:
        self.refused = 0
        self.n_sent = 0
        self.is_cutting = True
        self.sent: list[list[bytes]] = []

    def send(self, datagrams: list[bytes], address: Any) -> int:
        assert address == ADDRESS
        if self.refused and self.is_cutting:
            self.sent.append(datagrams[: self.n_sent])
            error = OSError(self.refused, "no")
            error.datagrams_sent = self.n_sent  # type: ignore[attr-defined]
            raise error
        self.sent.append(datagrams)
        return len(datagrams)

    def recv(self) -> list[tuple[bytes, Any]]:
        if self.refused:
            raise OSError(self.refused, "no")
        return [(b"a", ADDRESS)]

    def disable_gso(self) -> None:
        self.is_cutting = False


@pytest.fixture
def udp() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        yield made


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, udp: socket.socket) -> FakeState:
    fake = FakeState(udp.fileno())
    monkeypatch.setattr(_hazmat, "UdpSocketState", lambda fd: fake)
    return fake


def test_a_flight_leaves_in_one_call(state: FakeState, udp: socket.socket) -> None:
    Qh3Socket(udp).send(tuple(FLIGHT), ADDRESS)
    assert state.sent == [FLIGHT]


@pytest.mark.parametrize("n_sent", [0, 2])
def test_where_the_kernel_cannot_cut_the_rest_goes_one_by_one(
    state: FakeState, udp: socket.socket, n_sent: int
) -> None:
    made = Qh3Socket(udp)
    state.refused, state.n_sent = errno.EIO, n_sent
    made.send(FLIGHT, ADDRESS)
    assert [data for call in state.sent for data in call] == FLIGHT, "nothing is lost or doubled"
    assert not made.is_cutting


def test_what_is_refused_of_a_single_datagram_is_its_addresss_fault(state: FakeState, udp: socket.socket) -> None:
    made = Qh3Socket(udp)
    state.refused = errno.EINVAL  # as for port 0
    with pytest.raises(OSError, match="no"):
        made.send(FLIGHT[:1], ADDRESS)
    assert made.is_cutting, "one bad address must not make all others' flights slow"
    assert state.is_cutting


def test_a_full_socket_says_so_and_cutting_goes_on(state: FakeState, udp: socket.socket) -> None:
    made = Qh3Socket(udp)
    state.refused = errno.EAGAIN
    with pytest.raises(BlockingIOError):
        made.send(FLIGHT, ADDRESS)
    assert made.is_cutting


def test_an_error_of_an_earlier_send_ends_nothing(state: FakeState, udp: socket.socket) -> None:
    made = Qh3Socket(udp)
    state.refused = errno.ECONNREFUSED
    assert made.receive() == []
    state.refused = 0
    assert made.receive() == [(b"a", ADDRESS)]


def test_without_native_sockets_it_is_the_plain_one(monkeypatch: pytest.MonkeyPatch, udp: socket.socket) -> None:
    monkeypatch.delattr(_hazmat, "UdpSocketState")
    assert not isinstance(Qh3Driver.flights(udp), Qh3Socket)
