"""Socket addresses as text and back: `192.0.2.1:7440`, `[2001:db8::1]:7440`."""

from __future__ import annotations

import ipaddress
import socket

from swarm.errors import UserError

SocketAddress = tuple[str, int]


def parse_address(text: str, *, allow_any_port: bool = False) -> SocketAddress:
    """Return (host, port) of `host:port`; an IPv6 host stands in brackets. Port 0 (to listen on) only if allowed.

    Raises:
        UserError: anything else.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    is_number = (
        port.isascii() and port.isdigit() and len(port) <= 5
    )  # int() alone reads other digits, and chokes on many
    if not colon or not host or (":" in host) is not is_bracketed or "[" in host or "]" in host or not is_number:
        raise UserError(f"not an address: got {text[:80]!r}, expected host:port, or [host]:port for IPv6")
    if not int(not allow_any_port) <= int(port) < 65_536:
        raise UserError(f"not a port: got {port}, expected {int(not allow_any_port)} to 65535")
    return host, int(port)


def format_address(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return the text of a socket's address."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or an IP literal that means this machine alone; other names are not looked up."""
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        return plain_ip(host).is_loopback
    except ValueError:
        return False


def plain_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an IP literal's address, an IPv4 one in IPv6 clothes (RFC 4291 section 2.5.5.2) as itself. Raises ValueError."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


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
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a name that no resolver may be asked about
        reason = error.strerror if isinstance(error, socket.gaierror) else error
        raise UserError(f"cannot find host {host[:80]!r}: {reason}") from error
    return found[0][4][0], port  # type: ignore[return-value]  # AF_INET gives (str, int)
