"""Ten volunteers who choose for themselves, one after the other and all at once: all is held, nothing thrice while once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from peer.auto import OVERHEAD_BYTES
from swarm.emulation.processes import LocalSwarm
from swarm.identity import Identity
from swarm.ids import ExpertSet, NodeId
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import ModelSpec, read_spec
from swarm.net.endpoint import Endpoint
from swarm.registry.announcer import TTL_S
from swarm.registry.client import RegistryClient, parse_registry
from swarm.registry.records import ExpertAnnouncement
from tests.e2e.conftest import wait_healthy
from tests.e2e.test_map import held, probe

N_PEERS = 10
SHARE = 5  # each peer has room for this part of the model: all of them for everything twice
COMPLETE_WITHIN_S = 30.0  # of the last join, as promised


@pytest.fixture(scope="module")
def spec(tiny_moe: Path) -> ModelSpec:
    with GgufFile(tiny_moe / "model-Q4_K_M.gguf") as file:
        return read_spec(file)


def options(spec: ModelSpec) -> tuple[str, ...]:
    all_bytes = sum(spec.block_size_bytes(layer) for layer, _ in spec.all_experts)
    return ("--memory", f"{OVERHEAD_BYTES + all_bytes // SHARE}B", "--disk", "100MB", "--quiet")


def n_holders(spec: ModelSpec, slices: list[ExpertSet]) -> list[int]:
    counts = Counter(block for each in slices for block in each)
    return [counts[block] for block in spec.all_experts]


async def announced(registry: str) -> list[ExpertAnnouncement]:
    """Return what a stranger finds, once nobody is choosing or loading any more."""
    deadline = time.monotonic() + COMPLETE_WITHIN_S
    async with Endpoint(Identity.generate(), host="127.0.0.1") as endpoint:
        client = RegistryClient(endpoint, parse_registry(registry))
        try:
            (offer,) = await client.offers()
            while True:
                records = await client.holders(offer.model)
                if len(records) == N_PEERS and not any(each.is_choosing or each.is_loading for each in records):
                    return records
                assert time.monotonic() < deadline, [(each.node.short, each.is_loading) for each in records]
                await asyncio.sleep(0.2)
        finally:
            await client.close()


def assert_even(spec: ModelSpec, slices: list[ExpertSet]) -> None:
    counts = n_holders(spec, slices)
    assert min(counts) >= 1, "something is held by nobody"
    assert not (max(counts) >= 3 and min(counts) == 1), Counter(counts)


@pytest.mark.slow  # ten at once want the machine for themselves
async def test_ten_who_join_at_once_come_to_one_answer(tmp_path: Path, tiny_moe: Path, spec: ModelSpec) -> None:
    async with LocalSwarm(tmp_path) as processes:
        await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf")
        peers = await asyncio.gather(*(processes.add_peer("auto", *options(spec)) for _ in range(N_PEERS)))
        records = await announced(processes.registry)
        assert {each.node for each in records} == {NodeId.parse(each.ready["node"]) for each in peers}
        assert min(len(each.experts) for each in records) >= len(spec.all_experts) // (SHARE + 1), (
            "each takes what fits"
        )
        assert_even(spec, [each.experts for each in records])


@pytest.mark.slow
async def test_each_of_ten_who_come_one_by_one_takes_the_scarcest(
    tmp_path: Path, tiny_moe: Path, spec: ModelSpec
) -> None:
    async with LocalSwarm(tmp_path) as processes:
        await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf")
        slices: list[ExpertSet] = []
        for _ in range(N_PEERS):
            before = dict(zip(spec.all_experts, n_holders(spec, slices), strict=True))
            chosen = held(await processes.add_peer("auto", *options(spec)))
            slices.append(chosen)
            left = [before[block] for block in spec.all_experts if block not in chosen]
            assert max(before[block] for block in chosen) <= min(left), "the scarcest first"
        records = await announced(processes.registry)
        assert_even(spec, [each.experts for each in records])


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_ghost_goes_with_its_lease_and_the_next_volunteer_fills_its_gap(
    tmp_path: Path, tiny_moe: Path, spec: ModelSpec
) -> None:
    """Scenario 12: a holder never comes back; nobody has to act."""
    half = sum(spec.block_size_bytes(layer) for layer, _ in spec.all_experts) // 2
    room = ("--memory", f"{OVERHEAD_BYTES + half}B", "--disk", "100MB", "--quiet")
    async with LocalSwarm(tmp_path) as processes:
        backbone = await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf")
        ghost, _ = [await processes.add_peer("auto", *room) for _ in range(2)]
        await wait_healthy(backbone.ready["url"])
        await ghost.kill()
        async with Endpoint(Identity.generate(), host="127.0.0.1") as endpoint:
            client = RegistryClient(endpoint, parse_registry(processes.registry))
            (offer,) = await client.offers()
            deadline = time.monotonic() + TTL_S + 15
            while len(await client.holders(offer.model)) > 1:
                assert time.monotonic() < deadline, "it is still announced"
                await asyncio.sleep(1.0)
            await client.close()
        newcomer = await processes.add_peer("auto", *room)
        assert set(held(ghost)) <= set(held(newcomer)) | set(held(processes.peers[1]))
        await wait_healthy(backbone.ready["url"])
        assert await probe(backbone.ready["url"]) == 200
