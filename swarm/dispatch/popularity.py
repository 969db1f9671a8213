"""How often each expert was asked for lately: the backbone's own counts, fading with time. Pure; `now` is given.

Counts of (token, expert) pairs, nothing of any text. What is older than HALF_LIFE_S counts half, so that a model whose use
changes is known anew within an hour or so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HALF_LIFE_S = (
    1800.0  # guessed: long enough for a few thousand tokens of a slow swarm, short enough for the hours of a day
)


class Popularity:
    """One model's counts. Mutable, one owner."""

    def __init__(self, layers: Sequence[int], n_expert: int, *, now: float) -> None:
        self.layers = tuple(sorted(set(layers)))
        self._row_of = {layer: row for row, layer in enumerate(self.layers)}
        self._n_expert = n_expert
        self._counts = np.zeros((len(self.layers), n_expert))  # [L, E]
        self._n_tokens = np.zeros(len(self.layers))  # [L]
        self._weight_s = 0.0  # the seconds that went by, faded like the counts
        self._faded_at = now

    def add(self, layer: int, topk_ids: npt.NDArray[np.integer]) -> None:
        """Count the router's choice for some tokens, [T, K]; of a layer without experts nothing."""
        row = self._row_of.get(layer)
        if row is None:
            return
        self._counts[row] += np.bincount(topk_ids.ravel(), minlength=self._n_expert)
        self._n_tokens[row] += len(topk_ids)

    def fade(self, now: float) -> None:
        """Let what is known grow older, up to `now`."""
        past_s = max(0.0, now - self._faded_at)
        factor = 0.5 ** (past_s / HALF_LIFE_S)
        mean_life_s = HALF_LIFE_S / math.log(2)
        self._counts *= factor
        self._n_tokens *= factor
        self._weight_s = mean_life_s + (self._weight_s - mean_life_s) * factor
        self._faded_at = now

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """Pairs of each expert, [L, E], L in the order of `layers`; a copy."""
        return self._counts.copy()

    @property
    def n_tokens(self) -> float:
        """Tokens that the counts are of, by the layer that saw most (a failed layer ends a token early)."""
        return float(self._n_tokens.max(initial=0.0))

    @property
    def window_s(self) -> float:
        """The seconds in which that many tokens came, so that `n_tokens / window_s` is the present rate."""
        return self._weight_s
