"""Three minutes of eight clients that come and go while peers die and come back: nothing fails, nothing grows.

The half hour is `swarm bench soak`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.bench.soak import SoakOptions, measure_soak

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model-Q8_0.gguf"
DURATION_S = 180.0
GROWTH = 0.05  # what the project promises, as a share
IDLE_CPU = 0.05  # of a core

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DURATION_S + 150)]


async def test_nothing_fails_and_nothing_grows() -> None:
    # Clients that hardly think, so that what fills up in use is full after half of the time.
    options = SoakOptions(model=MODEL, duration_s=DURATION_S, think_s=1.0, warm_up_s=90.0)
    figures = await measure_soak(options, lambda done, total: None)
    json.dumps(figures)
    assert figures["failures"] == []
    assert figures["n_killed"] >= 2
    assert figures["n_answered"] > 100
    assert figures["n_left"] > 10
    assert figures["n_judged_lives"] >= 4, "relay, backbone, and the peers that were not killed"
    for life in figures["processes"]:
        assert (life["growth"] or 0) < GROWTH, life
    assert figures["largest_idle_cpu"] < IDLE_CPU, figures["idle_cpu"]
