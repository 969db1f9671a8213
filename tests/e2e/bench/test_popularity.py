"""`swarm bench popularity` over real peers: rows kept off the network, and the same choices whoever computes them."""

from __future__ import annotations

from pathlib import Path

from swarm.bench.popularity import PopularityOptions, measure_popularity
from swarm.bench.synthetic import SyntheticModel, write_synthetic
from swarm.bench.testbed import PathOptions
from swarm.wire.rows import parse_wire

SHAPE = SyntheticModel(
    n_layers=3, n_embd=256, n_expert=16, n_expert_used=4, n_ff_exp=64, n_ff_shared=64, n_head=4, router_skew=1.0
)


async def test_kept_experts_save_rows_and_replicas_save_destinations(tmp_path: Path) -> None:
    model = write_synthetic(tmp_path / "m.gguf", SHAPE)
    options = PopularityOptions(
        model=model,
        n_peers=2,
        n_local=8,
        n_extra=1,
        wire=parse_wire("q8/f16"),
        paths=PathOptions(),
        n_tokens=8,
        n_prefill=32,
        n_repetitions=1,
    )
    found = await measure_popularity(options, lambda done, total: None)
    none, local, replicas = found["modes"]
    assert [each["mode"] for each in found["modes"]] == ["none", "local", "replicas"]
    assert none["choices_kept_share"] == none["rows_kept_share"] == none["skipped_trips_share"] == 0
    assert local["choices_kept_share"] > 0.6, "half of the experts, and the popular ones"
    assert local["rows_kept_share"] > 0.2
    assert replicas["choices_kept_share"] == 0
    assert replicas["n_peers"] == 3
    assert replicas["rows_sent_per_token_layer"] <= none["rows_sent_per_token_layer"]
