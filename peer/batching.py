"""The line of dispatches at a peer: in the order they came, those that wait for one layer merged into one computation.

Pure: knows no thread, loop or clock.

    add(entry, asker) ... -> take() -> a group: an entry, and later ones of its layer

Askers (backbones) share by work, not by turns: whoever has had the fewest pairs goes next, so that one that sends whole prompts
does not get a hundred times what one gets that decodes (start-time fair queueing: Goyal, Vin, Cheng, 1996). An asker that comes
back is not credited for the time it was away: it starts level with who was served last. Each one's dispatches are taken in
their order. A light asker so waits for one group of the others at most, and groups can be kept small where several ask. No layer
starves: an asker's oldest dispatch is of the group of its turn, and what is drawn forward to a group is bounded, and charged to
whose it is. No asker starves: after MAX_PASSED_OVER groups it is its turn, whatever the others' names are. Raw rows (the form
`exact`) are never merged: they promise the bits of a computation by itself, which only exact kernels keep; partial sums promise
a tolerance.
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
# What a dispatch costs beside its pairs, in pairs: a call takes about as long as one pair.
OVERHEAD_PAIRS = 1
# Groups that may be taken while somebody waits for a turn. Guessed: above what a prompt's longest batch (512 rows of 8) costs
# beside merged groups of others, and a fraction of a second.
MAX_PASSED_OVER = 64
# So many groups after one of another asker the line counts as shared. Guessed: a light asker's next layer, at slow computing.
N_SHARED = 16
MAX_REMEMBERED = 64  # askers who do not wait but had more than others; beyond, all of these are forgiven. Guessed


class Entry(Protocol):
    """Who waits in line."""

    @property
    def dispatch(self) -> m.Dispatch:
        """What it wants computed."""
        ...


E = TypeVar("E", bound=Entry)


@dataclass(slots=True, eq=False)
class _Asker:
    """Somebody who waits, or was served lately.

    Attributes:
        start: the pairs it has had, in the line's own count.
        turn_at: the number of groups taken when it had its last turn, or began to wait.
    """

    start: int
    turn_at: int
    n_waiting: int = 0


class Line(Generic[E]):
    """Who waits, oldest first. Its user bounds it."""

    def __init__(self) -> None:
        self._entries: deque[tuple[Hashable, E]] = deque()  # with their askers
        self._askers: dict[Hashable, _Asker] = {}  # who wait, and those who have had more than the count is at
        self._n_askers = 0  # who wait
        self._count = 0  # where whoever was served last began
        self._n_taken = 0  # groups
        self._latest: Hashable = None  # whose turn was last
        self._changed_at = -N_SHARED  # the number of groups taken when that was somebody else than before

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: E, asker: Hashable = None) -> None:
        """Take a place at the end."""
        self._entries.append((asker, entry))
        known = self._askers.get(asker)
        if known is None:
            known = self._askers[asker] = _Asker(self._count, self._n_taken)
        if not known.n_waiting:
            self._n_askers += 1
            known.start = max(known.start, self._count)
            known.turn_at = self._n_taken
        known.n_waiting += 1

    def discard(self, entry: E) -> None:
        """Leave the line; does nothing for one that is no longer in it."""
        for index, (asker, each) in enumerate(self._entries):
            if each is entry:
                del self._entries[index]
                self._left(asker)
                return

    @property
    def is_shared(self) -> bool:
        """Whether several ask, now or lately."""
        return self._n_askers > 1 or self._n_taken < self._changed_at + N_SHARED

    def take(self, max_pairs: int | None = None) -> list[E]:
        """Return whose turn it is and what to compute together with it, in the order they came; the line must not be empty.

        Args:
            max_pairs: of a group of several dispatches; None: MAX_MERGED_PAIRS.
        """
        max_pairs = MAX_MERGED_PAIRS if max_pairs is None else max_pairs
        at = self._whose_turn() if self._n_askers > 1 else 0
        asker, first = self._entries[at]
        turn = self._askers[asker]
        self._count = max(self._count, turn.start)
        self._n_taken += 1
        turn.turn_at = self._n_taken
        if asker != self._latest:
            if self._latest is not None:
                self._changed_at = self._n_taken
            self._latest = asker
        if not at and (len(self._entries) == 1 or not _may_merge(first.dispatch)):
            self._entries.popleft()
            self._charge(asker, first)
            return [first]
        group: list[E] = []
        left: deque[tuple[Hashable, E]] = deque()
        n_pairs = len(first.dispatch.expert_ids)
        may_merge = _may_merge(first.dispatch)
        for index, each in enumerate(self._entries):
            entry = each[1]
            n_more = len(entry.dispatch.expert_ids)
            if index != at:
                if not may_merge or n_pairs + n_more > max_pairs or not _fits(first.dispatch, entry.dispatch):
                    left.append(each)
                    continue
                n_pairs += n_more
            group.append(entry)
            self._charge(each[0], entry)
        self._entries = left
        return group

    def _whose_turn(self) -> int:
        """Return the place of the oldest entry of the asker that has had least, or has been passed over for too long."""
        oldest: dict[Hashable, int] = {}
        for index, (asker, _) in enumerate(self._entries):
            oldest.setdefault(asker, index)
            if len(oldest) == self._n_askers:
                break
        askers, latest = self._askers, self._n_taken - MAX_PASSED_OVER
        return oldest[min(oldest, key=lambda each: (askers[each].turn_at > latest, askers[each].start, oldest[each]))]

    def _charge(self, asker: Hashable, entry: E) -> None:
        self._askers[asker].start += len(entry.dispatch.expert_ids) + OVERHEAD_PAIRS
        self._left(asker)

    def _left(self, asker: Hashable) -> None:
        """One entry of an asker waits no more."""
        self._askers[asker].n_waiting -= 1
        if self._askers[asker].n_waiting:
            return
        self._n_askers -= 1
        are_many = len(self._askers) - self._n_askers > MAX_REMEMBERED
        gone = [
            name
            for name, each in self._askers.items()
            if not each.n_waiting and (are_many or each.start <= self._count)
        ]
        for name in gone:
            del self._askers[name]


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
