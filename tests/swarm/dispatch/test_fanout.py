"""Slices by co-activation: they cover everything once, are even, and meet fewer peers on tokens they were not made from."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.dispatch import fanout
from swarm.dispatch.fanout import (
    clustered_shares,
    co_activation,
    contiguous_shares,
    destinations_per_token,
    load_imbalance,
    owners_of,
    uniform_destinations,
)
from swarm.ids import ExpertSet

Choices = npt.NDArray[np.int64]


def routed(n_tokens: int, n_expert: int, n_used: int, *, router: int, tokens: int, skew: float) -> Choices:
    """Return the choices [T, K] of a random router for tokens of ten kinds; `skew` is how much its experts differ."""
    rng = np.random.default_rng(router)
    preference = 2.0 * rng.standard_normal((10, n_expert)) + skew * rng.standard_normal(n_expert)
    rng = np.random.default_rng(tokens)
    scores = preference[rng.integers(0, 10, n_tokens)] + rng.gumbel(size=(n_tokens, n_expert))
    return np.argpartition(-scores, n_used, axis=1)[:, :n_used]


def planted(n_tokens: int, groups: npt.NDArray[np.int64], seed: int) -> Choices:
    """Return choices of two experts, always of the same group of `groups` [P, n]."""
    rng = np.random.default_rng(seed)
    chosen = groups[rng.integers(0, len(groups), n_tokens)]
    return np.take_along_axis(chosen, rng.permuted(np.tile(np.arange(chosen.shape[1]), (n_tokens, 1)), axis=1), axis=1)[
        :, :2
    ]


def sizes(shares: list[ExpertSet]) -> list[int]:
    return [len(share) for share in shares]


def is_even(counts: list[int]) -> bool:
    return max(counts) - min(counts) <= 1


# Counting


def test_co_activation_counts_pairs_and_on_the_diagonal_tokens() -> None:
    counts = co_activation(np.array([[0, 2], [2, 0], [1, 2]], np.int32), 4)
    assert counts.tolist() == [[2, 0, 2, 0], [0, 1, 1, 0], [2, 1, 3, 0], [0, 0, 0, 0]]


def test_destinations_are_the_distinct_owners_of_a_tokens_experts() -> None:
    owner_of = np.array([0, 0, 1, 2])
    assert destinations_per_token(np.array([[0, 1], [0, 2], [2, 3]]), owner_of) == (1 + 2 + 2) / 3
    assert destinations_per_token(np.array([[0, 1, 2, 3]]), owner_of) == 3
    assert destinations_per_token(np.array([[1, 2, 0, 2]]), owner_of) == 2, "owners that are not adjacent"
    assert destinations_per_token(np.empty((0, 4), np.int64), owner_of) == 0.0


@given(seed=st.integers(0, 1000), n_peers=st.integers(1, 8))
def test_destinations_agree_with_counting_them_one_by_one(seed: int, n_peers: int) -> None:
    rng = np.random.default_rng(seed)
    owner_of = rng.integers(0, n_peers, 12)
    ids = rng.permuted(np.tile(np.arange(12), (9, 1)), axis=1)[:, :4]
    assert destinations_per_token(ids, owner_of) == pytest.approx(np.mean([len(set(owner_of[row])) for row in ids]))


@pytest.mark.parametrize(("n_expert", "n_used", "n_peers"), [(32, 4, 4), (10, 3, 4), (8, 2, 8), (6, 6, 2), (5, 1, 3)])
def test_the_uniform_expectation_is_that_of_all_choices(n_expert: int, n_used: int, n_peers: int) -> None:
    if n_expert > 12:
        ids = np.argsort(np.random.default_rng(0).random((40_000, n_expert)), axis=1)[:, :n_used]
        tolerance = 0.02  # four standard errors of a sample this large
    else:
        ids = np.array(list(itertools.combinations(range(n_expert), n_used)))
        tolerance = 1e-9
    [owner_of] = [owners_of(contiguous_shares(n_expert, n_peers, [0]), 0, n_expert)]
    expected = destinations_per_token(ids, owner_of)
    assert uniform_destinations(n_expert, n_used, n_peers) == pytest.approx(expected, abs=tolerance)


def test_eight_experts_over_sixteen_peers_meet_six_and_a_half() -> None:
    assert uniform_destinations(128, 8, 16) == pytest.approx(6.6, abs=0.05)


def test_imbalance_is_the_busiest_peers_pairs_over_the_mean() -> None:
    ids = np.array([[0, 1], [0, 1], [0, 2]])
    assert load_imbalance(ids, np.array([0, 0, 1]), 2) == 5 / 3
    assert load_imbalance(ids[:0], np.array([0, 0, 1]), 2) == 1.0


# Shares


@given(
    n_layers=st.integers(1, 4),
    n_expert=st.integers(1, 20),
    n_peers=st.integers(1, 20),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_every_expert_is_in_one_share_and_shares_are_equal(
    n_layers: int, n_expert: int, n_peers: int, seed: int
) -> None:
    n_peers = min(n_peers, n_expert)
    rng = np.random.default_rng(seed)
    half = rng.integers(0, 50, (n_layers, n_expert, n_expert))
    layers = [3 + 2 * i for i in range(n_layers)]
    shares = clustered_shares(half + half.transpose(0, 2, 1), n_peers, layers)
    pairs = sorted(pair for share in shares for pair in share)
    assert pairs == [(layer, expert) for layer in layers for expert in range(n_expert)]
    for layer in layers:
        assert is_even([len(share.by_layer.get(layer, ())) for share in shares])
    assert is_even(sizes(shares)), "over all layers too"


def test_groups_that_are_always_chosen_together_are_found_wherever_they_are() -> None:
    groups = np.random.default_rng(1).permutation(64).reshape(16, 4)
    counts = co_activation(planted(3000, groups, 2), 64)
    shares = clustered_shares(counts[np.newaxis], 16)
    assert sorted(sorted(share.by_layer[0]) for share in shares) == sorted(sorted(group) for group in groups.tolist())


@pytest.mark.parametrize("n_peers", [4, 16])
@pytest.mark.parametrize("skew", [0.3, 1.5])
def test_held_out_tokens_meet_fewer_peers_than_with_contiguous_shares_and_load_stays_even(
    n_peers: int, skew: float
) -> None:
    n_layers, n_expert, n_used = 6, 64, 6
    learned = [routed(2000, n_expert, n_used, router=i, tokens=100 + i, skew=skew) for i in range(n_layers)]
    judged = [routed(2000, n_expert, n_used, router=i, tokens=200 + i, skew=skew) for i in range(n_layers)]
    layers = range(n_layers)
    clustered = clustered_shares(np.stack([co_activation(ids, n_expert) for ids in learned]), n_peers)
    contiguous = contiguous_shares(n_expert, n_peers, layers)

    def judge(shares: list[ExpertSet]) -> tuple[float, float, float]:
        owners = [owners_of(shares, layer, n_expert) for layer in layers]
        met = np.mean([destinations_per_token(judged[i], owners[i]) for i in layers])
        load = np.mean([load_imbalance(judged[i], owners[i], n_peers) for i in layers])
        pairs = sum(np.bincount(owners[i][judged[i]].ravel(), minlength=n_peers) for i in layers)
        return float(met), float(load), float(pairs.max() / pairs.mean())

    met, load, total = judge(clustered)
    met_contiguous, load_contiguous, _ = judge(contiguous)
    assert met < 0.93 * met_contiguous
    assert load < 1.25 * load_contiguous
    assert total < 1.15, "over all layers the peers' loads even out"


def test_without_the_weight_of_balance_popular_experts_crowd_on_one_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = routed(3000, 64, 6, router=1, tokens=2, skew=1.5)
    counts = co_activation(learned, 64)[np.newaxis]

    def imbalance() -> float:
        return load_imbalance(learned, owners_of(clustered_shares(counts, 8), 0, 64), 8)

    balanced = imbalance()
    monkeypatch.setattr(fanout, "BALANCE", 0.0)
    assert balanced < 0.75 * imbalance()


def test_a_router_that_picks_one_expert_has_its_load_evened_out() -> None:
    ids = np.repeat(np.arange(8), [800, 400, 200, 100, 50, 25, 12, 6])[:, np.newaxis]
    shares = clustered_shares(co_activation(ids, 8)[np.newaxis], 4)
    owner_of = owners_of(shares, 0, 8)
    assert load_imbalance(ids, owner_of, 4) == pytest.approx(4 * 806 / 1593), "the busiest with the idlest"


def test_counts_of_nothing_give_shares_too() -> None:
    assert sizes(clustered_shares(np.zeros((2, 5, 5), np.int64), 2)) == [5, 5]


def test_equal_counts_give_equal_shares() -> None:
    counts = co_activation(routed(500, 32, 4, router=1, tokens=2, skew=1.0), 32)[np.newaxis]
    assert clustered_shares(counts, 4) == clustered_shares(counts, 4)


@pytest.mark.parametrize("n_peers", [0, 6])
def test_numbers_of_peers_out_of_range_are_refused(n_peers: int) -> None:
    with pytest.raises(ValueError, match="number of peers out of range"):
        clustered_shares(np.ones((1, 5, 5), np.int64), n_peers)
    with pytest.raises(ValueError, match="number of peers out of range"):
        contiguous_shares(5, n_peers, [0])


def test_counts_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="wrong shape"):
        clustered_shares(np.ones((5, 5), np.int64), 2)


def test_an_expert_that_no_share_holds_has_no_owner() -> None:
    shares = [ExpertSet({0: frozenset({1})}), ExpertSet({0: frozenset({3}), 1: frozenset({0})})]
    assert owners_of(shares, 0, 4).tolist() == [-1, 0, -1, 1]
