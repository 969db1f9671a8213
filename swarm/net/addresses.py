"""Socket addresses as text and back: `192.0.2.1:7440`, `[2001:db8::1]:7440`."""

from __future__ import annotations

import ipaddress
import socket

from swarm.errors import UserError

SocketAddress = tuple[str, int]


def parse_address(text: str) -> SocketAddress:
    """Return (host, port) of `host:port`; an IPv6 host stands in brackets. Raises UserError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise UserError(f"not an address: got {text!r}, expected host:port")
    return host, int(port)


def format_address(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return the text of a socket's address."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(address: SocketAddress) -> SocketAddress:
    """Return the address with its host as an IPv4 literal, asking the resolver if needed. Raises UserError."""
    host, port = address
    try:
        ipaddress.ip_address(host)
        return address
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise UserError(f"cannot find host {host!r}: {error.strerror}") from error
    return found[0][4][0], port  # type: ignore[return-value]  # AF_INET gives (str, int)
