"""Which sequence and which position each row of a dispatch belongs to.

Pure. A dispatch knows rows, not texts; whoever must know what a peer's answer went into (audits, placement that keeps a
sequence on its replicas) is told by this. Knows nothing of tokens or of llama.cpp's own sequence numbers, which are used again.

llama.cpp cuts a step's N rows, in order, into graphs of at most `n_ubatch` rows. Each layer of a graph has all of its rows, but
the last one, which has those alone whose logits are asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from swarm.errors import LocalProtocolError

Indices = npt.NDArray[np.int64]

next_sequence: Callable[[], int] = itertools.count(1).__next__
"""Returns an id for a sequence, unique in this process, from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """Where the rows of one dispatch come from.

    Attributes:
        sequences: int64 [T], ids of `next_sequence`.
        positions: int64 [T], each row's place in its sequence, 0-based.
    """

    sequences: Indices
    positions: Indices

    def __post_init__(self) -> None:
        if self.sequences.shape != self.positions.shape or self.sequences.ndim != 1:
            raise LocalProtocolError(
                f"bad origin: got {self.sequences.shape} sequences and {self.positions.shape} positions, expected [T] both"
            )

    def __len__(self) -> int:
        return len(self.sequences)

    def of(self, rows: Indices) -> Origin:
        """Return the origin of some of the rows (indices or a mask)."""
        return Origin(sequences=self.sequences[rows], positions=self.positions[rows])

    def firsts(self) -> dict[int, int]:
        """Return sequence -> its first position among these rows."""
        if len(self.sequences) == 1:
            return {int(self.sequences[0]): int(self.positions[0])}
        firsts: dict[int, int] = {}
        for sequence in np.unique(self.sequences).tolist():
            firsts[sequence] = int(self.positions[self.sequences == sequence].min())
        return firsts


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginPart:
    """The rows of one sequence in a step, at consecutive positions.

    Attributes:
        logits: which of them get a row of logits.
    """

    sequence: int
    first_position: int
    n_rows: int
    logits: Literal["all", "last", "none"]


class StepOrigins:
    """The origins of one step's dispatches: asked once for each dispatch, in the order in which the graphs run."""

    def __init__(self, parts: Sequence[OriginPart], *, n_ubatch: int) -> None:
        """`parts`: in the order of the step's rows."""
        counts = [part.n_rows for part in parts]
        self._all = Origin(
            sequences=np.repeat(np.array([part.sequence for part in parts], np.int64), counts),
            positions=np.concatenate(
                [np.empty(0, np.int64), *(np.arange(part.n_rows) + part.first_position for part in parts)]
            ),
        )  # [N]
        self._has_logits = np.zeros(len(self._all), np.bool_)  # [N]
        end = 0
        for part in parts:
            end += part.n_rows
            if part.n_rows and part.logits != "none":
                self._has_logits[end - part.n_rows if part.logits == "all" else end - 1 : end] = True
        self._n_ubatch = n_ubatch
        self._graph = 0  # the one that runs now
        self._last_layer = -1

    def of(self, layer: int, n_rows: int) -> Origin | None:
        """Return the origin of the next dispatch, of `n_rows` rows; None if no graph of this step has so many there."""
        if layer <= self._last_layer:
            self._graph += 1  # layers ascend within a graph
        self._last_layer = layer
        n_all = len(self._all)
        if n_rows == n_all <= self._n_ubatch:
            return self._all
        for graph in range(self._graph, -(-n_all // self._n_ubatch)):  # of a graph without rows there, nobody asks
            rows = slice(graph * self._n_ubatch, (graph + 1) * self._n_ubatch)
            has_logits = self._has_logits[rows]
            is_whole = n_rows == len(has_logits)
            if is_whole or n_rows == int(has_logits.sum()):
                self._graph = graph
                found = Origin(sequences=self._all.sequences[rows], positions=self._all.positions[rows])
                return found if is_whole else found.of(has_logits.nonzero()[0])
        return None
