"""Which peers hold which expert, and one owner per (layer, expert), chosen from the live announcements of one model.

Pure and deterministic: the same history of announcements gives the same owners. Knows nothing of time: which of an expert's
holders computes it now is `replicas`; where an expert has one holder, that is its owner.

All holders of an expert are equal: the model id is the hash of the manifest, which has a hash for every (layer, expert) block,
and a peer checks its blocks against the manifest of the id that it announces. So peers of one model id hold the same bytes.

The rules, in order:
1. Announcements of other models, experts that the model lacks, and (for the form `exact`) peers without exact kernels do
   not count. Of two announcements of a node, the one with the higher seq counts.
2. A node that was marked down does not count until it announces a higher seq than it had then.
3. An owner stays while it lives and still announces the expert: nothing moves because a peer joined.
4. An expert with one holder goes to it; then each of the rest, by (layer, expert), goes to the holder with the fewest
   experts so far, ties to the lower node id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from swarm.errors import LocalProtocolError
from swarm.ids import ModelId, NodeId
from swarm.registry.records import ExpertAnnouncement

NOBODY = -1
MAX_DOWN = 1024  # down marks kept, oldest dropped first; guessed: far more nodes than one backbone uses


class Placement:
    """The owners of one model's experts. Mutable, one owner; `owner_of` and `destinations` belong together.

    The arrays are reused: what `owner_of` returned changes at the next `update` or `mark_down`, so read it and
    `destinations` in one go, without an await between.
    """

    def __init__(self, model: ModelId, layers: Sequence[int], n_expert: int, *, require_exact: bool) -> None:
        self._model = model
        self._n_expert = n_expert
        self._require_exact = require_exact
        self._index_of_layer = {layer: index for index, layer in enumerate(sorted(set(layers)))}
        shape = (len(self._index_of_layer), n_expert)
        self._owner = np.full(shape, NOBODY, dtype=np.int32)  # [L, E]
        self._previous = np.full(shape, NOBODY, dtype=np.int32)  # [L, E]
        self._n_holders = np.zeros(shape, dtype=np.int32)  # [L, E]
        self._views: dict[int, npt.NDArray[np.int32]] = {}
        for layer, index in self._index_of_layer.items():
            view = self._owner[index]
            view.flags.writeable = False
            self._views[layer] = view  # [E]
        self._announced: dict[NodeId, ExpertAnnouncement] = {}
        self._down: OrderedDict[NodeId, int] = OrderedDict()  # node -> the seq it had when it failed
        self._destinations: tuple[NodeId, ...] = ()
        self._held = np.zeros((0, *shape), dtype=np.bool_)  # [N, L, E]
        self.version = 0
        """Rises whenever `destinations`, owners or holders change."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with routed experts, ascending."""
        return tuple(self._index_of_layer)

    @property
    def holders(self) -> npt.NDArray[np.bool_]:
        """Which destination holds which expert, [N, L, E], L in the order of `layers`; made anew at each change."""
        return self._held

    @property
    def destinations(self) -> tuple[NodeId, ...]:
        """The nodes that may be used now, ascending; `owner_of` holds indexes into it. Some may own nothing."""
        return self._destinations

    def owner_of(self, layer: int) -> npt.NDArray[np.int32]:
        """Return each expert's index into `destinations`, int32 [E], -1 for nobody; a read-only view that is reused.

        Raises:
            LocalProtocolError: the layer has no routed experts.
        """
        try:
            return self._views[layer]
        except KeyError:
            raise LocalProtocolError(f"layer {layer} has no routed experts") from None

    def announcement(self, node: NodeId) -> ExpertAnnouncement | None:
        """Return what the node announced last (addresses, versions), down or not; None when it is gone."""
        return self._announced.get(node)

    def missing(self, layer: int, experts: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return which of `experts` (default: all of the layer) nobody holds, ascending."""
        absent = np.flatnonzero(self.owner_of(layer) == NOBODY)
        if experts is not None:
            absent = np.intersect1d(absent, np.fromiter(experts, dtype=np.int64))
        return tuple(absent.tolist())

    def all_missing(self) -> dict[int, tuple[int, ...]]:
        """Return layer -> experts that nobody holds; empty when every expert has an owner."""
        absent = {layer: self.missing(layer) for layer in self._index_of_layer}
        return {layer: experts for layer, experts in absent.items() if experts}

    def n_assigned(self) -> dict[NodeId, int]:
        """Return how many (layer, expert) pairs each destination owns."""
        counts = np.bincount(self._owner[self._owner >= 0], minlength=len(self._destinations))
        return dict(zip(self._destinations, counts.tolist(), strict=True))

    def update(self, announcements: Iterable[ExpertAnnouncement]) -> bool:
        """Take the whole set of live announcements in place of the former; return whether owners were chosen anew."""
        announced: dict[NodeId, ExpertAnnouncement] = {}
        for record in announcements:
            if record.model != self._model or (self._require_exact and not record.exact_kernels):
                continue
            known = announced.get(record.node)
            if known is None or record.seq > known.seq:
                announced[record.node] = record
        for node in [node for node, seq in self._down.items() if node in announced and announced[node].seq > seq]:
            del self._down[node]
        former, self._announced = self._announced, announced
        usable = self._usable()
        if usable == self._destinations and all(
            node in former and announced[node].experts == former[node].experts for node in usable
        ):
            return False  # renewals and new addresses move nobody
        self._rebuild(usable)
        return True

    def mark_down(self, node: NodeId) -> bool:
        """Use `node` no more until it announces a higher seq; return whether it was in use. Owners are chosen anew."""
        record = self._announced.get(node)
        if record is None or node in self._down:
            return False
        self._down[node] = record.seq
        if len(self._down) > MAX_DOWN:
            self._down.popitem(last=False)
        self._rebuild(self._usable())
        return True

    def _usable(self) -> tuple[NodeId, ...]:
        return tuple(sorted(node for node in self._announced if node not in self._down))

    def _rebuild(self, destinations: tuple[NodeId, ...]) -> None:
        """Choose the owners anew; the work grows with the announcements' size and with what has to move."""
        new_index = {node: index for index, node in enumerate(destinations)}
        translate = np.array([*(new_index.get(node, NOBODY) for node in self._destinations), NOBODY], dtype=np.int32)
        np.take(translate, self._owner, out=self._previous)  # index -1 takes the last: nobody stays nobody
        self._destinations = destinations
        self._owner.fill(NOBODY)
        self._n_holders.fill(0)

        held = [self._slice_of(node) for node in destinations]
        self._held = np.zeros((len(destinations), *self._owner.shape), dtype=np.bool_)
        self.version += 1
        for index, slice_of_node in enumerate(held):  # rule 3, and how many hold each expert
            for layer, experts in slice_of_node:
                self._held[index, layer, experts] = True
                self._n_holders[layer, experts] += 1
                kept = experts[self._previous[layer, experts] == index]
                self._owner[layer, kept] = index
        contested: dict[tuple[int, int], list[int]] = {}
        for index, slice_of_node in enumerate(held):  # rule 4
            for layer, experts in slice_of_node:
                free = experts[self._owner[layer, experts] == NOBODY]
                is_single = self._n_holders[layer, free] == 1
                self._owner[layer, free[is_single]] = index
                for expert in free[~is_single].tolist():
                    contested.setdefault((layer, expert), []).append(index)
        load = np.bincount(self._owner[self._owner >= 0], minlength=len(destinations)).tolist()
        for (layer, expert), holders in sorted(contested.items()):
            best = min(holders, key=lambda holder: (load[holder], holder))  # destinations ascend by node id
            self._owner[layer, expert] = best
            load[best] += 1

    def _slice_of(self, node: NodeId) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """Return (layer index, experts) of what a node announced and the model has."""
        arrays: dict[frozenset[int], npt.NDArray[np.int64]] = {}  # layers mostly share one set
        held: list[tuple[int, npt.NDArray[np.int64]]] = []
        for layer, experts in self._announced[node].experts.by_layer.items():
            index = self._index_of_layer.get(layer)
            if index is None:
                continue
            if experts not in arrays:
                ids = np.fromiter(experts, dtype=np.int64, count=len(experts))
                arrays[experts] = np.sort(ids[ids < self._n_expert])
            held.append((index, arrays[experts]))
        return held
