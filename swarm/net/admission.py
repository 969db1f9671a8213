"""Who may begin a connection: a proof of the return path once many are half-open, then bounds, in all and by host.

A first packet costs its sender nothing and its source address can be forged, so what is *unproved* may take few places. Beyond
them a client is told to come back with a token (QUIC's Retry, RFC 9000 section 8.1.2), which only the owner of the address
gets; it costs an honest one a round trip, and us nothing that is kept. Only proved clients use the other places.
Knows nothing of sockets or QUIC; a key is whatever stands for a connection.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable
from enum import Enum, auto

from swarm.net.addresses import plain_ip

RETRY_FROM = (
    32  # half-open connections from which on an address is to be proved; guessed: ten nodes that start together
)
MAX_HALF_OPEN = 256  # proved ones; guessed: a flood costs at most this many handshakes at a time
MAX_HALF_OPEN_PER_HOST = 32  # of these, from one host that is not this machine; guessed: a household of nodes


class Verdict(Enum):
    """What to do with a first packet."""

    ADMIT = auto()
    RETRY = auto()  # answer with a token
    REFUSE = auto()  # drop


class Admission:
    """Counts half-open connections: those that came from outside and whose greetings are not done."""

    def __init__(self) -> None:
        self._half_open: dict[Hashable, str | None] = {}  # the host, or None where the address is not proved
        self._proved: Counter[str] = Counter()  # by host
        self._n_proved = 0  # of all hosts

    def __len__(self) -> int:
        return len(self._half_open)

    def judge(self, host: str, *, is_proved: bool) -> Verdict:
        """Return what to do with a first packet from `host`, an IP literal."""
        if not is_proved:
            return Verdict.RETRY if len(self._half_open) >= RETRY_FROM else Verdict.ADMIT
        if self._n_proved >= MAX_HALF_OPEN:
            return Verdict.REFUSE
        if self._proved[host_of(host)] >= MAX_HALF_OPEN_PER_HOST and not plain_ip(host).is_loopback:
            return Verdict.REFUSE
        return Verdict.ADMIT

    def begin(self, key: Hashable, host: str, *, is_proved: bool) -> None:
        """Count a connection that was admitted."""
        assert key not in self._half_open
        self._half_open[key] = host_of(host) if is_proved else None
        if is_proved:
            self._proved[host_of(host)] += 1
            self._n_proved += 1

    def end(self, key: Hashable) -> None:
        """Stop counting one: it is open, or gone. Does nothing if it is not counted."""
        host = self._half_open.pop(key, None)
        if host is not None:
            self._n_proved -= 1
            self._proved[host] -= 1
            if not self._proved[host]:
                del self._proved[host]


def host_of(host: str) -> str:
    """Return what one host's addresses have in common: IPv4 as it is, of IPv6 the /64, which one line gets as a whole."""
    address = plain_ip(host)
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return address.packed[:8].hex()
