"""`swarm bench registry --processes`: look-ups in a ring of real relays stay right when some are killed."""

from __future__ import annotations

import pytest

from swarm.bench import registry_processes
from swarm.bench.registry_processes import ProcessOptions, measure_processes


async def test_lookups_in_real_processes_have_the_simulations_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_processes, "N_LOOKUPS", 5)
    monkeypatch.setattr(registry_processes, "SETTLE_S", 1.0)
    figures = await measure_processes(ProcessOptions(n_nodes=4, n_peers=3))
    assert figures["n_killed"] == 1
    assert figures["n_lookups"] == 15
    assert figures["lookup_success"] == figures["lookup_success_after_kill"] == 1
    assert figures["median_round_trips"] == 1
    assert figures["bytes_per_s_per_node"] > 0
