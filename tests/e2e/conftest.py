"""Shared by the tests that start real processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from swarm.emulation.processes import Child, LocalSwarm

N_EXPERT = 32  # of the embedded model, in each of its 6 layers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


async def wait_healthy(url: str, *, timeout_s: float = 30.0) -> None:
    """Return when the gateway says that every expert has a peer."""
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as client:
        while True:
            async with client.get(url.removesuffix("/v1") + "/health") as answer:
                if answer.status == 200:
                    return
                detail = await answer.text()
            assert time.monotonic() < deadline, f"the gateway is not healthy: {detail}"
            await asyncio.sleep(0.05)


class RunningSwarm:
    """A relay, three peers and a backbone with its gateway."""

    def __init__(self, processes: LocalSwarm, backbone: Child) -> None:
        self.processes = processes
        self.backbone = backbone
        self.url: str = backbone.ready["url"]

    async def wait_healthy(self) -> None:
        await wait_healthy(self.url)


@pytest_asyncio.fixture
async def running_swarm(tmp_path: Path, tiny_moe: Path) -> AsyncIterator[RunningSwarm]:
    async with LocalSwarm(tmp_path) as processes:
        backbone = await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf")
        await processes.add_peers(3, N_EXPERT)
        swarm = RunningSwarm(processes, backbone)
        await swarm.wait_healthy()
        yield swarm
