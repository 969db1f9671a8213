"""Which of its addresses a machine shows: the one that its default route leaves from. The socket is a stand-in."""

from __future__ import annotations

import errno
import ipaddress
import socket
from types import TracebackType
from typing import Self

import pytest

import relay.outward
from relay.outward import outward_host


class Probe:
    """A UDP socket of a machine with the given address, or with no route at all; it cannot send."""

    own: str | None
    asked: list[tuple[str, int]]

    def __init__(self, family: socket.AddressFamily, kind: socket.SocketKind) -> None:
        assert kind is socket.SOCK_DGRAM

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        self.asked.append(address)
        if self.own is None:
            raise OSError(errno.ENETUNREACH, "no route")

    def getsockname(self) -> tuple[str, int]:
        assert self.own is not None
        return self.own, 40_000


@pytest.mark.parametrize(
    ("family", "own", "expected"),
    [
        (socket.AF_INET, "10.1.2.3", "10.1.2.3"),
        (socket.AF_INET, "127.0.0.1", None),
        (socket.AF_INET, "0.0.0.0", None),
        (socket.AF_INET, None, None),
        (socket.AF_INET6, "2001:db8:5::1", "2001:db8:5::1"),
        (socket.AF_INET6, "fe80::1", None),
    ],
)
def test_it_is_the_default_routes_address_if_others_can_use_it(
    monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily, own: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(Probe, "own", own, raising=False)
    monkeypatch.setattr(Probe, "asked", [], raising=False)
    monkeypatch.setattr(relay.outward.socket, "socket", Probe)
    assert outward_host(family) == expected
    ((host, _),) = Probe.asked
    documentation = "192.0.2.0/24" if family is socket.AF_INET else "2001:db8::/32"
    assert ipaddress.ip_address(host) in ipaddress.ip_network(documentation), "nobody is asked"
