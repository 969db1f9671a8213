"""Golden figures of the issue, and rules that every plan keeps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.net import link_choice
from swarm.plan import planner
from swarm.plan.calibration import Point, fit
from swarm.plan.planner import PlanInputs, make_plan, step_of
from swarm.plan.shape import parse_shape

MIXTRAL = PlanInputs(shape=parse_shape("d=4096,E=8,k=2,ff=14336,b=2"), n_peers=8, n_devices=8, rate_bit_s=800e9)
SYNTH16 = PlanInputs(shape=parse_shape("d=1024,E=64,k=8,ff=256,b=4,bw=1.0625,layers=16,shared=512"), n_peers=3)
WIDE = PlanInputs(shape=parse_shape("d=3072,E=256,k=8,ff=1536,b=4,bw=0.5625,layers=62"), n_peers=1, wire="exact")


def test_the_worked_example_of_prefill() -> None:
    plan = make_plan(replace(MIXTRAL, n_tokens=4096))
    assert plan.expert_parallel is not None
    moved = plan.expert_parallel.traffic
    assert (moved.n_assignments, moved.payload_bytes) == (8192, 64 * 2**20)
    assert (moved.remote_bytes_each_way, moved.remote_bytes_both_ways) == (56 * 2**20, 112 * 2**20)
    assert plan.expert_parallel.bytes_per_device == 14 * 2**20
    assert plan.expert_parallel.transfer_s_per_device == pytest.approx(0.15e-3, rel=0.03)  # 100 GB/s
    assert moved.rows_per_expert == 1024 == plan.traffic.rows_per_expert
    assert plan.roofline.intensity == 1024
    assert plan.roofline.bound == "arithmetic"


def test_the_worked_example_of_decode() -> None:
    plan = make_plan(replace(MIXTRAL, n_tokens=32))
    assert (plan.traffic.n_assignments, plan.traffic.rows_per_expert) == (64, 8)


def test_two_of_eight_experts_are_not_four_times_faster() -> None:
    plan = make_plan(replace(MIXTRAL, n_tokens=4096, rtts_s=(20e-6,)))
    assert plan.expert_parallel is not None
    assert plan.expert_parallel.skipping.ideal_speedup == 4
    assert 1 < plan.expert_parallel.skipping.speedup < 4
    assert plan.verdict.skipping.imbalance_s > 0


def test_at_200_gbit_the_rtt_is_what_is_left() -> None:
    plan = make_plan(replace(WIDE, rate_bit_s=200e9))
    assert plan.left.payload_bytes == 110_592
    assert plan.left.payload_s == pytest.approx(4.4e-6, rel=0.01)
    assert plan.left.name == "RTT"
    assert plan.step.largest_term == "rtt"
    assert plan.left.slice_s == pytest.approx(8 * plan.memory.slice_bytes / 200e9)


def test_a_slice_of_794_mb_takes_32_ms() -> None:
    weights = 794e6 / (48 * 3 * 3072 * 1536 * 2)  # two experts of each of 48 layers
    shape = parse_shape(f"d=3072,E=128,k=8,ff=1536,bw={weights},layers=48")
    plan = make_plan(PlanInputs(shape=shape, n_peers=64, rate_bit_s=200e9))
    assert plan.memory.slice_bytes == pytest.approx(794e6)
    assert plan.memory.slice_transfer_s == pytest.approx(32e-3, rel=0.01)


def test_eight_of_128_over_16_peers_meet_six_and_a_half() -> None:
    plan = make_plan(PlanInputs(shape=parse_shape("d=2048,E=128,k=8,ff=768,layers=48"), n_peers=16))
    assert plan.spread.fan_out == pytest.approx(6.5, abs=0.1)
    assert plan.memory.experts_per_peer == 8


def test_the_floor_of_48_layers_at_20_ms_is_a_second() -> None:
    plan = make_plan(PlanInputs(shape=parse_shape("d=2048,E=128,k=8,ff=768,layers=48"), rtts_s=(0.02,)))
    assert plan.step.floor_s == pytest.approx(0.96)
    assert plan.step.step_s > plan.step.floor_s


def test_slower_links_lengthen_a_step_in_proportion_to_their_bytes() -> None:
    steps = {at.rate_bit_s: at for at in make_plan(replace(SYNTH16, software_s=0.0)).by_rate}
    assert list(steps) == [1e9, 1e8, 1e7]
    assert steps[1e9].lengthens_by_s == 0
    one_bit_s = (steps[1e8].step_s - steps[1e9].step_s) / (1e-8 - 1e-9)
    assert steps[1e7].lengthens_by_s == pytest.approx(one_bit_s * (1e-7 - 1e-9))
    # Software runs while others' bytes are under way: a fast link hides in it, a slow one hides it.
    with_software = {at.rate_bit_s: at for at in make_plan(SYNTH16).by_rate}
    assert with_software[1e8].lengthens_by_s < steps[1e8].lengthens_by_s
    assert with_software[1e7].lengthens_by_s > steps[1e7].lengthens_by_s - 16 * SYNTH16.software_s
    # three f32 rows of 4 KB each way on the backbone's link: 12.3 KB out, and the last peer's answer after it
    assert steps[1e7].transfer_s == pytest.approx(8 * (4 * 4096) / 10e6, rel=0.25)


def test_a_calibration_predicts_its_own_sweep() -> None:
    sweep = [Point(rtt_s=rtt, step_s=(0.045 + 16 * 1.01 * rtt) * noise, layers=16)
             for rtt, noise in zip((0.001, 0.005, 0.02, 0.05, 0.1), (1.02, 0.98, 1.01, 0.99, 1.0), strict=True)]  # fmt: skip
    calibration = fit(sweep, rate_bit_s=100e6)
    for point in sweep:
        step = step_of(replace(SYNTH16, rtts_s=(point.rtt_s,)), calibration)
        assert step.step_s == pytest.approx(point.step_s, rel=0.1)
        assert step.source == "calibration"


def test_a_calibrated_step_lengthens_with_the_rate_as_a_modelled_one_does() -> None:
    calibration = fit([Point(rtt_s=0.03, step_s=0.6, layers=16)], rate_bit_s=100e6)
    modelled, measured = make_plan(SYNTH16).by_rate, make_plan(SYNTH16, calibration).by_rate
    for one, other in zip(modelled, measured, strict=True):
        assert one.lengthens_by_s == pytest.approx(other.lengthens_by_s)
    assert measured[1].step_s == pytest.approx(0.6)


def test_drafts_break_even_where_the_verified_step_costs_as_much() -> None:
    plain = make_plan(SYNTH16).drafts
    assert 1 < plain.break_even_accept_length < 1.5  # the round trips are the same: extra rows are nearly free
    costly = make_plan(replace(SYNTH16, draft_s=plain.plain_step_s)).drafts
    assert costly.break_even_accept_length == pytest.approx(plain.break_even_accept_length + 1)
    assert costly.pays_at_all
    assert not make_plan(replace(SYNTH16, draft_s=10 * plain.plain_step_s)).drafts.pays_at_all


def test_half_of_the_experts_local_saves_hardly_a_round_trip_but_half_of_the_rows() -> None:
    plan = make_plan(replace(SYNTH16, local_share=0.5))
    assert plan.step.round_trips == pytest.approx(16 * (1 - 0.5**8))
    assert plan.traffic.remote_share == 0.5


def test_with_everything_local_nothing_is_left_of_the_network() -> None:
    plan = make_plan(replace(SYNTH16, local_share=1.0))
    assert (plan.step.round_trips, plan.step.floor_s, plan.wire.bytes_per_token) == (0, 0, 0)
    assert plan.step.rtt_bound_tokens_per_s is None


def test_a_model_too_large_for_here_is_worth_a_swarm_that_a_small_one_is_not() -> None:
    small = make_plan(SYNTH16).verdict
    assert (small.answer, small.is_in_memory_here) == ("no", True)
    huge = PlanInputs(
        shape=parse_shape("d=7168,E=256,k=8,ff=2048,b=4,bw=0.5625,layers=58"), n_peers=32, rtts_s=(0.005,)
    )
    verdict = make_plan(replace(huge, here_memory_bytes=8e9, ssd_bytes_per_s=5e8)).verdict
    assert (verdict.answer, verdict.is_in_memory_here) == ("yes", False)


def test_replicas_hold_what_is_left_over() -> None:
    plan = make_plan(replace(SYNTH16, n_peers=16, experts_per_peer=16))
    assert (plan.spread.n_groups, plan.spread.replicas) == (4, 4)
    assert plan.memory.slice_bytes == pytest.approx(plan.inputs.shape.experts_bytes / 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_tokens": 0}, "n_tokens"),
        ({"n_peers": 0}, "n_peers"),
        ({"n_devices": 0}, "n_devices"),
        ({"local_share": 1.5}, "local share"),
        ({"local_share": float("nan")}, "local share"),
        ({"rtts_s": (0.01, 0.02)}, "RTTs"),
        ({"experts_per_peer": 65}, "experts per peer"),
        ({"experts_per_peer": 2}, "without a holder"),
        ({"rate_bit_s": 0.0}, "rate"),
        ({"wire": "q3"}, "wire form"),
    ],
)
def test_a_contradiction_is_the_users_mistake(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(SYNTH16, **change)  # type: ignore[arg-type]


PLANS = st.builds(
    lambda tokens, peers, rtt, rate, local, wire: replace(
        SYNTH16, n_tokens=tokens, n_peers=peers, rtts_s=(rtt,), rate_bit_s=rate, local_share=local, wire=wire
    ),
    st.integers(1, 600),
    st.integers(1, 80),
    st.one_of(st.just(0.0), st.floats(1e-6, 1)),
    st.floats(1e5, 1e12),
    st.one_of(st.just(0.0), st.floats(0, 1)),
    st.sampled_from(["exact", "f32", "q8/f16", "fp8"]),
)


@settings(max_examples=40, deadline=None)
@given(PLANS, st.floats(1, 100))
def test_longer_round_trips_and_slower_links_never_shorten_a_step(inputs: PlanInputs, factor: float) -> None:
    step = step_of(inputs)
    assert step.step_s >= step.floor_s >= 0
    assert step_of(replace(inputs, rtts_s=(inputs.rtts_s[0] * factor,))).step_s >= step.step_s * (1 - 1e-9)
    assert step_of(replace(inputs, rate_bit_s=inputs.rate_bit_s / factor)).step_s >= step.step_s * (1 - 1e-9)


@settings(max_examples=25, deadline=None)
@given(PLANS)
def test_every_plan_is_plain_finite_json(inputs: PlanInputs) -> None:
    plan = make_plan(replace(inputs, n_devices=4), fit([Point(rtt_s=0.01, step_s=0.3, layers=16)]))
    again = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert again["expert_parallel"]["traffic"]["remote_share"] == 0.75
    assert again["verdict"]["answer"] in ("yes", "no")
    assert 0 <= again["traffic"]["remote_share"] <= 1
    assert again["verdict"]["skipping"]["imbalance_s"] >= 0
    assert again["verdict"]["skipping"]["small_batches_s"] >= -1e-12


def test_both_kinds_of_link_are_planned_and_the_usual_one_is_the_policys() -> None:
    inputs = replace(SYNTH16, rtts_s=(0.001,), software_s=planner.LINK_SOFTWARE_S["tls"])
    made = make_plan(inputs)
    by_link = {each.link: each for each in made.by_link}
    assert by_link["tls"].step_s == made.step.step_s < by_link["quic"].step_s
    assert planner.TLS_MAX_RTT_S == link_choice.MAX_RTT_S
    assert planner.usual_link((0.001, planner.TLS_MAX_RTT_S)) == "tls"
    assert planner.usual_link((0.001, 0.02)) == "quic"
