"""What each peer has computed for this backbone: the counts that its receipts are signed from. Pure, one owner.

Counted is what went into a layer: rows and (row, expert) pairs of the answer that was used. A copy that came second, an answer
that was refused, what this process computed itself, and a second opinion for an audit count for nobody.

Counts are kept by *period*: one UTC day of one run, with a random name, so that a backbone that has lost its counts, or whose
clock was set back, begins a new period and never signs less than before under an old name. So it does when a period is full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarm.dispatch.placement import Placement
from swarm.dispatch.plan import HERE
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.wire.receipts import FULL_WEIGHT, PERIOD_BYTES, Receipt, Totals, day_of, sign_receipt

KEPT_PERIODS = 2  # today's, and yesterday's for those who have not fetched their last receipt yet
MAX_PEERS = 1024  # of a period; guessed: four times `holders.MAX_HOLDERS`

FEW_PAIRS = (
    32  # up to so many, a list is faster than numpy (measured: an answer of 8 pairs takes 1.7 us instead of 3.9)
)


@dataclass(slots=True)
class _Count:
    n_rows: int = 0
    n_pairs: int = 0
    weight: int = 0

    @property
    def totals(self) -> Totals:
        return Totals(n_rows=self.n_rows, n_pairs=self.n_pairs, weight=self.weight)


@dataclass(slots=True)
class _Period:
    day: int
    name: bytes
    counts: dict[NodeId, _Count] = field(default_factory=dict)


class Contributions:
    """The peers' accounts at one backbone."""

    def __init__(self, placement: Placement, *, wall: Callable[[], float], random: Callable[[int], bytes]) -> None:
        """`wall`: seconds since 1970; `random`: so many random bytes, for the periods' names."""
        self._placement = placement
        self._wall, self._random = wall, random
        self._periods: list[_Period] = []  # the oldest first
        # Of each expert in thousandths, by layer: as an array [E], and as a list; of `_version`.
        self._weights: dict[int, npt.NDArray[np.int64]] = {}
        self._lists: dict[int, list[int]] = {}
        self._version = -1

    def count(self, node: NodeId, layer: int, n_rows: int, expert_ids: npt.NDArray[np.uint16]) -> None:
        """Count one answer that was used: `expert_ids` [P]."""
        if node == HERE:
            return
        period = self._period()
        mine = period.counts.get(node)
        if mine is None:
            # To forget one would make it count less under this name when it is back.
            if len(period.counts) >= MAX_PEERS:
                period = self._begin(period.day)
            mine = period.counts[node] = _Count()
        mine.n_rows += n_rows
        mine.n_pairs += len(expert_ids)
        mine.weight += self._weight_of(layer, expert_ids)

    def __contains__(self, node: NodeId) -> bool:
        """Return whether there is a receipt to be had for this peer."""
        return any(node in period.counts for period in self._periods)

    def receipts(self, node: NodeId, identity: Identity) -> list[Receipt]:
        """Return what a peer may be given now, signed anew: one receipt for each period that is kept."""
        return [
            sign_receipt(identity, peer=node, period=period.name, day=period.day, totals=count.totals)
            for period in self._periods
            if (count := period.counts.get(node)) is not None
        ]

    def by_period(self) -> dict[tuple[int, bytes], dict[NodeId, Totals]]:
        """Return (day, period's name) -> peer -> its counts."""
        return {
            (period.day, period.name): {node: count.totals for node, count in period.counts.items()}
            for period in self._periods
        }

    def _period(self) -> _Period:
        day = day_of(self._wall())
        if self._periods and self._periods[-1].day == day:
            return self._periods[-1]
        # A clock that jumps back and forth begins a new period each time; at worst what was not fetched is forgotten.
        return self._begin(day)

    def _begin(self, day: int) -> _Period:
        period = _Period(day, self._random(PERIOD_BYTES))
        self._periods = [*self._periods, period][-KEPT_PERIODS:]
        return period

    def _weight_of(self, layer: int, expert_ids: npt.NDArray[np.uint16]) -> int:
        if self._version != self._placement.version:
            n_holders = np.maximum(self._placement.holders.sum(axis=0), 1)  # [L, E]
            self._weights = dict(zip(self._placement.layers, FULL_WEIGHT // n_holders, strict=True))
            self._lists = {layer: weights.tolist() for layer, weights in self._weights.items()}
            self._version = self._placement.version
        if len(expert_ids) > FEW_PAIRS:
            return int(self._weights[layer].take(expert_ids).sum())
        return sum(map(self._lists[layer].__getitem__, expert_ids.tolist()))
