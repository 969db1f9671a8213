"""Experts kept at the backbone, over real peers: the same tokens, fewer rows sent; fetched where there is no file; drafts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from peer.fetch import SliceFetcher
from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import EngineConfig
from swarm.backbone.local_drafts import LocalDrafter
from swarm.backbone.local_keeper import FIRST_TOKENS, LocalBudget
from swarm.dispatch.layer_counts import DispatchStats
from swarm.emulation.processes import LocalSwarm
from swarm.files import Folders
from swarm.identity import Identity
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import MANIFEST_NAME, build_manifest
from swarm.model.slices import write_backbone
from swarm.registry.client import parse_registry
from swarm.speculation.drafter import Drafter
from swarm.wire.rows import parse_wire

N_EXPERT = 32
PROMPT = "The json module can be used to read and write text in the JSON format. " * 5
N_TOKENS = 24
LOAD_TIMEOUT_S = 30.0


@contextlib.asynccontextmanager
async def backbone(folder: Path, model: Path, swarm: LocalSwarm, **fields: Any) -> AsyncIterator[RunningBackbone]:
    config = BackboneConfig(
        registry=parse_registry(swarm.registry),
        folders=Folders.below(folder),
        model_file=model,
        wire=parse_wire("f32"),
        host="127.0.0.1",
        engine=EngineConfig(n_ctx=256),
        **fields,
    )
    async with open_backbone(config, Identity.generate()) as running:
        await running.holders.wait_complete(LOAD_TIMEOUT_S)
        yield running


async def decode(running: RunningBackbone, drafter: Drafter | None = None) -> tuple[list[int], Continuation]:
    """Return greedy tokens after the prompt; the dispatcher's counts are theirs alone."""
    engine = running.engine
    continuation = Continuation(
        engine,
        lambda row: int(engine.context.logits(row).argmax()),
        n_batch=512,
        n_draft=8 if drafter is not None else 0,
        drafter=drafter,
    )
    prompt = engine.model.tokenize(PROMPT, add_special=True, parse_special=False)
    assert len(prompt) >= FIRST_TOKENS
    await continuation.start(prompt)
    running.dispatcher.stats = DispatchStats()
    return [token async for token in continuation.tokens(N_TOKENS)], continuation


async def kept(running: RunningBackbone, n_experts: int) -> None:
    """Return once so many experts are in memory."""
    assert running.local is not None
    async with asyncio.timeout(LOAD_TIMEOUT_S):
        while len(running.local.experts) < n_experts:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.fixture
def model(tiny_moe: Path) -> Path:
    return tiny_moe / "model-Q8_0.gguf"


async def test_kept_experts_change_no_token_and_save_rows_and_trips(tmp_path: Path, model: Path) -> None:
    async with LocalSwarm(tmp_path / "children") as swarm:
        await swarm.add_peers(2, N_EXPERT, "--model", str(model))
        async with backbone(tmp_path / "a", model, swarm) as running:
            expected, _ = await decode(running)
            spec = running.manifest.spec
            plain = running.dispatcher.stats
        sizes = sum(map(spec.block_size_bytes, spec.moe_layers))
        half = LocalBudget(sizes * N_EXPERT // 2)
        async with backbone(tmp_path / "b", model, swarm, local_experts=half, n_draft=8) as running:
            await kept(running, len(spec.moe_layers) * N_EXPERT // 2)
            tokens, _ = await decode(running)
            assert tokens == expected
            stats = running.dispatcher.stats
            assert 0.2 < stats.n_local_assignments / stats.n_assignments < 0.9
            assert stats.n_assignments == plain.n_assignments
            assert stats.n_rows_sent < plain.n_rows_sent

            assert running.local is not None
            drafter = LocalDrafter(running.engine, 0, running.local, least_reach=0.0)
            tokens, continuation = await decode(running, drafter)
            assert tokens == expected
            assert continuation.stats.accept_length > 1.2
            assert running.dispatcher.stats.n_round_trips < plain.n_round_trips / 1.2


async def test_a_backbone_that_keeps_everything_needs_no_peer(tmp_path: Path, model: Path) -> None:
    async with LocalSwarm(tmp_path / "children") as swarm:
        async with backbone(tmp_path / "a", model, swarm, local_experts=LocalBudget(10**9)) as running:
            tokens, _ = await decode(running)
            stats = running.dispatcher.stats
            assert stats.n_round_trips == 0
            assert stats.n_skipped_trips > 0
        await swarm.add_peer(range(N_EXPERT), "--model", str(model))
        async with backbone(tmp_path / "b", model, swarm) as running:
            assert (await decode(running))[0] == tokens


async def test_without_a_model_file_the_popular_ones_are_fetched_and_known_again(tmp_path: Path, model: Path) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    with GgufFile(model) as file:
        manifest = build_manifest(file)
        write_backbone(file, manifest, cut / "backbone.gguf")
    (cut / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    sizes = sum(map(manifest.spec.block_size_bytes, manifest.spec.moe_layers))
    fields = {
        "local_experts": LocalBudget(sizes * 8),
        "fetcher": lambda registry, pool, store: SliceFetcher(registry, pool, store, lambda done, total: None).fetch,
    }
    n_kept = 8 * len(manifest.spec.moe_layers)
    async with LocalSwarm(tmp_path / "children") as swarm:
        await swarm.add_peer(range(N_EXPERT), "--model", str(model))
        async with (
            backbone(tmp_path / "whole", model, swarm),
            backbone(tmp_path / "b", cut / "backbone.gguf", swarm, **fields) as running,
        ):
            expected, _ = await decode(running)
            assert running.dispatcher.stats.n_local_assignments == 0
            await kept(running, n_kept)
            tokens, _ = await decode(running)
            assert tokens == expected
            assert running.dispatcher.stats.n_local_assignments > 0
        async with backbone(tmp_path / "b", cut / "backbone.gguf", swarm, **fields) as running:
            await kept(running, n_kept)  # nobody offers blocks any more: they and the popularity were kept
