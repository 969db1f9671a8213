"""Which of an expert's holders computes it now: by measured service time, sticky, by phase.

Pure; `now` is given. Never changes the router's choice of experts, only who computes them. Where no expert of a layer has two
holders, the placement's owners are returned as they are, at no cost.

*Decode* (a few rows): a layer takes as long as its slowest destination. For these rows' experts the fastest holder of each is
known; the slowest of those bounds the layer from below, whatever is chosen. Every replica that is no slower than this bound
costs no time: these are the candidates among which `homes` chooses, as few as will do.

*Prefill* (many rows): what counts is throughput. Rows go, block by block, to the holder of most of their experts, weighed by
how full each holder already is, by the measured time per pair.

*Stickiness*: costs are looked at every REFRESH_S, and a cost that is in use changes only when the measured one has left it by a
quarter. So nothing moves for noise, and everything within REFRESH_S of a slow answer.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm.dispatch.homes import Homes
from swarm.dispatch.origin import Origin
from swarm.dispatch.placement import NOBODY, Placement
from swarm.dispatch.plan import Batch, part_of
from swarm.dispatch.service_time import ServiceTimes
from swarm.ids import NodeId

DECODE_ROWS = 8  # as many rows as a step with drafts has; a choice in `homes` costs about 1 us a pair
DECODE_PAIRS = 4  # what replicas are compared by: a token's share at one peer of a few
REFRESH_S = 0.1  # between two looks at the costs; guessed: a tenth of the second that a dead peer may cost
# A cost in use stays until the measured one differs by more. Guessed: above the scatter of means, below what a person notices.
KEEP_SHARE, KEEP_S = 0.25, 0.0005
NEAR_SHARE, NEAR_S = 0.25, 0.0005  # costs that differ by less are equal
N_BLOCKS = 16  # of the rows of a prefill: each is given out knowing the load of those before
PRESSURE = 2.0  # how much a holder's load above the mean counts against the experts it holds; guessed
DISFAVOURED = 3.0  # how many times as slow such a peer is taken to be; guessed: used where others are far or full
UNKNOWN_PAIR_S = 1e-4  # of a peer that has not computed yet, among others that have not; only ratios matter


@dataclass(slots=True, eq=False)
class _Layer:
    """One layer in which some expert has two holders or more."""

    masks: list[int]  # of each expert: bit n for destination n
    held: npt.NDArray[np.bool_]  # [N, E]


class Replicas:
    """Chooses holders for one backbone.

    Attributes:
        disfavoured: peers that others are preferred to, though they may be slower; after a change call `refresh_soon`.
    """

    def __init__(self, placement: Placement, times: ServiceTimes, *, home: bytes = b"") -> None:
        """`home`: of this backbone; those with different ones prefer different replicas."""
        self.disfavoured: frozenset[NodeId] = frozenset()
        self.on_trial: Callable[[float], Collection[NodeId]] | None = None
        """Who failed and is tried again now: asked for nothing more while it owes an answer, if others can be asked."""
        self._placement = placement
        self._times = times
        self._homes = Homes(home)
        self._version = -1
        self._refresh_at = 0.0
        self._nodes: tuple[NodeId, ...] = ()
        self._costs: list[float] = []  # in use, seconds
        self._layers: dict[int, _Layer] = {}
        self._owners: dict[int, list[int]] = {}  # layer -> of each expert, of the placement; where they were asked for
        self._least: dict[int, float] = {}  # holders' mask -> the least of their costs
        self._ladder: tuple[list[float], list[int]] = ([], [])  # costs, ascending; who costs no more, as masks

    @property
    def sequence_stickiness(self) -> float:
        """Share of the pairs with a choice that went where the last of their sequence, layer and expert went; 1 without any.

        Of decode alone: a prefill's rows are spread.
        """
        return self._homes.n_kept / self._homes.n_choices if self._homes.n_choices else 1.0

    def refresh_soon(self) -> None:
        """A peer turned out late: look at the costs before the next choice."""
        self._refresh_at = 0.0

    def has_choice(self, layer: int) -> bool:
        """Return whether some expert of the layer has several holders."""
        self._follow()
        return layer in self._layers

    def owners(
        self,
        layer: int,
        topk_ids: npt.NDArray[np.int32],
        now: float,
        *,
        origin: Origin | None = None,
        is_kept: npt.NDArray[np.bool_] | None = None,
    ) -> npt.NDArray[np.integer]:
        """Return who computes what, as `plan_dispatch` takes it: int [E], or int [T, K].

        Args:
            origin: of the T rows; None: all of one sequence.
            is_kept: bool [T, K], pairs that nobody is asked for; their owners mean nothing.

        Raises:
            LocalProtocolError: the layer has no routed experts.
        """
        self._follow()
        here = self._layers.get(layer)
        if here is None or not topk_ids.size:
            return self._placement.owner_of(layer)
        n_rows = len(topk_ids)
        is_few = n_rows <= DECODE_ROWS
        ids: list[int] = topk_ids.ravel().tolist() if is_few else [int(topk_ids.min()), int(topk_ids.max())]
        if min(ids) < 0 or max(ids) >= len(here.masks):
            return self._placement.owner_of(layer)  # the plan will name them
        if is_few:
            owners = self._chosen(layer, here, ids, n_rows, now, origin, is_kept)
            return np.array(owners, np.int32).reshape(topk_ids.shape)
        if now >= self._refresh_at:
            self._refresh(now)
        return self._spread(here, topk_ids, now, self._tried(now))

    def owners_of_row(
        self, layer: int, ids: list[int], now: float, *, origin: Origin | None = None
    ) -> list[int] | None:
        """Return who computes each pair of one token, as `owners` says; None: an id is no expert's, or nobody holds one.

        Args:
            ids: [K], the router's choice.
            origin: of the one row.

        Raises:
            LocalProtocolError: the layer has no routed experts.
        """
        self._follow()
        owners = self._owners.get(layer)
        if owners is None:
            owners = self._owners[layer] = self._placement.owner_of(layer).tolist()
        if min(ids) < 0 or max(ids) >= len(owners):
            return None
        here = self._layers.get(layer)
        of_row = [owners[expert] for expert in ids]
        if here is not None:
            of_row = self._chosen(layer, here, ids, 1, now, origin, None)
        return None if NOBODY in of_row else of_row

    def _chosen(
        self,
        layer: int,
        here: _Layer,
        ids: list[int],
        n_rows: int,
        now: float,
        origin: Origin | None,
        is_kept: npt.NDArray[np.bool_] | None,
    ) -> list[int]:
        """Return who computes each pair of a few rows, of a layer in which there is a choice."""
        if now >= self._refresh_at:
            self._refresh(now)
        asked = _experts_of(ids, n_rows, origin, is_kept)
        owner_of: Mapping[int, int] = {}
        if asked:
            owner_of = self._homes.choose(layer, asked, self._candidates(here, asked, self._tried(now)))
        return [owner_of.get(expert, NOBODY) for expert in ids]

    def others(
        self, layer: int, batch: Batch, tried: Collection[NodeId], now: float
    ) -> list[tuple[NodeId, Batch]] | None:
        """Return who else can compute a batch, whole if one can; None if some expert has no holder but those tried.

        A batch that no single other peer holds is cut by experts: its partial sums are then added in other groups, which may
        change their last bits. Raw rows (`exact`) have no groups.
        """
        self._follow()
        on_trial = self._tried(now)
        usable = [index for index, node in enumerate(self._nodes) if node not in tried]
        if on_trial:
            proved = [index for index in usable if not on_trial >> index & 1]
            if (found := self._others_among(proved, layer, batch, now)) is not None:
                return found
        return self._others_among(usable, layer, batch, now)

    def _others_among(
        self, usable: list[int], layer: int, batch: Batch, now: float
    ) -> list[tuple[NodeId, Batch]] | None:
        held = self._placement.holders[:, self._placement.layers.index(layer)]  # [N, E], by now perhaps one holder each
        cost = {index: self._times.of(self._nodes[index]).estimate_s(batch.n_pairs, now) for index in usable}
        left = set(batch.expert_ids.tolist())
        chosen: list[tuple[NodeId, Batch]] = []
        while left:
            covers = {index: {expert for expert in left if held[index, expert]} for index in usable}
            best = min(
                usable, key=lambda index: (-len(covers[index]), cost[index], self._homes.ranks[index]), default=NOBODY
            )
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
        self._costs = [kept.get(node, 0.0) for node in self._nodes]
        self._refresh_at = 0.0
        self._note_costs()
        self._layers = {}
        self._owners = {}
        for index, layer in enumerate(placement.layers):
            held = placement.holders[:, index]  # [N, E]
            if not (held.sum(axis=0) > 1).any():
                continue
            masks = [0] * held.shape[1]
            for expert, node in np.argwhere(held.T).tolist():
                masks[expert] |= 1 << node
            self._layers[layer] = _Layer(masks, held)
        self._homes.follow(self._nodes, {layer: here.masks for layer, here in self._layers.items()})

    def _refresh(self, now: float) -> None:
        self._refresh_at = now + REFRESH_S
        is_changed = False
        for index, node in enumerate(self._nodes):
            measured_s = self._times.of(node).estimate_s(DECODE_PAIRS, now)
            if node in self.disfavoured:
                measured_s = DISFAVOURED * max(measured_s, NEAR_S)
            used_s = self._costs[index]
            if abs(measured_s - used_s) > max(KEEP_SHARE * used_s, KEEP_S):
                self._costs[index] = measured_s
                is_changed = True
        if is_changed:
            self._note_costs()

    def _note_costs(self) -> None:
        self._least.clear()
        order = sorted(range(len(self._costs)), key=self._costs.__getitem__)
        masks = itertools.accumulate((1 << index for index in order), int.__or__)
        self._ladder = [self._costs[index] for index in order], list(masks)

    def _least_s(self, mask: int) -> float:
        """Return the least cost of some holders; 0 where there are none."""
        least_s = self._least.get(mask)
        if least_s is None:
            costs = [cost_s for index, cost_s in enumerate(self._costs) if mask >> index & 1]
            least_s = self._least[mask] = min(costs, default=0.0)
        return least_s

    def _tried(self, now: float) -> int:
        """Return who is on trial and owes an answer, as a mask."""
        nodes = self.on_trial(now) if self.on_trial is not None else ()
        owing = {node for node in nodes if self._times.of(node).n_outstanding}
        return sum(1 << index for index, node in enumerate(self._nodes) if node in owing) if owing else 0

    def _candidates(self, here: _Layer, asked: Mapping[int, list[int]], tried: int) -> int:
        """Return who makes the layer no slower than it must be, as a mask; at least one holder of each expert is there."""
        masks = {here.masks[expert] for experts in asked.values() for expert in experts}
        if tried:
            for mask in masks:
                if not mask & ~tried:
                    tried &= ~mask  # nobody else holds it
            masks = {mask & ~tried for mask in masks}
        bound_s = max(map(self._least_s, masks), default=0.0)
        costs, upto = self._ladder
        n_near = bisect.bisect_right(costs, bound_s + max(NEAR_SHARE * bound_s, NEAR_S))
        return upto[n_near - 1] & ~tried if n_near else 0

    def _spread(self, here: _Layer, topk_ids: npt.NDArray[np.int32], now: float, tried: int) -> npt.NDArray[np.integer]:
        """Return an owner for each pair, int [T, K], so that the holders finish at about the same time."""
        n_rows, n_used = topk_ids.shape
        times = [self._times.of(node) for node in self._nodes]
        share = max(1, n_rows * n_used // max(1, len(times)))  # pairs of each, about
        known = [each.pair_s(share) for each in times]
        measured = [pair_s for pair_s in known if pair_s]
        usual_s = float(np.median(measured)) if measured else UNKNOWN_PAIR_S
        pair_s = np.array([each or usual_s for each in known])  # [N]
        if self.disfavoured:
            pair_s[[node in self.disfavoured for node in self._nodes]] *= DISFAVOURED
        # A holder that is slow to answer at all (a hang, a queue) starts with that: as if it had so much to do.
        finish_s = np.array([each.estimate_s(1, now) for each in times])  # [N]
        holders = here.held  # [N, E]
        if tried:
            is_tried = np.array([bool(tried >> index & 1) for index in range(len(times))])[:, np.newaxis]  # [N, 1]
            others = holders & ~is_tried
            holders = np.where(others.any(axis=0), others, holders)
        owner = np.full(topk_ids.shape, NOBODY, np.int32)
        for block in np.array_split(np.arange(n_rows), min(N_BLOCKS, n_rows)):
            held = holders[:, topk_ids[block]]  # [N, B, K]
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


def _experts_of(
    ids: list[int], n_rows: int, origin: Origin | None, is_kept: npt.NDArray[np.bool_] | None
) -> dict[int, list[int]]:
    """Return sequence -> the experts that its rows ask for; `ids` are of all pairs."""
    sequences = [0] * n_rows if origin is None else origin.sequences.tolist()
    if is_kept is None and sequences.count(sequences[0]) == n_rows:
        return {sequences[0]: ids}
    n_used = len(ids) // n_rows
    kept = [False] * len(ids) if is_kept is None else is_kept.ravel().tolist()
    asked: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids):
        if not kept[pair]:
            asked.setdefault(sequences[pair // n_used], []).append(expert)
    return asked
