"""Which nodes store what: the closest by XOR, judged by plain arithmetic, and no two of one network while there are others."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest

from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.registry import ring as ring_module
from swarm.registry.records import NO_MODEL, ExpertAnnouncement, RecordKind, RoutingHistogram, Withdrawal
from swarm.registry.ring import (
    DIRECTORY,
    EXPERTS_PER_BUCKET,
    HISTOGRAMS,
    N_EXPERT_BUCKETS,
    N_REPLICAS,
    N_TOLERATED,
    OFFERS,
    THE_DIRECTORY,
    Ring,
    expert_buckets,
    is_place,
    key_of,
    places_of,
    position_of,
)
from tests.sample_records import sample_announcement, sample_offer

MODEL = ModelId(b"m" * 32)
RNG = random.Random(7)
NODES = [NodeId(RNG.randbytes(32)) for _ in range(60)]


def announcement(experts: ExpertSet) -> ExpertAnnouncement:
    return sample_announcement(NODES[0], model=MODEL, experts=experts, addresses=("192.0.2.1:1",), exact_kernels=False)


def test_a_place_is_stored_by_the_members_whose_positions_are_closest_by_xor() -> None:
    ring = Ring(dict.fromkeys(NODES))
    for bucket in range(20):
        key = int.from_bytes(hashlib.sha256(b"swarm place 1\0" + MODEL.raw + bytes([bucket, 0])).digest())
        distance = {
            node: key ^ int.from_bytes(hashlib.sha256(b"swarm position 1\0" + node.raw).digest()) for node in NODES
        }
        expected = sorted(NODES, key=distance.__getitem__)
        assert list(ring.closest((MODEL, bucket))) == expected[:N_REPLICAS]
        assert list(ring.closest((MODEL, bucket), N_TOLERATED)) == expected[:N_TOLERATED]


def test_everybody_with_the_same_members_agrees_in_whatever_order_they_were_learnt() -> None:
    shuffled = RNG.sample(NODES, len(NODES))
    a, b = Ring(dict.fromkeys(NODES)), Ring(dict.fromkeys(shuffled), {node: position_of(node) for node in NODES})
    assert [a.closest((MODEL, n)) for n in range(64)] == [b.closest((MODEL, n)) for n in range(64)]


def test_a_member_that_leaves_changes_only_what_it_stored() -> None:
    before = Ring(dict.fromkeys(NODES))
    gone = before.closest((MODEL, 0))[2]
    after = Ring(dict.fromkeys(node for node in NODES if node != gone))
    for bucket in range(64):
        old, new = before.closest((MODEL, bucket)), after.closest((MODEL, bucket))
        assert [node for node in old if node != gone] == list(new[: N_REPLICAS - (gone in old)])


def test_with_few_members_everything_is_everywhere() -> None:
    for n in range(N_REPLICAS + 1):
        ring = Ring(dict.fromkeys(NODES[:n]))
        assert set(ring.closest((MODEL, 3))) == set(NODES[:n])


def test_places_are_spread_over_the_members() -> None:
    ring = Ring(dict.fromkeys(NODES))
    rng = random.Random(3)
    counts = Counter(node for _ in range(600) for node in ring.closest((ModelId(rng.randbytes(32)), 0)))
    assert len(counts) == len(NODES)
    assert max(counts.values()) < 4 * 600 * N_REPLICAS / len(NODES)


def test_ground_keys_of_one_network_get_one_replica_of_a_place() -> None:
    place = (MODEL, 5)
    ground = sorted(
        (NodeId(RNG.randbytes(32)) for _ in range(2_000)), key=lambda node: key_of(place) ^ position_of(node)
    )
    sybils = dict.fromkeys(ground[:20], "198.51.100.0/24")
    honest = {node: f"10.{n}.0.0/24" for n, node in enumerate(NODES)}
    chosen = Ring(honest | sybils).closest(place)
    assert sum(node in sybils for node in chosen) == 1
    assert len(set(chosen)) == N_REPLICAS


def test_one_network_alone_still_fills_its_ring() -> None:
    ring = Ring(dict.fromkeys(NODES, "198.51.100.0/24"))
    assert len(set(ring.closest((MODEL, 1)))) == N_REPLICAS


def test_places_asked_for_by_strangers_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "MAX_KEPT_PLACES", 10)
    ring = Ring(dict.fromkeys(NODES))
    first = ring.closest((MODEL, 0))
    for n in range(50):
        ring.closest((ModelId(bytes([n]) * 32), 0))
    assert len(ring._closest) <= 10
    assert ring.closest((MODEL, 0)) == first


def test_an_announcement_is_where_its_experts_are_looked_for() -> None:
    held = ExpertSet({0: frozenset({0, 1}), 3: frozenset({EXPERTS_PER_BUCKET, 2 * EXPERTS_PER_BUCKET + 1})})
    assert places_of(announcement(held)) == ((MODEL, 0), (MODEL, 1), (MODEL, 2))
    far = announcement(ExpertSet({0: frozenset({65_535, N_EXPERT_BUCKETS * EXPERTS_PER_BUCKET})}))
    assert places_of(far) == ((MODEL, N_EXPERT_BUCKETS - 1),)
    for n_expert in (1, 16, 17, 128, 65_536):
        every = places_of(announcement(ExpertSet.of([0], range(n_expert))))
        assert every == tuple((MODEL, bucket) for bucket in expert_buckets(n_expert))


def test_an_offer_is_also_in_the_directory_and_a_withdrawal_nowhere() -> None:
    offer = sample_offer(NODES[0], model=MODEL, moe_layers="0", size_bytes=1, addresses=("192.0.2.1:1",))
    histogram = RoutingHistogram(
        node=NODES[0], seq=1, ttl_s=60, model=MODEL, n_tokens=1, window_s=1, loads=((0, "f0"),)
    )
    gone = Withdrawal(node=NODES[0], seq=2, model=MODEL, withdraws=RecordKind.EXPERTS)
    assert places_of(offer) == ((MODEL, OFFERS), THE_DIRECTORY)
    assert places_of(histogram) == ((MODEL, HISTOGRAMS),)
    assert places_of(gone) == ()
    for record in (offer, histogram, announcement(ExpertSet.of([0], [1]))):
        for model, bucket in places_of(record):
            assert is_place(model, bucket)


@pytest.mark.parametrize("place", [(MODEL, 64), (MODEL, DIRECTORY), (NO_MODEL, 0), (NO_MODEL, OFFERS), (MODEL, 0x103)])
def test_what_is_no_place(place: tuple[ModelId, int]) -> None:
    assert not is_place(*place)
