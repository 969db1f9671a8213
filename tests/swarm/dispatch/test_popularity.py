"""What is counted, and how it fades."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from swarm.dispatch.popularity import FEW_PAIRS, HALF_LIFE_S, Popularity


def test_every_pair_counts_once_at_its_layer() -> None:
    popularity = Popularity((4, 2), 5, now=0.0)
    popularity.add(2, np.array([[0, 1], [1, 4]], np.int32))
    popularity.add(4, np.array([[3, 1]], np.int32))
    popularity.add(3, np.array([[3, 1]], np.int32))  # a layer without experts
    assert popularity.layers == (2, 4)
    assert popularity.counts.tolist() == [[1, 2, 0, 0, 1], [0, 1, 0, 1, 0]]
    assert popularity.n_tokens == 2


def test_weights_are_summed_apart_and_fade_alike() -> None:
    popularity = Popularity((0,), 4, now=0.0)
    popularity.add(0, np.array([[0, 1], [1, 2]], np.int32), np.array([[0.75, 0.25], [0.5, 0.5]], np.float32))
    assert popularity.mass.tolist() == [[0.75, 0.75, 0.5, 0]]
    popularity.add(0, np.array([[3, 0]], np.int32))  # without weights each choice counts 1
    assert popularity.mass.tolist() == [[1.75, 0.75, 0.5, 1]]
    popularity.fade(HALF_LIFE_S)
    assert np.allclose(popularity.mass, [[0.875, 0.375, 0.25, 0.5]])
    again = Popularity((0,), 4, now=0.0)
    assert again.restore(popularity.to_bytes())
    assert np.allclose(again.mass, popularity.mass, atol=1e-3)


@pytest.mark.parametrize("n_tokens", [1, FEW_PAIRS // 4 - 1, FEW_PAIRS // 4, FEW_PAIRS + 7])
def test_tokens_one_by_one_are_counted_as_all_at_once(n_tokens: int) -> None:
    rng = np.random.default_rng(n_tokens)
    ids = rng.integers(0, 8, (n_tokens, 4)).astype(np.int32)
    weights = rng.random((n_tokens, 4)).astype(np.float32)
    whole, single = (Popularity((0, 1), 8, now=0.0) for _ in range(2))
    whole.add(1, ids, weights)
    for token in range(n_tokens):
        single.add(1, ids[token : token + 1], weights[token : token + 1])
    assert single.to_bytes() == whole.to_bytes(), "before anybody has asked"
    assert single.counts.tolist() == whole.counts.tolist()
    assert np.allclose(single.mass, whole.mass)
    assert single.n_tokens == n_tokens


def test_a_token_that_was_not_asked_for_yet_fades_from_when_it_came() -> None:
    popularity = Popularity((0,), 4, now=0.0)
    popularity.add(0, np.array([[1, 2]], np.int32), np.array([[0.5, 0.5]], np.float32))
    popularity.fade(HALF_LIFE_S)
    assert np.allclose(popularity.counts, [[0, 0.5, 0.5, 0]])
    assert np.allclose(popularity.mass, [[0, 0.25, 0.25, 0]])


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


def test_what_was_kept_over_a_restart_counts_on() -> None:
    before = Popularity((2, 5), 4, now=0.0)
    for _ in range(100):
        before.add(2, np.array([[0, 3]], np.int32))
        before.add(5, np.array([[1, 2]], np.int32))
    before.fade(500.0)
    after = Popularity((2, 5), 4, now=7.0)  # another clock
    assert after.restore(before.to_bytes())
    assert np.allclose(after.counts, before.counts, atol=0.01)
    assert after.n_tokens / after.window_s == pytest.approx(before.n_tokens / before.window_s, rel=0.01)
    after.add(2, np.array([[1, 3]], np.int32))
    assert after.counts[0, 1] == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data.replace(b'"layers":[2,5]', b'"layers":[2,6]'),
        lambda data: data.replace(b'"n_tokens":[', b'"n_tokens":[1.0,'),
        lambda data: data.replace(b"10.0", b"-10.0"),
        lambda data: data.replace(b"10.0", b"NaN"),
        lambda data: data.replace(b"10.0", b'"x"'),
        lambda data: b"[1, 2]",
    ],
)
def test_a_damaged_record_changes_nothing(damage: Callable[[bytes], bytes]) -> None:
    before = Popularity((2, 5), 4, now=0.0)
    before.add(2, np.zeros((10, 1), np.int32))
    data = before.to_bytes()
    assert damage(data) != data
    after = Popularity((2, 5), 4, now=0.0)
    assert not after.restore(damage(data))
    assert after.n_tokens == 0
    assert not after.counts.any()
