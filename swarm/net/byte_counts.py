"""How many bytes a node sent and received, by the kind of path that carried them. Pure.

    direct   datagrams to an address: QUIC, probes, holes being punched
    relay    the same through a relay's channel, its head included
    tls      a TLS link's TCP payload: TLS records with all that they add; what TCP sends again counts
    unix     the same over a Unix socket, which leaves no machine

Headers of IP, UDP and TCP count nowhere. Of a link the kernel tells (`tcp_losses.payload`); where it does not, what was handed
to TLS counts, and RECORD_OVERHEAD_BYTES for each record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MAX_RECORD_BYTES = 16 << 10  # of a TLS record's content (RFC 8446 section 5.1)
RECORD_OVERHEAD_BYTES = 22  # RFC 8446 section 5.2: head 5, type of the content 1, tag 16 (AES-GCM, ChaCha20-Poly1305)


class PathKind(StrEnum):
    """What carries bytes."""

    DIRECT = "direct"
    RELAY = "relay"
    TLS = "tls"
    UNIX = "unix"


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes; `repair`, not in `sent`: of datagrams that went a second time in case the first copy was lost."""

    sent: int = 0
    received: int = 0
    repair: int = 0

    def __add__(self, other: Amount) -> Amount:
        """Return both together."""
        return Amount(self.sent + other.sent, self.received + other.received, self.repair + other.repair)

    def __sub__(self, other: Amount) -> Amount:
        """Return what has come since `other`."""
        return Amount(self.sent - other.sent, self.received - other.received, self.repair - other.repair)


@dataclass(frozen=True, slots=True)
class Amounts:
    """One moment's counts of every kind of path."""

    by_kind: dict[PathKind, Amount]

    def __add__(self, other: Amounts) -> Amounts:
        """Return both together."""
        return Amounts({kind: amount + other.by_kind[kind] for kind, amount in self.by_kind.items()})

    def __sub__(self, other: Amounts) -> Amounts:
        """Return what has come since `other`."""
        return Amounts({kind: amount - other.by_kind[kind] for kind, amount in self.by_kind.items()})

    @property
    def total(self) -> Amount:
        """All kinds together."""
        return sum(self.by_kind.values(), Amount())

    def both_ways(self) -> dict[str, tuple[int, int]]:
        """Return {kind: (sent, repair included, received)} of the kinds that carried any."""
        return {
            kind.value: (amount.sent + amount.repair, amount.received)
            for kind, amount in self.by_kind.items()
            if amount != Amount()
        }

    def shares(self, n: float) -> dict[str, dict[str, float]]:
        """Return the bytes of each of `n`, by the kinds that carried any: {kind: {"out", "back"}}, without repair."""
        return {
            kind.value: {"out": amount.sent / n, "back": amount.received / n}
            for kind, amount in self.by_kind.items()
            if amount != Amount()
        }


class Link(Protocol):
    """What is needed of a TLS link."""

    @property
    def path_kind(self) -> PathKind:
        """TLS or UNIX."""
        ...

    def wire_bytes(self) -> Amount:
        """Return what it sent and received so far; never less than before."""
        ...


@dataclass(slots=True)
class ByteCounts:
    """One node's. Who sends and receives datagrams adds to `udp` and `relayed`; links are asked when somebody wants to know.

    Attributes:
        udp_sent, udp_received, udp_repair: UDP payload; `udp_sent` without repair.
        relayed_sent, relayed_received, relayed_repair: of these, through a relay's channel.
    """

    udp_sent: int = 0
    udp_received: int = 0
    udp_repair: int = 0
    relayed_sent: int = 0
    relayed_received: int = 0
    relayed_repair: int = 0
    _links: set[Link] = field(default_factory=set)
    _ended: dict[PathKind, Amount] = field(default_factory=lambda: {PathKind.TLS: Amount(), PathKind.UNIX: Amount()})

    def begin(self, link: Link) -> None:
        """Count a link's bytes from its first one."""
        self._links.add(link)

    def end(self, link: Link) -> None:
        """A link has ended: what it counts now is its last word."""
        if link in self._links:
            self._links.remove(link)
            self._ended[link.path_kind] += link.wire_bytes()

    def links(self, *kinds: PathKind) -> Amount:
        """Return what all links of these kinds, or of any, sent and received, those that have ended too."""
        kinds = kinds or (PathKind.TLS, PathKind.UNIX)
        ended = sum((self._ended[kind] for kind in kinds), Amount())
        return sum((link.wire_bytes() for link in self._links if link.path_kind in kinds), ended)

    def now(self) -> Amounts:
        """Return the counts as they stand."""
        return Amounts(
            {
                PathKind.DIRECT: Amount(
                    self.udp_sent - self.relayed_sent,
                    self.udp_received - self.relayed_received,
                    self.udp_repair - self.relayed_repair,
                ),
                PathKind.RELAY: Amount(self.relayed_sent, self.relayed_received, self.relayed_repair),
                PathKind.TLS: self.links(PathKind.TLS),
                PathKind.UNIX: self.links(PathKind.UNIX),
            }
        )


def tls_bytes(n_written: int, n_records: int) -> int:
    """Return what so much content takes in so many TLS records."""
    return n_written + n_records * RECORD_OVERHEAD_BYTES


def n_tls_records(n_content: int) -> int:
    """Return how many TLS records one piece of content takes that is written at once."""
    return -(-n_content // MAX_RECORD_BYTES)
