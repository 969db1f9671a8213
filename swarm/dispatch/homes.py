"""Which of an expert's equal replicas a sequence meets: as few peers as will do, and the same ones token after token.

Pure; knows no time and no cost: whoever calls says which peers are near enough, the *candidates*.

A *home* is a few candidates that hold all of a layer (taken greedily, most experts first), each expert with a fixed owner among
them. Of equals the first is taken by an order that is drawn from this backbone's name and the home's number. A sequence has one
of N_HOMES: it stays on its own replicas, and several sequences, and several backbones, spread over all. Sequences that are
computed in one step share the home of the eldest and keep it: a step with homes of their own meets twice as many peers.

A step takes its home's owners unless fewer peers hold all of its experts: one more is one more to wait for.

Sets of peers and of experts are integers, bit n for number n: a token's choice takes a few microseconds.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.dispatch.placement import NOBODY
from swarm.ids import NodeId

N_HOMES = 8  # guessed: so many sequences of one backbone meet different replicas, where there are as many
MAX_TABLES = 64  # of a layer; one for each home and set of candidates. Guessed
# Whose last owners are remembered; those longest unused are forgotten. Guessed: more than run at once.
MAX_SEQUENCES = 128


@dataclass(slots=True, eq=False)
class _Layer:
    holders: list[int]  # of each expert: who holds it, as bits
    held: list[int]  # of each peer: its experts, as bits
    owners: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (home, candidates) -> of each expert


@dataclass(slots=True, eq=False)
class _Sequence:
    home: int
    last: dict[int, dict[int, int]] = field(default_factory=dict)  # layer -> expert -> who computed it last


class Homes:
    """One backbone's.

    Attributes:
        n_choices: pairs whose expert had several holders; n_kept: of those that went where the last one of their sequence,
            layer and expert went.
    """

    def __init__(self, name: bytes) -> None:
        self.n_choices = self.n_kept = 0
        self._name = name
        self._layers: dict[int, _Layer] = {}
        self._ranks: list[list[int]] = [[]] * N_HOMES  # of each home: every peer's place in its order
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()  # latest last

    @property
    def ranks(self) -> list[int]:
        """Each peer's place in this backbone's first order."""
        return self._ranks[0]

    def follow(self, nodes: Sequence[NodeId], holders: Mapping[int, list[int]]) -> None:
        """Take over who holds what: layer -> of each expert the peers, as bits of their place in `nodes`."""
        self._ranks = [_order(nodes, self._name + bytes([home])) for home in range(N_HOMES)]
        for known in self._sequences.values():
            known.last.clear()  # other numbers mean other peers
        self._layers = {}
        for layer, of_expert in holders.items():
            held = [0] * len(nodes)
            for expert, mask in enumerate(of_expert):
                for peer in _bits(mask):
                    held[peer] |= 1 << expert
            self._layers[layer] = _Layer(of_expert, held)

    def choose(self, layer: int, asked: Mapping[int, list[int]], candidates: int) -> dict[int, int]:
        """Return expert -> its owner in this step; NOBODY for those that no candidate holds.

        Args:
            asked: sequence -> the experts of its rows, as often as they are asked for.
        """
        here = self._layers[layer]
        sequences = [self._sequence(name) for name in asked]
        home = self._sequence(min(asked)).home
        owners = here.owners.get((home, candidates))
        if owners is None:
            if len(here.owners) >= MAX_TABLES:
                here.owners.clear()
            owners = here.owners[home, candidates] = _home_of(here, self._ranks[home], candidates)
        owner_of = {expert: owners[expert] for experts in asked.values() for expert in experts}
        n_met = len(set(owner_of.values()))
        if n_met > 1:
            masks = {expert: here.holders[expert] & candidates for expert in owner_of}
            owner_of = _fewer(masks, self._ranks[home], n_met) or owner_of
        for sequence, experts in zip(sequences, asked.values(), strict=True):
            sequence.home = home
            last = sequence.last.setdefault(layer, {})
            for expert in experts:
                if here.holders[expert].bit_count() > 1:
                    owner = owner_of[expert]
                    self.n_choices += 1
                    self.n_kept += last.get(expert, owner) == owner
                    last[expert] = owner
        return owner_of

    def _sequence(self, name: int) -> _Sequence:
        known = self._sequences.get(name)
        if known is None:
            known = self._sequences[name] = _Sequence(name % N_HOMES)
            if len(self._sequences) > MAX_SEQUENCES:
                self._sequences.popitem(last=False)
        else:
            self._sequences.move_to_end(name)
        return known


def _home_of(here: _Layer, ranks: list[int], candidates: int) -> list[int]:
    """Return each expert's owner among a few candidates that hold all of the layer, so that they own about as many."""
    order = sorted(_bits(candidates), key=ranks.__getitem__)
    met: list[int] = []
    left = functools.reduce(int.__or__, (here.held[peer] for peer in order), 0)
    everything = left
    while left:
        met.append(max(order, key=lambda peer: (here.held[peer] & left).bit_count()))  # the first of equals
        left &= ~here.held[met[-1]]
    for peer in met[:]:  # one that was taken early may be of no use beside those after it
        others = [other for other in met if other != peer]
        if functools.reduce(int.__or__, (here.held[other] for other in others), 0) == everything:
            met = others
    owners, n_owned = [NOBODY] * len(here.holders), dict.fromkeys(met, 0)
    choices = [[peer for peer in met if mask >> peer & 1] for mask in here.holders]
    for expert in sorted(range(len(choices)), key=lambda expert: len(choices[expert])):  # those without a choice first
        if choices[expert]:
            owners[expert] = best = min(choices[expert], key=n_owned.__getitem__)
            n_owned[best] += 1
    return owners


def _fewer(holders: Mapping[int, int], ranks: list[int], n_met: int) -> dict[int, int] | None:
    """Return owners of some experts, fewer than `n_met`; None: none were found. One is found if there is one."""
    common = functools.reduce(int.__and__, holders.values())
    if common:
        return dict.fromkeys(holders, min(_bits(common), key=ranks.__getitem__))
    if n_met == 2:
        return None
    experts = list(holders)
    covers: dict[int, int] = {}  # peer -> which of `experts`, as bits of their place
    left = 0
    for place, mask in enumerate(holders.values()):
        left |= (mask != 0) << place
        for peer in _bits(mask):
            covers[peer] = covers.get(peer, 0) | 1 << place
    order = sorted(covers, key=ranks.__getitem__)
    owner_of = dict.fromkeys(experts, NOBODY)
    for _ in range(n_met - 1):
        best = max(order, key=lambda peer: (covers[peer] & left).bit_count())  # the first of equals
        for place in _bits(covers[best] & left):
            owner_of[experts[place]] = best
        left &= ~covers[best]
        if not left:
            return owner_of
    return None


def _order(nodes: Sequence[NodeId], name: bytes) -> list[int]:
    """Return each node's place in an order that `name` draws."""
    order = sorted(range(len(nodes)), key=lambda index: hashlib.sha256(name + nodes[index].raw).digest())
    ranks = [0] * len(nodes)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
