"""Which of an expert's holders computes it now: by measured service time, sticky, by phase.

Pure; `now` is given. Never changes the router's choice of experts, only who computes them. Where no expert of a layer has two
holders, the placement's owners are returned as they are, at no cost.

*Decode* (a few rows): a layer takes as long as its slowest destination. For these rows' experts the fastest holder of each is
known; the slowest of those bounds the layer from below, whatever is chosen. Every replica that is no slower than this bound
costs no time, so they are candidates, and of these the fewest are asked that hold all of the step's experts: fewer bytes, fewer
packets, a shorter maximum. Of choices with as few, the step takes that of its sequence's *home*: a few candidates that hold all
of the layer, each expert with a fixed owner among them, the first by an order that is drawn from this backbone's identity. There
are N_HOMES of them: a sequence stays on its own replicas, several spread over all, and those of one step share a home.

*Prefill* (many rows): what counts is throughput. Rows go, block by block, to the holder of most of their experts, weighed by
how full each holder already is, by the measured time per pair.

*Stickiness*: costs are looked at every REFRESH_S, and a cost that is in use changes only when the measured one has left it by a
quarter. So nothing moves for noise, and everything within REFRESH_S of a slow answer.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarm.dispatch.origin import Origin
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
DISFAVOURED = 3.0  # how many times as slow such a peer is taken to be; guessed: used where others are far or full
UNKNOWN_PAIR_S = 1e-4  # of a peer that has not computed yet, among others that have not; only ratios matter
N_HOMES = 8  # guessed: so many sequences of one backbone meet different replicas, where there are as many
MAX_TABLES = 64  # of a layer; one for each home and each set of replicas that are near enough. Guessed
# Whose last choices are remembered; those longest unused are forgotten. Guessed: more than run at once.
MAX_SEQUENCES = 128


@dataclass(slots=True, eq=False)
class _Layer:
    """One layer in which some expert has two holders or more."""

    masks: list[int]  # of each expert: bit n for destination n
    held: npt.NDArray[np.bool_]  # [N, E]
    covers: list[int]  # of each destination: bit n for expert n
    has_choice: list[bool]  # of each expert
    tables: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (home, candidates) -> owner of each expert


@dataclass(slots=True, eq=False)
class _Sequence:
    """One text's replicas."""

    home: int
    last: dict[int, dict[int, int]] = field(default_factory=dict)  # layer -> expert -> who computed it last


class Replicas:
    """Chooses holders for one backbone.

    Attributes:
        n_choices: pairs of a few rows whose expert had several holders; n_kept: of those that went where the last one of their
            sequence, layer and expert went.
        disfavoured: peers that others are preferred to, though they may be slower; after a change call `refresh_soon`.
    """

    def __init__(self, placement: Placement, times: ServiceTimes, *, home: bytes = b"") -> None:
        """`home` draws the orders among equals: backbones with different ones prefer different replicas."""
        self.n_choices = self.n_kept = 0
        self.disfavoured: frozenset[NodeId] = frozenset()
        self.on_trial: Callable[[float], Collection[NodeId]] | None = None
        """Who failed and is tried again now: asked for nothing more while it owes an answer, if others can be asked."""
        self._placement = placement
        self._times = times
        self._home = home
        self._version = -1
        self._refresh_at = 0.0
        self._nodes: tuple[NodeId, ...] = ()
        self._ranks: list[list[int]] = [
            [] for _ in range(N_HOMES)
        ]  # of each home: every destination's place in its order
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()  # latest last
        self._costs: list[float] = []  # in use, seconds
        self._layers: dict[int, _Layer] = {}
        self._least: dict[int, float] = {}  # holders' mask -> the least of their costs
        self._ladder: tuple[list[float], list[int]] = ([], [])  # costs, ascending; who costs no more, as masks

    @property
    def sequence_stickiness(self) -> float:
        """n_kept / n_choices; 1 where there was nothing to choose."""
        return self.n_kept / self.n_choices if self.n_choices else 1.0

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
        if now >= self._refresh_at:
            self._refresh(now)
        n_rows = len(topk_ids)
        is_few = n_rows <= DECODE_ROWS
        ids: list[int] = topk_ids.ravel().tolist() if is_few else [int(topk_ids.min()), int(topk_ids.max())]
        if min(ids) < 0 or max(ids) >= len(here.masks):
            return self._placement.owner_of(layer)  # the plan will name them
        tried = self._tried(now)
        if not is_few:
            return self._spread(here, topk_ids, now, tried)
        sequences = [0] * n_rows if origin is None else origin.sequences.tolist()
        asked = None if is_kept is None else (~is_kept).ravel().tolist()
        owners = self._nearest(layer, here, ids, sequences, asked, tried)
        return np.array(owners, np.int32).reshape(topk_ids.shape)

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
                usable, key=lambda index: (-len(covers[index]), cost[index], self._ranks[0][index]), default=NOBODY
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
        self._ranks = [self._order(self._home + bytes([home])) for home in range(N_HOMES)]
        for known in self._sequences.values():
            known.last.clear()  # other numbers mean other peers
        self._costs = [kept.get(node, 0.0) for node in self._nodes]
        self._refresh_at = 0.0
        self._note_costs()
        self._layers = {}
        for index, layer in enumerate(placement.layers):
            held = placement.holders[:, index]  # [N, E]
            if not (held.sum(axis=0) > 1).any():
                continue
            masks = [0] * held.shape[1]
            for expert, node in np.argwhere(held.T).tolist():
                masks[expert] |= 1 << node
            covers = [sum(1 << expert for expert in np.flatnonzero(of_node).tolist()) for of_node in held]
            self._layers[layer] = _Layer(masks, held, covers, [mask.bit_count() > 1 for mask in masks])

    def _order(self, name: bytes) -> list[int]:
        """Return each destination's place in an order that `name` draws."""
        order = sorted(self._nodes, key=lambda node: hashlib.sha256(name + node.raw).digest())
        ranks = dict(zip(order, range(len(order)), strict=True))
        return [ranks[node] for node in self._nodes]

    def _sequence(self, sequence: int) -> _Sequence:
        known = self._sequences.get(sequence)
        if known is None:
            known = self._sequences[sequence] = _Sequence(sequence % N_HOMES)
            if len(self._sequences) > MAX_SEQUENCES:
                self._sequences.popitem(last=False)
        else:
            self._sequences.move_to_end(sequence)
        return known

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

    def _nearest(
        self,
        layer: int,
        here: _Layer,
        ids: list[int],
        sequences: list[int],
        asked: list[bool] | None,
        tried: int,
    ) -> list[int]:
        """Return each pair's owner: as few replicas as make the layer no slower. In plain Python: a few pairs."""
        masks = here.masks
        wanted = ids if asked is None else list(itertools.compress(ids, asked))
        of_wanted = {masks[expert] for expert in wanted}
        if tried:
            for mask in of_wanted:
                if not mask & ~tried:
                    tried &= ~mask  # nobody else holds it
            of_wanted = {mask & ~tried for mask in of_wanted}
        bound_s = max(map(self._least_s, of_wanted), default=0.0)
        costs, upto = self._ladder
        n_near = bisect.bisect_right(costs, bound_s + max(NEAR_SHARE * bound_s, NEAR_S))
        candidates = upto[n_near - 1] & ~tried if n_near else 0
        names = dict.fromkeys(sequences)
        home = self._sequence(min(names)).home
        table = here.tables.get((home, candidates))
        if table is None:
            if len(here.tables) >= MAX_TABLES:
                here.tables.clear()
            table = here.tables[home, candidates] = self._owners_among(here, home, candidates)
        owner_of = {expert: table[expert] for expert in wanted}
        n_met = len(set(owner_of.values()))
        if n_met > 1:
            owner_of = self._fewer(here, list(owner_of), home, candidates, n_met) or owner_of
        for name in names:
            sequence = self._sequence(name)
            sequence.home = home  # who is computed together stays together
            experts = wanted if len(names) == 1 else self._of(name, ids, sequences, asked)
            self._count(here, experts, sequence.last.setdefault(layer, {}), owner_of)
        return [owner_of.get(expert, NOBODY) for expert in ids]

    def _fewer(self, here: _Layer, experts: list[int], home: int, candidates: int, n_met: int) -> dict[int, int] | None:
        """Return owners of some experts that are fewer than `n_met`; None: not found. One is found if there is one."""
        ranks = self._ranks[home]
        masks = [here.masks[expert] & candidates for expert in experts]
        common = functools.reduce(int.__and__, masks)
        if common:
            best = min((index for index in range(common.bit_length()) if common >> index & 1), key=ranks.__getitem__)
            return dict.fromkeys(experts, best)
        if n_met == 2:
            return None
        covers: dict[int, int] = {}  # candidate -> which of `experts`, as bits
        left = 0
        for place, mask in enumerate(masks):
            left |= (mask != 0) << place
            while mask:
                low = mask & -mask
                index = low.bit_length() - 1
                covers[index] = covers.get(index, 0) | 1 << place
                mask ^= low
        order = sorted(covers, key=ranks.__getitem__)
        owner_of = dict.fromkeys(experts, NOBODY)
        for _ in range(n_met - 1):
            best = max(order, key=lambda index: (covers[index] & left).bit_count())  # the first of equals
            taken = covers[best] & left
            left ^= taken
            while taken:
                low = taken & -taken
                owner_of[experts[low.bit_length() - 1]] = best
                taken ^= low
            if not left:
                return owner_of
        return None

    def _of(self, name: int, ids: list[int], sequences: list[int], asked: list[bool] | None) -> list[int]:
        """Return the experts that one of several sequences asks for."""
        n_used = len(ids) // len(sequences)
        pairs = [pair for pair in range(len(ids)) if sequences[pair // n_used] == name]
        return [ids[pair] for pair in pairs if asked is None or asked[pair]]

    def _count(self, here: _Layer, experts: list[int], last: dict[int, int], owner_of: dict[int, int]) -> None:
        for expert in experts:
            if here.has_choice[expert]:
                index = owner_of[expert]
                self.n_choices += 1
                self.n_kept += last.get(expert, index) == index
                last[expert] = index

    def _owners_among(self, here: _Layer, home: int, candidates: int) -> list[int]:
        """Return each expert's owner, NOBODY for those that none of the candidates holds."""
        ranks = self._ranks[home]
        order = sorted((index for index in range(len(here.covers)) if candidates >> index & 1), key=ranks.__getitem__)
        met: list[int] = []
        covered, best = 0, 0
        while True:
            best = max(
                order, key=lambda index: (here.covers[index] & ~covered).bit_count(), default=0
            )  # first of equals
            if not order or not here.covers[best] & ~covered:
                break
            met.append(best)
            covered |= here.covers[best]
        for index in met[:]:  # one that was taken early may be of no use beside those after it
            others = functools.reduce(int.__or__, (here.covers[other] for other in met if other != index), 0)
            if others == covered:
                met.remove(index)
        owners, load = [NOBODY] * len(here.masks), dict.fromkeys(met, 0)
        holders = {expert: [index for index in met if mask >> index & 1] for expert, mask in enumerate(here.masks)}
        for expert in sorted(holders, key=lambda expert: len(holders[expert])):  # those without a choice first
            if holders[expert]:
                owners[expert] = best = min(holders[expert], key=load.__getitem__)
                load[best] += 1
        return owners

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
