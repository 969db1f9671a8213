"""Demand over capacity, block by block, and who takes what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.registry import scarcity as scarcity_module
from swarm.registry.records import ExpertAnnouncement, RoutingHistogram, levels_of, sign
from swarm.registry.scarcity import (
    EVEN_SHARE,
    FULL_UPLOAD_BYTES_S,
    MOVE_GAIN,
    MOVE_PAUSE_S,
    NO_CAPACITY,
    ONE_HOLDER,
    Pool,
    capacity,
    choose_slice,
    demand,
    first_expert,
    foresee,
    is_move_worthwhile,
    scarcity,
)
from tests.sample_records import sample_announcement

MODEL = ModelId(b"m" * 32)
LAYERS = (1, 2, 5)
N_EXPERT = 8
NODES = [NodeId(bytes([n]) * 32) for n in range(1, 9)]


def peer(number: int, experts: ExpertSet, **fields: object) -> ExpertAnnouncement:
    record = sample_announcement(
        NODES[number], model=MODEL, experts=experts, addresses=("192.0.2.1:7",), exact_kernels=False
    )
    return replace(record, **fields)  # type: ignore[arg-type]


def histogram(counts: list[int], *, layer: int = 1, n_tokens: int = 1000, window_s: int = 100) -> RoutingHistogram:
    return RoutingHistogram(
        node=NODES[0],
        seq=1,
        ttl_s=300,
        model=MODEL,
        n_tokens=n_tokens,
        window_s=window_s,
        loads=((layer, levels_of(counts)),),
    )


def everything() -> ExpertSet:
    return ExpertSet.of(LAYERS, range(N_EXPERT))


def test_without_histograms_everything_is_wanted_alike() -> None:
    assert np.allclose(demand(LAYERS, N_EXPERT, []), 1.0)


def test_demand_follows_the_router_and_a_share_of_it_stays_even() -> None:
    wanted = demand(LAYERS, N_EXPERT, [histogram([8, 4, 2, 2, 0, 0, 0, 0])])
    expected = EVEN_SHARE + (1 - EVEN_SHARE) * np.array([8, 4, 2, 2, 0, 0, 0, 0]) / 2
    assert np.allclose(wanted[0], expected, rtol=0.01)
    assert np.allclose(wanted[1:], 1.0), "of layers that a histogram does not speak of, nothing is known"


def test_a_busy_backbone_counts_for_more_than_an_idle_one() -> None:
    idle, busy = [8, 0, 0, 0, 0, 0, 0, 0], [0, 8, 0, 0, 0, 0, 0, 0]
    wanted = demand(LAYERS, N_EXPERT, [histogram(idle, n_tokens=10), histogram(busy, n_tokens=1000)])
    assert wanted[0, 1] > 20 * wanted[0, 0]


def test_histograms_and_slices_of_other_shapes_are_left_out() -> None:
    assert np.allclose(demand(LAYERS, N_EXPERT, [histogram([9] * 4), histogram([9] + [0] * 7, layer=3)]), 1.0)
    there = capacity(LAYERS, N_EXPERT, [peer(1, ExpertSet({9: frozenset({1}), 1: frozenset({1, 4464})}))])
    assert there[0, 1] == there.sum() == pytest.approx(24)


def test_a_peers_capacity_is_spread_over_what_it_holds() -> None:
    there = capacity(LAYERS, N_EXPERT, [peer(1, everything()), peer(2, ExpertSet.of(LAYERS, range(2)))])
    assert np.allclose(there[:, :2], 1 + 4)
    assert np.allclose(there[:, 2:], 1)


def test_a_peer_with_a_cap_on_what_it_sends_counts_for_less() -> None:
    caps = {None: 1.0, FULL_UPLOAD_BYTES_S: 1.0, FULL_UPLOAD_BYTES_S // 4: 0.25, 10 * FULL_UPLOAD_BYTES_S: 1.0, 1: 0.01}
    for cap, expected in caps.items():
        assert np.allclose(capacity(LAYERS, N_EXPERT, [peer(1, everything(), upload_bytes_s=cap)]), expected)


def test_the_next_volunteer_stands_by_those_who_may_send_least() -> None:
    slow, fast = ExpertSet.of(LAYERS, range(4)), ExpertSet.of(LAYERS, range(4, 8))
    pairs = [peer(1, slow, upload_bytes_s=100_000), peer(2, slow, upload_bytes_s=100_000), peer(3, fast), peer(4, fast)]
    assert choose(scarcity(LAYERS, N_EXPERT, [], pairs), 12, NODES[5]) == slow


def test_what_nobody_holds_is_scarcer_than_the_hottest_that_somebody_holds() -> None:
    held = peer(1, ExpertSet({1: frozenset(range(7)), 2: frozenset(range(8)), 5: frozenset(range(8))}))
    scarce = scarcity(LAYERS, N_EXPERT, [histogram([10**6, 1, 1, 1, 1, 1, 1, 0])], [held])
    assert scarce.argmax() == 7
    assert scarce[0, 7] > 1000 * np.delete(scarce.ravel(), 7).max()


def choose(scarce: np.ndarray, n_blocks: int, node: NodeId = NODES[1], among: ExpertSet | None = None) -> ExpertSet:
    return choose_slice(scarce, LAYERS, [100] * len(LAYERS), n_blocks * 100 + 50, node, among=among)


def test_among_equals_a_volunteer_takes_whole_experts_in_one_range() -> None:
    chosen = choose(np.ones((3, N_EXPERT)), 12)
    first = first_expert(NODES[1], N_EXPERT)
    assert chosen == ExpertSet.of(LAYERS, [(first + n) % N_EXPERT for n in range(4)])


def test_the_next_volunteer_fills_the_gap_exactly() -> None:
    first = choose(np.ones((3, N_EXPERT)), 12, NODES[1])
    scarce = scarcity(LAYERS, N_EXPERT, [], [peer(1, first)])
    second = choose(scarce, 12, NODES[2])
    assert not set(first) & set(second)
    assert set(first) | set(second) == set(everything())


def test_the_third_doubles_what_is_hot() -> None:
    halves = [peer(1, ExpertSet.of(LAYERS, range(4))), peer(2, ExpertSet.of(LAYERS, range(4, 8)))]
    hot = [1, 1, 1, 90, 1, 1, 80, 1]
    histograms = [histogram(hot, layer=layer) for layer in LAYERS]
    chosen = choose(scarcity(LAYERS, N_EXPERT, histograms, halves), 6, NODES[3])
    assert chosen == ExpertSet.of(LAYERS, [3, 6])


def test_layers_may_differ() -> None:
    scarce = np.ones((3, N_EXPERT))
    scarce[0, 3] = scarce[2, 5] = 100
    assert choose(scarce, 2) == ExpertSet({1: frozenset({3}), 5: frozenset({5})})


def test_only_what_may_be_chosen_is() -> None:
    among = ExpertSet({2: frozenset({1, 6})})
    assert choose(np.ones((3, N_EXPERT)), 20, among=among) == among


def test_a_budget_below_one_block_takes_nothing() -> None:
    assert choose(np.ones((3, N_EXPERT)), 0) == ExpertSet({})


def test_a_ragged_choice_of_a_huge_model_is_made_even_so_that_it_can_be_announced() -> None:
    rng = np.random.default_rng(5)
    layers, n_expert = tuple(range(3, 61)), 256
    scarce = np.where(rng.random((58, n_expert)) < 0.5, 1.0, 100.0)
    identity = Identity.from_seed(b"p" * 32)
    chosen = choose_slice(scarce, layers, [1] * 58, 58 * 128, identity.node_id)
    assert len(chosen) == 58 * 128
    assert len(set(chosen.by_layer.values())) <= 2, "whole experts, but for where the budget ends"
    sign(peer(1, chosen, node=identity.node_id), identity)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    budget=st.integers(0, 3000),
    sizes=st.lists(st.integers(1, 200), min_size=3, max_size=3),
)
def test_a_choice_fits_its_budget_is_the_scarcest_and_always_the_same(seed: int, budget: int, sizes: list[int]) -> None:
    scarce = np.exp2(np.random.default_rng(seed).integers(-4, 5, (3, N_EXPERT)).astype(float))
    chosen = choose_slice(scarce, LAYERS, sizes, budget, NODES[2])
    assert chosen == choose_slice(scarce.copy(), LAYERS, sizes, budget, NODES[2])
    size = {layer: sizes[row] for row, layer in enumerate(LAYERS)}
    assert sum(size[layer] for layer, _ in chosen) <= budget
    rows = {layer: row for row, layer in enumerate(LAYERS)}
    taken = [scarce[rows[layer], expert] for layer, expert in chosen]
    left = [scarce[rows[layer], expert] for layer, expert in everything() if (layer, expert) not in chosen]
    assert not taken or not left or min(taken) >= max(left)


def by_definition(histograms: list[RoutingHistogram], peers: list[ExpertAnnouncement]) -> np.ndarray:
    """Return scarcity, block by block, in plain numbers."""
    wanted = demand(LAYERS, N_EXPERT, histograms)
    scarce = np.empty(wanted.shape)
    for row, layer in enumerate(LAYERS):
        for expert in range(N_EXPERT):
            holders = [each for each in peers if (layer, expert) in each.experts]
            there = 0.0
            for each in holders:
                cap = FULL_UPLOAD_BYTES_S if each.upload_bytes_s is None else each.upload_bytes_s
                share = min(1.0, max(0.01, cap / FULL_UPLOAD_BYTES_S))
                n_held = len([pair for pair in each.experts if pair[0] in LAYERS and pair[1] < N_EXPERT])
                there += share * wanted.size / n_held
            scarce[row, expert] = wanted[row, expert] / max(there, NO_CAPACITY)
            scarce[row, expert] *= ONE_HOLDER if len(holders) == 1 else 1.0
    return scarce


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_peers_that_come_one_after_another_make_the_same_pool_as_all_at_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    histograms = [histogram(rng.integers(0, 100, N_EXPERT).tolist())]
    caps = (None, 1, FULL_UPLOAD_BYTES_S // 3)
    peers = []
    for number in range(7):
        held = {layer: frozenset(np.flatnonzero(rng.random(N_EXPERT + 2) < 0.4).tolist()) for layer in (*LAYERS, 9)}
        peers.append(peer(number, ExpertSet(held), upload_bytes_s=caps[rng.integers(3)]))
    pool = Pool(LAYERS, N_EXPERT, histograms)
    for number, each in enumerate(peers):
        assert pool.n_peers == number
        pool.extend([each])
        scarce = pool.scarcity()
        assert np.array_equal(scarce, scarcity(LAYERS, N_EXPERT, histograms, peers[: number + 1]))
        assert np.allclose(scarce, by_definition(histograms, peers[: number + 1]), rtol=1e-12)


# Two at once


def takes(*experts: int) -> Callable[[Sequence[ExpertAnnouncement], ExpertAnnouncement], ExpertSet]:
    """Return a choice of so many experts each time, after those that the others have."""
    return lambda so_far, rival: ExpertSet.of(LAYERS, [experts[len(so_far) % len(experts)]])


def test_a_newcomer_reckons_with_those_of_lower_ids_as_they_will_choose_one_after_the_other() -> None:
    claims = [peer(number, everything(), is_loading=True, is_choosing=True) for number in (5, 1, 3)]
    assert foresee(claims, NODES[1], takes(0, 1, 2)) == []
    seen = foresee(claims, NODES[5], takes(0, 1, 2))
    assert [(each.node, each.experts) for each in seen] == [
        (NODES[1], ExpertSet.of(LAYERS, [0])),
        (NODES[3], ExpertSet.of(LAYERS, [1])),
    ]


def test_who_has_chosen_counts_for_everybody_as_it_says() -> None:
    loading, ready = peer(5, everything(), is_loading=True), peer(6, everything())
    assert foresee([loading, ready], NODES[1], takes(0)) == [loading, ready]


def test_our_own_claim_does_not_stand_in_our_way() -> None:
    assert foresee([peer(1, everything(), is_choosing=True)], NODES[1], takes(0)) == []


def test_a_crowd_of_newcomers_is_worked_out_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarcity_module, "MAX_FORESEEN", 2)
    claims = [peer(number, everything(), is_choosing=True) for number in range(1, 5)]
    seen = foresee(claims, NODES[7], takes(0, 1))
    assert [len(each.experts) for each in seen] == [len(LAYERS), len(LAYERS), len(everything()), len(everything())]


# Replicas


def test_what_one_holds_alone_comes_before_the_hottest_that_two_hold_and_after_what_nobody_holds() -> None:
    hot = ExpertSet({1: frozenset({7})})
    others = [peer(1, ExpertSet({1: frozenset(range(6))})), peer(2, hot), peer(3, everything_of(2, 5)), peer(4, hot)]
    others += [peer(number, everything_of(2, 5)) for number in (5, 6)]
    scarce = scarcity(LAYERS, N_EXPERT, [histogram([1, 1, 1, 1, 1, 1, 1, 10**6])], others)
    assert choose(scarce, 1) == ExpertSet({1: frozenset({6})})
    assert scarce[0, 0] > 1000 * scarce[0, 7]
    assert scarce[0, 6] > 1000 * scarce[0, :6].max()


def everything_of(*layers: int) -> ExpertSet:
    return ExpertSet.of(layers, range(N_EXPERT))


@pytest.mark.parametrize("is_hot", [False, True])
def test_no_block_has_a_third_holder_while_another_has_one(is_hot: bool) -> None:
    """Ten come one after the other, of equal size, with an even router and with one that has favourites."""
    histograms = [histogram([100, 50, 20, 10, 5, 2, 1, 1], layer=layer) for layer in LAYERS] if is_hot else []
    announced: list[ExpertAnnouncement] = []
    for number in range(10):
        node = Identity.from_seed(bytes([number]) * 32).node_id
        chosen = choose(scarcity(LAYERS, N_EXPERT, histograms, announced), 5, node)
        announced.append(peer(1, chosen, node=node))
        counts = Counter(block for record in announced for block in record.experts)
        n_holders = [counts[block] for block in everything()]
        assert max(n_holders) <= max(1, min(n_holders) + 1), n_holders
    assert min(n_holders) == 2


# Moving


def test_a_peer_moves_only_for_much_more_and_not_soon_again() -> None:
    held, better = ExpertSet.of(LAYERS, [0]), ExpertSet.of(LAYERS, [1])
    scarce = np.ones((3, N_EXPERT))
    scarce[:, 1] = MOVE_GAIN * 1.01
    assert is_move_worthwhile(scarce, LAYERS, held, better, since_s=MOVE_PAUSE_S)
    assert not is_move_worthwhile(scarce, LAYERS, held, better, since_s=MOVE_PAUSE_S - 1)
    scarce[:, 1] = MOVE_GAIN * 0.99
    assert not is_move_worthwhile(scarce, LAYERS, held, better, since_s=MOVE_PAUSE_S)
    assert not is_move_worthwhile(scarce, LAYERS, held, ExpertSet({}), since_s=MOVE_PAUSE_S)


def test_nobody_gives_up_what_he_alone_holds_for_what_is_merely_hot() -> None:
    others = [peer(2, ExpertSet.of(LAYERS, range(1, 8)))]
    hot = [histogram([1, 1, 1, 1, 1, 1, 1, 10**6], layer=layer) for layer in LAYERS]
    scarce = scarcity(LAYERS, N_EXPERT, hot, others)
    held, hottest = ExpertSet.of(LAYERS, [0]), ExpertSet.of(LAYERS, [7])
    assert not is_move_worthwhile(scarce, LAYERS, held, hottest, since_s=1e9)
    assert scarce[0, 0] >= EVEN_SHARE / NO_CAPACITY


def test_who_doubles_others_moves_to_what_nobody_holds() -> None:
    others = [peer(2, ExpertSet.of(LAYERS, range(7)))]
    scarce = scarcity(LAYERS, N_EXPERT, [], others)
    better = choose(scarce, 3)
    assert better == ExpertSet.of(LAYERS, [7])
    assert is_move_worthwhile(scarce, LAYERS, ExpertSet.of(LAYERS, [0]), better, since_s=MOVE_PAUSE_S)
