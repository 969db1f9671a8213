"""Addresses as text: one way to write each, and nothing else is read."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.net.addresses import (
    format_address,
    host_towards,
    is_loopback,
    literal_address,
    own_hosts,
    parse_address,
    plain_address,
    resolve,
    socket_address,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.1:7440", ("192.0.2.1", 7440)),
        ("[2001:db8::1]:1", ("2001:db8::1", 1)),
        ("example.org:65535", ("example.org", 65535)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_an_address_reads_and_writes_back(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert format_address(address) == text


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.1:7440", ("192.0.2.1", 7440)),
        ("[2001:DB8:0::1]:1", ("2001:db8::1", 1)),
        ("[::ffff:192.0.2.1]:1", ("192.0.2.1", 1)),
    ],
)
def test_a_nodes_address_is_read_in_its_shortest_form(text: str, address: tuple[str, int]) -> None:
    assert literal_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["example.org:1", "[::ffff:zz]:1", "[2001:db8::1%é]:1", "224.0.0.1:1", "0.0.0.0:1", "[::]:1", "192.0.2.1:0", ""],
)
def test_what_is_no_nodes_address_is_refused(text: str) -> None:
    """Sockets raise TypeError at a zone of many foreign letters, and `format_address` chokes on what only looks mapped."""
    with pytest.raises(UserError):
        literal_address(text)


def test_a_sockets_ipv6_address_is_written_without_flow_and_scope() -> None:
    assert format_address(("2001:db8::1", 7440, 0, 3)) == "[2001:db8::1]:7440"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":80",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host: 80",
        "host:²",
        "host:" + "1" * 5000,
        "::1:80",
        "2001:db8::1",
        "[::1:80",
        "::1]:80",
        "[host]:80",
        "[]:80",
        "[[::1]]:80",
    ],
)
def test_anything_else_is_refused_in_a_short_message(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_address(text)
    assert len(str(caught.value)) < 200


def test_port_0_is_for_listening_only() -> None:
    assert parse_address("127.0.0.1:0", allow_any_port=True) == ("127.0.0.1", 0)


@pytest.mark.parametrize("host", ["192.0.2.1", "::1"])
def test_a_literal_is_not_looked_up(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("asked the resolver")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert resolve((host, 1)) == (host, 1)


def test_a_name_becomes_an_ipv4_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(host: str, port: int, **kwargs: object) -> list[object]:
        assert (host, kwargs["family"]) == ("relay.example", socket.AF_INET)
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("192.0.2.7", port))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert resolve(("relay.example", 7440)) == ("192.0.2.7", 7440)


def test_a_name_that_is_not_found_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(UserError, match=r"nowhere\.example.*not known"):
        resolve(("nowhere.example", 1))


def test_a_name_that_no_resolver_may_be_asked_about_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="cannot find host"):
        resolve(("a" * 70 + ".example", 1))


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost", "localhost.", "127.0.0.1", "127.200.0.9", "::1", "::ffff:127.0.0.1"]
)
def test_loopback_is_known_without_asking_a_resolver(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["", "localhost.example.org", "127.0.0.1.example.org", "192.0.2.1", "0.0.0.0", "::", "2001:db8::1", "127.1", "::2"],
)
def test_what_is_not_loopback_or_may_not_be_is_told_apart(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("address", "plain"),
    [
        (("192.0.2.1", 5), ("192.0.2.1", 5)),
        (("::ffff:192.0.2.1", 5, 0, 0), ("192.0.2.1", 5)),
        (("2001:db8::1", 5, 0, 0), ("2001:db8::1", 5)),
        (("fe80::1%eth0", 5, 0, 2), ("fe80::1", 5)),
    ],
)
def test_a_dual_stack_sockets_addresses_are_told_plainly(address: Any, plain: tuple[str, int]) -> None:
    assert plain_address(address) == plain
    assert "%" in address[0] or format_address(address) == format_address(plain)


def test_a_dual_stack_socket_takes_both_kinds_in_its_own_form() -> None:
    assert socket_address(("192.0.2.1", 5)) == ("::ffff:192.0.2.1", 5, 0, 0)
    assert socket_address(("2001:db8::1", 5)) == ("2001:db8::1", 5, 0, 0)
    for given in (("192.0.2.1", 5), ("2001:db8::1", 5)):
        assert socket_address(socket_address(given)) == socket_address(given)
        assert plain_address(socket_address(given)) == given


def test_the_way_to_this_machine_leaves_from_this_machine() -> None:
    assert host_towards(("127.0.0.1", 5)) == "127.0.0.1"
    assert all(not is_loopback(host) for host in own_hosts(frozenset((4, 6))))
