"""Whether a node is to be reached over a TLS link beside its QUIC connection. Pure; times are given.

TLS over TCP costs a quarter of QUIC's software: on a short path that is most of a layer. TCP repairs the loss of a last packet
only after 200 ms or so, where QUIC's copies take milliseconds. On the shortest paths a link asks over QUIC as well before that
(`tls_link`); on longer ones, where there is less to gain, it is for paths that have lost nothing lately. A link that is open is
kept until it fails or its path does: what is measured a little better today is no reason to change. While it carries the
dispatches QUIC sees few packets, so what it loses itself is looked at, too: a link that loses much is doubled by a second one.
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
# Up to here losses do not matter: measured at 0.1 % and 1 % (docs/bench/links-*.json), TLS's p50 is the better one at 3 ms
# and below, at 10 ms they are equal, and QUIC's p99 is better.
LOSSY_MAX_RTT_S = 0.005
# A link on a longer path that lost a packet within so many since it was opened, or since the one it lost before, is given up. As
# QUIC's memory of losses (net/repair): at one loss in 2,000 packets, 5 a dispatch, one dispatch in 400 waits for TCP.
CLEAN_PACKETS = 2000
# Small dispatches go over a second link as well from so many losses among the link's latest COPIED_PACKETS on, until they are
# fewer than the second figure. 0.2 %: from there on one dispatch in a hundred loses one of its five packets, and p99 is theirs.
COPIED_LOSSES, UNCOPIED_LOSSES = 4, 2
COPIED_PACKETS = 2000
FORGIVEN_AFTER_S = 300.0  # a link that lived as long begins anew with FIRST_RETRY_S; guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """What is known of the QUIC connection's path.

    Attributes:
        rtt_s: None: not measured yet.
        is_lossy: it has lost packets lately.
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
        self._n_lost = self._n_packets_at_loss = 0  # of the open link
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
        if n_lost <= self._n_lost:
            return False
        n_since = n_packets - self._n_packets_at_loss
        self._n_lost, self._n_packets_at_loss = n_lost, n_packets
        return n_since < CLEAN_PACKETS and rtt_s > LOSSY_MAX_RTT_S

    def copies(self, n_packets: int, n_lost: int) -> bool:
        """Learn how many packets the open link had and lost so far; return whether a second one should double it."""
        told = self._told
        told.append((n_packets, n_lost))
        while told[1][0] <= n_packets - COPIED_PACKETS:
            told.popleft()
        n_lately = n_lost - told[0][1]
        self._is_copying = n_lately >= (UNCOPIED_LOSSES if self._is_copying else COPIED_LOSSES)
        return self._is_copying

    def opened(self, now: float) -> None:
        """The link is open."""
        self._opened_at = now
        self._n_lost = self._n_packets_at_loss = 0
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
