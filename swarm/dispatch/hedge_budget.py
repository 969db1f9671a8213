"""How many second copies of a batch may be asked for. Pure."""

from __future__ import annotations

# Hedges are at most this share of all orders, and so many at once: a swarm that is slow as a whole must not get twice the
# work. What is overdue does not count. Share as in DESIGN (p95), burst guessed.
HEDGE_SHARE, HEDGE_BURST = 0.05, 8.0


class HedgeBudget:
    """A share of all orders, saved up to a burst."""

    def __init__(self) -> None:
        self._saved = HEDGE_BURST

    def earn(self, n_orders: int) -> None:
        """So many orders were sent without hedging."""
        self._saved = min(HEDGE_BURST, self._saved + HEDGE_SHARE * n_orders)

    def spend(self) -> bool:
        """Return whether one more hedge is allowed, and take it."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

    def give_back(self) -> None:
        """There was nobody to hedge to."""
        self._saved = min(HEDGE_BURST, self._saved + 1.0)
