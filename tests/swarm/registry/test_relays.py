"""The ring's members as relays: each node has an order of its own, which stays."""

from __future__ import annotations

from collections import Counter

from swarm.ids import NodeId
from swarm.registry.records import RegistryNodeRecord
from swarm.registry.relays import MAX_RELAYS, relays_of


def member(n: int) -> RegistryNodeRecord:
    return RegistryNodeRecord(node=NodeId(bytes([n]) * 32), seq=1, ttl_s=60, addresses=(f"192.0.2.{n}:7440",))


def test_nodes_spread_over_the_members_and_each_stays_with_its_own() -> None:
    members = [member(n) for n in range(1, 5)]
    first: Counter[tuple[str, int]] = Counter()
    for n in range(400):
        own = NodeId(n.to_bytes(32, "big"))
        found = relays_of(members, own)
        assert found == relays_of(reversed(members), own)
        assert {each.node for each in found} == {each.node for each in members}
        first[found[0].address] += 1
    assert all(70 <= count <= 130 for count in first.values())
    assert len(first) == 4


def test_there_are_only_so_many_to_choose_from() -> None:
    assert len(relays_of([member(n) for n in range(1, 100)], NodeId(bytes(32)))) == MAX_RELAYS
