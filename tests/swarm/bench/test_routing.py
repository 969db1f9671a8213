"""A router of kinds: its choices are those of its law, and some experts go together."""

from __future__ import annotations

import numpy as np

from swarm.bench.routing import KindRouter, draw_weights
from swarm.dispatch.fanout import (
    clustered_shares,
    co_activation,
    contiguous_shares,
    destinations_per_token,
    owners_of,
    uniform_destinations,
)

ROUTER = KindRouter(n_expert=64, n_expert_used=8, n_kinds=6)


def test_rows_choose_distinct_experts_of_the_layer() -> None:
    ids = ROUTER.draw(np.random.default_rng(1), 500)
    assert ids.shape == (500, 8)
    assert ids.dtype == np.int32
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert 0 <= ids.min() <= ids.max() < 64


def test_the_router_is_the_same_whoever_draws_and_its_tokens_are_the_generators() -> None:
    one, other = (ROUTER.draw(np.random.default_rng(seed), 4000) for seed in (1, 2))
    assert (one != other).any()
    popular = [np.bincount(ids.ravel(), minlength=64) for ids in (one, other)]
    assert np.corrcoef(popular[0], popular[1])[0, 1] > 0.98
    elsewhere = KindRouter(n_expert=64, n_expert_used=8, n_kinds=6, seed=1).draw(np.random.default_rng(1), 4000)
    assert np.corrcoef(popular[0], np.bincount(elsewhere.ravel(), minlength=64))[0, 1] < 0.5


def test_one_kind_draws_by_its_softmax() -> None:
    """K = 1: the frequencies are the softmax of what the module's formula gives."""
    router = KindRouter(n_expert=8, n_expert_used=1, n_kinds=1, skew=0.5, seed=3)
    drawn = np.random.default_rng(3)
    scores = 2.0 * drawn.standard_normal((1, 8))[0] + 0.5 * drawn.standard_normal(8)
    expected = np.exp(scores) / np.exp(scores).sum()
    found = np.bincount(router.draw(np.random.default_rng(0), 40_000)[:, 0], minlength=8) / 40_000
    np.testing.assert_allclose(found, expected, atol=0.01)


def test_clustered_slices_meet_fewer_peers_on_further_tokens() -> None:
    rng = np.random.default_rng(5)
    learned, judged = ROUTER.draw(rng, 2000), ROUTER.draw(rng, 2000)
    met = {}
    for name, shares in (
        ("contiguous", contiguous_shares(64, 8, [0])),
        ("clustered", clustered_shares(co_activation(learned, 64)[np.newaxis], 8)),
    ):
        met[name] = destinations_per_token(judged, owners_of(shares, 0, 64))
    assert met["clustered"] < 0.85 * met["contiguous"]
    assert met["contiguous"] < uniform_destinations(64, 8, 8) + 0.3


def test_weights_of_a_row_add_up_to_one() -> None:
    ids = ROUTER.draw(np.random.default_rng(1), 50)
    weights = draw_weights(np.random.default_rng(2), ids)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    assert weights.min() > 0.01
