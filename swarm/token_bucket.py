"""A token bucket: how often something may happen. `now` is monotonic seconds from the caller."""

from __future__ import annotations

_ROUNDING_S = 1e-6  # floats may fall short of a whole token by a trifle, and be asked again and again


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
