"""`swarm bench prefill` on a small model over loopback: real peers, and what the figures must agree on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from swarm.bench.prefill import PrefillOptions, measure_prefill
from swarm.bench.testbed import PathOptions
from swarm.wire.rows import parse_wire
from tests.synthetic_moe import write_synthetic_moe


async def test_chunked_and_whole_prefills_move_the_same_rows(tmp_path: Path) -> None:
    path = write_synthetic_moe(tmp_path / "tiny.gguf", n_embd=64, n_layers=2, n_expert=6, n_expert_used=2, n_ff_exp=32)
    told: list[tuple[int, int]] = []
    options = PrefillOptions(
        model=path,
        n_peers=2,
        wire=parse_wire("f32"),
        paths=PathOptions(),
        n_tokens=96,
        n_repetitions=2,
        chunk_bytes=2048,
    )
    figures = await measure_prefill(options, lambda done, total: told.append((done, total)))
    assert told[-1] == (2, 2)
    assert (figures["n_tokens"], figures["layers"]) == (96, 2)
    whole = figures["unchunked"]
    assert whole["n_batches_per_layer"] <= 2 < figures["n_batches_per_layer"]
    payload = 96 * 64 * 4  # of the first layer, to one peer at the least
    assert payload < whole["bytes_out"] < figures["bytes_out"] < 1.5 * whole["bytes_out"]
    assert len(figures["ratios"]) == 2
    assert math.isclose(figures["chunked_over_unchunked"], sum(figures["ratios"]) / 2)
    assert figures["tokens_per_s"] > 0
    assert figures["sweep"] == []


@pytest.mark.alone
async def test_on_a_slow_path_chunks_do_not_cost_time(tmp_path: Path) -> None:
    path = write_synthetic_moe(
        tmp_path / "small.gguf", n_embd=512, n_layers=3, n_expert=4, n_expert_used=2, n_ff_exp=32
    )
    options = PrefillOptions(
        model=path,
        n_peers=1,
        wire=parse_wire("f32"),
        paths=PathOptions(rtts_s=(0.02,), rate_bit_s=100e6),
        n_tokens=256,
        n_repetitions=5,
        sweep_bit_s=(50e6,),
    )
    figures = await measure_prefill(options, lambda done, total: None)
    assert figures["n_batches_per_layer"] > 3 * figures["unchunked"]["n_batches_per_layer"]
    # 42 ms of bytes each way, one after the other or at once: 1.33 to 1.38 on a quiet machine. A single one may suffer.
    assert max(figures["ratios"]) > 0.9
    assert figures["step_s"] > figures["bytes_s"]
    assert figures["emulator"]["n_delivered"] > 2 * 256 * 2048 * 2 / 1232
    assert [(each["n_tokens"], each["rate_bit_s"]) for each in figures["sweep"]] == [(64, 50e6), (256, 50e6)]
