"""Many streams over real processes: a quick run, so that the benchmark stays runnable and its answers right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.bench.gateway import GatewayOptions, measure_gateway
from swarm.bench.testbed import PathOptions
from swarm.wire.rows import parse_wire

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model-Q8_0.gguf"


@pytest.mark.alone
async def test_streams_share_steps_and_answer_as_they_do_alone() -> None:
    options = GatewayOptions(
        model=MODEL,
        n_peers=2,
        wire=parse_wire("f32"),
        paths=PathOptions(rtts_s=(0.01,)),
        n_streams=8,
        n_slots=8,
        n_tokens=12,
        n_repetitions=1,
        n_prefix=200,
        n_ctx=256,
        n_compared=16,
    )
    figures = await measure_gateway(options, lambda done, total: None)
    assert figures["requests_per_step"] > 1.5
    assert figures["scaling"] > 2, "eight streams in steps of their own would be as fast as one"
    assert figures["ttft_warm_s"] < figures["ttft_cold_s"]
    assert figures["n_wrong"] == 0
    assert figures["n_same_answers"] >= 6
    json.dumps(figures)
