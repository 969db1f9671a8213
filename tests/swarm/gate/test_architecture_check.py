"""One hook for all: small models of several architectures are served bit for bit, and a wrong table is found out."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from swarm.architectures.generator import Variant, write_model
from swarm.architectures.recipes import RECIPES, Recipe
from swarm.gate import architecture_check
from swarm.gate.architecture_check import ArchitectureReport, Comparison, check_architecture, compare_model
from swarm.model import spec as spec_module
from swarm.model.expert_kinds import EXPERT_KINDS, Stub

BY_NAME = {recipe.architecture: recipe for recipe in RECIPES}
F32 = Variant(name="F32")  # no kernels of F32 depend on how many rows share a call: identity holds without exact ones


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("gpt-oss", F32),
        ("llama4", F32),
        ("grovemoe", F32),
        ("smallthinker", F32),
        ("kimi-k3", F32),
        ("nemotron_h_moe", Variant(name="scales", has_scales=True)),
        ("qwen3next", Variant(name="scales", has_scales=True, splits_gate_up=True)),
        ("step35", F32),
        ("deepseek4", F32),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_each_kind_of_expert_is_stocks_bit_for_bit_also_after_failed_steps(
    name: str, variant: Variant, tmp_path: Path
) -> None:
    write_model(tmp_path / "m.gguf", BY_NAME[name], variant)
    comparison = compare_model(tmp_path / "m.gguf", tmp_path, prompts=(9,), is_control=True)
    assert comparison.fault == ""
    assert comparison.n_rows == 9 + architecture_check.N_DECODED + 12 + 5 + 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gpt-oss", {"activation": "silu"}),
        ("grok", {"activation": "relu"}),
        ("step35", {"clamps": False}),
        ("deepseek4", {"clamps_fused": False}),
    ],
)
def test_a_wrong_row_of_the_table_differs_from_stock(
    name: str, wrong: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = (("swiglu_clamp_exp", 0.05),) if name == "deepseek4" else ()
    monkeypatch.setitem(spec_module.EXPERT_KINDS, name, dataclasses.replace(EXPERT_KINDS[name], **wrong))  # type: ignore[arg-type]
    report = check_architecture(BY_NAME[name], [Variant(name="F32", keys=keys)])
    assert report.status == "differs"
    assert not report.identical
    assert "positions differ" in report.reason
    assert report.min_cosine is not None


def test_a_wrong_stub_is_refused_by_llama_cpp_and_never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        spec_module.EXPERT_KINDS, "llama4", dataclasses.replace(EXPERT_KINDS["llama4"], stub=Stub.NARROW)
    )
    report = check_architecture(BY_NAME["llama4"], [F32])
    assert report.status == "failed"
    assert "ffn_gate_shexp" in report.reason


def test_an_output_node_of_another_name_is_an_error_not_a_stubs_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        spec_module.EXPERT_KINDS,
        "smallthinker",
        dataclasses.replace(EXPERT_KINDS["smallthinker"], output_node="ffn_moe_out"),
    )
    report = check_architecture(BY_NAME["smallthinker"], [F32])
    assert report.status == "failed"


def test_a_comparison_that_proves_nothing_is_no_success() -> None:
    rows = np.ones((2, 3), np.float32)
    for name in ("n_not_finite", "n_blind", "n_different"):
        comparison = Comparison()
        comparison.add(rows, rows)
        assert comparison.fault == ""
        setattr(comparison, name, 1)
        assert comparison.fault
    comparison = Comparison()
    comparison.add(rows, rows * np.float32(np.nan))
    assert "not finite" in comparison.fault
    assert comparison.min_cosine == -1.0


def test_one_that_cannot_be_made_counts_as_failed_with_its_reason() -> None:
    assert check_architecture(BY_NAME["dflash"], [F32]).reason.startswith("a draft model")
    odd = Recipe(architecture="deepseek2", source="x", left_out=frozenset({"attention.kv_lora_rank"}))
    report = check_architecture(odd, [F32])
    assert report.status == "failed"
    assert report.reason.startswith("F32: llama.cpp refuses the metadata")


def test_a_report_survives_json() -> None:
    report = ArchitectureReport(name="a", source="b", status="differs", min_cosine=0.5, reason="r", variants=("F32",))
    plain = json.loads(json.dumps(report.to_json()))
    assert ArchitectureReport.from_json(plain) == report
    assert plain["identical"] is False


def test_as_a_program_it_prints_one_object() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarm.gate.architecture_check", "nomic-bert-moe"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "GGML_CPU_TILED_MM": "0"},
    )
    assert json.loads(done.stdout)["name"] == "nomic-bert-moe"
