"""Which points a sweep measures, in which order, and how many steps of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.bench.sweep import MIN_STEPS, SweepOptions
from swarm.bench.testbed import PathOptions
from swarm.errors import UserError
from swarm.wire.rows import parse_wire


def sweep(rtts_s: tuple[float, ...] = (0.05, 0.001), rates_bit_s: tuple[float, ...] = (1e9, 1e7)) -> SweepOptions:
    return SweepOptions(
        model=Path("m.gguf"),
        n_peers=3,
        wire=parse_wire("q8/f16"),
        rtts_s=rtts_s,
        rates_bit_s=rates_bit_s,
        paths=PathOptions(rtts_s=(0.03,), loss=0.001),
    )


def test_round_trips_are_measured_at_the_first_rate_and_rates_at_one_round_trip() -> None:
    points = sweep().points
    assert [(point.rtts_s, point.rate_bit_s) for point in points] == [
        ((0.001,), 1e9),
        ((0.05,), 1e9),
        ((0.03,), 1e9),
        ((0.03,), 1e7),
    ]
    assert {point.loss for point in points} == {0.001}


def test_long_round_trips_get_fewer_steps_but_never_none() -> None:
    options = sweep()
    steps = [options.n_steps_at(PathOptions(rtts_s=(rtt,)), 16) for rtt in (0.0, 0.001, 0.05, 0.1, 2.0)]
    assert steps == [24, 24, 3, MIN_STEPS, MIN_STEPS]


@pytest.mark.parametrize("nothing", [{"rtts_s": ()}, {"rates_bit_s": ()}])
def test_nothing_to_sweep_is_the_users_mistake(nothing: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(UserError, match="nothing to sweep"):
        sweep(**nothing)
