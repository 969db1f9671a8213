"""How often each expert was asked for lately: the backbone's own counts, fading with time. Pure; `now` is given.

Counts of (token, expert) pairs, nothing of any text. What is older than HALF_LIFE_S counts half, so that a model whose use
changes is known anew within an hour or so. `to_bytes` and `restore` carry it over a restart; while the backbone is away it does
not grow older.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

HALF_LIFE_S = (
    1800.0  # guessed: long enough for a few thousand tokens of a slow swarm, short enough for the hours of a day
)
# Pairs of single tokens that are kept as they are until somebody asks, or so many of one layer are there: a token costs 1 us
# then, and 5 where numpy counts each by itself (measured, hot; 16 cold). Guessed: 32 tokens of 8.
FEW_PAIRS = 256


class Popularity:
    """One model's counts. Mutable, one owner."""

    def __init__(self, layers: Sequence[int], n_expert: int, *, now: float) -> None:
        self.layers = tuple(sorted(set(layers)))
        self._row_of = {layer: row for row, layer in enumerate(self.layers)}
        self._n_expert = n_expert
        self._counts = np.zeros((len(self.layers), n_expert))  # [L, E]
        self._mass = np.zeros((len(self.layers), n_expert))  # [L, E]
        self._n_tokens = np.zeros(len(self.layers))  # [L]
        self._few: dict[int, tuple[list[int], list[float]]] = {}  # row -> ids and weights that are not counted yet
        self._weight_s = 0.0  # the seconds that went by, faded like the counts
        self._faded_at = now

    def add(
        self, layer: int, topk_ids: npt.NDArray[np.integer], topk_weights: npt.NDArray[np.float32] | None = None
    ) -> None:
        """Count the router's choice for some tokens, ids and weights [T, K]; of a layer without experts nothing."""
        row = self._row_of.get(layer)
        if row is None:
            return
        self._n_tokens[row] += len(topk_ids)
        if len(topk_ids) == 1 and topk_weights is not None:
            ids, weights = self._few.setdefault(row, ([], []))
            ids += topk_ids[0].tolist()
            weights += topk_weights[0].tolist()
            if len(ids) >= FEW_PAIRS:
                self._count_few()
            return
        self._count(row, topk_ids.ravel(), None if topk_weights is None else topk_weights.ravel())

    def _count(self, row: int, ids: npt.NDArray[np.integer], weights: npt.NDArray[np.floating] | None) -> None:
        counts = np.bincount(ids, minlength=self._n_expert)
        self._counts[row] += counts
        if weights is None:
            self._mass[row] += counts
        else:
            self._mass[row] += np.bincount(ids, weights=np.abs(weights), minlength=self._n_expert)

    def _count_few(self) -> None:
        few, self._few = self._few, {}
        for row, (ids, weights) in few.items():
            self._count(row, np.array(ids), np.array(weights))

    def fade(self, now: float) -> None:
        """Let what is known grow older, up to `now`."""
        self._count_few()
        past_s = max(0.0, now - self._faded_at)
        factor = 0.5 ** (past_s / HALF_LIFE_S)
        mean_life_s = HALF_LIFE_S / math.log(2)
        self._counts *= factor
        self._mass *= factor
        self._n_tokens *= factor
        self._weight_s = mean_life_s + (self._weight_s - mean_life_s) * factor
        self._faded_at = now

    def to_bytes(self) -> bytes:
        """Return the counts in the form that `restore` takes: JSON."""
        self._count_few()
        known = {
            "layers": self.layers,
            "counts": np.round(self._counts, 3).tolist(),
            "mass": np.round(self._mass, 4).tolist(),
            "n_tokens": np.round(self._n_tokens, 3).tolist(),
            "window_s": round(self._weight_s, 3),
        }
        return json.dumps(known, separators=(",", ":")).encode()

    def restore(self, data: bytes) -> bool:
        """Add what was kept by `to_bytes`; return False, and change nothing, if it is damaged or of another shape."""
        try:
            known: dict[str, Any] = json.loads(data)
            counts = np.asarray(known["counts"], np.float64)
            mass = np.asarray(known["mass"], np.float64)
            n_tokens = np.asarray(known["n_tokens"], np.float64)
            window_s = float(known["window_s"])
            layers = tuple(known["layers"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        if layers != self.layers or any(each.shape != self._counts.shape for each in (counts, mass)):
            return False
        if n_tokens.shape != self._n_tokens.shape:
            return False
        found = (counts, mass, n_tokens, np.float64(window_s))
        if not all(np.isfinite(each).all() and np.min(each) >= 0 for each in found):
            return False
        self._counts += counts
        self._mass += mass
        self._n_tokens += n_tokens
        self._weight_s += window_s
        return True

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """Pairs of each expert, [L, E], L in the order of `layers`; a copy."""
        self._count_few()
        return self._counts.copy()

    @property
    def mass(self) -> npt.NDArray[np.float64]:
        """The router's weights of each expert, summed, [L, E]: how much of the layers' output it is; a copy."""
        self._count_few()
        return self._mass.copy()

    @property
    def n_tokens(self) -> float:
        """Tokens that the counts are of, by the layer that saw most (a failed layer ends a token early)."""
        return float(self._n_tokens.max(initial=0.0))

    @property
    def window_s(self) -> float:
        """The seconds in which that many tokens came, so that `n_tokens / window_s` is the present rate."""
        return self._weight_s
