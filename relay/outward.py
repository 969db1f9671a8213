"""Which address this machine shows to others, as far as it can tell by itself. Knows nothing of NAT: `--advertise` does."""

from __future__ import annotations

import ipaddress
import socket

# Addresses for documentation (RFC 5737, RFC 3849): nobody routes them anywhere special, so the default route decides.
_SOMEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def outward_host(family: socket.AddressFamily) -> str | None:
    """Return the address of the interface with the default route; None where there is none. Sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_SOMEWHERE[family], 9))  # of UDP this only picks a route
            host = str(probe.getsockname()[0])
    except OSError:
        return None
    address = ipaddress.ip_address(host)
    return None if address.is_loopback or address.is_unspecified or address.is_link_local else host
