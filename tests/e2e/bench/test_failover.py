"""A peer's death changes no token and stalls the text for a moment: each kind, over real processes, by the command's JSON.

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
# What is promised on a quiet machine; tests share theirs, hence the slack. `swarm bench failover` judges the promise.
LONGEST_STALL_S = {"kill": 1.0, "stop": 2.0, "cut": 2.0, "drain": 1.0}
SLACK = 5.0


async def bench(*options: str) -> dict[str, Any]:
    """Return what `swarm bench failover` found."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "swarm",
        "bench",
        "failover",
        "--model",
        str(MODEL),
        "--tokens",
        "60",
        "--json",
        *options,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    figures: dict[str, Any] = json.loads(out)
    assert figures["errors"] == []
    return figures


@pytest.mark.parametrize("kind", list(LONGEST_STALL_S))
async def test_the_tokens_are_those_of_an_undisturbed_run(kind: str) -> None:
    figures = await bench("--kind", kind, "--runs", "2")
    assert (figures["runs"], figures["identical_runs"]) == (2, 2)
    assert figures["max_stall_s"] < SLACK * LONGEST_STALL_S[kind]


async def test_partial_sums_differ_at_most_at_a_tie() -> None:
    figures = await bench("--kind", "kill", "--runs", "1", "--wire", "q8/f16")
    assert figures["identical_runs"] + figures["tied_runs"] == 1


async def test_a_second_peer_may_die_once_the_first_is_back() -> None:
    figures = await bench("--kind", "kill", "--runs", "1", "--twice")
    assert figures["identical_runs"] == 1
    [struck] = figures["struck"]
    assert len(struck) == 2
    assert struck[0][0] != struck[1][0]
