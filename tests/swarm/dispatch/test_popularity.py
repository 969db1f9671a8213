"""What is counted, and how it fades."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.dispatch.popularity import HALF_LIFE_S, Popularity


def test_every_pair_counts_once_at_its_layer() -> None:
    popularity = Popularity((4, 2), 5, now=0.0)
    popularity.add(2, np.array([[0, 1], [1, 4]], np.int32))
    popularity.add(4, np.array([[3, 1]], np.int32))
    popularity.add(3, np.array([[3, 1]], np.int32))  # a layer without experts
    assert popularity.layers == (2, 4)
    assert popularity.counts.tolist() == [[1, 2, 0, 0, 1], [0, 1, 0, 1, 0]]
    assert popularity.n_tokens == 2


def test_counts_halve_and_their_rate_stays_true() -> None:
    popularity = Popularity((0,), 4, now=100.0)
    for step in range(2000):  # ten half-lives, one token each 9 s
        popularity.add(0, np.array([[step % 2, 2]], np.int32))
        popularity.fade(100.0 + 9.0 * (step + 1))
    assert popularity.n_tokens / popularity.window_s == pytest.approx(1 / 9, rel=0.01)
    before = popularity.counts
    popularity.fade(100.0 + 9.0 * 2000 + HALF_LIFE_S)
    assert np.allclose(popularity.counts, before / 2)


def test_a_young_backbone_tells_its_rate_too() -> None:
    popularity = Popularity((0,), 4, now=0.0)
    popularity.add(0, np.zeros((60, 1), np.int32))
    popularity.fade(10.0)
    assert popularity.window_s == pytest.approx(10.0, rel=0.01)
    assert popularity.n_tokens / popularity.window_s == pytest.approx(6.0, rel=0.01)


def test_a_clock_that_stands_still_fades_nothing() -> None:
    popularity = Popularity((0,), 4, now=5.0)
    popularity.add(0, np.zeros((3, 1), np.int32))
    popularity.fade(5.0)
    popularity.fade(4.0)
    assert popularity.counts[0, 0] == 3
