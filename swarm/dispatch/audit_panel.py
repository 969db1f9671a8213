"""Who can be asked for an opinion on somebody's answer."""

from __future__ import annotations

from collections.abc import Collection, MutableSequence
from typing import Any, Protocol

import numpy as np

from swarm.dispatch.audit_opinions import Part, Question
from swarm.dispatch.audit_standing import Standing
from swarm.dispatch.holders import Holders
from swarm.dispatch.plan import HERE, part_of
from swarm.ids import NodeId
from swarm.registry.networks import rival_prefix


class Shuffler(Protocol):
    """A generator of chance, as `random.Random` is one."""

    def sample(self, population: range, k: int, /) -> list[int]:
        """Return k of the numbers, in random order."""
        ...

    def shuffle(self, x: MutableSequence[Any], /) -> None:
        """Put a list in random order."""
        ...


class Panel:
    """The holders of experts, as an audit sees them."""

    def __init__(self, holders: Holders, standing: Standing, rng: Shuffler) -> None:
        self._holders = holders
        self._standing = standing
        self._rng = rng

    def second(self, question: Question) -> list[Part] | None:
        """Return who is to give a second opinion on what, in the fewest parts; None: nobody can."""
        batch = question.batch
        held, nodes = self._held_by_others(question.layer, {question.node})
        network = self.network_of(question.node)
        # Who is suspected is asked first: it is evidence, and does no harm here. Else another network's, else by chance.
        rank = {
            node: (
                not self._standing.is_suspected(node),
                network is not None and self.network_of(node) == network,
                chance,
            )
            for node, chance in zip(nodes, self._rng.sample(range(len(nodes)), len(nodes)), strict=True)
        }
        parts: list[Part] = []
        left = np.ones(batch.n_pairs, np.bool_)  # [P]
        while left.any():
            covers = {node: held[index, batch.expert_ids] & left for index, node in enumerate(nodes)}  # each [P]
            node = min(covers, key=lambda each: (-int(covers[each].sum()), rank[each]), default=HERE)
            if node == HERE or not covers[node].any():
                node, is_in = HERE, left.copy()
                own = self._holders.own
                if own is None or not own.holds(question.layer, batch.expert_ids[left].tolist()):
                    return None
            else:
                is_in = covers[node]
            parts.append(Part(is_in=is_in, batch=part_of(batch, is_in), node=node))
            left &= ~is_in
        return parts

    def third(self, question: Question, part: Part) -> NodeId | None:
        """Return who can be asked besides both sides: this process, else another peer."""
        experts = part.batch.expert_ids
        own = self._holders.own
        if own is not None and own.holds(question.layer, experts.tolist()):
            return HERE
        held, nodes = self._held_by_others(question.layer, {question.node, part.node})
        found = [node for index, node in enumerate(nodes) if held[index, experts].all()]
        networks = {self.network_of(question.node), self.network_of(part.node)} - {None}
        self._rng.shuffle(found)
        return min(found, key=lambda node: self.network_of(node) in networks, default=None)

    def _held_by_others(self, layer: int, sides: Collection[NodeId]) -> tuple[np.ndarray[Any, Any], list[NodeId]]:
        """Return which experts each of the other peers holds, bool [N, E], and the peers."""
        placement = self._holders.placement
        indexes = [index for index, node in enumerate(placement.destinations) if node not in sides]
        held = placement.holders[indexes, placement.layers.index(layer)]  # [N, E]
        return held, [placement.destinations[index] for index in indexes]

    def can_compare(self, a: NodeId, b: NodeId) -> bool:
        """Return whether two peers hold an expert that both could be asked for; of who is not in use now, nobody can say no."""
        placement = self._holders.placement
        if a not in placement.destinations or b not in placement.destinations:
            return True
        index_a, index_b = placement.destinations.index(a), placement.destinations.index(b)
        return bool((placement.holders[index_a] & placement.holders[index_b]).any())

    def network_of(self, node: NodeId) -> str | None:
        """Return under which network a peer counts; None: unknown, or the operator's own."""
        record = self._holders.placement.announcement(node)
        return rival_prefix(record.addresses[0]) if record is not None and record.addresses else None
