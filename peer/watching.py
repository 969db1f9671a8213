"""What a running peer's owner sees beyond its counters: who uses it, by which path, and who else holds its experts."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable

from swarm.errors import SwarmError
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.net.connection import Connection
from swarm.peer_report import BackboneView, Scarcity, scarcity_of
from swarm.registry.client import RegistryClient

logger = logging.getLogger(__name__)

MAX_ASKERS = 1024  # nodes that are remembered to have asked for something; guessed
LOOK_S = 60.0  # between two looks at who else holds this peer's experts; guessed


class Askers:
    """Who has sent a dispatch: others, who look at the status or dial back, are no users."""

    def __init__(self) -> None:
        self._nodes: set[NodeId] = set()

    def add(self, node: NodeId) -> None:
        """Remember a node; of too many all are forgotten, and those in use come back with their next dispatch."""
        if node not in self._nodes:
            if len(self._nodes) >= MAX_ASKERS:
                self._nodes.clear()
            self._nodes.add(node)

    def views(self, connections: Iterable[Connection]) -> tuple[BackboneView, ...]:
        """Return those of them that are connected, by node id."""
        return backbone_views(connections, self._nodes)


def backbone_views(connections: Iterable[Connection], askers: Collection[NodeId]) -> tuple[BackboneView, ...]:
    """Return the open connections by which these nodes have reached us, by node id."""
    views = [
        BackboneView(
            node=str(each.remote),
            path=str(each.path) if each.path.is_relayed else f"direct {each.path}",
            is_relayed=each.path.is_relayed,
            rtt_s=each.rtt_s,
        )
        for each in connections
        if not each.is_client and each.is_open and each.remote in askers
    ]
    return tuple(sorted(views, key=lambda view: view.node))


class ScarcityWatch:
    """Looks now and then who else holds what this peer holds. Its owner runs `run`."""

    def __init__(
        self, registry: RegistryClient, node: NodeId, held: Callable[[], tuple[ModelId | None, ExpertSet]]
    ) -> None:
        """`held`: the model and the experts that this peer holds now."""
        self._registry = registry
        self._node = node
        self._held = held
        self.scarcity: Scarcity | None = None

    async def run(self) -> None:
        """Look, for ever; a registry that is away changes nothing."""
        while True:
            model, experts = self._held()
            if model is not None:
                try:
                    self.scarcity = scarcity_of(experts, await self._registry.holders(model), self._node)
                except SwarmError as error:
                    logger.debug("cannot ask who else holds these experts: %s", error)
            await asyncio.sleep(LOOK_S * random.uniform(0.8, 1.2))  # not all peers at the same moment
