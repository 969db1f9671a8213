"""Costs of steps and drafts: found from measured ones, with a guess for rows until rows were seen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from swarm.speculation.costs import ROW_SHARE, TOGETHER, DraftCost, StepCosts, StepTrips


def test_before_rows_were_seen_a_row_costs_what_is_guessed() -> None:
    costs = StepCosts()
    assert not costs.is_known
    assert costs.step_s(3) == 0
    for _ in range(30):
        costs.count(1, 0.5)
    assert costs.step_s(1) == pytest.approx(0.5)
    assert costs.step_s(9) == pytest.approx(0.5 * (1 + 8**0.5 * ROW_SHARE), rel=0.01)


def linear(rows: int) -> float:
    return 0.2 + 0.03 * (rows - 1)


def saturating(rows: int) -> float:
    """Trips that a single row mostly does without."""
    return 0.5 - 0.35 * 0.5 ** (rows - 1)


@pytest.mark.parametrize("truth", [linear, saturating])
def test_what_rows_cost_is_found_in_noise(truth: Callable[[int], float]) -> None:
    rng = np.random.default_rng(0)
    costs = StepCosts()
    for _ in range(300):
        rows = int(rng.integers(1, 10))
        costs.count(rows, truth(rows) * rng.uniform(0.9, 1.1))
    for rows in range(1, 10):
        assert costs.step_s(rows) == pytest.approx(truth(rows), rel=0.2)


def test_few_rows_tell_nearly_what_many_cost_where_trips_saturate() -> None:
    costs = StepCosts()
    for _ in range(20):
        for rows in (1, 2, 3):
            costs.count(rows, saturating(rows))
    assert 0.4 < costs.step_s(9) < 0.85


def test_rows_between_two_that_were_seen_lie_between_them() -> None:
    costs = StepCosts()
    for _ in range(10):
        costs.count(1, 0.1)
        costs.count(5, 0.3)
    assert [costs.step_s(rows) for rows in (1, 2, 3, 4, 5)] == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])


def test_what_rows_cost_long_ago_is_forgotten() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.count(1, 0.1)
        costs.count(9, 1.0)
    for _ in range(600):
        costs.count(1, 0.1)
    assert costs.step_s(2) < 0.125


def test_steps_of_one_length_alone_still_tell_that_length() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.count(9, 0.6)
    assert costs.step_s(9) == pytest.approx(0.6, rel=0.02)
    assert 0.4 < costs.step_s(1) < 0.61


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
    assert costs.step_s(20) >= costs.step_s(9) > 0


N_LAYERS, TRIP_S, REST_S = 6, 0.08, 0.02


def skipping(costs: StepCosts, rng: np.random.Generator, n_rows: int, share: float) -> None:
    """Count a step of which each layer needs no peer with a probability that falls with the rows."""
    n_skipped = int((rng.random(N_LAYERS) < share ** (n_rows**TOGETHER)).sum())
    n_trips = N_LAYERS - n_skipped
    trips = StepTrips(n_trips=n_trips, n_skipped=n_skipped, trip_s=n_trips * TRIP_S)
    costs.count(n_rows, REST_S + n_trips * TRIP_S, trips=trips)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.9])
def test_what_many_rows_cost_is_known_from_trips_that_single_ones_skipped(share: float) -> None:
    rng = np.random.default_rng(0)
    told: list[float] = []
    for _ in range(20):
        costs = StepCosts()
        for _ in range(40):
            skipping(costs, rng, 1, share)
        told.append(costs.step_s(9))
    expected = REST_S + N_LAYERS * TRIP_S * (1 - share ** (9**TOGETHER))
    assert np.median(told) == pytest.approx(expected, rel=0.25)


def test_a_step_that_could_skip_no_trip_does_not_make_rows_dear() -> None:
    rng = np.random.default_rng(0)
    costs = StepCosts()
    for _ in range(40):
        skipping(costs, rng, 1, 0.7)
    before = costs.step_s(9)
    costs.count(3, REST_S + N_LAYERS * TRIP_S, trips=StepTrips(n_trips=N_LAYERS, trip_s=N_LAYERS * TRIP_S))
    assert costs.step_s(9) < 1.1 * before


def test_where_no_trip_is_ever_skipped_trips_change_nothing() -> None:
    rng = np.random.default_rng(0)
    with_trips, without = StepCosts(), StepCosts()
    for _ in range(50):
        rows = int(rng.integers(1, 10))
        seconds = linear(rows) * rng.uniform(0.9, 1.1)
        without.count(rows, seconds)
        with_trips.count(rows, seconds, trips=StepTrips(n_trips=6, trip_s=0.8 * seconds))
    assert [with_trips.step_s(rows) for rows in range(1, 12)] == [without.step_s(rows) for rows in range(1, 12)]


def test_a_drafts_token_costs_its_share() -> None:
    cost = DraftCost()
    assert cost.token_s == 0
    for _ in range(20):
        cost.count(4, 0.02)
    assert cost.token_s == pytest.approx(0.005)
    cost.count(0, 0.005)  # one that ended at once still took its time
    assert cost.token_s == pytest.approx(0.005)
