"""Whether a node is to be reached over a TLS link beside its QUIC connection. Pure; times are given.

TLS over TCP costs a quarter of QUIC's software: on a short path that is most of a layer. But TCP repairs the loss of a last
packet only after 200 ms or so, where QUIC's copies take milliseconds, so it is for paths that are short and have lost nothing
lately. A link that is open is kept until it fails or its path does: what is measured a little better today is no reason to
change.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RTT_S = 0.010  # to open one: above, a millisecond of software is not worth another kind of failure. Guessed
KEEP_RTT_S = 0.020  # to keep one; guessed: twice that, so that a path about there does not change all the time
FIRST_RETRY_S, LONGEST_RETRY_S = (
    10.0,
    600.0,
)  # after a failure, doubling; guessed: a firewall does not change by the minute
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

    def wants(self, facts: PathFacts, now: float) -> bool:
        """Return whether there should be a link now: one that is open is kept, else one is opened."""
        if facts.is_relayed or facts.is_lossy or facts.rtt_s is None:
            return False
        if self._opened_at is not None:
            return facts.rtt_s <= KEEP_RTT_S
        return facts.rtt_s <= MAX_RTT_S and now >= self._retry_at

    def opened(self, now: float) -> None:
        """The link is open."""
        self._opened_at = now

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
