"""A step is round trips and what is beside them; transfers follow the two-machine flow shop."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.plan.calibration import Point, fit
from swarm.plan.shape import parse_shape
from swarm.plan.step import LayerTime, calibrated_step, make_step, slowest_rtt_s, star_transfer_s, transfer_s
from swarm.plan.traffic import DATAGRAM_BYTES, IP_UDP_BYTES, group_sizes, link_bytes, wire_cost

SHAPE = parse_shape("d=1024,E=64,k=8,ff=256,layers=16")


def layer_of(rtt_s: float = 0.03) -> LayerTime:
    return LayerTime(rtt_s=rtt_s, transfer_s=0.002, compute_s=0.001, software_s=0.0015)


def test_at_200_gbit_bytes_take_microseconds_and_a_slice_milliseconds() -> None:
    assert transfer_s(110_000, 200e9) == pytest.approx(4.4e-6)
    assert transfer_s(794e6, 200e9) == pytest.approx(32e-3, rel=0.01)


def test_a_step_is_its_layers_and_the_local_share() -> None:
    step = make_step(layer=layer_of(), round_trips=16, local_s=0.02, n_tokens=4)
    assert step.floor_s == pytest.approx(16 * 0.03)
    assert step.step_s == pytest.approx(0.02 + 16 * 0.0345)
    assert step.tokens_per_s == pytest.approx(4 / step.step_s)
    assert step.rtt_bound_tokens_per_s == pytest.approx(4 / step.floor_s)
    assert step.largest_term == "rtt"
    assert make_step(layer=layer_of(), round_trips=16, local_s=1.0, n_tokens=1).largest_term == "local"


def test_without_round_trips_there_is_no_floor() -> None:
    step = make_step(layer=layer_of(), round_trips=0, local_s=0.02, n_tokens=1)
    assert (step.step_s, step.floor_s, step.rtt_bound_tokens_per_s) == (0.02, 0, None)


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_longer_rtt_never_shortens_a_step(one_s: float, other_s: float) -> None:
    steps = [
        make_step(layer=layer_of(rtt_s), round_trips=16, local_s=0.02, n_tokens=1).step_s
        for rtt_s in sorted((one_s, other_s))
    ]
    assert steps[0] <= steps[1]


@pytest.mark.parametrize(("wire", "n_peers"), [("f32", 3), ("f32", 1), ("q8/f16", 4), ("exact", 3)])
def test_a_star_takes_what_its_packets_take_one_after_the_other(wire: str, n_peers: int) -> None:
    """Batches leave one by one, each peer answers when it has all of its own, answers queue on the way back."""
    cost = wire_cost(SHAPE, 1, wire, group_sizes(64, n_peers), 0.0, 16.0)
    rate = 10e6
    out_s = transfer_s(link_bytes(cost.message_out_bytes), rate)
    back_s = transfer_s(link_bytes(cost.message_back_bytes), rate)
    there = list(accumulate([out_s] * n_peers))
    done = 0.0
    for arrived in there:
        done = max(done, arrived) + back_s
    hops = transfer_s(
        sum(
            min(link_bytes(each), DATAGRAM_BYTES + IP_UDP_BYTES)
            for each in (cost.message_out_bytes, cost.message_back_bytes)
        ),
        rate,
    )
    assert star_transfer_s(cost, n_peers, rate) == pytest.approx(done + hops)


@given(
    st.integers(1, 6),
    st.floats(1e-5, 5e-3),
    st.sampled_from([1e6, 10e6, 100e6, 1e9]),
    st.sampled_from(["f32", "q8/f16", "q8"]),
)
def test_software_is_a_stage_that_runs_while_other_peers_bytes_are_under_way(
    n_peers: int, each_s: float, rate: float, wire: str
) -> None:
    """Equal jobs through three machines: the backbone's thread, its link out, its link back."""
    cost = wire_cost(SHAPE, 1, wire, group_sizes(64, n_peers), 0.0, 16.0)
    out_s = transfer_s(link_bytes(cost.message_out_bytes), rate)
    back_s = transfer_s(link_bytes(cost.message_back_bytes), rate)
    free = [0.0, 0.0, 0.0]  # when each machine is free
    for _ in range(n_peers):
        done = 0.0
        for machine, takes_s in enumerate((each_s, out_s, back_s)):
            done = free[machine] = max(done, free[machine]) + takes_s
    hops_s = star_transfer_s(cost, 1, rate) - out_s - back_s
    found_s = star_transfer_s(cost, n_peers, rate, n_peers * each_s)
    assert found_s == pytest.approx(done + hops_s - n_peers * each_s)


def test_software_hides_no_more_than_itself() -> None:
    cost = wire_cost(SHAPE, 1, "q8", group_sizes(64, 3), 0.0, 16.0)
    for rate in (1e6, 1e8, 1e12):
        alone_s = star_transfer_s(cost, 3, rate)
        assert alone_s - 0.0014 <= star_transfer_s(cost, 3, rate, 0.0014) <= alone_s
    assert star_transfer_s(cost, 3, 1e12, 0.0014) == pytest.approx(0, abs=1e-6)


def test_a_tenth_of_the_rate_takes_ten_times_as_long() -> None:
    cost = wire_cost(SHAPE, 1, "q8", group_sizes(64, 3), 0.0, 16.0)
    assert star_transfer_s(cost, 3, 10e6) == pytest.approx(10 * star_transfer_s(cost, 3, 100e6))
    assert star_transfer_s(cost, 0, 10e6) == 0


def test_a_star_waits_for_the_slowest_peer_that_it_meets() -> None:
    rtts = (0.02, 0.04, 0.06, 0.08)
    assert slowest_rtt_s(rtts, 1.0) == 0.08
    assert slowest_rtt_s(rtts, 1e-9) == pytest.approx(0.05, rel=1e-3)  # one peer, any of them
    assert 0.05 < slowest_rtt_s(rtts, 0.5) < 0.08
    assert slowest_rtt_s((0.03, 0.03), 0.3) == 0.03


def test_a_calibrated_step_is_the_fit_and_what_the_plan_adds() -> None:
    calibration = fit([Point(rtt_s=rtt, step_s=0.05 + 1.1 * 16 * rtt, layers=16) for rtt in (0.001, 0.02, 0.1)])
    step = calibrated_step(calibration=calibration, layer=layer_of(0.05), round_trips=16, extra_s=0.007, n_tokens=1)
    assert step.step_s == pytest.approx(0.05 + 1.1 * 16 * 0.05 + 0.007)
    assert step.source == "calibration"
