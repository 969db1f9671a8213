"""Costs of steps and drafts: found from measured ones, with a guess for rows until rows were seen."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.speculation.costs import ROW_SHARE, DraftCost, StepCosts


def test_before_rows_were_seen_a_row_costs_what_is_guessed() -> None:
    costs = StepCosts()
    assert not costs.is_known
    assert costs.step_s(3) == 0
    for _ in range(30):
        costs.count(1, 0.5)
    assert costs.step_s(1) == pytest.approx(0.5)
    assert costs.step_s(9) == pytest.approx(0.5 * (1 + 8 * ROW_SHARE), rel=0.01)


def test_base_and_row_are_found_in_noise() -> None:
    rng = np.random.default_rng(0)
    costs = StepCosts()
    for _ in range(200):
        rows = int(rng.integers(1, 10))
        costs.count(rows, (0.2 + 0.03 * (rows - 1)) * rng.uniform(0.9, 1.1))
    assert costs.step_s(1) == pytest.approx(0.2, rel=0.15)
    assert costs.step_s(9) - costs.step_s(1) == pytest.approx(0.24, rel=0.25)


def test_steps_of_one_length_alone_still_tell_that_length() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.count(9, 0.6)
    assert costs.step_s(9) == pytest.approx(0.6, rel=0.02)
    assert 0.4 < costs.step_s(1) < 0.6


def test_a_path_that_becomes_slower_is_followed() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.count(1, 0.1)
    for _ in range(60):
        costs.count(1, 0.25)
    assert costs.step_s(1) == pytest.approx(0.25, rel=0.1)


def test_a_hiccup_is_no_cost() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.count(1, 0.1)
    costs.count(1, 30.0)
    assert costs.step_s(1) < 0.12


def test_several_that_tell_of_one_step_count_as_one() -> None:
    one, many = StepCosts(), StepCosts()
    for rows, seconds in [(1, 0.1), (4, 0.2), (2, 0.15)]:
        one.count(rows, seconds)
        for _ in range(4):
            many.count(rows, seconds, 0.25)
    assert many.step_s(3) == pytest.approx(one.step_s(3), rel=0.02)


def test_no_row_costs_less_than_nothing() -> None:
    costs = StepCosts()
    for _ in range(30):
        costs.count(1, 0.5)
        costs.count(9, 0.3)
    assert costs.step_s(9) >= costs.step_s(1) > 0


def test_a_drafts_token_costs_its_share() -> None:
    cost = DraftCost()
    assert cost.token_s == 0
    for _ in range(20):
        cost.count(4, 0.02)
    assert cost.token_s == pytest.approx(0.005)
    cost.count(0, 0.005)  # one that ended at once still took its time
    assert cost.token_s == pytest.approx(0.005)
