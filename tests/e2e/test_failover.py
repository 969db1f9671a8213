"""Placement and failover over real processes: a path that grows slow, a holder without a replica that hangs, a last resort."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import EngineConfig
from swarm.dispatch.holders import REFRESH_S
from swarm.emulation.processes import LocalSwarm, contiguous_shares
from swarm.errors import ExpertUnavailable
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.registry.client import parse_registry
from swarm.wire.rows import parse_wire

N_EXPERT = 32
PROMPT = list(range(40, 56))
DEADLINE_S = 5.0  # the promise to users


async def decode(running: RunningBackbone, n_tokens: int) -> tuple[list[int], Continuation]:
    """Return greedy tokens after the prompt, and what goes on from there."""
    engine = running.engine
    continuation = Continuation(engine, lambda row: int(engine.context.logits(row).argmax()), n_batch=512)
    await continuation.start(PROMPT)
    tokens = [await continuation.first()]
    while len(tokens) < n_tokens:
        tokens += await continuation.step(1)
    return tokens, continuation


@contextlib.asynccontextmanager
async def backbone(
    folder: Path, model: Path, swarm: LocalSwarm, *, last_resort: bool = False
) -> AsyncIterator[RunningBackbone]:
    config = BackboneConfig(
        registry=parse_registry(swarm.registry),
        folders=Folders.below(folder),
        model_file=model,
        wire=parse_wire("f32"),
        host="127.0.0.1",
        engine=EngineConfig(n_ctx=1024),
        last_resort=last_resort,
    )
    async with open_backbone(config, Identity.generate()) as running:
        yield running


def n_assigned(running: RunningBackbone, nodes: list[NodeId]) -> list[int]:
    return [running.dispatcher.stats.assignments.get(node, 0) for node in nodes]


async def test_the_only_holder_that_hangs_ends_the_step_by_name_within_the_deadline(
    tmp_path: Path, tiny_moe: Path
) -> None:
    model = tiny_moe / "model-Q8_0.gguf"
    async with LocalSwarm(tmp_path / "children") as swarm:
        for share in contiguous_shares(N_EXPERT, 2):
            await swarm.add_peer(share, "--model", str(model))
        async with backbone(tmp_path, model, swarm) as running:
            await running.holders.wait_complete(30.0)
            expected, _ = await decode(running, 5)
            swarm.peers[0].suspend()
            began = time.monotonic()
            with pytest.raises(ExpertUnavailable) as caught:
                await decode(running, 50)
            assert time.monotonic() - began < DEADLINE_S
            assert set(caught.value.experts) <= set(range(16))
            swarm.peers[0].resume()
            await running.holders.wait_complete(30.0)
            assert (await decode(running, 5))[0] == expected


async def test_two_peers_with_disjoint_slices_share_the_work(tmp_path: Path, tiny_moe: Path) -> None:
    model = tiny_moe / "model-Q8_0.gguf"
    async with LocalSwarm(tmp_path / "children") as swarm:
        await swarm.add_peers(2, N_EXPERT, "--model", str(model))
        async with backbone(tmp_path, model, swarm) as running:
            await running.holders.wait_complete(30.0)
            await decode(running, 40)
            counts = list(running.dispatcher.stats.assignments.values())
            assert len(counts) == 2
            assert min(counts) / sum(counts) > 0.3


async def test_a_peer_that_leaves_is_not_noticed_where_a_replica_is(tmp_path: Path, tiny_moe: Path) -> None:
    model = tiny_moe / "model-Q8_0.gguf"
    async with LocalSwarm(tmp_path / "children") as swarm:
        for _ in range(2):
            await swarm.add_peer(range(N_EXPERT), "--model", str(model))
        async with backbone(tmp_path, model, swarm) as running:
            await running.holders.wait_complete(30.0)
            await asyncio.sleep(2 * REFRESH_S)  # the other one is seen at the next look, if not at this one
            assert len(running.holders.placement.destinations) == 2
            tokens, continuation = await decode(running, 5)
            used = max(running.dispatcher.stats.assignments, key=running.dispatcher.stats.assignments.__getitem__)
            leaver = next(peer for peer in swarm.peers if peer.ready["node"] == str(used))
            leaver.leave()
            for _ in range(60):
                tokens += await continuation.step(1)
            await leaver.process.wait()
            assert leaver.process.returncode == 0
            assert used not in running.holders.placement.destinations
            assert (await decode(running, len(tokens)))[0][:40] == tokens[:40]


async def test_own_experts_serve_where_no_peer_does(tmp_path: Path, tiny_moe: Path) -> None:
    model = tiny_moe / "model-Q8_0.gguf"
    async with LocalSwarm(tmp_path / "children") as swarm:
        await swarm.add_peer(range(16), "--model", str(model))
        async with backbone(tmp_path, model, swarm, last_resort=True) as running:
            await running.holders.wait_complete(5.0)
            tokens, continuation = await decode(running, 10)
            await swarm.peers[0].kill()
            for _ in range(30):
                tokens += await continuation.step(1)
            assert len(tokens) == 40
            assert running.dispatcher.stats.attempts.n_local > 0
            assert running.holders.missing() == {}


async def test_two_backbones_on_one_pool_both_get_their_part(tmp_path: Path, tiny_moe: Path) -> None:
    """One decodes, the other sends whole prompts, again and again, without waiting for their answers one by one."""
    model = tiny_moe / "model-Q8_0.gguf"
    async with LocalSwarm(tmp_path / "children") as swarm:
        await swarm.add_peers(2, N_EXPERT, "--model", str(model))
        opening = backbone(tmp_path / "calm", model, swarm), backbone(tmp_path / "busy", model, swarm)
        async with opening[0] as calm, opening[1] as busy:
            for running in (calm, busy):
                await running.holders.wait_complete(30.0)
            expected, _ = await decode(calm, 8)
            spec = calm.manifest.spec
            rng = np.random.default_rng(1)
            x = rng.standard_normal((64, spec.n_embd)).astype(np.float32)
            ids = np.stack([rng.permutation(N_EXPERT)[: spec.n_expert_used] for _ in range(64)]).astype(np.int32)
            weights = rng.random(ids.shape).astype(np.float32)
            n_answered, is_over = 0, False

            async def flood() -> None:
                nonlocal n_answered
                while not is_over:
                    await busy.dispatcher.dispatch(0, x, ids, weights)
                    n_answered += 1

            async with asyncio.TaskGroup() as tasks:
                for _ in range(12):
                    tasks.create_task(flood())
                await asyncio.sleep(0.2)
                found, _ = await asyncio.wait_for(decode(calm, 8), 30.0)
                is_over = True
            assert found == expected
            assert n_answered > 12, "the other was served as well"
