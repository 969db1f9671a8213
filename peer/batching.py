"""The line of dispatches at a peer: in the order they came, those that wait for one layer merged into one computation.

Pure: knows no thread, loop or clock.

    add(entry, asker) ... -> take() -> a group: an entry, and later ones of its layer

Askers (backbones) take turns, and each one's dispatches are taken in their order: one that sends a hundred at once does not keep
another's next token waiting for them all. Who is new, or comes back, goes before whoever had the last turn and behind all others
who wait: so several who send one at a time do not keep one with many waiting, either. No layer starves: an asker's oldest
dispatch is of the group of its turn, and what is drawn forward to a group is bounded. Raw rows (the form `exact`) are never
merged: they promise the bits of a computation by itself, which only exact kernels keep; partial sums promise a tolerance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from swarm.wire import messages as m

# (row, expert) pairs of a merged computation. Merging saves the overhead of a call (about 60 us), and where memory binds
# the weights are read once; measured on 2 cores the time per pair is the same from 3 to 1,536 pairs (65 us at D=2048,
# F=256, Q8_0; 145 us at F=768, Q4_K), so more would only delay the first answers: these are 8 to 20 ms. It also keeps the
# chunks of a long batch apart (swarm.dispatch.chunks), which are to be answered one after another.
MAX_MERGED_PAIRS = 128


class Entry(Protocol):
    """Who waits in line."""

    @property
    def dispatch(self) -> m.Dispatch:
        """What it wants computed."""
        ...


E = TypeVar("E", bound=Entry)


class Line(Generic[E]):
    """Who waits, oldest first. Its user bounds it."""

    def __init__(self) -> None:
        self._entries: deque[tuple[Hashable, E]] = deque()  # with their askers
        self._turns: dict[Hashable, int] = {}  # of those who wait: when their last turn was; odd for none yet
        self._last_turn = 0  # even

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: E, asker: Hashable = None) -> None:
        """Take a place at the end."""
        self._entries.append((asker, entry))
        self._turns.setdefault(asker, self._last_turn - 1)

    def discard(self, entry: E) -> None:
        """Leave the line; does nothing for one that is no longer in it."""
        left = [each for each in self._entries if each[1] is not entry]
        if len(left) < len(self._entries):
            self._keep(left)

    def take(self) -> list[E]:
        """Return whose turn it is and what to compute together with it, in the order they came; the line must not be empty."""
        at = self._whose_turn() if len(self._turns) > 1 else 0
        asker, first = self._entries[at]
        self._last_turn += 2
        self._turns[asker] = self._last_turn
        if not at and (len(self._entries) == 1 or not _may_merge(first.dispatch)) and len(self._turns) == 1:
            self._entries.popleft()
            if not self._entries:
                self._turns.clear()
            return [first]
        group: list[E] = []
        left: list[tuple[Hashable, E]] = []
        n_pairs = len(first.dispatch.expert_ids)
        may_merge = _may_merge(first.dispatch)
        for index, each in enumerate(self._entries):
            entry = each[1]
            n_more = len(entry.dispatch.expert_ids)
            if index == at:
                group.append(entry)
            elif may_merge and n_pairs + n_more <= MAX_MERGED_PAIRS and _fits(first.dispatch, entry.dispatch):
                group.append(entry)
                n_pairs += n_more
            else:
                left.append(each)
        self._keep(left)
        return group

    def _whose_turn(self) -> int:
        """Return the place of the oldest entry of the asker whose last turn is longest ago."""
        oldest: dict[Hashable, int] = {}
        for index, (asker, _) in enumerate(self._entries):
            oldest.setdefault(asker, index)
            if len(oldest) == len(self._turns):
                break
        return oldest[min(oldest, key=lambda asker: (self._turns[asker], oldest[asker]))]

    def _keep(self, left: list[tuple[Hashable, E]]) -> None:
        self._entries = deque(left)
        waiting = {asker for asker, _ in left}
        for asker in self._turns.keys() - waiting:
            del self._turns[asker]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Merged:
    """The arguments of one computation for several dispatches; `starts` [G] is where each one's rows begin."""

    rows: npt.NDArray[np.float32]
    row_counts: npt.NDArray[np.uint8]
    expert_ids: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float32]
    starts: list[int]

    def split(self, sums: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """Return each dispatch's partial sums, views of `sums` [N, D]."""
        return np.split(sums, self.starts[1:])


def merge(dispatches: Sequence[m.Dispatch]) -> Merged:
    """Return dispatches of one group, which have weights, as one: their rows one after another."""
    weights = [dispatch.weights for dispatch in dispatches if dispatch.weights is not None]
    assert len(weights) == len(dispatches), "raw rows are not merged"
    n_rows = [len(dispatch.rows) for dispatch in dispatches]
    return Merged(
        rows=np.concatenate([dispatch.rows for dispatch in dispatches]),
        row_counts=np.concatenate([dispatch.row_counts for dispatch in dispatches]),
        expert_ids=np.concatenate([dispatch.expert_ids for dispatch in dispatches]),
        weights=np.concatenate(weights),
        starts=[0, *np.cumsum(n_rows[:-1]).tolist()],
    )


def _may_merge(dispatch: m.Dispatch) -> bool:
    """Return whether a dispatch is whole in itself: one that is not would shift the pairs of those after it.

    The decoder refuses such a dispatch, and the executor checks the rest of what a stranger may have sent.
    """
    n_pairs = len(dispatch.expert_ids)
    return (
        dispatch.weights is not None
        and n_pairs < MAX_MERGED_PAIRS
        and len(dispatch.weights) == n_pairs == int(dispatch.row_counts.sum(dtype=np.int64))
        and len(dispatch.row_counts) == len(dispatch.rows)
    )


def _fits(first: m.Dispatch, other: m.Dispatch) -> bool:
    return first.layer == other.layer and first.rows.shape[1:] == other.rows.shape[1:] and _may_merge(other)
