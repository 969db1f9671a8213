"""Packs one layer's chosen (token, expert) pairs into one batch per destination.

Pure; no Python loop over rows or experts, because it runs for every layer of every step. Knows nothing of why an expert
has its owner (`placement`), of the network, or of what comes back (`combine`).

A row goes once to each destination, however many of its experts live there; every (token, slot) is in exactly one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarm.errors import LocalProtocolError
from swarm.ids import MAX_INDEX, NodeId

MAX_EXPERTS_USED = 255  # row counts and slots travel as u8
HERE = NodeId(bytes(32))  # the destination of what this process computes itself; nobody's key
# What the batches of one token share; read-only.
_FIRST_ROW = np.zeros(1, np.int64)
_COUNTS = np.arange(MAX_EXPERTS_USED + 1, dtype=np.uint8)
_FIRST_ROW.flags.writeable = _COUNTS.flags.writeable = False


# Not frozen, as all that is made for each layer is not: to make a frozen one of six fields takes 1.7 us instead of 0.7, and a
# layer makes twenty (docs/performance.md). Nobody changes one.
@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """What one destination computes for one layer: N rows, P (row, expert) pairs ordered by row, then by slot.

    Attributes:
        n_rows, n_pairs: N, and P: the assignments that the destination counts.
        rows: int64 [N], which tokens, ascending, each once; at least one.
        row_counts: uint8 [N], pairs of each row, at least 1; they add up to P.
        expert_ids: uint16 [P], global expert ids.
        slots: uint8 [P], which of the token's K choices a pair is.
        weights: float32 [P], the router's final weights.
    """

    destination: NodeId
    rows: npt.NDArray[np.int64]
    row_counts: npt.NDArray[np.uint8]
    expert_ids: npt.NDArray[np.uint16]
    slots: npt.NDArray[np.uint8]
    weights: npt.NDArray[np.float32]
    n_rows: int = field(init=False)
    n_pairs: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_pairs, self.n_rows = n_pairs, n_rows = len(self.expert_ids), len(self.rows)
        if n_rows == len(self.row_counts) == 1:  # a decoded token: the reductions below cost more than all else here
            is_whole, is_ordered = int(self.row_counts[0]) == n_pairs, n_pairs > 0
        else:
            is_whole = len(self.row_counts) == n_rows and int(self.row_counts.sum()) == n_pairs
            is_ordered = is_whole and n_pairs > 0 and int(self.row_counts.min()) > 0
            is_ordered = is_ordered and bool((self.rows[1:] > self.rows[:-1]).all())
        if not is_whole:
            raise LocalProtocolError(f"bad batch: row counts do not add up to {n_pairs} pairs of {n_rows} rows")
        if not is_ordered:
            raise LocalProtocolError("bad batch: expected ascending rows, each once and with at least one pair")
        if len(self.slots) != n_pairs or len(self.weights) != n_pairs:
            raise LocalProtocolError(
                f"bad batch: got {len(self.slots)} slots and {len(self.weights)} weights, expected {n_pairs} of each"
            )

    @property
    def pair_rows(self) -> npt.NDArray[np.int64]:
        """The token of each pair, int64 [P]."""
        return np.repeat(self.rows, self.row_counts)


def part_of(batch: Batch, is_in: npt.NDArray[np.bool_]) -> Batch:
    """Return the pairs of a batch for which `is_in` [P] holds, at least one, as a batch with the same destination."""
    at = np.repeat(np.arange(batch.n_rows), batch.row_counts)[is_in]  # which of the rows each kept pair belongs to
    kept, counts = np.unique(at, return_counts=True)
    return Batch(
        destination=batch.destination,
        rows=batch.rows[kept],
        row_counts=counts.astype(np.uint8),
        expert_ids=batch.expert_ids[is_in],
        slots=batch.slots[is_in],
        weights=batch.weights[is_in],
    )


@dataclass(frozen=True, slots=True)
class MissingExperts:
    """Chosen experts that nobody holds, ascending. The caller, who knows the layer, raises ExpertUnavailable."""

    experts: tuple[int, ...]


def plan_dispatch(
    topk_ids: npt.NDArray[np.int32],
    topk_weights: npt.NDArray[np.float32],
    owner_of: npt.NDArray[np.integer],
    destinations: Sequence[NodeId],
) -> list[Batch] | MissingExperts:
    """Return one batch per destination that has work, in the order of `destinations`; or what nobody holds.

    Args:
        topk_ids: int32 [T, K], any strides, the router's choice.
        topk_weights: float32 [T, K].
        owner_of: int [E], each expert's index into `destinations`, -1 for none; or int [T, K], each pair's, where the rows
            of an expert are spread over its replicas.

    Raises:
        LocalProtocolError: shapes that do not agree, or an id outside 0..E-1.
    """
    if topk_ids.ndim != 2 or topk_ids.shape != topk_weights.shape or not 1 <= topk_ids.shape[1] <= MAX_EXPERTS_USED:
        raise LocalProtocolError(
            f"bad choice of experts: got ids {topk_ids.shape} and weights {topk_weights.shape}, expected [T, K] both"
        )
    n_used = topk_ids.shape[1]
    n_expert = len(owner_of) if owner_of.ndim == 1 else MAX_INDEX + 1
    if n_expert > MAX_INDEX + 1:
        raise LocalProtocolError(f"too many experts: got {n_expert}, expected at most {MAX_INDEX + 1}")
    if topk_ids.size == 0:
        return []
    ids = topk_ids.ravel()  # [T*K]
    if int(ids.min()) < 0 or int(ids.max()) >= n_expert:
        raise LocalProtocolError(f"bad expert id: got {ids.min()} to {ids.max()}, expected 0 to {n_expert - 1}")
    if owner_of.ndim == 2 and owner_of.shape != topk_ids.shape:
        raise LocalProtocolError(f"bad owners of pairs: got {owner_of.shape}, expected {topk_ids.shape}")
    owners = owner_of[ids] if owner_of.ndim == 1 else owner_of.ravel()  # [T*K]
    if int(owners.min()) < 0:
        return MissingExperts(tuple(np.unique(ids[owners < 0]).tolist()))
    if int(owners.max()) >= len(destinations):
        raise LocalProtocolError(
            f"bad owner: got index {int(owners.max())}, expected one of {len(destinations)} destinations"
        )
    if len(topk_ids) == 1:
        return plan_row(ids.tolist(), topk_weights.ravel(), owners.tolist(), destinations)
    order = np.argsort(owners, kind="stable")  # [P] by owner; stable keeps (row, slot) order within one
    owners = owners[order]
    pair_rows, slots = np.divmod(order, n_used)
    is_start = np.ones(len(order), np.bool_)  # where the pairs of a row at an owner begin
    is_start[1:] = (pair_rows[1:] != pair_rows[:-1]) | (owners[1:] != owners[:-1])
    starts = np.flatnonzero(is_start)  # [N], of all destinations together, as all below
    rows = pair_rows[starts]
    row_counts = np.empty(len(starts), np.uint8)
    row_counts[:-1] = starts[1:] - starts[:-1]
    row_counts[-1] = len(order) - starts[-1]
    expert_ids = ids[order].astype(np.uint16)
    weights = topk_weights.astype(np.float32, copy=False).ravel()[order]
    slots = slots.astype(np.uint8)

    batches: list[Batch] = []
    row_at = pair_at = 0
    n_rows = np.bincount(owners[starts], minlength=len(destinations)).tolist()
    n_pairs = np.bincount(owners, minlength=len(destinations)).tolist()
    for destination, n_row, n_pair in zip(destinations, n_rows, n_pairs, strict=True):  # a few
        if n_pair:
            of_rows, of_pairs = slice(row_at, row_at + n_row), slice(pair_at, pair_at + n_pair)
            batches.append(
                Batch(
                    destination=destination,
                    rows=rows[of_rows],
                    row_counts=row_counts[of_rows],
                    expert_ids=expert_ids[of_pairs],
                    slots=slots[of_pairs],
                    weights=weights[of_pairs],
                )
            )
        row_at, pair_at = row_at + n_row, pair_at + n_pair
    return batches


def plan_row(
    ids: Sequence[int],
    weights: npt.NDArray[np.float32],
    owners: Sequence[int],
    destinations: Sequence[NodeId],
) -> list[Batch]:
    """Return the batches of one token, as `plan_dispatch` does: what decoding mostly asks for.

    Between two layers the caches go cold, and a few numbers in lists touch less code than in arrays: 15 us instead of the 75 of
    the general way (K=8, three owners, measured after 32 MB were read).

    Args:
        ids: [K], 0 to MAX_INDEX; weights: float32 [K]; owners: [K], of each pair the index of its destination.
    """
    order = sorted(range(len(ids)), key=owners.__getitem__)  # [K] slots by owner; stable
    slots = np.array(order, np.uint8)
    expert_ids = np.array([ids[slot] for slot in order], np.uint16)
    weights = weights.astype(np.float32, copy=False).take(slots)
    batches = []
    at = 0
    while at < len(order):
        owner = owners[order[at]]
        n_pairs = owners.count(owner)
        of_pairs = slice(at, at + n_pairs)
        batches.append(
            Batch(
                destination=destinations[owner],
                rows=_FIRST_ROW,
                row_counts=_COUNTS[n_pairs : n_pairs + 1],
                expert_ids=expert_ids[of_pairs],
                slots=slots[of_pairs],
                weights=weights[of_pairs],
            )
        )
        at += n_pairs
    return batches
