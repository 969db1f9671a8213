"""Which experts a pool is short of, and which of them the next volunteer is to hold. Pure; E experts, L MoE layers.

    histograms of the backbones -> demand [L, E]      1: chosen as often as the layer's mean
    announcements of the peers  -> capacity [L, E]    1: one peer that holds the whole model
    demand / capacity           -> scarcity [L, E]    1: an average expert that is served by such a peer

A peer's capacity is spread evenly over the blocks that it holds; what machines differ in is not announced. A block that nobody
holds is scarcer than any that somebody holds. Histograms and announcements are untrusted: both can be invented, so what is
chosen by them costs a volunteer no more than its budget.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from swarm.ids import ExpertSet, NodeId
from swarm.registry.records import ExpertAnnouncement, RoutingHistogram

# Share of the demand that counts as even, whatever backbones say: what was never chosen may be tomorrow, and a forged
# histogram can move only the rest. Guessed.
EVEN_SHARE = 0.2
NO_CAPACITY = 1e-6  # stands for none, so that nothing that somebody holds is as scarce as what nobody does
# A rate that backbones which tell none, or which stand still, add up to; guessed: far below one running conversation.
IDLE_TOKENS_PER_S = 1e-3
STEPS_PER_OCTAVE = 2  # scarcities are compared in steps of the square root of two, as fine as histograms are
# Of the experts' text in an announcement, which as a whole may have 16 KB (`records.MAX_SIGNED_BYTES`).
MAX_TEXT_BYTES = 12_000
# A peer moves only to a slice that is this much scarcer than its own; guessed: moving costs a download, and two peers that see
# the same must not change places for ever.
MOVE_GAIN = 2.0
MOVE_PAUSE_S = 600.0  # between two moves of a peer, and between its start and its first; guessed


def demand(layers: Sequence[int], n_expert: int, histograms: Iterable[RoutingHistogram]) -> npt.NDArray[np.float64]:
    """Return how often each expert is wanted, [L, E], its layer's mean being 1, by backbones' tokens a second.

    What does not fit the model is left out; without any histogram, everything is wanted alike.
    """
    row_of = {layer: row for row, layer in enumerate(layers)}
    total = np.full((len(layers), n_expert), IDLE_TOKENS_PER_S)
    for histogram in histograms:
        rate = histogram.n_tokens / histogram.window_s
        for layer, levels in histogram.loads:
            row = row_of.get(layer)
            if row is not None and len(levels) == n_expert:
                total[row] += rate * n_expert * np.asarray(histogram.shares(layer))
    total /= total.mean(axis=1, keepdims=True)
    return EVEN_SHARE + (1.0 - EVEN_SHARE) * total  # [L, E]


def capacity(
    layers: Sequence[int], n_expert: int, announcements: Iterable[ExpertAnnouncement]
) -> npt.NDArray[np.float64]:
    """Return what live peers, loading ones too, can do for each block, [L, E]; 1 is one peer that holds all of them."""
    row_of = {layer: row for row, layer in enumerate(layers)}
    total = np.zeros((len(layers), n_expert))
    for record in announcements:
        held = mask(row_of, n_expert, record.experts)
        n_held = int(held.sum())
        if n_held:
            total += held * (held.size / n_held)
    return total


def scarcity(
    layers: Sequence[int],
    n_expert: int,
    histograms: Iterable[RoutingHistogram],
    announcements: Iterable[ExpertAnnouncement],
) -> npt.NDArray[np.float64]:
    """Return demand over capacity, [L, E]."""
    there = capacity(layers, n_expert, announcements)
    wanted: npt.NDArray[np.float64] = demand(layers, n_expert, histograms) / np.maximum(there, NO_CAPACITY)
    return wanted


def mask(row_of: Mapping[int, int], n_expert: int, experts: ExpertSet) -> npt.NDArray[np.bool_]:
    """Return which blocks a set has, [L, E]; what the model does not have is left out."""
    held = np.zeros((len(row_of), n_expert), dtype=np.bool_)
    for layer, chosen in experts.by_layer.items():
        if layer in row_of:
            held[row_of[layer], [expert for expert in chosen if expert < n_expert]] = True
    return held


def choose_slice(
    scarce: npt.NDArray[np.float64],
    layers: Sequence[int],
    block_bytes: Sequence[int],
    budget_bytes: int,
    node: NodeId,
    *,
    among: ExpertSet | None = None,
) -> ExpertSet:
    """Return the scarcest blocks that fit the budget; empty if not even one does.

    Equally scarce ones are taken expert by expert through all layers, from an expert on that the node's id decides: so two
    volunteers in an empty pool mostly begin at different ones, and slices are ranges where nothing speaks against it.

    Args:
        scarce: [L, E].
        block_bytes: of each layer, [L].
        among: what may be chosen; None: everything.
    """
    n_expert = scarce.shape[1]
    row_of = {layer: row for row, layer in enumerate(layers)}
    allowed = np.ones(scarce.shape, dtype=np.bool_) if among is None else mask(row_of, n_expert, among)
    turn = (np.arange(n_expert) - first_expert(node, n_expert)) % n_expert  # [E]
    steps = np.round(np.log2(scarce) * STEPS_PER_OCTAVE)  # [L, E]
    chosen = _take(steps, turn, allowed, np.asarray(block_bytes), budget_bytes)
    experts = _expert_set(chosen, layers)
    if sum(len(part) + 3 for group in experts.grouped() for part in group) <= MAX_TEXT_BYTES:
        return experts
    # Too ragged to be announced: whole experts, the same in every layer.
    columns = np.where(allowed, scarce, 0.0).sum(axis=0)  # [E]
    columns = np.round(np.log2(np.maximum(columns, NO_CAPACITY)) * STEPS_PER_OCTAVE)
    steps = np.broadcast_to(columns, scarce.shape)
    return _expert_set(_take(steps, turn, allowed, np.asarray(block_bytes), budget_bytes), layers)


def first_expert(node: NodeId, n_expert: int) -> int:
    """Return where a node begins among equals."""
    return int.from_bytes(hashlib.sha256(b"swarm first expert\0" + node.raw).digest()[:8]) % n_expert


def is_move_worthwhile(
    scarce_without: npt.NDArray[np.float64],
    layers: Sequence[int],
    held: ExpertSet,
    better: ExpertSet,
    *,
    since_s: float,
) -> bool:
    """Return whether a peer is to give up `held` for `better`.

    Args:
        scarce_without: [L, E], of the pool without this peer: so a block that it alone holds is as scarce as can be.
        since_s: since its start or its last move.
    """
    if since_s < MOVE_PAUSE_S or held == better or not better.by_layer:
        return False
    row_of = {layer: row for row, layer in enumerate(layers)}
    n_expert = scarce_without.shape[1]
    now_worth = float(scarce_without[mask(row_of, n_expert, held)].sum())
    then_worth = float(scarce_without[mask(row_of, n_expert, better)].sum())
    return then_worth >= MOVE_GAIN * now_worth


def rivals(
    seen: Collection[ExpertAnnouncement], listed: Iterable[ExpertAnnouncement], node: NodeId
) -> list[ExpertAnnouncement]:
    """Return the others that a joining `node` has to reckon with, when it looks again after its claim.

    Of two who have claimed at the same moment, the one with the higher id gives way: it alone counts the other.

    Args:
        seen: what it reckoned with when it chose.
        listed: what is announced now.
    """
    known = {record.node for record in seen}
    return [
        record
        for record in listed
        if record.node != node and (record.node in known or not record.is_loading or record.node < node)
    ]


def _take(
    steps: npt.NDArray[np.float64],
    turn: npt.NDArray[np.int64],
    allowed: npt.NDArray[np.bool_],
    block_bytes: npt.NDArray[np.int64],
    budget_bytes: int,
) -> npt.NDArray[np.bool_]:
    """Return which blocks are taken, [L, E]: by steps, highest first, then by the experts' turn, then by layer."""
    n_layers, n_expert = steps.shape
    row, column = np.divmod(np.arange(n_layers * n_expert), n_expert)
    order = np.lexsort((row, turn[column], -steps.ravel()))
    order = order[allowed.ravel()[order]]
    fits = np.cumsum(block_bytes[row[order]]) <= budget_bytes  # layers differ little in size: the first misfit ends it
    chosen = np.zeros(n_layers * n_expert, dtype=np.bool_)
    chosen[order[fits]] = True
    return chosen.reshape(n_layers, n_expert)


def _expert_set(chosen: npt.NDArray[np.bool_], layers: Sequence[int]) -> ExpertSet:
    return ExpertSet({layer: frozenset(np.flatnonzero(chosen[row]).tolist()) for row, layer in enumerate(layers)})
