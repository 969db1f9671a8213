"""Which experts are kept: each layer's K first, then the most popular for their bytes; nothing moves for noise."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.dispatch.local_choice import KEEP_BONUS, choose_local, is_change_worthwhile, kept_share
from swarm.ids import ExpertSet

LAYERS = (1, 4)
COUNTS = np.array([[10, 40, 30, 20, 0, 0], [1, 0, 0, 5, 0, 94]], np.float64)  # [L, E]


def chosen(budget: int, *, n_least: int = 0, sizes: tuple[int, int] = (1, 1), kept: ExpertSet | None = None) -> dict:  # type: ignore[type-arg]
    found = choose_local(COUNTS, LAYERS, sizes, budget, n_least, kept=kept)
    return {layer: sorted(experts) for layer, experts in found.by_layer.items()}


def test_the_most_popular_are_kept_whatever_their_layer() -> None:
    assert chosen(1) == {4: [5]}
    assert chosen(3) == {1: [1, 2], 4: [5]}
    assert chosen(5) == {1: [0, 1, 2, 3], 4: [5]}
    assert chosen(100) == {1: list(range(6)), 4: list(range(6))}
    assert chosen(0) == {}


def test_each_layer_gets_what_a_draft_needs_before_any_gets_more() -> None:
    assert chosen(4, n_least=2) == {1: [1, 2], 4: [3, 5]}
    assert chosen(3, n_least=2) == {1: [1, 2], 4: [5]}
    assert chosen(6, n_least=2) == {1: [0, 1, 2, 3], 4: [3, 5]}


def test_bytes_count() -> None:
    assert chosen(100, sizes=(20, 50)) == {1: [1, 2], 4: [5]}, "94 for 50 bytes is worth less than 40 for 20"
    assert chosen(50, sizes=(20, 50)) == {1: [1]}, (
        "0.4/20, then 0.94/50, which does not fit: nothing smaller jumps the line"
    )


def test_without_counts_layers_share_evenly() -> None:
    found = choose_local(np.zeros((2, 6)), LAYERS, (1, 1), 6, 2)
    assert {layer: sorted(experts) for layer, experts in found.by_layer.items()} == {1: [0, 1, 2], 4: [0, 1, 2]}


def test_what_is_kept_stays_unless_others_are_clearly_more_popular() -> None:
    counts = np.array([[100.0, 100 * KEEP_BONUS - 1, 0, 0]])
    first = ExpertSet({0: frozenset({0})})
    assert choose_local(counts, (0,), (1,), 1, 0, kept=first) == first
    counts[0, 1] += 2
    assert choose_local(counts, (0,), (1,), 1, 0, kept=first) == ExpertSet({0: frozenset({1})})


def test_a_change_must_keep_more_rows_off_the_network() -> None:
    counts = np.array([[500.0, 495, 5, 0]])
    sets = [ExpertSet({0: frozenset({expert})}) for expert in range(3)]
    assert not is_change_worthwhile(counts, (0,), sets[1], sets[0]), "half a percent"
    assert is_change_worthwhile(counts, (0,), sets[2], sets[0])
    assert not is_change_worthwhile(counts, (0,), sets[0], sets[0])


def test_the_kept_share_is_of_all_pairs() -> None:
    experts = ExpertSet({1: frozenset({1, 3}), 4: frozenset({5})})
    assert kept_share(COUNTS, LAYERS, experts) == pytest.approx((0.6 + 0.94) / 2)
    assert kept_share(COUNTS, LAYERS, ExpertSet({})) == 0
