"""Which experts a pool is short of, and which of them the next volunteer is to hold. Pure; E experts, L MoE layers.

    histograms of the backbones -> demand [L, E]      1: chosen as often as the layer's mean
    announcements of the peers  -> capacity [L, E]    1: one peer that holds the whole model, and may send FULL_UPLOAD
    demand / capacity           -> scarcity [L, E]    1: an average expert that is served by such a peer

A peer's capacity is spread evenly over the blocks that it holds; of what machines differ in, only a cap on what they send is
announced. A block that nobody
holds is scarcer than any that somebody holds, and one with a single holder than any with more: one death must not stop a model
while others idle in threes. Histograms and announcements are untrusted: both can be invented, so what is
chosen by them costs a volunteer no more than its budget.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from swarm.ids import ExpertSet, NodeId
from swarm.registry.records import ExpertAnnouncement, RoutingHistogram

# Share of the demand that counts as even, whatever backbones say: what was never chosen may be tomorrow, and a forged
# histogram can move only the rest. Guessed.
EVEN_SHARE = 0.2
# From so many bytes a second on, a cap on what a peer sends makes it no less than others; guessed: 1,000 rows of 2,048 numbers in
# f16, as much as a swarm over home connections asks of one peer.
FULL_UPLOAD_BYTES_S = 4_000_000
LEAST_SHARE = 0.01  # of a peer's capacity, however low its cap
# What one peer alone holds is so much scarcer: more than demand and capacity can differ between blocks (256 experts in 58
# layers: a hot one is wanted 205 times as much as an average one, a peer of one
# block has 14,848 times the capacity for it, and one with a low cap a hundredth).
ONE_HOLDER = 1e9
NO_CAPACITY = 1e-16  # stands for none, so that nothing that somebody holds is as scarce as what nobody does
# Newcomers whose choices another one works out: in a model of 58 layers of 256 experts 100 to 130 ms for all; guessed.
MAX_FORESEEN = 64
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
    """Return what live peers, loading ones too, can do for each block, [L, E]; 1 is one peer that holds all of them.

    One that has a cap on what it sends counts for less.
    """
    pool = Pool(layers, n_expert, ())
    pool.extend(announcements)
    return pool.capacity


class Pool:
    """A model's live peers, who come one after another: what all of `scarcity` costs is paid for newcomers alone.

    Attributes:
        demand, capacity: [L, E], as the functions of these names.
        n_peers: so many have come.
    """

    def __init__(self, layers: Sequence[int], n_expert: int, histograms: Iterable[RoutingHistogram]) -> None:
        """Begin without anybody."""
        self.demand = demand(layers, n_expert, histograms)
        self.capacity = np.zeros(self.demand.shape)
        self.n_peers = 0
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        self._n_holders = np.zeros(self.demand.shape, dtype=np.int64)

    def extend(self, announcements: Iterable[ExpertAnnouncement]) -> None:
        """These peers come, or begin to load."""
        for record in announcements:
            self.n_peers += 1
            held = mask(self._row_of, self.demand.shape[1], record.experts)
            n_held = int(held.sum())
            if n_held:
                cap = record.upload_bytes_s
                share = 1.0 if cap is None else min(1.0, max(LEAST_SHARE, cap / FULL_UPLOAD_BYTES_S))
                self.capacity += held * (share * held.size / n_held)
                self._n_holders += held

    def scarcity(self) -> npt.NDArray[np.float64]:
        """Return demand over capacity, [L, E]; what has one holder or none comes before the rest."""
        wanted: npt.NDArray[np.float64] = self.demand / np.maximum(self.capacity, NO_CAPACITY)
        return np.where(self._n_holders == 1, ONE_HOLDER * wanted, wanted)


def scarcity(
    layers: Sequence[int],
    n_expert: int,
    histograms: Iterable[RoutingHistogram],
    announcements: Iterable[ExpertAnnouncement],
) -> npt.NDArray[np.float64]:
    """Return demand over capacity, [L, E]; what has one holder or none comes before the rest."""
    pool = Pool(layers, n_expert, histograms)
    pool.extend(announcements)
    return pool.scarcity()


def mask(row_of: Mapping[int, int], n_expert: int, experts: ExpertSet) -> npt.NDArray[np.bool_]:
    """Return which blocks a set has, [L, E]; what the model does not have is left out."""
    held = np.zeros((len(row_of), n_expert), dtype=np.bool_)
    rows_of: dict[frozenset[int], list[int]] = {}  # most have the same experts in all layers: each set is read once
    for layer, chosen in experts.by_layer.items():
        if layer in row_of:
            rows_of.setdefault(chosen, []).append(row_of[layer])
    for chosen, rows in rows_of.items():
        held[np.ix_(rows, [expert for expert in chosen if expert < n_expert])] = True
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


def foresee(
    listed: Iterable[ExpertAnnouncement],
    node: NodeId,
    choose: Callable[[Sequence[ExpertAnnouncement], ExpertAnnouncement], ExpertSet],
) -> list[ExpertAnnouncement]:
    """Return the others that a joining `node` has to reckon with, newcomers with what they will choose.

    Newcomers of one moment come to one answer without another word: each works out what all of them choose, one after the other
    in the order of their ids, and takes its own part. So those with a higher id are left out: they reckon with this node.

    Args:
        choose: (the others so far, a newcomer's claim) -> what that one takes. Those so far only become more.
    """
    others = [record for record in listed if record.node != node]
    foreseen = [record for record in others if not record.is_choosing]
    before = sorted((record for record in others if record.is_choosing and record.node < node), key=lambda r: r.node)
    for rival in before[:MAX_FORESEEN]:
        foreseen.append(replace(rival, experts=choose(foreseen, rival)))
    return foreseen + before[MAX_FORESEEN:]


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
