"""Measured steps beside the plan's: errors are those of the plan's own prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.plan.calibration import Point, fit
from swarm.plan.checks import check_rates, check_rtts
from swarm.plan.planner import PlanInputs, step_of
from swarm.plan.shape import parse_shape

LAYERS = 16
INPUTS = PlanInputs(shape=parse_shape(f"d=1024,E=64,k=8,ff=256,layers={LAYERS}"), wire="q8/f16", rate_bit_s=1e9)
RTTS_S = (0.001, 0.005, 0.02, 0.05, 0.1)


def points_of(extra_s: float = 0.0) -> list[Point]:
    """Return a straight line; `extra_s` is added to the last point."""
    steps = [0.03 + 1.02 * LAYERS * rtt for rtt in RTTS_S]
    steps[-1] += extra_s
    return [Point(rtt_s=rtt, step_s=step, layers=LAYERS) for rtt, step in zip(RTTS_S, steps, strict=True)]


def test_a_straight_line_is_predicted_at_every_point_also_unseen() -> None:
    points = points_of()
    checks = check_rtts(INPUTS, points, fit(points, rate_bit_s=1e9))
    assert [check.rtt_s for check in checks] == list(RTTS_S)
    for check in checks:
        assert abs(check.error_share) < 1e-6
        assert check.left_out_error_share is not None
        assert abs(check.left_out_error_share) < 1e-6


def test_a_point_off_the_line_is_missed_by_more_when_it_was_not_seen() -> None:
    points = points_of(extra_s=0.3)
    last = check_rtts(INPUTS, points, fit(points, rate_bit_s=1e9))[-1]
    assert last.left_out_error_share is not None
    assert last.left_out_error_share < last.error_share < -0.01
    assert last.left_out_error_share == pytest.approx(-0.3 / points[-1].step_s, rel=0.02)


def test_three_points_are_too_few_to_leave_one_out() -> None:
    points = points_of()[:3]
    assert {check.left_out_error_share for check in check_rtts(INPUTS, points, fit(points))} == {None}


def test_rates_are_judged_by_what_a_step_lengthens_against_the_rate_before() -> None:
    points = points_of()
    calibration = fit(points, rate_bit_s=1e9)
    rates = (1e9, 1e8, 1e7)
    planned = [step_of(replace(INPUTS, rate_bit_s=rate), calibration).step_s for rate in rates]
    assert planned == sorted(planned)
    measured = [planned[0] + 0.1, planned[1] + 0.1, planned[2] + 0.08]  # an offset is not the rates' fault
    checks = check_rates(INPUTS, rates, measured, calibration)
    assert (checks[0].lengthens_by_s, checks[0].predicted_lengthens_by_s, checks[0].miss_share) == (0, 0, 0)
    assert checks[1].miss_share == pytest.approx(0, abs=1e-9)
    assert checks[2].lengthens_by_s == pytest.approx(planned[2] - planned[1] - 0.02)
    assert checks[2].miss_share == pytest.approx(0.02 / measured[2])
