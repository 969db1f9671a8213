"""Which of an expert's holders computes it now: by measured service time, sticky, by phase.

Pure; `now` is given. Never changes the router's choice of experts, only who computes them. Where no expert of a layer has two
holders, the placement's owners are returned as they are, at no cost.

*Decode* (a few rows): a layer takes as long as its slowest destination. For these rows' experts the fastest holder of each is
known; the slowest of those bounds the layer from below, whatever is chosen. Every replica that is no slower than this bound
costs no time, so among them the fewest that hold all experts are taken (greedily, most experts first): fewer bytes, fewer
packets, a shorter maximum. Of equals the first in this backbone's own order is taken, which is drawn from its identity: a
sequence stays on its own replicas, and several backbones spread over them.

*Prefill* (many rows): what counts is throughput. Rows go, block by block, to the holder of most of their experts, weighed by
how full each holder already is, by the measured time per pair.

*Stickiness*: costs are looked at every REFRESH_S, and a cost that is in use changes only when the measured one has left it by a
quarter. So nothing moves for noise, and everything within REFRESH_S of a slow answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm.dispatch.placement import NOBODY, Placement
from swarm.dispatch.plan import Batch, part_of
from swarm.dispatch.service_time import ServiceTimes
from swarm.ids import NodeId

DECODE_ROWS = 8  # as many rows as a step with drafts has; the greedy choice below costs some 2 us a pair
DECODE_PAIRS = 4  # what replicas are compared by: a token's share at one peer of a few
REFRESH_S = 0.1  # between two looks at the costs; guessed: a tenth of the second that a dead peer may cost
# A cost in use stays until the measured one differs by more. Guessed: above the scatter of means, below what a person notices.
KEEP_SHARE, KEEP_S = 0.25, 0.0005
NEAR_SHARE, NEAR_S = 0.25, 0.0005  # costs that differ by less are equal
N_BLOCKS = 16  # of the rows of a prefill: each is given out knowing the load of those before
PRESSURE = 2.0  # how much a holder's load above the mean counts against the experts it holds; guessed
UNKNOWN_PAIR_S = 1e-4  # of a peer that has not computed yet, among others that have not; only ratios matter


@dataclass(slots=True, eq=False)
class _Layer:
    """One layer in which some expert has two holders or more."""

    masks: list[int]  # of each expert: bit n for destination n
    held: npt.NDArray[np.bool_]  # [N, E]
    last: list[int]  # of each expert: who computed it last


class Replicas:
    """Chooses holders for one backbone.

    Attributes:
        n_choices: pairs whose expert had several holders; n_kept: of those that went where this expert's went before.
    """

    def __init__(self, placement: Placement, times: ServiceTimes, *, home: bytes = b"") -> None:
        """`home` draws the order among equals: backbones with different ones prefer different replicas."""
        self.n_choices = self.n_kept = 0
        self._placement = placement
        self._times = times
        self._home = home
        self._version = -1
        self._refresh_at = 0.0
        self._nodes: tuple[NodeId, ...] = ()
        self._ranks: list[int] = []  # place in this backbone's own order
        self._costs: list[float] = []  # in use, seconds
        self._layers: dict[int, _Layer] = {}
        self._by_cost: dict[int, tuple[tuple[float, int], ...]] = {}  # holders' mask -> (cost, index), cheapest first

    @property
    def kept_share(self) -> float:
        """n_kept / n_choices; 1 where there was nothing to choose."""
        return self.n_kept / self.n_choices if self.n_choices else 1.0

    def refresh_soon(self) -> None:
        """A peer turned out late: look at the costs before the next choice."""
        self._refresh_at = 0.0

    def has_choice(self, layer: int) -> bool:
        """Return whether some expert of the layer has several holders."""
        self._follow()
        return layer in self._layers

    def owners(self, layer: int, topk_ids: npt.NDArray[np.int32], now: float) -> npt.NDArray[np.integer]:
        """Return who computes what, as `plan_dispatch` takes it: int [E], or int [T, K].

        Raises:
            LocalProtocolError: the layer has no routed experts.
        """
        self._follow()
        here = self._layers.get(layer)
        if here is None or not topk_ids.size:
            return self._placement.owner_of(layer)
        if now >= self._refresh_at:
            self._refresh(now)
        is_few = len(topk_ids) <= DECODE_ROWS
        ids: list[int] = topk_ids.ravel().tolist() if is_few else [int(topk_ids.min()), int(topk_ids.max())]
        if min(ids) < 0 or max(ids) >= len(here.masks):
            return self._placement.owner_of(layer)  # the plan will name them
        if is_few:
            return self._nearest(here, ids).reshape(topk_ids.shape)
        return self._spread(here, topk_ids, now)

    def others(
        self, layer: int, batch: Batch, tried: Collection[NodeId], now: float
    ) -> list[tuple[NodeId, Batch]] | None:
        """Return who else can compute a batch, whole if one can; None if some expert has no holder but those tried.

        A batch that no single other peer holds is cut by experts: its partial sums are then added in other groups, which may
        change their last bits. Raw rows (`exact`) have no groups.
        """
        self._follow()
        held = self._placement.holders[:, self._placement.layers.index(layer)]  # [N, E], by now perhaps one holder each
        usable = [index for index, node in enumerate(self._nodes) if node not in tried]
        cost = {index: self._times.of(self._nodes[index]).estimate_s(batch.n_pairs, now) for index in usable}
        left = set(batch.expert_ids.tolist())
        chosen: list[tuple[NodeId, Batch]] = []
        while left:
            covers = {index: {expert for expert in left if held[index, expert]} for index in usable}
            best = min(usable, key=lambda index: (-len(covers[index]), cost[index], self._ranks[index]), default=NOBODY)
            if best == NOBODY or not covers[best]:
                return None
            node = self._nodes[best]
            if not chosen and len(covers[best]) == len(left):
                return [(node, batch)]
            chosen.append((node, part_of(batch, np.isin(batch.expert_ids, list(covers[best])))))
            left -= covers[best]
        return chosen

    def _follow(self) -> None:
        """Take over what has changed in the placement."""
        placement = self._placement
        if placement.version == self._version:
            return
        self._version = placement.version
        kept = dict(zip(self._nodes, self._costs, strict=True))
        self._nodes = placement.destinations
        self._times.keep_only(frozenset(self._nodes))
        order = sorted(self._nodes, key=lambda node: hashlib.sha256(self._home + node.raw).digest())
        self._ranks = [order.index(node) for node in self._nodes]
        self._costs = [kept.get(node, 0.0) for node in self._nodes]
        self._refresh_at = 0.0
        self._by_cost.clear()
        former, self._layers = self._layers, {}
        for index, layer in enumerate(placement.layers):
            held = placement.holders[:, index]  # [N, E]
            if not (held.sum(axis=0) > 1).any():
                continue
            masks = [0] * held.shape[1]
            for expert, node in np.argwhere(held.T).tolist():
                masks[expert] |= 1 << node
            known = former.get(layer)
            if known is not None and known.masks == masks:
                known.held = held
                self._layers[layer] = known
            else:
                self._layers[layer] = _Layer(masks, held, [NOBODY] * len(masks))

    def _refresh(self, now: float) -> None:
        self._refresh_at = now + REFRESH_S
        for index, node in enumerate(self._nodes):
            measured_s = self._times.of(node).estimate_s(DECODE_PAIRS, now)
            used_s = self._costs[index]
            if abs(measured_s - used_s) > max(KEEP_SHARE * used_s, KEEP_S):
                self._costs[index] = measured_s
                self._by_cost.clear()

    def _holders(self, mask: int) -> tuple[tuple[float, int], ...]:
        found = self._by_cost.get(mask)
        if found is None:
            indexes = [index for index in range(mask.bit_length()) if mask >> index & 1]
            found = self._by_cost[mask] = tuple(sorted((self._costs[index], index) for index in indexes))
        return found

    def _nearest(self, here: _Layer, ids: list[int]) -> npt.NDArray[np.int32]:
        """Return the fewest of the replicas that make the layer no slower, int32 [T*K]; in plain Python: a few pairs."""
        experts = list(dict.fromkeys(ids))
        holders = [self._holders(here.masks[expert]) for expert in experts]
        bound_s = max((found[0][0] for found in holders if found), default=0.0)
        limit_s = bound_s + max(NEAR_SHARE * bound_s, NEAR_S)
        covers: dict[int, int] = {}  # destination -> which of `experts`, as bits
        left = 0
        for place, found in enumerate(holders):
            for cost_s, index in found:
                if cost_s > limit_s:
                    break
                covers[index] = covers.get(index, 0) | 1 << place
                left |= 1 << place
        owner = [NOBODY] * len(experts)
        ranks = self._ranks
        while left:
            best, gain, rank = NOBODY, 0, 0
            for index, cover in covers.items():
                n = (cover & left).bit_count()
                if n > gain or (n == gain and n and ranks[index] < rank):
                    best, gain, rank = index, n, ranks[index]
            taken = covers.pop(best) & left
            left ^= taken
            while taken:
                low = taken & -taken
                owner[low.bit_length() - 1] = best
                taken ^= low
        last = here.last
        for expert, found, index in zip(experts, holders, owner, strict=True):
            if len(found) > 1:
                self.n_choices += 1
                self.n_kept += last[expert] in (index, NOBODY)
                last[expert] = index
        if len(ids) == len(experts):
            return np.array(owner, np.int32)
        of_expert = dict(zip(experts, owner, strict=True))
        return np.array([of_expert[expert] for expert in ids], np.int32)

    def _spread(self, here: _Layer, topk_ids: npt.NDArray[np.int32], now: float) -> npt.NDArray[np.integer]:
        """Return an owner for each pair, int [T, K], so that the holders finish at about the same time."""
        n_rows, n_used = topk_ids.shape
        times = [self._times.of(node) for node in self._nodes]
        share = max(1, n_rows * n_used // max(1, len(times)))  # pairs of each, about
        known = [each.pair_s(share) for each in times]
        measured = [pair_s for pair_s in known if pair_s]
        usual_s = float(np.median(measured)) if measured else UNKNOWN_PAIR_S
        pair_s = np.array([each or usual_s for each in known])  # [N]
        # A holder that is slow to answer at all (a hang, a queue) starts with that: as if it had so much to do.
        finish_s = np.array([each.estimate_s(1, now) for each in times])  # [N]
        owner = np.full(topk_ids.shape, NOBODY, np.int32)
        for block in np.array_split(np.arange(n_rows), min(N_BLOCKS, n_rows)):
            held = here.held[:, topk_ids[block]]  # [N, B, K]
            left = held.any(axis=0)  # [B, K]
            mean_s = max(float(finish_s.mean()), 1e-9)
            weight = np.exp(-PRESSURE * (finish_s / mean_s - 1.0))[:, np.newaxis]  # [N, 1]
            of_block = owner[block]
            while left.any():
                n_held = (held & left).sum(axis=2)  # [N, B]
                best = (n_held * weight).argmax(axis=0)  # [B]
                taken = held[best, np.arange(len(block))] & left  # [B, K]
                if not taken.any():  # weights too small for a float: whoever holds anything
                    best = n_held.argmax(axis=0)
                    taken = held[best, np.arange(len(block))] & left
                of_block = np.where(taken, best[:, np.newaxis], of_block)
                left &= ~taken
            owner[block] = of_block
            n_pairs = np.bincount(of_block[of_block >= 0], minlength=len(times))  # [N]
            finish_s = finish_s + n_pairs * pair_s
        return owner
