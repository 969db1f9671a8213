"""The registry's simulation: small runs of it are tests of the ring, with controls that show that it can fail."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from swarm.bench.registry import deep_size, simulate_cut, simulate_registry, views
from swarm.bench.registry_hosts import Host, RegistryOptions, SimNode
from swarm.bench.registry_network import RegistrySimulation, size_of
from swarm.identity import Identity
from swarm.ids import ModelId, NodeId
from swarm.registry.announcer import RENEW_S, TTL_S
from swarm.registry.membership import MEMBER_TTL_S
from swarm.registry.records import RegistryNodeRecord, sign
from swarm.registry.ring import key_of, position_of
from swarm.wire import messages as m
from swarm.wire.frames import encode

SMALL = RegistryOptions(
    n_nodes=24, n_peers=120, n_models=2, churn_per_hour=1.0, duration_s=120.0, lookups_per_s=4.0, cut_s=250.0, seed=3
)


def start(n_nodes: int = 24, n_peers: int = 0, **options: float) -> RegistrySimulation:
    """Return a simulation whose nodes know each other and whose peers have announced themselves."""
    simulation = RegistrySimulation(
        RegistryOptions(n_nodes=n_nodes, n_peers=n_peers, n_models=1, **options)  # type: ignore[arg-type]
    )
    for _ in range(n_nodes):
        simulation.add_node(joins=False)
    simulation.introduce_all()
    simulation.run_until(simulation.now + 1)
    for _ in range(n_peers):
        simulation.add_peer()
    simulation.run_until(simulation.now + 1.5 * RENEW_S)
    return simulation


def reader_of(simulation: RegistrySimulation) -> Host:
    return Host(NodeId(simulation.rng.randbytes(32)), "60.1.2.3:5000", (0.5, 0.5))


def look_everywhere(simulation: RegistrySimulation, n_rounds: int = 3) -> list[bool]:
    client = simulation.add_client(reader_of(simulation))
    outcomes = [simulation.look_up(client, place) for place in sorted(simulation.peers_at) for _ in range(n_rounds)]
    simulation.run_until(simulation.now + 10)
    return [outcome.is_right for outcome in outcomes]


def test_with_churn_loss_and_withholding_lookups_are_right_in_one_round_trip() -> None:
    figures = simulate_registry(SMALL)
    assert figures["n_lookups"] == 480
    assert figures["lookup_success"] >= 0.998
    assert figures["median_round_trips"] == 1
    assert figures["records_per_lookup"] > 5, "there was something to find"
    assert figures["heal"]["n_views_while_cut"] == 2
    assert figures["heal"]["n_views_after"] == 1
    assert figures["bytes_per_s_per_node"] > 0
    assert figures["memory_bytes_per_node"] > 0


def test_the_same_seed_gives_the_same_run() -> None:
    options = RegistryOptions(n_nodes=8, n_peers=20, n_models=1, duration_s=30.0, lookups_per_s=2.0, cut_s=20.0)
    first = simulate_registry(options)
    second = simulate_registry(options)
    del (
        first["memory_bytes_per_node"],
        second["memory_bytes_per_node"],
    )  # which sets have grown how far is Python's affair
    assert first == second


def test_the_control_where_everybody_withholds_finds_nothing() -> None:
    simulation = start(n_peers=40)
    assert all(look_everywhere(simulation))
    for node in simulation.nodes.values():
        node.withholds = True
    assert not any(look_everywhere(simulation))


def test_a_cut_network_comes_to_one_view_after_all_leases_have_ended() -> None:
    figures = simulate_cut(RegistryOptions(n_nodes=20, cut_s=MEMBER_TTL_S + 60.0, seed=5))
    assert (figures["n_views_while_cut"], figures["n_views_after"]) == (2, 1)
    assert figures["one_view_after_s"] <= 60


def test_a_node_that_joins_and_one_that_crashes_are_known_to_all() -> None:
    simulation = start()
    new = simulation.add_node()
    simulation.run_until(simulation.now + 60)
    assert len(views(simulation)) == 1
    assert new.node in next(iter(views(simulation)))
    simulation.crash(new)
    simulation.run_until(simulation.now + MEMBER_TTL_S + 5)
    (view,) = views(simulation)
    assert new.node not in view
    assert len(view) == 24


def test_ground_keys_of_a_few_networks_cannot_withhold_a_place() -> None:
    simulation = start(n_peers=60)
    place = sorted(simulation.peers_at)[2]
    keys = [Identity.from_seed(n.to_bytes(32, "big")) for n in range(1_000)]
    keys.sort(key=lambda identity: key_of(place) ^ position_of(identity.node_id))
    for n, identity in enumerate(keys[:40]):
        simulation.add_node(identity=identity, address=f"66.6.{n % 2}.{n + 1}:7440").withholds = True
    simulation.run_until(simulation.now + 150)
    client = simulation.add_client(reader_of(simulation))
    near = client.ring.closest(place)
    assert sum(simulation.nodes[node].withholds for node in near) == 2, "one of each network, or this tests nothing"
    outcomes = []
    for _ in range(40):
        outcomes.append(simulation.look_up(client, place))
        simulation.run_until(simulation.now + 1)
    simulation.run_until(simulation.now + 10)
    assert all(outcome.is_right and outcome.n_found for outcome in outcomes)


def teach_lies(simulation: RegistrySimulation, nodes: Iterable[SimNode]) -> NodeId:
    """Tell nodes of a hundred members that do not exist, each signed and in a network of its own; returns the last."""
    for n in range(100):
        identity = Identity.from_seed(n.to_bytes(32, "big"))
        record = RegistryNodeRecord(node=identity.node_id, seq=1, ttl_s=MEMBER_TTL_S, addresses=(f"66.{n}.1.1:7440",))
        for node in nodes:
            node.replica.membership.learn(record, sign(record, identity), simulation.now)
    return identity.node_id


def test_members_that_do_not_exist_are_in_nobodys_ring() -> None:
    simulation = start()
    before = views(simulation)
    invented = teach_lies(simulation, simulation.nodes.values())
    heard = sum(bool(node.replica.membership.addresses(invented)) for node in simulation.nodes.values())
    assert heard > 12, "the lie was told"
    simulation.run_until(simulation.now + 60)
    assert views(simulation) == before


def test_names_that_nobody_has_met_are_not_passed_on() -> None:
    simulation = start()
    liar = next(iter(simulation.nodes.values()))
    invented = teach_lies(simulation, [liar])
    assert liar.replica.membership.addresses(invented), "the liar itself knows"
    simulation.run_until(simulation.now + 60)
    others = [node for node in simulation.nodes.values() if node is not liar]
    assert not any(node.replica.membership.addresses(invented) for node in others)


def test_a_quick_rejoin_is_one_entry() -> None:
    """Scenario 11: killed, and back within two seconds, with the same key."""
    simulation = start(n_peers=30)
    peer = next(iter(simulation.peers.values()))
    host = peer.client.host
    simulation.crash(host)
    simulation.run_until(simulation.now + 2)
    host.is_up = True
    simulation._announce_first(peer)
    simulation.run_until(simulation.now + 2)
    client = simulation.add_client(reader_of(simulation))
    for place in peer.places:
        outcome = simulation.look_up(client, place)
        simulation.run_until(simulation.now + 5)
        assert outcome.is_right
        assert outcome.n_found == len(simulation.peers_at[place]), "nobody twice"


def test_a_ghost_expires_without_anybody_acting() -> None:
    """Scenario 12: a holder never comes back."""
    simulation = start(n_peers=30)
    peer = next(iter(simulation.peers.values()))
    simulation.kill(peer)
    client = simulation.add_client(reader_of(simulation))
    n_there = {place: len(simulation.peers_at[place]) for place in peer.places}
    for passed_s, n_gone in ((TTL_S / 3, 0), (2 * TTL_S, 1)):
        simulation.run_until(simulation.now + passed_s)
        outcomes = [simulation.look_up(client, place) for place in peer.places]
        simulation.run_until(simulation.now + 10)
        assert [outcome.n_found for outcome in outcomes] == [n_there[place] - n_gone for place in peer.places]


def test_a_sizes_shortcut_is_the_size_of_the_frame() -> None:
    model = ModelId(b"m" * 32)
    messages: list[m.Message] = [
        m.Gossip(summary=((b"t" * 8, 1), (b"u" * 8, 2))),
        m.Sync(digests=(((model, 1), b"d" * 8),)),
        m.Records(records=((1, b"abc"), (2, b""))),
        m.GetMembers(known=(b"t" * 8,)),
    ]
    for message in messages:
        assert size_of(message) == len(encode(message))


def test_deep_size_counts_each_object_once() -> None:
    shared = b"x" * 1000
    one, two = deep_size([shared]), deep_size([shared, shared])
    assert 0 < two - one < 100
    assert deep_size({"a": [shared], "b": (b"y" * 1000,)}) > 2000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_nodes_and_ten_thousand_peers() -> None:
    """Must show 3 of issue 4, at its size, for five simulated minutes."""
    figures = simulate_registry(RegistryOptions(duration_s=300.0, lookups_per_s=20.0))
    assert figures["lookup_success"] >= 0.999
    assert figures["median_round_trips"] == 1
    assert figures["heal"]["n_views_after"] == 1
    assert math.isfinite(figures["bytes_per_s_per_node"])
