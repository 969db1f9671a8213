"""What an IP address says about who stands behind it: the network it is counted under, and how far it can be reached.

Pure: looks nothing up. Addresses cost their owner something, keys do not: so limits count networks.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache

from swarm.ip import plain_ip

# What one customer of a provider usually gets (RFC 6177: a site's /48). Guessed for IPv4: a host or a small network of hosts.
PREFIX_BITS_V4, PREFIX_BITS_V6 = 24, 48

_N_KEPT = 16_384  # answers kept, some 3 MB: reading an address costs more than most of what is done with it


class Scope(IntEnum):
    """From how far an address can be reached; a greater one from farther."""

    MACHINE = 0
    SITE = 1  # private, link-local, or shared by a provider's customers
    WORLD = 2


def host_of(address: str) -> str:
    """Return the host of a record's `host:port`, without brackets."""
    return address.rpartition(":")[0].strip("[]")


@lru_cache(_N_KEPT)
def scope_of(host: str) -> Scope:
    """Return the scope of an IP literal. Raises ValueError for what is none."""
    address = plain_ip(host)
    if address.is_loopback:
        return Scope.MACHINE
    # The ranges for documentation count as the world's, though nobody has them: tests and examples use them.
    if any(address in network for network in _SITES if network.version == address.version):
        return Scope.SITE
    return Scope.WORLD


@lru_cache(_N_KEPT)
def prefix_of(host: str) -> str | None:
    """Return the network that an IP address is counted under, as text; None for loopback, which is not counted."""
    address = plain_ip(host)
    if address.is_loopback:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return str(ipaddress.IPv4Network((int(address), PREFIX_BITS_V4), strict=False))
    return str(ipaddress.IPv6Network((int(address), PREFIX_BITS_V6), strict=False))


def rival_prefix(address: str) -> str | None:
    """Return the network under which a registry node at `address` competes with others for a place's replicas.

    None where addresses are the operator's own to give (this machine, a private site): there they say nothing.
    """
    host = host_of(address)
    return prefix_of(host) if scope_of(host) is Scope.WORLD else None


def is_one_network(addresses: Iterable[str]) -> bool:
    """Return whether all addresses of a registry node compete as one.

    Else one host, reached at its own address, would count under any number of networks that it names beside it.
    """
    return len({rival_prefix(address) for address in addresses}) == 1


_SITES = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fe80::/10"),
    )
)
