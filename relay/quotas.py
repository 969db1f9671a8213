"""How much one asker may have of what the relay shares among all. Pure: `now` is monotonic seconds from the caller."""

from __future__ import annotations

from dataclasses import dataclass

MBIT_S = 1_000_000
# What may go at once of a rate, seconds of it. As long as the queue may be: a first flight of 100 KB passes a channel unhindered.
BURST_S = 0.030
# The largest packet that is passed on: an Ethernet frame's payload, less IPv4's and UDP's heads.
MAX_PACKET_BYTES = 1472
_ROUNDING_S = 1e-6  # floats may fall short of a whole token by a trifle, and be asked again and again


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a relay gives. The figures are DESIGN's guesses to start from; each is a flag.

    Attributes:
        channel_bit_s: of one channel, each direction.
        node_bit_s: that one node may send through all its channels.
        total_bit_s: of all that the relay passes on.
        n_channels_per_node, n_reservations: at a time; reservations in all.
        queue_s: the longest that what is above a rate waits: a queue holds as many bytes as the rate carries in that time.
        idle_s: after as long without a packet from one of its sides a channel is forgotten.
    """

    channel_bit_s: int = 50 * MBIT_S
    node_bit_s: int = 100 * MBIT_S
    total_bit_s: int = 1000 * MBIT_S
    n_channels_per_node: int = 64
    n_reservations: int = 4096
    queue_s: float = 0.030
    idle_s: float = 60.0


class TokenBucket:
    """Lets `burst` go at once and `rate_per_s` in the long run."""

    __slots__ = ("_burst", "_filled", "_n_tokens", "rate_per_s")

    def __init__(self, *, rate_per_s: float, burst: float, now: float) -> None:
        self.rate_per_s = rate_per_s
        self._burst = burst
        self._n_tokens = burst
        self._filled = now

    def take(self, now: float) -> float:
        """Take one token and return 0, or take none and return the seconds until there is one."""
        if self.level(now) >= 1:
            self._n_tokens -= 1
            return 0.0
        return (1 - self._n_tokens) / self.rate_per_s

    def level(self, now: float) -> float:
        """Return how many tokens there are."""
        n_tokens = self._n_tokens + (now - self._filled) * self.rate_per_s
        self._filled = now
        self._n_tokens = n_tokens = min(n_tokens, self._burst)
        return n_tokens

    def spend(self, n_tokens: float) -> None:
        """Take as many, which the caller has seen to be there."""
        self._n_tokens -= n_tokens

    def wait_s(self, n_tokens: float) -> float:
        """Return the seconds from the last look until there are as many, or until it is full; 0 if there are."""
        n_missing = min(n_tokens, self._burst) - self._n_tokens
        return n_missing / self.rate_per_s + _ROUNDING_S if n_missing > 0 else 0.0


def byte_bucket(rate_bit_s: int, now: float) -> TokenBucket:
    """Return a bucket of bytes for a rate; two packets always fit, however low the rate."""
    rate_per_s = rate_bit_s / 8
    return TokenBucket(rate_per_s=rate_per_s, burst=max(BURST_S * rate_per_s, 2.0 * MAX_PACKET_BYTES), now=now)
