"""IP addresses as this program compares them: an IPv4 address in IPv6 clothes is the IPv4 address."""

from __future__ import annotations

import ipaddress

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def plain_ip(host: str) -> IpAddress:
    """Return an IP literal's address, an IPv4 one in IPv6 clothes (RFC 4291 section 2.5.5.2) as itself. Raises ValueError."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped
