"""The fit finds what made the points, judged against every point; a bad file is the user's mistake."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.plan.calibration import Calibration, Point, fit, parse_calibration

SWEEP_S = (0.001, 0.005, 0.02, 0.05, 0.1)


def points_of(a_s: float, slope: float, layers: int = 16) -> list[Point]:
    return [Point(rtt_s=rtt, step_s=a_s + slope * layers * rtt, layers=layers) for rtt in SWEEP_S]


@given(st.floats(1e-3, 10), st.floats(0.9, 3))
def test_a_line_is_found_again(a_s: float, slope: float) -> None:
    found = fit(points_of(a_s, slope))
    assert found.a_s == pytest.approx(a_s, rel=1e-6, abs=1e-9)
    assert found.trips_per_layer == pytest.approx(slope, rel=1e-6)
    assert found.max_error_share < 1e-6


def test_every_point_of_a_noisy_sweep_is_met_within_a_tenth() -> None:
    rng = np.random.default_rng(3)
    noisy = [
        Point(rtt_s=each.rtt_s, step_s=each.step_s * rng.uniform(0.96, 1.04), layers=16)
        for each in points_of(0.03, 1.02)
    ]
    found = fit(noisy)
    assert found.max_error_share < 0.1
    assert found.trips_per_layer == pytest.approx(1.02, rel=0.05)
    for each in noisy:
        assert found.step_s(each.rtt_s, 16) == pytest.approx(each.step_s, rel=0.1)


def test_short_steps_count_as_much_as_long_ones() -> None:
    """The largest step 5 % too long: an absolute fit would bend the smallest step by far more than that."""
    found = fit([*points_of(0.03, 1.0)[:-1], Point(rtt_s=0.1, step_s=1.05 * 1.63, layers=16)])
    assert found.max_error_share < 0.05


def test_close_rtts_give_no_slope() -> None:
    found = fit([Point(rtt_s=0.02, step_s=0.35, layers=16), Point(rtt_s=0.021, step_s=0.34, layers=16)])
    assert found.trips_per_layer == 1
    assert 0.34 - 0.02 * 16 > found.a_s > 0


def test_one_point_is_enough_for_the_local_share() -> None:
    found = fit([Point(rtt_s=0.02, step_s=0.4, layers=16)])
    assert found.a_s == pytest.approx(0.08)
    assert found.step_s(0.05, 16) == pytest.approx(0.08 + 0.8)


def test_the_local_share_is_never_negative() -> None:
    found = fit([Point(rtt_s=rtt, step_s=16 * rtt * 0.9 - 0.0001, layers=16) for rtt in SWEEP_S])
    assert found.a_s == 0
    assert found.trips_per_layer == pytest.approx(0.9, rel=0.03)


def test_another_number_of_layers_takes_its_share() -> None:
    found = fit(points_of(0.032, 1.0))
    assert found.step_s(0.02, 48) == pytest.approx(3 * 0.032 + 48 * 0.02)
    mixed = fit([*points_of(0.032, 1.0, 16), *points_of(0.096, 1.0, 48)])
    assert mixed.step_s(0.02, 16) == pytest.approx(0.032 + 16 * 0.02)


def parse(content: object) -> Calibration:
    return parse_calibration(json.dumps(content))


def test_a_list_and_an_object_are_read_alike() -> None:
    points = [{"rtt_s": rtt, "step_s": 0.03 + 16 * rtt, "layers": 16, "share_of_bound": 0.9} for rtt in SWEEP_S]
    assert parse(points) == parse({"points": points})
    found = parse({"points": points, "rate_bit_s": 1e9, "n_tokens": 2})
    assert (found.rate_bit_s, found.n_tokens) == (1e9, 2)
    assert found.a_s == pytest.approx(0.03)
    assert (
        parse({"command": "swarm bench sweep", "figures": {"points": points, "rate_bit_s": 1e9, "n_tokens": 2}})
        == found
    )


@pytest.mark.parametrize(
    "content",
    [[], {}, {"figures": {}}, {"figures": [1]}, 3, None, "x", {"points": []}, [1], [{}], [{"rtt_s": 0.1, "step_s": 0.2}],
     [{"rtt_s": -1, "step_s": 0.2, "layers": 1}], [{"rtt_s": 0.1, "step_s": 0, "layers": 1}],
     [{"rtt_s": 0.1, "step_s": 1, "layers": 0.5}], [{"rtt_s": True, "step_s": 1, "layers": 1}],
     {"points": [{"rtt_s": 0.1, "step_s": 1, "layers": 1}], "rate_bit_s": "fast"}],
)  # fmt: skip
def test_a_bad_file_is_the_users_mistake(content: object) -> None:
    with pytest.raises(UserError, match="bad calibration"):
        parse(content)


@pytest.mark.parametrize("text", ["", "{", '[{"rtt_s": NaN, "step_s": 1, "layers": 1}]', "[" * 100_000])
def test_what_is_no_json_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError, match="bad calibration"):
        parse_calibration(text)
