"""Two backbone processes on one pool of peers, by the command's JSON: both go on, and neither is left with little."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model-Q8_0.gguf"
pytestmark = pytest.mark.alone  # shares of time

LEAST_SHARE = 0.35  # the promise; with equal work each has half


async def bench(*options: str) -> dict[str, Any]:
    """Return what `swarm bench federation` found."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "swarm", "bench", "federation", "--model", str(MODEL), "--turn", "1.5s", "--repetitions", "1"),
        "--json",
        *options,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    figures: dict[str, Any] = json.loads(out)
    return figures


@pytest.mark.parametrize(
    "options",
    [("--rtt", "5ms"), ("--phase", "prefill", "--prompt-tokens", "64", "--rtt", "5ms", "--rate", "100Mbit")],
    ids=["decode", "prefill at 100 Mbit/s"],
)
async def test_neither_of_two_backbones_is_below_35_percent_of_the_pool(options: tuple[str, ...]) -> None:
    figures = await bench(*options)
    assert figures["least_share"] >= LEAST_SHARE, figures["each_repetition"]
    assert min(figures["alone_tokens_per_s"]) > 0


async def test_a_light_backbone_beside_a_greedy_one_keeps_its_pace_where_the_pool_is_scarce() -> None:
    figures = await bench("--rtt", "5ms", "--streams", "1,6", "--slow-disk", "10MB")
    assert figures["kept"][0] > 0.5, figures["each_repetition"]
    assert figures["tokens_per_s"][1] > figures["tokens_per_s"][0], "the greedy one has what is left"
