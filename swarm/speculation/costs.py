"""What a step costs by its rows, and a draft by its tokens: measured, fading, with a guess until then. Pure.

    rows that were seen lately      what they took
    between two such                in a straight line
    beyond all of them              growing with sqrt(rows - 1), fitted by least squares to the latest steps

A step that went without some of its round trips, since a layer's experts were all here, counts as if it had made them; what is
told is less by the trips that a step of so many rows is expected to go without:

    skipped(rows)                   layers * share ** (rows ** TOGETHER), share: of a single row

So what many rows cost is known before any were tried: with more of them some row needs a peer. And a step that was quick since
it met no peer says nothing of rows. Before rows were seen they are taken to cost ROW_SHARE of the base; nobody is to go far
beyond the rows that were seen (`most_rows`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Measured on the embedded model, three peers, all trips made (docs/speculation.md): a step with four drafted rows takes 1.01
# times one without at 80 ms; on short paths more, which the first drafts tell.
ROW_SHARE = 0.02
ROW_WEIGHT = 1.0  # steps with one drafted row that the guess counts as
KNOWN = 0.5  # steps of so many rows, faded, from which on they are a measure of their own; guessed
FORGET = 0.995  # of what rows were found to cost, for each step since without any: it is looked again after some hundred steps
FADE = 0.95  # what older steps count, for each new one: about the last twenty
# How rows keep together: if each chose experts by itself this were 1; if all chose the same, 0. Measured on 48 stretches of
# held-out text, embedded model: 0.64 to 0.77 for 2 to 9 rows and a quarter to nine tenths of the experts here
# (docs/speculation.md).
TOGETHER = 0.7
OUTLIER = 3.0  # a step that took longer than so many times what was expected counts as that: a hiccup, not a cost


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrips:
    """What a step's layers asked of the network.

    Attributes:
        n_skipped: dispatches of a layer for which all that was chosen is kept in this process.
        n_trips: all others; trip_s: seconds that they took, together.
    """

    n_trips: int = 0
    n_skipped: int = 0
    trip_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What the steps so far say.

    Attributes:
        base, growth: seconds of a step that makes all its trips, beyond the rows that were seen.
        seen: rows -> seconds of such a step.
        share: of the trips that a single row goes without.
    """

    base: float
    growth: float
    seen: dict[int, float]
    share: float


class StepCosts:
    """Of one engine, all its sequences together."""

    def __init__(self) -> None:
        self._most_extra = 0
        self._n_layers = 0
        self._n_trips = self._trips_s = 0.0  # faded
        self._skips: dict[int, tuple[float, float]] = {}  # rows -> steps and the shares they skipped, both faded
        self._told: dict[int, float] = {}  # what `step_s` said since the latest step, and from what
        self._model: _Model | None = None
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

    def count(self, n_rows: int, seconds: float, weight: float = 1.0, trips: StepTrips | None = None) -> None:
        """A step has been made.

        Args:
            weight: less than 1 where several tell of the same one.
            trips: it made; None: not known.
        """
        growth = math.sqrt(n_rows - 1)
        fade = FADE**weight
        if trips is not None:
            seconds += self._count_trips(n_rows, trips, weight)
        if self.is_known:
            seconds = min(seconds, OUTLIER * self._whole_s(n_rows))
        self._told.clear()
        self._model = None
        self._most_extra = max(self._most_extra, n_rows - 1)
        self._n = fade * self._n + weight
        self._growths = fade * self._growths + weight * growth
        self._growths2 = fade * self._growths2 + weight * growth * growth
        self._seconds = fade * self._seconds + weight * seconds
        self._products = fade * self._products + weight * growth * seconds
        self._of = {rows: (fade * n, fade * total) for rows, (n, total) in self._of.items() if n > KNOWN / 4}
        n, total = self._of.get(n_rows, (0.0, 0.0))
        self._of[n_rows] = n + weight, total + weight * seconds
        if n_rows > 1:
            _, self._growth_s = self._fit()
        elif self._growth_s is not None:
            base, _ = self._fit()
            self._growth_s = FORGET * self._growth_s + (1.0 - FORGET) * ROW_SHARE * base

    def _count_trips(self, n_rows: int, trips: StepTrips, weight: float) -> float:
        """Return how much longer the step would have taken with all of its trips."""
        fade = FADE**weight
        self._n_layers = trips.n_trips + trips.n_skipped
        self._n_trips = fade * self._n_trips + weight * trips.n_trips
        self._trips_s = fade * self._trips_s + weight * trips.trip_s
        self._skips = {rows: (fade * n, fade * total) for rows, (n, total) in self._skips.items() if n > KNOWN / 4}
        n, total = self._skips.get(n_rows, (0.0, 0.0))
        self._skips[n_rows] = n + weight, total + weight * trips.n_skipped / max(self._n_layers, 1)
        return trips.n_skipped * self._trip_s

    @property
    def _trip_s(self) -> float:
        return self._trips_s / self._n_trips if self._n_trips else 0.0

    def skipped(self, n_rows: int) -> float:
        """Return how many round trips a step of so many rows is expected to go without."""
        if not self._skips:
            return 0.0
        return float(self._n_layers * self._fitted().share ** (n_rows**TOGETHER))

    def step_s(self, n_rows: int) -> float:
        """Return how long a step of so many rows takes; 0 before any was seen."""
        if not self.is_known:
            return 0.0
        told = self._told.get(n_rows)
        if told is None:
            told = max(self._whole_s(n_rows) - self.skipped(n_rows) * self._trip_s, 1e-9)
            self._told[n_rows] = told
        return told

    def _whole_s(self, n_rows: int) -> float:
        """Return how long a step takes that makes all of its trips."""
        model = self._fitted()
        seen, base, growth = model.seen, model.base, model.growth
        if n_rows in seen:
            return seen[n_rows]
        below = max((rows for rows in seen if rows < n_rows), default=None)
        above = min((rows for rows in seen if rows > n_rows), default=None)
        if below is None:
            return base + growth * math.sqrt(n_rows - 1)
        if above is None:
            return seen[below] + growth * (math.sqrt(n_rows - 1) - math.sqrt(below - 1))
        return seen[below] + (seen[above] - seen[below]) * (n_rows - below) / (above - below)

    def _fitted(self) -> _Model:
        if self._model is None:
            base, growth = self._fit()
            n_steps = sum(n for n, _ in self._skips.values())
            # Each number of rows tells what a single one would skip.
            skips = (n * (total / n) ** (rows**-TOGETHER) for rows, (n, total) in self._skips.items())
            self._model = _Model(
                base=base,
                growth=growth,
                seen={rows: total / n for rows, (n, total) in self._of.items() if n >= KNOWN},
                share=sum(skips) / n_steps if n_steps else 0.0,
            )
        return self._model

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
