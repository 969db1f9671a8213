"""`--peers 0`: the keys that scripts rely on are there, those of the network are null, and the logits are stock llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.bench.dispatch import DispatchOptions
from swarm.bench.in_process import (
    InProcessOptions,
    measure_decode_in_process,
    measure_dispatch_in_process,
    measure_prefill_in_process,
)
from swarm.bench.synthetic import write_synthetic
from swarm.wire.rows import parse_wire

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model-Q8_0.gguf"


def check_shares(figures: dict[str, Any], n_repetitions: int) -> None:
    json.dumps(figures)
    assert figures["n_peers"] == 0
    assert figures["max_logit_difference"] == 0
    assert len(figures["shares_of_stock"]) == n_repetitions
    assert min(figures["shares_of_stock"]) <= figures["share_of_stock"] <= max(figures["shares_of_stock"])
    assert 0 < figures["experts_share"] < 1
    assert figures["tokens_per_s"] > 0
    assert figures["stock_tokens_per_s"] > 0


def test_decode_has_its_figures_and_no_networks() -> None:
    options = InProcessOptions(model=MODEL, n_threads=1, n_tokens=4, n_repetitions=2)
    seen: list[tuple[int, int]] = []
    figures = measure_decode_in_process(options, lambda *each: seen.append(each), lambda: None)
    check_shares(figures, 2)
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert (figures["round_trips_per_token"], figures["accept_length"], figures["layers"]) == (0, 1.0, 6)
    for name in ("rtt_bound_tokens_per_s", "share_of_bound", "shared_hidden_share", "bytes_out_per_token_layer"):
        assert figures[name] is None


def test_prefill_is_one_step_of_the_whole_prompt() -> None:
    options = InProcessOptions(model=MODEL, n_threads=1, n_tokens=40, n_repetitions=3)
    figures = measure_prefill_in_process(options, lambda *_: None, lambda: None)
    check_shares(figures, 3)
    assert figures["tokens_per_s"] == pytest.approx(40 / figures["step_s"])


def test_a_dispatch_is_one_call_of_the_experts(tmp_path: Path) -> None:
    options = DispatchOptions(
        d_model=64, n_expert=4, n_expert_used=2, n_ff_exp=32, n_peers=0, n_dispatches=5, wire=parse_wire("f32")
    )
    path = write_synthetic(tmp_path / "m.gguf", options.model)
    figures = measure_dispatch_in_process(options, path, 1, lambda *_: None, lambda: None)
    json.dumps(figures)
    assert figures["n_dispatches"] == 5
    assert figures["compute_s"] > 0
    assert figures["p50_s"] <= figures["p99_s"]
    for name in ("bytes_out_per_token_layer", "rtt_s", "quic_star_p50_s", "transport"):
        assert figures[name] is None


def test_a_cancelled_measurement_ends() -> None:
    class Cancelled(Exception):
        pass

    def check() -> None:
        raise Cancelled

    options = InProcessOptions(model=MODEL, n_threads=1, n_tokens=2)
    with pytest.raises(Cancelled):
        measure_decode_in_process(options, lambda *_: None, check)
