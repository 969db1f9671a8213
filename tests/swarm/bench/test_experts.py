"""The experts' benchmark: what it counts, where it puts the knee, what it refuses. Speed is not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.bench.experts import ExpertsOptions, knee, measure_experts
from swarm.bench.synthetic import write_synthetic
from swarm.errors import UserError


def test_counts_bytes_and_flop_of_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.bench.experts.MIN_CALL_S", 0.0)
    monkeypatch.setattr("swarm.bench.experts.MEMORY_BYTES", 1 << 16)
    options = ExpertsOptions(
        d_model=256,
        n_expert=8,
        n_expert_used=2,
        n_ff_exp=256,
        n_rows=(1, 3),
        n_grouped=3,
        skews=(0.0, 3.0),
        n_tokens=64,
        n_repetitions=2,
    )
    seen: list[tuple[int, int]] = []
    path = write_synthetic(tmp_path / "m.gguf", options.model)
    figures = measure_experts(options, path, lambda *each: seen.append(each), lambda: None)
    json.dumps(figures)
    assert seen[-1] == (3, 3)
    assert figures["expert_bytes"] == 3 * 256 * 256 * 144 // 256
    assert [point["n_rows"] for point in figures["rows_per_expert"]] == [1, 3]
    for point in figures["rows_per_expert"]:
        assert point["flop_per_byte"] == pytest.approx(2 * point["n_rows"] / 0.5625)
        assert point["flops_per_s"] * point["grouped_s"] == pytest.approx(6 * 256 * 256 * 3 * point["n_rows"])
    even, skewed = figures["skew"]
    assert skewed["max_over_mean"] > even["max_over_mean"] >= 1
    assert even["over_even"] == 1
    assert even["n_experts_met"] == 8


def test_the_knee_is_where_the_two_measured_roofs_meet() -> None:
    points = [
        {"flops_per_s": 40e9, "weight_bytes_per_s": 10e9},
        {"flops_per_s": 200e9, "weight_bytes_per_s": 2e9},
        {"flops_per_s": 190e9, "weight_bytes_per_s": 1e9},
    ]
    found = knee(points, bytes_per_weight=0.5, memory_bytes_per_s=20e9)
    assert found["knee_flop_per_byte"] == 20
    assert found["knee_rows_per_expert"] == 5
    assert found["share_of_memory"] == 0.5


@pytest.mark.parametrize(
    "wrong", [{"weight_type": "Q9"}, {"n_rows": ()}, {"n_rows": (0,)}, {"n_grouped": 0}, {"n_grouped": 129}], ids=str
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        ExpertsOptions(**wrong)  # type: ignore[arg-type]
