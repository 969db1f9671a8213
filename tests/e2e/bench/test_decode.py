"""Decode over real processes: drafts save round trips and change nothing, and clustered slices serve a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.backbone.assembly import BackboneConfig, open_backbone
from swarm.backbone.engine import EngineConfig
from swarm.backbone.requests import GenerationRequest, SamplingParams
from swarm.bench.decode import DecodeOptions, measure_decode
from swarm.bench.testbed import PathOptions
from swarm.emulation.processes import LocalSwarm
from swarm.files import Folders
from swarm.identity import Identity
from swarm.registry.client import parse_registry
from swarm.wire.rows import parse_wire

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model-Q8_0.gguf"
COPIED = "   * ``json.dumps()``, ``json.loads()``\n" * 20
N_LAYERS, N_EXPERT = 6, 32


async def test_drafts_share_round_trips_on_text_that_copies(tmp_path: Path) -> None:
    text = tmp_path / "copied.txt"
    text.write_text(COPIED)
    options = DecodeOptions(
        model=MODEL,
        n_peers=2,
        wire=parse_wire("f32"),
        paths=PathOptions(),
        n_tokens=24,
        n_repetitions=1,
        n_draft=8,
        n_prompt=128,
        text=text,
    )
    figures = await measure_decode(options, lambda done, total: None)
    assert figures["accept_length"] > 4
    assert figures["round_trips_per_token"] == pytest.approx(N_LAYERS / figures["accept_length"])
    assert figures["first_difference"] is None
    assert figures["undrafted_tokens_per_s"] > 0
    assert figures["draft_speedup"] > 0


async def test_without_drafts_every_token_costs_its_round_trips() -> None:
    options = DecodeOptions(
        model=MODEL, n_peers=2, wire=parse_wire("f32"), paths=PathOptions(), n_tokens=6, n_repetitions=2
    )
    figures = await measure_decode(options, lambda done, total: None)
    assert figures["accept_length"] == 1.0
    assert figures["round_trips_per_token"] == N_LAYERS
    assert "draft_speedup" not in figures
    bridge = figures["bridge"]
    assert 0 < bridge["to_loop_s"] < figures["step_s"]
    assert 0 < bridge["waited_share"] <= 1
    assert bridge["loop_wakeups_per_layer"] > 0
    assert bridge["engine_wakeups_per_layer"] > 0
    json.dumps(figures)


@pytest.mark.alone
async def test_a_second_backbone_decodes_the_same_tokens_without_overlap() -> None:
    options = DecodeOptions(
        model=MODEL,
        n_peers=2,
        wire=parse_wire("f32"),
        paths=PathOptions(),
        n_tokens=4,
        n_repetitions=2,
        compares_overlap=True,
    )
    figures = await measure_decode(options, lambda done, total: None)
    assert figures["overlap_s_per_token"] == pytest.approx(figures["step_s"], rel=0.5)
    assert figures["waiting_s_per_token"] > 0
    assert len(figures["overlap_speedups"]) == 2
    assert figures["round_trips_per_token"] == N_LAYERS, "the other backbone's layers are not counted"


async def test_peers_that_hold_other_experts_in_each_layer_serve_a_model(tmp_path: Path) -> None:
    files = []
    for index in range(2):
        held = {layer: [e for e in range(N_EXPERT) if (e + layer) % 3 % 2 == index] for layer in range(N_LAYERS)}
        files.append(tmp_path / f"slice-{index}.json")
        files[-1].write_text(json.dumps({str(layer): ",".join(map(str, ids)) for layer, ids in held.items()}))
    async with LocalSwarm(tmp_path / "children") as swarm:
        for file in files:
            await swarm.add_peer(file, "--model", str(MODEL))
        config = BackboneConfig(
            registry=parse_registry(swarm.registry),
            folders=Folders.below(tmp_path),
            model_file=MODEL,
            host="127.0.0.1",
            engine=EngineConfig(n_ctx=128),
            n_draft=4,
        )
        async with open_backbone(config, Identity.generate()) as running:
            await running.holders.wait_complete(30.0)
            request = GenerationRequest(prompt=COPIED[:120], max_tokens=12, sampling=SamplingParams(temperature=0))
            text = "".join([delta.text async for delta in running.backbone.generate(request)])
            assert text
            assert len(running.dispatcher.stats.assignments) == 2
            assert running.backbone.drafts.n_steps > 0
