"""Whether a node is to be reached over a TLS link beside its QUIC connection. Pure; times are given.

TLS over TCP costs a quarter of QUIC's software: on a short path that is most of a layer. TCP repairs the loss of a last packet
only after 200 ms or so, where QUIC's copies take milliseconds. So a link that loses packets asks over QUIC as well before that
(`tls_link`), and is doubled by a second one; on longer paths, where there is less to gain, one that loses many is given up. One
that is open is kept until it fails or its path does: what is measured a little better today is no reason to change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# To open one: above, a millisecond of software is not worth another kind of failure. A path of 10 ms is measured as a bit more;
# there, without loss, TLS's p50 is 3 % lower and long batches are 1.3 to 1.7 times as fast (docs/links.md). The rest is guessed.
MAX_RTT_S = 0.015
KEEP_RTT_S = 0.020  # to keep one; guessed: so much more that a path about there does not change all the time
FIRST_RETRY_S, LONGEST_RETRY_S = (
    10.0,
    600.0,
)  # after a failure, doubling; guessed: a firewall does not change by the minute
# Up to here losses do not matter: at 1 % TLS's p50 is the better one at 3 ms and below, and two links' p99 (docs/links.md).
LOSSY_MAX_RTT_S = 0.005
# Small dispatches go over a second link as well from so many losses among the link's latest COPIED_PACKETS on, until they are
# fewer than the second figure. 0.2 %: from there on one dispatch in a hundred loses one of its five packets, and p99 is theirs.
COPIED_LOSSES, UNCOPIED_LOSSES = 4, 2
COPIED_PACKETS = 2000
# On paths longer than LOSSY_MAX_RTT_S a link with so many losses among as many packets is given up, for LONGEST_RETRY_S. The
# kernel's figures show one and a half for each lost packet: 3 of 2,000 at 0.1 %, 30 at 1 %, which is found out within 300
# dispatches. At 10 ms and 0.1 % TLS's p50 is 3 to 5 % lower than QUIC's and p99 as good; at 1 % two links' p99 is 1.55 times
# QUIC's, since losses leave TCP a window of a few packets.
GIVEN_UP_LOSSES = 20
FORGIVEN_AFTER_S = 300.0  # a link that lived as long begins anew with FIRST_RETRY_S; guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """What is known of the QUIC connection's path.

    Attributes:
        rtt_s: None: not measured yet.
        is_lossy: it has lost packets lately, and nobody will tell what a link over it loses.
    """

    rtt_s: float | None
    is_relayed: bool
    is_lossy: bool


class LinkChoice:
    """One node's."""

    def __init__(self) -> None:
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._opened_at: float | None = None
        self._told: deque[tuple[int, int]] = deque([(0, 0)])  # packets and losses, the first COPIED_PACKETS ago
        self._is_copying = False

    def wants(self, facts: PathFacts, now: float) -> bool:
        """Return whether there should be a link now: one that is open is kept, else one is opened."""
        if facts.is_relayed or facts.rtt_s is None or (facts.is_lossy and facts.rtt_s > LOSSY_MAX_RTT_S):
            return False
        if self._opened_at is not None:
            return facts.rtt_s <= KEEP_RTT_S
        return facts.rtt_s <= MAX_RTT_S and now >= self._retry_at

    def loses(self, n_packets: int, n_lost: int, rtt_s: float) -> bool:
        """Learn how many packets the open link had so far, and how many of them it lost; return whether to give it up."""
        return self._lost_lately(n_packets, n_lost) >= GIVEN_UP_LOSSES and rtt_s > LOSSY_MAX_RTT_S

    def copies(self, n_packets: int, n_lost: int) -> bool:
        """Learn how many packets the open link had and lost so far; return whether a second one should double it."""
        n_lately = self._lost_lately(n_packets, n_lost)
        self._is_copying = n_lately >= (UNCOPIED_LOSSES if self._is_copying else COPIED_LOSSES)
        return self._is_copying

    def _lost_lately(self, n_packets: int, n_lost: int) -> int:
        """Return how many of the latest COPIED_PACKETS were lost."""
        told = self._told
        if told[-1] != (n_packets, n_lost):
            told.append((n_packets, n_lost))
        while len(told) > 1 and told[1][0] <= n_packets - COPIED_PACKETS:
            told.popleft()
        return n_lost - told[0][1]

    def opened(self, now: float) -> None:
        """The link is open."""
        self._opened_at = now
        self._told, self._is_copying = deque([(0, 0)]), False

    def closed(self) -> None:
        """The link was closed because it is not wanted any more."""
        self._opened_at = None

    def failed(self, now: float) -> None:
        """It could not be opened, or has ended by itself."""
        if self._opened_at is not None and now - self._opened_at >= FORGIVEN_AFTER_S:
            self._retry_s = FIRST_RETRY_S
        self._opened_at = None
        self._retry_at = now + self._retry_s
        self._retry_s = min(LONGEST_RETRY_S, 2 * self._retry_s)

    def given_up(self, now: float) -> None:
        """The link was closed because it loses too much: its path will tomorrow, too."""
        self._opened_at = None
        self._retry_at = now + LONGEST_RETRY_S
