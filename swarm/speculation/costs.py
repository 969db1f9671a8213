"""What a step costs by its rows, and a draft by its tokens: measured, fading, with a guess until then. Pure.

    rows that were seen lately      what they took
    between two such                in a straight line
    beyond all of them              growing with sqrt(rows - 1), fitted by least squares to the latest steps

The root stands between what bytes and computing cost, which grows with every row, and what round trips cost, which soon grows no
more: a layer whose experts are all here needs none, but with more rows some row needs one. So the guesses are rather low, and a
step with so many rows corrects them. Before rows were seen they are taken to cost ROW_SHARE of the base; nobody is to go far
beyond the rows that were seen (`most_rows`).
"""

from __future__ import annotations

import math

# Measured on the embedded model at 80 ms, three peers (docs/speculation.md): a step with five drafted rows takes 1.09 to 1.16
# times one without.
ROW_SHARE = 0.05
ROW_WEIGHT = 1.0  # steps with one drafted row that the guess counts as
KNOWN = 0.5  # steps of so many rows, faded, from which on they are a measure of their own; guessed
FORGET = 0.995  # of what rows were found to cost, for each step since without any: it is looked again after some hundred steps
FADE = 0.95  # what older steps count, for each new one: about the last twenty
OUTLIER = 3.0  # a step that took longer than so many times what was expected counts as that: a hiccup, not a cost


class StepCosts:
    """Of one engine, all its sequences together."""

    def __init__(self) -> None:
        self._most_extra = 0
        self._growth_s: float | None = None  # as of the latest step that had rows more than one
        self._n = self._growths = self._growths2 = self._seconds = self._products = 0.0
        self._of: dict[int, tuple[float, float]] = {}  # rows -> steps and their seconds, both faded

    @property
    def is_known(self) -> bool:
        """Whether any step was seen."""
        return self._n > 0

    @property
    def most_rows(self) -> int:
        """How many rows a step should have at most: not far more than any before, lest it cost far more than was thought."""
        return 2 * self._most_extra + 3

    def count(self, n_rows: int, seconds: float, weight: float = 1.0) -> None:
        """A step has been made; `weight` is less than 1 where several tell of the same one."""
        growth = math.sqrt(n_rows - 1)
        if self.is_known:
            seconds = min(seconds, OUTLIER * self.step_s(n_rows))
        self._most_extra = max(self._most_extra, n_rows - 1)
        fade = FADE**weight
        self._n = fade * self._n + weight
        self._growths = fade * self._growths + weight * growth
        self._growths2 = fade * self._growths2 + weight * growth * growth
        self._seconds = fade * self._seconds + weight * seconds
        self._products = fade * self._products + weight * growth * seconds
        self._of = {rows: (fade * n, fade * total) for rows, (n, total) in self._of.items() if n > KNOWN / 4}
        n, total = self._of.get(n_rows, (0.0, 0.0))
        self._of[n_rows] = n + weight, total + weight * seconds
        base, fitted = self._fit()
        if n_rows > 1:
            self._growth_s = fitted
        elif self._growth_s is not None:
            self._growth_s = FORGET * self._growth_s + (1.0 - FORGET) * ROW_SHARE * base

    def step_s(self, n_rows: int) -> float:
        """Return how long a step of so many rows takes; 0 before any was seen."""
        if not self.is_known:
            return 0.0
        seen = {rows: total / n for rows, (n, total) in self._of.items() if n >= KNOWN}
        if n_rows in seen:
            return seen[n_rows]
        base, growth = self._fit()
        below = max((rows for rows in seen if rows < n_rows), default=None)
        above = min((rows for rows in seen if rows > n_rows), default=None)
        if below is None:
            return base + growth * math.sqrt(n_rows - 1)
        if above is None:
            return seen[below] + growth * (math.sqrt(n_rows - 1) - math.sqrt(below - 1))
        return seen[below] + (seen[above] - seen[below]) * (n_rows - below) / (above - below)

    def _fit(self) -> tuple[float, float]:
        """Return base and growth: least squares, with ROW_WEIGHT * (growth - what is thought of it)^2 added."""
        share, seconds = (ROW_SHARE, 0.0) if self._growth_s is None else (0.0, self._growth_s)
        a11 = self._n + ROW_WEIGHT * share**2
        a12 = self._growths - ROW_WEIGHT * share
        a22 = self._growths2 + ROW_WEIGHT
        b1 = self._seconds - ROW_WEIGHT * share * seconds
        b2 = self._products + ROW_WEIGHT * seconds
        determinant = a11 * a22 - a12 * a12
        base, growth = (b1 * a22 - b2 * a12) / determinant, (b2 * a11 - b1 * a12) / determinant
        return max(base, 1e-9), max(growth, 0.0)


class DraftCost:
    """Of one drafter: seconds a token."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def token_s(self) -> float:
        """Seconds that one drafted token takes; 0 before any."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def count(self, n_tokens: int, seconds: float) -> None:
        """So many tokens were drafted, or at least one was tried."""
        self._tokens = FADE * self._tokens + max(n_tokens, 1)
        self._seconds = FADE * self._seconds + seconds
