"""How many rows of prompts the lanes of one backbone have under way together. Pure.

    lane 0  |512 rows          |352        |352        |512 ...
    lane 1       |192   |352        |352   |
                  ^ what is left ^ an equal share          ^ alone again

A row under way takes memory: llama.cpp's buffers, its messages and its answers (docs/memory.md). One lane alone takes whole
batches. While others read prompts as well each takes an equal share of the rows, and until they have made room, what they leave:
nobody waits, so there is nobody to wake, to starve or to give up. Rows of requests that stream are few and are not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from swarm.wire.rows import Wire, WireForm

# Rows that a lane may always take; guessed, as `scheduler.MIN_CHUNK`: with four lanes 64 more than the budget, 6 MB in f32.
LEAST_ROWS = 32
# Rows of all lanes, in batches of one. Measured with batches of 512 rows of D=2048 and two lanes: 47 MB for a batch more in f32
# both ways, 33 in q8/f16. There are 40, of which texts for the prefix cache and chance take half (docs/memory.md).
WIDE_SHARE, NARROW_SHARE, EXACT_SHARE = 1.375, 2.0, 1.0
NARROW_BYTES = 4  # out and back, of a value: f16 both ways
_VALUE_BYTES = {WireForm.F32: 4, WireForm.BF16: 2, WireForm.F16: 2, WireForm.Q8: 1, WireForm.FP8: 1}


def most_rows(wire: Wire, n_batch: int) -> int:
    """Return how many rows all lanes may have under way, with batches of up to `n_batch`, by the forms in which rows travel."""
    if WireForm.EXACT in wire:  # K rows come back for each
        return int(EXACT_SHARE * n_batch)
    is_narrow = _VALUE_BYTES[wire.out] + _VALUE_BYTES[wire.back] <= NARROW_BYTES
    return int((NARROW_SHARE if is_narrow else WIDE_SHARE) * n_batch)


class _Rows(NamedTuple):
    """What a lane's step has under way.

    Attributes:
        wants_more: its prompts were not over with these.
    """

    n_rows: int
    wants_more: bool


class RowBudget:
    """The rows of prompts that lanes have under way; a step takes them as it begins, and gives them back."""

    def __init__(self, n_rows: int | None = None) -> None:
        """`n_rows`: of all lanes; None: as many as they like."""
        self._n_rows = n_rows
        self._under_way: dict[int, _Rows] = {}

    def room(self, lane: int) -> int | None:
        """Return how many rows a lane's next step may take; None: as many as it likes."""
        others = [rows for each, rows in self._under_way.items() if each != lane]
        if self._n_rows is None or not others:
            return self._n_rows
        n_hungry = sum(rows.wants_more for rows in others)
        n_fed = sum(rows.n_rows for rows in others if not rows.wants_more)
        n_free = self._n_rows - sum(rows.n_rows for rows in others)
        return max(min((self._n_rows - n_fed) // (n_hungry + 1), n_free), LEAST_ROWS)

    def began(self, lane: int, n_rows: int, *, wants_more: bool) -> None:
        """Take the rows of a lane's step; none, if it reads no prompt."""
        if n_rows:
            self._under_way[lane] = _Rows(n_rows, wants_more)

    def ended(self, lane: int) -> None:
        """Give them back."""
        self._under_way.pop(lane, None)
