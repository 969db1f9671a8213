"""How much one asker may have of what the relay shares among all. Pure: `now` is monotonic seconds from the caller."""

from __future__ import annotations


class TokenBucket:
    """Lets `burst` go at once and `rate_per_s` in the long run."""

    def __init__(self, *, rate_per_s: float, burst: float, now: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._n_tokens = burst
        self._filled = now

    def take(self, now: float) -> float:
        """Take one token and return 0, or take none and return the seconds until there is one."""
        self._n_tokens = min(self._burst, self._n_tokens + (now - self._filled) * self._rate_per_s)
        self._filled = now
        if self._n_tokens >= 1:
            self._n_tokens -= 1
            return 0.0
        return (1 - self._n_tokens) / self._rate_per_s
