"""Expected maxima against seeded simulation of a uniform router."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.plan import load


def simulate(n_expert: int, n_used: int, n_tokens: int, n_groups: int, *, n_runs: int = 400) -> dict[str, float]:
    """Return means over runs: rows of the busiest expert and peer, active experts, those of the busiest peer, its pairs."""
    rng = np.random.default_rng(7)
    keys = rng.random((n_runs, n_tokens, n_expert))
    chosen = np.argsort(keys, axis=-1)[..., :n_used] if n_used < n_expert else np.argsort(keys, axis=-1)
    is_used = np.zeros(keys.shape, bool)
    np.put_along_axis(is_used, chosen, True, axis=-1)  # [runs, T, E]
    by_expert = is_used.sum(axis=1)  # [runs, E]
    grouped = is_used.reshape(n_runs, n_tokens, n_groups, -1)
    return {
        "expert": by_expert.max(axis=1).mean(),
        "active": (by_expert > 0).sum(axis=1).mean(),
        "peer": grouped.any(axis=-1).sum(axis=1).max(axis=1).mean(),
        "peer_active": grouped.any(axis=1).sum(axis=-1).max(axis=1).mean(),
        "pairs": grouped.sum(axis=(1, 3)).max(axis=1).mean(),
    }


@pytest.mark.parametrize(
    ("n_expert", "n_used", "n_tokens", "n_groups"), [(64, 8, 1, 4), (64, 8, 16, 4), (32, 4, 64, 8), (8, 2, 512, 8)]
)
def test_maxima_are_those_of_a_simulation(n_expert: int, n_used: int, n_tokens: int, n_groups: int) -> None:
    found = simulate(n_expert, n_used, n_tokens, n_groups)
    mean = n_tokens * n_used / n_expert
    assert load.active_experts(n_expert, n_used, n_tokens) == pytest.approx(found["active"], rel=0.02)
    assert load.rows_imbalance(n_expert, n_used, n_tokens) == pytest.approx(found["expert"] / mean, rel=0.1)
    sizes = (n_expert, n_used, n_tokens, n_groups, 0.0)
    assert load.most_active_experts(*sizes) == pytest.approx(found["peer_active"], rel=0.1)
    assert load.most_assignments(*sizes) == pytest.approx(found["pairs"], rel=0.1)
    touched = load.touch_probability(n_expert, n_used, n_expert // n_groups) * n_tokens
    assert load.peer_imbalance(n_expert, n_used, n_tokens, n_groups) == pytest.approx(found["peer"] / touched, rel=0.1)


def test_a_single_token_loads_one_row_on_each_expert_that_it_picks() -> None:
    assert load.active_experts(128, 8, 1) == pytest.approx(8)
    assert load.rows_imbalance(128, 8, 1) == pytest.approx(16, rel=0.01)


def test_one_peer_has_everything() -> None:
    assert load.most_assignments(64, 8, 10, 1, 0.0) == 80
    assert load.most_assignments(64, 8, 10, 1, 0.25) == 60
    assert load.most_active_experts(64, 8, 1, 1, 0.0) == pytest.approx(8)


@given(st.integers(1, 100_000), st.floats(1e-6, 1), st.integers(1, 2000))
def test_a_maximum_lies_between_the_mean_and_all(n_trials: int, chance: float, n_cells: int) -> None:
    found = load.expected_max_binomial(n_trials, chance, n_cells)
    assert n_trials * chance * (1 - 1e-6) - 1e-9 <= found <= n_trials * (1 + 1e-9)


def test_nothing_has_no_maximum() -> None:
    assert load.expected_max_binomial(0, 0.5, 8) == 0 == load.expected_max_binomial(5, 0.0, 8)
