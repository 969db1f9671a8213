"""`swarm bench relay` measures what it says: nothing is lost, and what is relayed went through the relay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.bench.relay import RelayOptions, measure_relay
from swarm.bench.relayed_decode import RelayedDecodeOptions, measure_relayed_decode

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model-Q8_0.gguf"
N_LAYERS = 6

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's /proc")


async def test_all_parts_are_measured_and_no_packet_is_lost(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    options = RelayOptions(seconds=0.2, n_channels=5, n_reservations=10, n_dispatches=5)
    figures = await measure_relay(options, tmp_path, lambda *each: told.append(each))
    assert told == [(n, 4) for n in range(5)]
    for kind, n_channels in (("flights", 1), ("singles", 5)):
        part = figures[kind]
        assert (part["n_channels"], part["n_lost"]) == (n_channels, 0)
        assert part["packets_per_s"] > 0
        assert part["cpu_us_per_packet"] > 0
    assert figures["dispatch"]["relay_cpu_s"] > 0, "the dispatches went by another way"
    assert figures["relay_overhead_p50_s"] == pytest.approx(
        figures["dispatch"]["relayed_p50_s"] - figures["dispatch"]["direct_p50_s"]
    )
    assert figures["idle_reservations"]["n"] == 10
    assert figures["idle_reservations"]["bytes_each"] < 1_000_000


async def test_what_is_decoded_through_the_relay_goes_through_it_and_nowhere_else(tmp_path: Path) -> None:
    options = RelayedDecodeOptions(model=MODEL, rtt_s=0.002, n_peers=2, n_tokens=4, n_repetitions=1)
    figures = await measure_relayed_decode(options, tmp_path, lambda done, total: None)
    assert figures["n_packets_relayed"] >= 2 * 7 * N_LAYERS
    assert figures["relayed_share"] > 0
    assert figures["relayed_tokens_per_s"] < figures["bound_tokens_per_s"]
    json.dumps(figures)
