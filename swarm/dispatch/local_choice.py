"""Which experts a backbone keeps in its own memory. Pure; E experts, K of them used for a token, L MoE layers.

    popularity [L, E], sizes, budget -> the experts to keep

1. Each layer gets its K most popular ones, expert by expert through all layers: with fewer a layer cannot be drafted with
   local experts alone. What does not fit any more is left out.
2. The rest of the budget goes to the most popular of all that are left, whatever their layer, by their share of the layer's
   pairs for each byte: that keeps most rows off the network.

Experts that are kept already count KEEP_BONUS times, so that nothing moves for noise; and the whole set moves only for a gain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarm.ids import ExpertSet

KEEP_BONUS = 1.25  # guessed: above the scatter of the counts of some hundred tokens
MOVE_GAIN = 0.01  # of the pairs of all layers that a new set must keep off the network beyond the old one; guessed


def choose_local(
    counts: npt.NDArray[np.float64],
    layers: Sequence[int],
    block_bytes: Sequence[int],
    budget_bytes: int,
    n_least: int,
    *,
    kept: ExpertSet | None = None,
) -> ExpertSet:
    """Return the experts to keep; perhaps none. Equally popular ones are taken in the order of (expert, layer).

    Args:
        counts: [L, E], pairs of each expert lately.
        block_bytes: of an expert of each layer, [L].
        n_least: how many each layer gets first: K.
        kept: what is kept now.
    """
    shares = _shares(counts)  # [L, E]
    if kept is not None:
        for row, layer in enumerate(layers):
            shares[row, sorted(kept.by_layer.get(layer, frozenset()))] *= KEEP_BONUS
    n_layers, n_expert = shares.shape
    sizes = np.asarray(block_bytes, np.float64)  # [L]
    rank = np.empty(shares.shape, np.int64)  # of each expert in its layer, 0 for the most popular
    order = np.argsort(-shares, axis=1, kind="stable")
    np.put_along_axis(rank, order, np.arange(n_expert)[np.newaxis], axis=1)
    is_first = rank < n_least
    worth = shares / sizes[:, np.newaxis]
    rows, columns = np.divmod(np.arange(n_layers * n_expert), n_expert)
    by = np.lexsort((rows, columns, -worth.ravel(), np.where(is_first, rank, n_least).ravel()))
    fits = np.cumsum(sizes[rows[by]]) <= budget_bytes
    chosen = np.zeros(n_layers * n_expert, np.bool_)
    chosen[by[fits]] = True
    found = chosen.reshape(shares.shape)
    return ExpertSet(
        {layer: frozenset(np.flatnonzero(found[at]).tolist()) for at, layer in enumerate(layers) if found[at].any()}
    )


def kept_share(counts: npt.NDArray[np.float64], layers: Sequence[int], experts: ExpertSet) -> float:
    """Return the share of all pairs, layers counting alike, that these experts would keep off the network."""
    shares = _shares(counts)
    kept = sum(float(shares[row, sorted(experts.by_layer.get(layer, ()))].sum()) for row, layer in enumerate(layers))
    return kept / len(layers)


def is_change_worthwhile(
    counts: npt.NDArray[np.float64], layers: Sequence[int], kept: ExpertSet, better: ExpertSet
) -> bool:
    """Return whether to load `better` in place of `kept`."""
    if better == kept:
        return False
    return kept_share(counts, layers, better) >= kept_share(counts, layers, kept) + MOVE_GAIN


def _shares(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return each expert's share of its layer's pairs, [L, E]; even where a layer has none."""
    totals = counts.sum(axis=1, keepdims=True)
    shares: npt.NDArray[np.float64] = np.where(totals > 0, counts / np.maximum(totals, 1e-9), 1.0 / counts.shape[1])
    return shares
