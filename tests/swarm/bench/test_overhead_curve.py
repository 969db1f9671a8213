"""What a run of `swarm bench overhead` says: lines through its points, and where the overhead is within the limit."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.bench.overhead_curve import How, Point, fit_curve

ROWS = (1, 4, 16, 64, 256, 512)


def on_lines(
    *, hop_s: float, row_s: float, base_s: float, compute_s: float, rows: tuple[int, ...] = ROWS
) -> list[Point]:
    """Return points without any noise."""
    points = []
    for n_rows in rows:
        layer_s, extra_s = base_s + compute_s * n_rows, hop_s + row_s * n_rows
        points.append(
            Point(n_rows=n_rows, layer_s=layer_s, extra_s=extra_s, overhead=extra_s / (layer_s + extra_s)),
        )
    return points


def test_the_lines_are_found_again() -> None:
    curve = fit_curve(on_lines(hop_s=0.5e-3, row_s=3e-6, base_s=0.3e-3, compute_s=0.2e-3))
    assert curve.hop_s == pytest.approx(0.5e-3)
    assert curve.row_s == pytest.approx(3e-6)


def test_a_long_layers_noise_does_not_hide_what_a_hop_costs() -> None:
    points = on_lines(hop_s=0.5e-3, row_s=2e-6, base_s=0.3e-3, compute_s=0.2e-3)
    rng = np.random.default_rng(7)
    hops = []
    for _ in range(50):
        noisy = [
            Point(
                n_rows=each.n_rows,
                layer_s=each.layer_s,
                extra_s=each.extra_s + 0.01 * each.layer_s * rng.standard_normal(),
                overhead=each.overhead,
            )
            for each in points
        ]
        hops.append(fit_curve(noisy).hop_s)
    assert np.std(hops) < 0.05e-3, "a hundredth of 100 ms is twice the hop"


def test_a_limit_that_was_reached_is_measured_at_the_shortest_layer_within_it() -> None:
    points = on_lines(hop_s=0.5e-3, row_s=0.0, base_s=0.0, compute_s=0.2e-3)
    curve = fit_curve(points)
    assert curve.how is How.MEASURED
    assert curve.under_from_s == pytest.approx(0.2e-3 * 256)
    assert fit_curve(points[::-1]) == curve, "in whatever order they came"


def test_a_shorter_layer_within_the_limit_does_not_count_before_a_longer_one_beyond_it() -> None:
    points = on_lines(hop_s=0.5e-3, row_s=0.0, base_s=0.0, compute_s=0.2e-3)
    lucky = [Point(n_rows=4, layer_s=0.8e-3, extra_s=0.0, overhead=0.0), *(each for each in points if each.n_rows != 4)]
    assert fit_curve(lucky).under_from_s == pytest.approx(0.2e-3 * 256)


@pytest.mark.parametrize(("hop_s", "row_s"), [(0.5e-3, 1e-6), (2e-3, 0.0), (0.1e-3, 2e-6)])
def test_beyond_the_points_the_lines_are_followed_to_where_they_meet_the_limit(hop_s: float, row_s: float) -> None:
    base_s, compute_s = 0.3e-3, 0.2e-3
    curve = fit_curve(on_lines(hop_s=hop_s, row_s=row_s, base_s=base_s, compute_s=compute_s, rows=(1, 4, 16)))
    assert curve.how is How.EXTRAPOLATED
    assert curve.under_from_s is not None
    extra_s = hop_s + row_s * (curve.under_from_s - base_s) / compute_s
    assert extra_s / (curve.under_from_s + extra_s) == pytest.approx(0.012, rel=1e-3)


def test_rows_that_each_cost_more_than_the_limit_never_get_there() -> None:
    curve = fit_curve(on_lines(hop_s=0.5e-3, row_s=5e-6, base_s=0.3e-3, compute_s=0.2e-3))
    assert (curve.how, curve.under_from_s) == (How.NEVER, None)


def test_one_point_is_a_hop_alone() -> None:
    curve = fit_curve([Point(n_rows=1, layer_s=1e-3, extra_s=0.5e-3, overhead=1 / 3)])
    assert (curve.hop_s, curve.row_s, curve.how) == (0.5e-3, 0.0, How.EXTRAPOLATED)
    assert curve.under_from_s == pytest.approx(0.5e-3 * 0.988 / 0.012)


def test_a_swarm_that_is_faster_is_under_the_limit_from_its_first_point_on() -> None:
    points = [Point(n_rows=n, layer_s=1e-3 * n, extra_s=-1e-5 * n, overhead=-0.01) for n in ROWS]
    assert fit_curve(points).under_from_s == pytest.approx(1e-3)
