"""Socket addresses as text and back: `192.0.2.1:7440`, `[2001:db8::1]:7440`."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from swarm.errors import UserError
from swarm.ip import plain_ip

SocketAddress = tuple[str, int]
# Addresses for documentation (RFC 5737, RFC 3849): nobody has a special way to them, so the default one decides.
_SOMEWHERE = {4: "192.0.2.1", 6: "2001:db8:ffff::1"}


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


def literal_address(text: str) -> SocketAddress:
    """Return (host, port) of an untrusted text, the host an IP literal that may be a node's: the socket takes it as it is.

    Raises:
        UserError: anything else, such as a zone, which means nothing on another machine and with which sockets choke.
    """
    host, port = parse_address(text)
    try:
        ip = plain_ip(host)
        if "%" not in host and not ip.is_multicast and not ip.is_unspecified:
            return str(ip), port
    except ValueError:
        pass
    raise UserError(f"not a node's address: got {text[:80]!r}, expected a unicast IP literal without a zone")


def format_address(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return the text of a socket's address, an IPv4 one in IPv6 clothes as itself."""
    host, port = plain_address(address) if address[0].startswith("::ffff:") else address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or an IP literal that means this machine alone; other names are not looked up."""
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        return plain_ip(host).is_loopback
    except ValueError:
        return False


def plain_address(address: Any) -> SocketAddress:
    """Return a socket's address as host and port, an IPv4 one in IPv6 clothes as itself."""
    host, port = address[0], address[1]
    if ":" in host:
        host = str(plain_ip(host.partition("%")[0]))
    return host, port


def socket_address(address: Any) -> tuple[str, int, int, int]:
    """Return an address in the form in which a dual-stack IPv6 socket takes and gives it; `address`: any form, an IP literal."""
    host, port = address[0], address[1]
    if ":" not in host:
        return f"::ffff:{host}", port, 0, 0
    return (host, port, address[2], address[3]) if len(address) == 4 else (host, port, 0, 0)


def host_towards(address: Any) -> str | None:
    """Return the address of this machine that packets to `address` leave from; None: there is no way there. Sends nothing."""
    host = str(plain_ip(address[0]))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, address[1] or 9))  # of UDP this only picks a way
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_hosts(families: frozenset[int]) -> list[str]:
    """Return this machine's addresses towards the world, by IP version; none where there is no way out."""
    hosts = [host_towards((_SOMEWHERE[version], 9)) for version in sorted(families)]
    return [host for host in hosts if host is not None and _is_usable(host)]


def _is_usable(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return not (address.is_loopback or address.is_unspecified or address.is_link_local)


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
