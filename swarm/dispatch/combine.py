"""Adds what returned for one layer into the experts' output.

Pure. The order of additions is fixed by the plan, never by arrival, so equal inputs give equal bits. Knows nothing of
deadlines or replicas: whoever calls has one answer for every batch, and an incomplete set is that caller's bug.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarm.dispatch.plan import Batch
from swarm.errors import LocalProtocolError

Rows = npt.NDArray[np.float32]


def combine_exact(
    n_tokens: int,
    n_expert_used: int,
    n_embd: int,
    parts: Sequence[tuple[Batch, Rows]],
    topk_weights: npt.NDArray[np.float32],
) -> Rows:
    """Return the experts' output, shape [T, D], float32, freshly allocated; the bits that llama.cpp computes.

    llama.cpp multiplies each expert's row by its weight and adds the products in the order of the router's choice, each
    step rounded to float32: y0*w0, then + y1*w1, and so on. The same is done here.

    Args:
        parts: each batch with its raw rows, float32 [P, D], one per pair, in the batch's order.
        topk_weights: float32 [T, K], the router's final weights.

    Raises:
        LocalProtocolError: a (token, slot) with no row or with two, or shapes that do not agree.
    """
    if topk_weights.shape != (n_tokens, n_expert_used) or topk_weights.dtype != np.float32:
        raise LocalProtocolError(
            f"bad weights: got {topk_weights.dtype} {topk_weights.shape}, expected float32 {(n_tokens, n_expert_used)}"
        )
    _check_cover(n_tokens, n_expert_used, [batch for batch, _ in parts])
    raw = np.empty((n_expert_used, n_tokens, n_embd), dtype=np.float32)  # [K, T, D]: each addition reads in one run
    for batch, rows in parts:
        _check_shape(rows, (batch.n_pairs, n_embd))
        raw[batch.slots, batch.pair_rows] = rows
    raw *= topk_weights.T[:, :, np.newaxis]  # a rounding of its own: a fused multiply-add would give other bits
    out: Rows = raw[0].copy()  # [T, D]
    for slot in range(1, n_expert_used):
        out += raw[slot]
    return out


def combine_partial(n_tokens: int, n_expert_used: int, n_embd: int, parts: Sequence[tuple[Batch, Rows]]) -> Rows:
    """Return the experts' output, shape [T, D], float32, freshly allocated: the partial sums added by destination.

    Adds in ascending node id (then by first pair, should one node have had two batches), not in arrival order.

    Args:
        parts: each batch with its weighted partial sums, float32 [N, D], one per row.

    Raises:
        LocalProtocolError: a (token, slot) in no batch or in two, or shapes that do not agree.
    """
    _check_cover(n_tokens, n_expert_used, [batch for batch, _ in parts])
    out = np.zeros((n_tokens, n_embd), dtype=np.float32)  # [T, D]
    for batch, rows in sorted(parts, key=_fixed_order):
        _check_shape(rows, (batch.n_rows, n_embd))
        if batch.n_rows == n_tokens:
            out += rows
        else:
            out[batch.rows] += rows  # rows of a batch are distinct
    return out


def _fixed_order(part: tuple[Batch, Rows]) -> tuple[bytes, np.integer, np.integer]:
    batch = part[0]
    return batch.destination.raw, batch.rows[0], batch.slots[0]  # no two batches share a (row, slot)


def _check_shape(rows: Rows, expected: tuple[int, int]) -> None:
    if rows.shape != expected or rows.dtype != np.float32:
        raise LocalProtocolError(f"bad rows of a batch: got {rows.dtype} {rows.shape}, expected float32 {expected}")


def _check_cover(n_tokens: int, n_expert_used: int, batches: Sequence[Batch]) -> None:
    """Raise LocalProtocolError unless the batches hold every (token, slot) exactly once."""
    if n_tokens == 1:  # a decoded token: a few pairs, for which the reductions below cost most of a combine
        slots = [batch.slots.tobytes() for batch in batches if batch.n_rows == 1 and not batch.rows[0]]
        if len(slots) == len(batches) and sorted(b"".join(slots)) == list(range(n_expert_used)):
            return
    pairs = np.concatenate(
        [np.empty(0, np.int64), *(batch.pair_rows * n_expert_used + batch.slots for batch in batches)]
    )
    n_pairs = n_tokens * n_expert_used
    for batch in batches:
        if batch.rows[0] < 0 or batch.rows[-1] >= n_tokens or int(batch.slots.max()) >= n_expert_used:
            raise LocalProtocolError(f"bad batch: a row or slot lies outside {n_tokens} tokens x {n_expert_used} slots")
    times = np.bincount(pairs, minlength=n_pairs)  # [T*K]
    if len(pairs) == n_pairs and (times == 1).all():
        return
    missing, doubled = np.flatnonzero(times == 0), np.flatnonzero(times > 1)
    first = int(missing[0]) if len(missing) else int(doubled[0])
    raise LocalProtocolError(
        f"answers do not cover the layer: {len(missing)} pairs missing, {len(doubled)} twice, "
        f"the first is token {first // n_expert_used}, slot {first % n_expert_used}"
    )
