"""One owner per expert: each rule of the module by itself, and all of them under random change."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest

from swarm.dispatch.placement import Placement
from swarm.dispatch.plan import plan_dispatch
from swarm.errors import LocalProtocolError
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.registry.records import ExpertAnnouncement

MODEL = ModelId(b"m" * 32)
A, B, C, D = (NodeId(bytes([n]) * 32) for n in (10, 20, 30, 40))
LAYERS = (2, 3, 7)
E = 8


def announce(
    node: NodeId,
    experts: Iterable[int] | ExpertSet,
    *,
    seq: int = 1,
    layers: Iterable[int] = LAYERS,
    exact: bool = True,
    model: ModelId = MODEL,
) -> ExpertAnnouncement:
    return ExpertAnnouncement(
        node=node,
        seq=seq,
        ttl_s=60,
        model=model,
        model_name="tiny",
        experts=experts if isinstance(experts, ExpertSet) else ExpertSet.of(layers, experts),
        addresses=("127.0.0.1:1",),
        exact_kernels=exact,
        wire_versions=(1,),
    )


def placement(*announcements: ExpertAnnouncement, require_exact: bool = False) -> Placement:
    fresh = Placement(MODEL, LAYERS, E, require_exact=require_exact)
    fresh.update(announcements)
    return fresh


def owners(found: Placement, layer: int = 2) -> list[NodeId | None]:
    return [None if index < 0 else found.destinations[index] for index in found.owner_of(layer).tolist()]


def test_each_expert_goes_to_its_holder_layer_by_layer() -> None:
    sets = ExpertSet({2: frozenset({0, 1}), 7: frozenset({5})})
    found = placement(announce(A, sets), announce(B, [6]))
    assert found.destinations == (A, B)
    assert owners(found, 2) == [A, A, None, None, None, None, B, None]
    assert owners(found, 3) == [None] * 6 + [B, None]
    assert owners(found, 7) == [None] * 5 + [A, B, None]


def test_nobody_holds_anything_at_first() -> None:
    fresh = Placement(MODEL, LAYERS, E, require_exact=False)
    assert fresh.destinations == ()
    assert fresh.all_missing() == {layer: tuple(range(E)) for layer in LAYERS}
    assert fresh.n_assigned() == {}


def test_missing_names_what_has_no_owner() -> None:
    found = placement(announce(A, [0, 1, 4, 5, 6, 7]))
    assert found.missing(2) == (2, 3)
    assert found.missing(2, [7, 3, 1]) == (3,)
    assert found.missing(2, [7]) == ()
    found.update([announce(A, range(E))])
    assert found.all_missing() == {}


def test_a_layer_without_routed_experts_is_our_mistake() -> None:
    with pytest.raises(LocalProtocolError):
        placement().owner_of(4)


def test_what_the_model_lacks_is_ignored() -> None:
    found = placement(announce(A, [0, 8, 65_535], layers=[1, 2, 65_535]), announce(B, [1], model=ModelId(b"x" * 32)))
    assert found.destinations == (A,)
    assert owners(found) == [A] + [None] * 7
    assert found.n_assigned() == {A: 1}


def test_the_form_exact_uses_only_peers_with_exact_kernels() -> None:
    both = [announce(A, [0, 1], exact=False), announce(B, [1])]
    assert owners(placement(*both, require_exact=True))[:2] == [None, B]
    assert owners(placement(*both, require_exact=False))[:2] == [A, B]


def test_replicas_share_the_experts_evenly_and_ties_go_to_the_lower_node() -> None:
    found = placement(announce(B, range(E)), announce(A, range(E)))
    assert found.n_assigned() == {A: 12, B: 12}
    assert owners(found) == [A, B] * 4


def test_an_experts_only_holder_counts_before_the_shared_ones_are_given_out() -> None:
    found = placement(announce(A, range(4)), announce(B, range(E)))
    assert owners(found) == [A] * 4 + [B] * 4


def test_the_order_of_announcements_does_not_matter() -> None:
    rng = random.Random(3)
    records = [announce(node, rng.sample(range(E), 5)) for node in (A, B, C, D)]
    expected = [owners(placement(*records), layer) for layer in LAYERS]
    for _ in range(5):
        rng.shuffle(records)
        assert [owners(placement(*records), layer) for layer in LAYERS] == expected


def test_of_two_announcements_of_a_node_the_higher_seq_counts() -> None:
    for records in ([announce(A, [0], seq=1), announce(A, [1], seq=2)], [announce(A, [1], seq=2), announce(A, [0])]):
        assert owners(placement(*records))[:2] == [None, A]


def test_an_owner_stays_when_a_peer_joins_even_one_with_a_lower_id() -> None:
    found = placement(announce(B, range(E)), announce(C, [0, 1]))
    before = owners(found)
    assert found.update([announce(B, range(E)), announce(C, [0, 1]), announce(A, range(E))])
    assert found.destinations == (A, B, C)
    assert owners(found) == before
    assert found.n_assigned()[A] == 0


def test_only_a_leavers_experts_move() -> None:
    records = {node: announce(node, range(E)) for node in (A, B, C)}
    found = placement(*records.values())
    before = owners(found)
    found.update([records[A], records[C]])
    after = owners(found)
    assert B in before
    assert [new for old, new in zip(before, after, strict=True) if old != B] == [old for old in before if old != B]
    assert found.n_assigned() == {A: 12, C: 12}


def test_an_owner_that_no_longer_announces_an_expert_loses_it() -> None:
    found = placement(announce(A, range(E)))
    found.update([announce(A, range(4), seq=2), announce(B, range(E))])
    assert owners(found) == [A] * 4 + [B] * 4


def test_a_node_that_is_down_is_used_again_only_after_a_higher_seq() -> None:
    first, other = announce(A, range(E), seq=5), announce(B, range(4))
    found = placement(first, other)
    assert found.mark_down(A)
    assert found.destinations == (B,)
    assert owners(found) == [B] * 4 + [None] * 4
    assert not found.mark_down(A)
    assert not found.update([first, other])
    assert not found.update([announce(A, range(E), seq=4), other])
    assert found.missing(2) == (4, 5, 6, 7)
    assert found.update([announce(A, range(E), seq=6), other])
    assert owners(found) == [B] * 4 + [A] * 4


def test_being_absent_does_not_lift_a_down_mark() -> None:
    first = announce(A, range(E), seq=5)
    found = placement(first)
    found.mark_down(A)
    found.update([])
    found.update([first])
    assert found.destinations == ()
    assert found.announcement(A) == first


def test_marking_an_unknown_node_down_changes_nothing() -> None:
    found = placement(announce(A, range(E)))
    assert not found.mark_down(B)
    assert found.destinations == (A,)


def test_a_renewal_changes_nothing_but_the_announcement() -> None:
    found = placement(announce(A, range(E)))
    renewed = announce(A, range(E), seq=2)
    assert not found.update([renewed])
    assert found.announcement(A) == renewed
    assert found.announcement(B) is None


def test_the_arrays_are_reused_and_cannot_be_written() -> None:
    found = placement(announce(A, range(E)))
    view = found.owner_of(2)
    assert view.dtype == np.int32
    found.update([])
    assert view is found.owner_of(2)
    assert (view == -1).all()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_plan_follows_the_placement() -> None:
    found = placement(announce(A, range(4)), announce(B, range(4, E)))
    plan = plan_dispatch(
        np.array([[0, 7], [5, 6]], np.int32), np.ones((2, 2), np.float32), found.owner_of(3), found.destinations
    )
    assert isinstance(plan, list)
    assert [(batch.destination, batch.rows.tolist(), batch.expert_ids.tolist()) for batch in plan] == [
        (A, [0], [0]),
        (B, [0, 1], [7, 5, 6]),
    ]


def test_under_random_change_every_held_expert_has_a_live_holder_and_nothing_moves_without_need() -> None:
    rng = random.Random(11)
    nodes = [NodeId(bytes([n]) * 32) for n in range(1, 9)]
    live: dict[NodeId, ExpertAnnouncement] = {}
    down: dict[NodeId, int] = {}
    found = Placement(MODEL, LAYERS, E, require_exact=False)
    for seq in range(1, 301):
        node, before = rng.choice(nodes), {layer: owners(found, layer) for layer in LAYERS}
        action = rng.choice(["announce", "announce", "leave", "down"])
        if action == "announce":
            by_layer = {layer: frozenset(rng.sample(range(E), rng.randint(1, E))) for layer in rng.sample(LAYERS, 2)}
            live[node] = announce(node, ExpertSet(by_layer), seq=seq)
            down.pop(node, None)
        elif action == "leave":
            live.pop(node, None)
        elif node in live:
            down.setdefault(node, live[node].seq)
            found.mark_down(node)
        found.update(live.values())
        usable = {name: record for name, record in live.items() if name not in down}
        for layer in LAYERS:
            for expert, owner in enumerate(owners(found, layer)):
                holders = {name for name, record in usable.items() if (layer, expert) in record.experts}
                assert (owner is None) if not holders else (owner in holders)
                if before[layer][expert] in holders:
                    assert owner == before[layer][expert]


def test_all_holders_of_each_expert_are_known_and_the_version_tells_of_changes() -> None:
    sets = ExpertSet({2: frozenset({0, 1}), 7: frozenset({5, E})})
    found = placement(announce(A, sets), announce(B, [1]))
    before = found.version
    assert found.layers == LAYERS
    held = found.holders
    assert held.shape == (2, len(LAYERS), E)
    assert {tuple(each) for each in np.argwhere(held).tolist()} == {
        (0, 0, 0), (0, 0, 1), (0, 2, 5), (1, 0, 1), (1, 1, 1), (1, 2, 1)
    }  # fmt: skip
    found.update([announce(A, sets, seq=2), announce(B, [1])])
    assert found.version == before
    found.mark_down(A)
    assert found.version > before
    assert found.holders.shape == (1, len(LAYERS), E)
    assert held.shape == (2, len(LAYERS), E), "who looks at the former may go on"
