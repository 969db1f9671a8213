"""Relays that a node may be called through, besides those that a person has named: the other members of the registry's ring."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from swarm.ids import NodeId
from swarm.net.addresses import parse_address
from swarm.net.relay_client import RelayAddress
from swarm.registry.records import RegistryNodeRecord

MAX_RELAYS = 8  # to choose from; guessed: a node needs two


def relays_of(members: Iterable[RegistryNodeRecord], own: NodeId) -> Sequence[RelayAddress]:
    """Return the members as relays, in an order of each node's own, so that the nodes spread over them.

    A member that is no relay refuses the reservation, and the next one is tried.
    """
    ordered = sorted(members, key=lambda member: hashlib.sha256(own.raw + member.node.raw).digest())
    return [RelayAddress(address=parse_address(each.addresses[0]), node=each.node) for each in ordered[:MAX_RELAYS]]
