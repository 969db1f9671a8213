"""Flights are cut into runs that one call can carry, and go one by one where the kernel refuses. Real sockets: tests/e2e."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from swarm.net.flights import MAX_BYTES, MAX_SEGMENTS, MAX_TAKEN, FlightSocket, runs

ADDRESS = ("192.0.2.1", 5)


class FakeSocket:
    """Notes what it is given; refuses what it is told to."""

    def __init__(self, *, on_cut: int = 0, on_join: int = 0) -> None:
        self.on_cut, self.on_join = on_cut, on_join
        self.calls: list[tuple[bytes, ...]] = []
        self.sizes: list[int] = []
        self.arriving: list[tuple[bytes, list[tuple[int, int, bytes]]]] = []

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if self.on_join:
            raise OSError(self.on_join, "no")

    def sendto(self, data: bytes, address: Any) -> None:
        assert address == ADDRESS
        self.calls.append((data,))

    def sendmsg(self, buffers: Sequence[bytes], ancillary: Any, flags: int, address: Any) -> None:
        assert (address, flags) == (ADDRESS, 0)
        if self.on_cut:
            raise OSError(self.on_cut, "no")
        ((level, _, size),) = ancillary
        assert level == socket.IPPROTO_UDP
        self.sizes.append(struct.unpack("=H", size)[0])
        self.calls.append(tuple(buffers))

    def recvmsg(self, size: int, ancillary_bytes: int) -> Any:
        if not self.arriving:
            raise BlockingIOError
        data, ancillary = self.arriving.pop(0)
        return data, ancillary, 0, ADDRESS

    def recvfrom(self, size: int) -> Any:
        if not self.arriving:
            raise BlockingIOError
        return self.arriving.pop(0)[0], ADDRESS


@pytest.fixture(autouse=True)
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")


def sizes(flight: Sequence[int]) -> list[list[int]]:
    data = [bytes([at % 251]) * size for at, size in enumerate(flight)]
    cut = list(runs(data))
    assert [each for run in cut for each in run] == data, "nothing is lost, doubled or reordered"
    return [[len(each) for each in run] for run in cut]


@pytest.mark.parametrize(
    ("flight", "expected"),
    [
        ([], []),
        ([1232], [[1232]]),
        ([1232, 1232, 40], [[1232, 1232, 40]]),
        ([40, 1232, 1232], [[40], [1232, 1232]]),
        ([1232, 40, 40], [[1232, 40], [40]]),
        ([1232, 40, 1232, 40], [[1232, 40], [1232, 40]]),
        ([0, 0, 5], [[0, 0], [5]]),
    ],
)
def test_a_run_has_one_size_of_which_the_last_may_be_smaller(flight: list[int], expected: list[list[int]]) -> None:
    assert sizes(flight) == expected


def test_a_run_is_no_longer_than_a_call_can_carry() -> None:
    assert [len(run) for run in sizes([100] * (2 * MAX_SEGMENTS + 1))] == [MAX_SEGMENTS, MAX_SEGMENTS, 1]
    assert all(sum(run) <= MAX_BYTES for run in sizes([1452] * 60))


def test_a_flight_leaves_in_one_call() -> None:
    udp = FakeSocket()
    FlightSocket(udp).send([bytes(1232), bytes(1232), bytes(7)], ADDRESS)  # type: ignore[arg-type]
    assert [tuple(map(len, call)) for call in udp.calls] == [(1232, 1232, 7)]
    assert udp.sizes == [1232]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO, errno.EMSGSIZE])
def test_where_the_kernel_cannot_cut_datagrams_go_one_by_one_from_then_on(code: int) -> None:
    udp = FakeSocket(on_cut=code)
    flights = FlightSocket(udp)  # type: ignore[arg-type]
    flights.send([b"aa", b"bb", b"c"], ADDRESS)
    assert udp.calls == [(b"aa",), (b"bb",), (b"c",)]
    assert not flights.is_cutting
    udp.on_cut = 0
    flights.send([b"aa", b"bb"], ADDRESS)
    assert udp.calls[3:] == [(b"aa",), (b"bb",)]


def test_a_full_socket_says_so_and_cutting_goes_on() -> None:
    udp = FakeSocket(on_cut=errno.EAGAIN)
    flights = FlightSocket(udp)  # type: ignore[arg-type]
    with pytest.raises(BlockingIOError):
        flights.send([b"aa", b"bb"], ADDRESS)
    assert flights.is_cutting


def test_what_came_together_is_taken_apart_at_the_senders_size() -> None:
    udp = FakeSocket()
    udp.arriving = [(b"aabbc", [(socket.IPPROTO_UDP, 104, struct.pack("=i", 2))]), (b"alone", [])]
    flights = FlightSocket(udp)  # type: ignore[arg-type]
    assert flights.receive() == [(data, ADDRESS) for data in (b"aa", b"bb", b"c", b"alone")]
    assert flights.receive() == []


def test_without_the_kernels_help_datagrams_come_one_by_one() -> None:
    udp = FakeSocket(on_join=errno.ENOPROTOOPT)
    udp.arriving = [(b"one", []), (b"two", [])]
    flights = FlightSocket(udp)  # type: ignore[arg-type]
    assert flights.receive() == [(b"one", ADDRESS), (b"two", ADDRESS)]


def test_others_get_their_turn_while_datagrams_keep_coming() -> None:
    udp = FakeSocket()
    udp.arriving = [(b"x", [])] * (MAX_TAKEN + 1)
    flights = FlightSocket(udp)  # type: ignore[arg-type]
    assert [len(flights.receive()) for _ in range(2)] == [MAX_TAKEN, 1]


def test_an_error_of_an_earlier_send_does_not_hide_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    udp = FakeSocket()
    udp.arriving = [(b"x", [])]
    errors = [ConnectionRefusedError()]
    taken = udp.recvmsg

    def recvmsg(size: int, ancillary_bytes: int) -> Any:
        if errors:
            raise errors.pop()
        return taken(size, ancillary_bytes)

    monkeypatch.setattr(udp, "recvmsg", recvmsg)
    assert FlightSocket(udp).receive() == [(b"x", ADDRESS)]  # type: ignore[arg-type]
