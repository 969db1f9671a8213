"""Keeps names that strangers chose from leading into this machine's own network: which addresses count as public.

A name is judged by what it resolves to at the moment of the connection, so that an answer which changes between a look and
the connection changes nothing.
"""

from __future__ import annotations

import ipaddress
import socket

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from swarm.ip import plain_ip

_NAT64 = ipaddress.IPv6Network(
    "64:ff9b::/96"
)  # RFC 6052: the last 32 bits are the IPv4 address that a gateway connects to
# Not the public internet's, though `is_global` says so in Python 3.11: a network's own NAT64 (RFC 8215), site-local addresses
# (RFC 3879), and IPv4 addresses in clothes that nobody should wear (RFC 4291 section 2.5.5.1, RFC 2765).
_NOWHERE = tuple(map(ipaddress.IPv6Network, ("64:ff9b:1::/48", "fec0::/10", "::/96", "::ffff:0:0:0/96")))


class PrivateAddress(OSError):
    """A name leads to no public address."""


def is_public(host: str) -> bool:
    """Return whether an IP literal is an address of the public internet, itself and the IPv4 address that is in it, if any."""
    try:
        address = plain_ip(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if (inner is not None and not inner.is_global) or any(address in network for network in _NOWHERE):
            return False
    return address.is_global and not address.is_multicast


def is_public_literal(url: URL) -> bool:
    """Return whether a URL's host is a name, which the resolver judges, or a public address."""
    host = url.host or ""
    try:
        plain_ip(host)
    except ValueError:
        return bool(host)
    return is_public(host)


class GuardedResolver(AbstractResolver):
    """Resolves names, to public addresses alone or to any, and remembers which hosts are public."""

    def __init__(self, inner: AbstractResolver, *, is_public_only: bool) -> None:
        self._inner = inner
        self._is_public_only = is_public_only
        self.public_hosts: set[str] = set()
        """Hosts of which an address was public."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return a name's addresses, or the public ones among them. Raises OSError: none are, or the name is not known."""
        found = await self._inner.resolve(host, port, family)
        public = [each for each in found if is_public(each["host"])]
        if public:
            self.public_hosts.add(host)
        if not self._is_public_only:
            return found
        if not public:
            raise PrivateAddress(f"{host} has no public address")
        return public

    async def close(self) -> None:
        """Close the resolver that does the work."""
        await self._inner.close()
