"""Who may begin and keep a connection: a proof of the return path once many are half-open, then bounds, in all and by host.

A first packet costs its sender nothing and its source address can be forged, so what is *unproved* may take few places. Beyond
them a client is told to come back with a token (QUIC's Retry, RFC 9000 section 8.1.2), which only the owner of the address
gets; it costs an honest one a round trip, and us nothing that is kept. Only proved clients use the other places.

Who is open has proved its address by the handshake. Keeping a connection open costs next to nothing, so one host may have only a
part of all places: else it could keep everybody out.
Knows nothing of sockets or QUIC; a key is whatever stands for a connection.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable
from enum import Enum, auto

from swarm.ip import plain_ip

RETRY_FROM = (
    32  # half-open connections from which on an address is to be proved; guessed: ten nodes that start together
)
MAX_HALF_OPEN = 256  # proved ones; guessed: a flood costs at most this many handshakes at a time
MAX_HALF_OPEN_PER_HOST = 32  # of these, from one host that is not this machine; guessed: a household of nodes
# Open and proved half-open ones of one host that is not this machine. Guessed: a network behind one address shares it, and it
# takes sixteen hosts to fill an endpoint's 4,096 places. Unproved ones may exceed it by as many as open before a Retry is due.
MAX_PER_HOST = 256


class Verdict(Enum):
    """What to do with a first packet."""

    ADMIT = auto()
    RETRY = auto()  # answer with a token
    REFUSE = auto()  # drop


class Admission:
    """Counts the connections that came from outside: half-open until their greetings are done, then open.

    Its length is the number of half-open ones.
    """

    def __init__(self) -> None:
        self._half_open: dict[Hashable, tuple[str, bool]] = {}  # host, and whether the address is proved
        self._open: dict[Hashable, str] = {}  # host
        self._half_open_of: Counter[str] = Counter()  # proved ones by host
        self._open_of: Counter[str] = Counter()  # by host
        self._n_proved = 0  # half-open ones of all hosts

    def __len__(self) -> int:
        return len(self._half_open)

    def judge(self, host: str, *, is_proved: bool) -> Verdict:
        """Return what to do with a first packet from `host`, an IP literal."""
        key = host_of(host)
        is_bounded = not plain_ip(host).is_loopback
        # Before a Retry too: a round trip more would not change the answer.
        if is_bounded and self._open_of[key] + self._half_open_of[key] >= MAX_PER_HOST:
            return Verdict.REFUSE
        if not is_proved:
            return Verdict.RETRY if len(self._half_open) >= RETRY_FROM else Verdict.ADMIT
        if self._n_proved >= MAX_HALF_OPEN or (is_bounded and self._half_open_of[key] >= MAX_HALF_OPEN_PER_HOST):
            return Verdict.REFUSE
        return Verdict.ADMIT

    def begin(self, key: Hashable, host: str, *, is_proved: bool) -> None:
        """Count a connection that was admitted as half-open."""
        assert key not in self._half_open
        assert key not in self._open
        host = host_of(host)
        self._half_open[key] = host, is_proved
        if is_proved:
            self._half_open_of[host] += 1
            self._n_proved += 1

    def open(self, key: Hashable) -> None:
        """Count one as open: its greetings are done. Does nothing if it is not counted as half-open."""
        host = self._end_half_open(key)
        if host is not None:
            self._open[key] = host
            self._open_of[host] += 1

    def end(self, key: Hashable) -> None:
        """Stop counting one: it is gone. Does nothing if it is not counted."""
        self._end_half_open(key)
        host = self._open.pop(key, None)
        if host is not None:
            _take_one(self._open_of, host)

    def _end_half_open(self, key: Hashable) -> str | None:
        """Return the host of one that was half-open until now."""
        host, is_proved = self._half_open.pop(key, (None, False))
        if host is not None and is_proved:
            self._n_proved -= 1
            _take_one(self._half_open_of, host)
        return host


def _take_one(counts: Counter[str], host: str) -> None:
    counts[host] -= 1
    if not counts[host]:
        del counts[host]


def host_of(host: str) -> str:
    """Return what one host's addresses have in common: IPv4 as it is, of IPv6 the /64, which one line gets as a whole."""
    address = plain_ip(host)
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return address.packed[:8].hex()
