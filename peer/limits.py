"""What a volunteer gives at most, and when: bytes per second, hours of the day, a machine that nobody else needs. Pure.

Rates count what really went over the socket, with all headers and copies. An answer is promised before it is computed: what
does not fit is refused as busy, with the time when it will, so that backbones ask a replica instead of waiting.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from swarm.errors import UserError

MIN_RATE_BYTES_S = 50_000  # guessed: below, one answer of a large model takes longer than a backbone waits for it
BURST_S = 0.5  # of the rate that may be saved up: over a minute 1 % more
# When others need the machine: their share of all its cores, and for how long. Guessed: a compiler or a game pauses a peer
# within seconds, a page that loads does not; it comes back when the machine has been left alone for a while.
BUSY_SHARE, BUSY_FOR_S = 0.5, 6.0
IDLE_SHARE, IDLE_FOR_S = 0.25, 60.0


class RateCap:
    """Lets a counter of bytes rise by a rate, in the long run."""

    def __init__(self, rate_bytes_s: float, *, now: float, n_bytes: int) -> None:
        """`n_bytes`: the counter as it stands.

        Raises:
            UserError: the rate is too low for anything.
        """
        if rate_bytes_s < MIN_RATE_BYTES_S:
            raise UserError(f"the rate is too low: got {rate_bytes_s:g} bytes/s, expected at least {MIN_RATE_BYTES_S}")
        self.rate_bytes_s = rate_bytes_s
        self._burst = rate_bytes_s * BURST_S
        self._level = self._burst
        self._at = now
        self._n_bytes = n_bytes
        self._n_promised = 0

    def wait_s(self, now: float, n_bytes: int, n_more: int) -> float:
        """Return how long until `n_more` bytes may go, 0: now; more than can be saved up may go when it is full.

        Args:
            n_bytes: the counter now.
        """
        # What went since the last look is taken off before the burst bounds what is saved: an idle hour pays for its own pings.
        earned = (now - self._at) * self.rate_bytes_s
        self._level = min(self._burst, self._level + earned - (n_bytes - self._n_bytes))
        self._at, self._n_bytes = now, n_bytes
        missing = min(n_more, self._burst) - (self._level - self._n_promised)
        return max(0.0, missing / self.rate_bytes_s)

    def promise(self, n_bytes: int) -> None:
        """Count bytes that will go soon."""
        self._n_promised += n_bytes

    def settle(self, n_bytes: int) -> None:
        """Take a promise back: the bytes have gone, and the counter has them, or they never will."""
        self._n_promised -= n_bytes


@dataclass(frozen=True, slots=True)
class Schedule:
    """Times of the day, local, at which a peer serves; each from its begin to its end, over midnight too."""

    spans: tuple[tuple[datetime.time, datetime.time], ...]

    def is_open(self, at: datetime.time) -> bool:
        """Return whether a peer serves at this time."""
        return any(begin <= at < end if begin < end else at >= begin or at < end for begin, end in self.spans)


def parse_schedule(text: str) -> Schedule:
    """Return the schedule of `22:00-07:00`, or of a comma list of such spans. Raises UserError."""
    spans = []
    for span in text.split(","):
        try:
            begin, end = (datetime.datetime.strptime(each.strip(), "%H:%M").time() for each in span.split("-"))
        except ValueError:
            raise UserError(
                f"bad schedule: got {text!r}, expected spans such as 22:00-07:00, a comma between them"
            ) from None
        if begin == end:
            raise UserError(f"bad schedule: {span.strip()} begins when it ends")
        spans.append((begin, end))
    return Schedule(tuple(spans))


class BusyMeter:
    """Whether others need the machine, with patience both ways."""

    def __init__(self) -> None:
        self.is_busy = False
        self._since: float | None = None  # the other side of the threshold has been seen without a break since then

    def update(self, now: float, share: float) -> bool:
        """Take in the share of all cores that others use; return whether the machine is theirs."""
        is_other = share < IDLE_SHARE if self.is_busy else share > BUSY_SHARE
        if not is_other:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= (IDLE_FOR_S if self.is_busy else BUSY_FOR_S):
            self.is_busy, self._since = not self.is_busy, None
        return self.is_busy
