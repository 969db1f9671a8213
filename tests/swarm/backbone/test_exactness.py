"""Hook and engine with local experts against stock llama.cpp on the whole file, in a process with exact kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.synthetic_moe import write_synthetic_moe

ROOT = Path(__file__).parents[3]
MODELS = ("model-Q8_0", "model-Q4_K_M", "qwen2moe", "qwen3moe")
N_DECODED = 20


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("exact")
    files = [ROOT / "examples" / "tiny_moe" / f"{name}.gguf" for name in MODELS[:2]]
    for name in MODELS[2:]:
        files.append(write_synthetic_moe(folder / f"{name}.gguf", architecture=name, n_layers=3, n_expert=8, seed=4))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("GGML_CPU_TILED_MM", None)
    program = str(Path(__file__).with_name("exact_check.py"))
    done = subprocess.run(
        [sys.executable, program, str(folder), *map(str, files)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_prompt", [1, 37, 300])
def test_every_logit_is_bit_identical_in_prefill_and_decode(results: dict[str, Any], name: str, n_prompt: int) -> None:
    assert results[name][str(n_prompt)] == {"prefill": [n_prompt, 0], "decode": [N_DECODED, 0]}


@pytest.mark.parametrize("name", MODELS)
def test_every_token_meets_k_experts_in_every_layer_once(results: dict[str, Any], name: str) -> None:
    n_tokens = 1 + 37 + 300 + 3 * N_DECODED
    assert results[name]["n_assignments"] == n_tokens * results[name]["n_layers"] * 4


@pytest.mark.parametrize("name", MODELS)
def test_the_last_row_alone_is_bit_identical_too(results: dict[str, Any], name: str) -> None:
    assert results[name]["last_differs"] is False


@pytest.mark.parametrize("name", MODELS)
def test_at_temperature_0_the_answer_is_stocks_greedy_one(results: dict[str, Any], name: str) -> None:
    answer = results[name]["greedy"]
    assert answer["ours"] == answer["stock"]
    assert len(answer["ours"]) > 20


@pytest.mark.parametrize("name", MODELS)
def test_the_comparison_notices_one_flipped_byte(results: dict[str, Any], name: str) -> None:
    found = results[name]["after_a_flip"]
    assert found["prefill"][1] + found["decode"][1] > 0
