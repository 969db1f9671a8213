"""A peer that lies is caught and what it touched is taken back: over real processes, by the command's JSON.

The command has a process of its own: exact kernels must be chosen before the engine's library is loaded.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model-Q8_0.gguf"


async def bench(*options: str) -> dict[str, Any]:
    """Return what `swarm bench audit` found."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "swarm", "bench", "audit", "--model", str(MODEL), "--tokens", "60", "--json", *options),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    figures: dict[str, Any] = json.loads(out)
    assert figures["errors"] == []
    return figures


@pytest.mark.parametrize("kind", ["orthogonal", "noise", "sly"])
async def test_who_lies_is_caught_and_answers_are_the_honest_ones(kind: str) -> None:
    figures = await bench("--kind", kind, "--runs", "2")
    assert (figures["runs"], figures["detected_runs"], figures["wrong_accusations"]) == (2, 2, 0)
    assert figures["max_batches_to_detection"] < 100, "two runs of fifty, of which one is chosen in each"
    assert figures["held_equal_runs"] == figures["held_runs"] == 1
    assert figures["streamed_error_runs"] == figures["streamed_prefix_equal_runs"]
    assert figures["streamed_error_runs"] + figures["streamed_equal_runs"] == figures["streamed_runs"] == 1
    assert figures["next_equal_runs"] == 2


async def test_where_nobody_lies_nobody_is_accused() -> None:
    figures = await bench("--kind", "none", "--runs", "1", "--audit", "20%", "--wire", "q8")
    assert (figures["detected_runs"], figures["wrong_accusations"]) == (0, 0)
    assert figures["streamed_error_runs"] == 0
