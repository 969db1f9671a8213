"""`swarm bench sweep` on a small model: paths really change under way, and the record calibrates the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.bench.sweep import SweepOptions, measure_sweep
from swarm.bench.testbed import PathOptions
from swarm.plan.calibration import parse_calibration
from swarm.wire.rows import parse_wire

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model-Q8_0.gguf"
N_LAYERS = 6


async def test_steps_follow_the_paths_and_the_record_is_a_calibration() -> None:
    options = SweepOptions(
        model=MODEL,
        n_peers=2,
        wire=parse_wire("f32"),
        rtts_s=(0.002, 0.06),
        rates_bit_s=(1e9, 1e6),
        paths=PathOptions(rtts_s=(0.01,)),
        n_steps=3,
        n_repetitions=1,
    )
    figures = await measure_sweep(options, lambda done, total: None)
    short, long = figures["points"]
    assert (short["rtt_s"], long["rtt_s"]) == (0.002, 0.06)
    assert short["measured_step_s"] >= N_LAYERS * 0.002
    assert long["measured_step_s"] >= N_LAYERS * 0.06
    assert short["measured_step_s"] < N_LAYERS * 0.06, "the path was changed, not begun with"
    fast, slow = figures["rates"]
    # At 1 Mbit/s a row of D=256 in f32 takes 8 ms each way at the least.
    assert slow["lengthens_by_s"] > N_LAYERS * 0.016
    assert slow["predicted_lengthens_by_s"] > N_LAYERS * 0.016
    assert fast["lengthens_by_s"] == 0
    assert 0 < short["drawn_share"] < long["drawn_share"] <= 1
    assert long["bytes_out_per_step"] > N_LAYERS * 4 * 256
    found = parse_calibration(json.dumps({"figures": figures}))
    assert found.a_s == pytest.approx(figures["a_s"])
    assert [point.rtt_s for point in found.points] == [0.002, 0.06]
