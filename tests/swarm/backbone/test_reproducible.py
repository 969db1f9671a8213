"""Answers that do not depend on who else is served; and otherwise, just what stock llama.cpp computes in the same steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.backbone.engine import StepPart
from swarm.backbone.reproducible import accompanied

ROOT = Path(__file__).parents[3]
MODELS = ("model-Q8_0", "model-Q4_K_M")


def part(first: int, *tokens: int, logits: str = "last") -> StepPart:
    return StepPart(tokens=list(tokens), first_position=first, logits=logits, origin=7)  # type: ignore[arg-type]


def test_a_row_alone_takes_the_one_before_it_along() -> None:
    assert accompanied(part(9, 30), 20) == [part(8, 20, 30, logits="all")]


def test_the_first_row_of_a_text_stays_alone() -> None:
    assert accompanied(part(0, 30), None) == [part(0, 30)]


def test_the_last_two_rows_of_a_prompt_have_logits() -> None:
    assert accompanied(part(5, 1, 2, 3, 4), None) == [part(5, 1, 2, logits="none"), part(7, 3, 4, logits="all")]
    assert accompanied(part(5, 1, 2), None) == [part(5, 1, 2, logits="all")]


def test_what_has_no_logits_or_all_stays_as_it_is() -> None:
    for logits in ("none", "all"):
        assert accompanied(part(5, 1, 2, 3, logits=logits), None) == [part(5, 1, 2, 3, logits=logits)]


@pytest.mark.parametrize(
    ("n_talks", "n_slots", "n_rounds"),
    [(5, 2, 4), pytest.param(20, 4, 20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_conversations_that_take_turns_get_the_answers_of_a_fresh_context(
    tmp_path: Path, n_talks: int, n_slots: int, n_rounds: int
) -> None:
    files = [ROOT / "examples" / "tiny_moe" / f"{name}.gguf" for name in MODELS]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("GGML_CPU_TILED_MM", None)
    program = str(Path(__file__).with_name("reproducible_check.py"))
    done = subprocess.run(
        [sys.executable, program, str(tmp_path), *map(str, (n_talks, n_slots, n_rounds)), *map(str, files)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150 if n_talks < 20 else 870,  # 4 s and 140 s on a busy machine of two cores
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    print(found)
    n_answers = n_talks * n_rounds
    for name in MODELS:
        assert found[name]["reproducible"]["answers"] == [n_answers, 0], f"{name}: answers, and those that differ"
        n_rows, n_different = found[name]["shared"]["rows"]
        assert n_rows > n_answers
        assert n_different == 0, f"{name}: stock llama.cpp computed other bits in the same steps"
