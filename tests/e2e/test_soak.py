"""Three minutes of eight clients that come and go while peers die and come back: nothing fails, nothing grows."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from swarm.emulation.processes import Child, LocalSwarm
from tests.e2e.conftest import N_EXPERT, wait_healthy

DURATION_S = float(os.environ.get("SWARM_SOAK_S", "180"))
WARM_UP_S = DURATION_S / 3
N_CLIENTS = 8
KILL_EVERY_S = 60.0
GROWTH = 0.05
IDLE_CPU = 0.05
SEED = 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(DURATION_S + 120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]


@pytest_asyncio.fixture
async def swarm(tmp_path: Path, tiny_moe: Path) -> AsyncIterator[LocalSwarm]:
    async with LocalSwarm(tmp_path) as processes:
        options = ("--slots", "8", "--lanes", "2", "--ctx", "512", "--prefix-cache", "8MiB", "--audit", "0%")
        backbone = await processes.start_backbone(tiny_moe / "model-Q8_0.gguf", *options)
        for _ in range(2):  # every expert on two peers
            await processes.add_peers(2, N_EXPERT)
        await wait_healthy(backbone.ready["url"])
        yield processes


def rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Clients:
    """Eight people with random questions, patience and manners."""

    def __init__(self, url: str, ends_at: float) -> None:
        self.url = url
        self.ends_at = ends_at
        self.failures: list[str] = []
        self.n_answered = 0
        self.n_left = 0

    async def run(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(self._one(session, random.Random(SEED + i)) for i in range(N_CLIENTS)))

    async def _one(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        while time.monotonic() < self.ends_at:
            words = " ".join(f"json.dump{rng.randrange(1000)}()" for _ in range(rng.randrange(1, 40)))
            body = {
                "prompt": words,
                "max_tokens": rng.randrange(1, 120),
                "stream": rng.random() < 0.6,
                "temperature": rng.choice([0, 1]),
            }
            leaves_after = rng.randrange(1, 30) if rng.random() < 0.2 else None
            try:
                async with session.post(f"{self.url}/completions", json=body) as answer:
                    if answer.status != 200:
                        self.failures.append(f"{answer.status}: {await answer.text()}")
                        continue
                    n_lines = 0
                    async for line in answer.content:
                        n_lines += 1
                        if b'"error"' in line:
                            self.failures.append(line.decode())
                        if leaves_after is not None and n_lines > leaves_after and body["stream"]:
                            self.n_left += 1
                            answer.close()
                            break
                    else:
                        self.n_answered += 1
            except aiohttp.ClientError as error:
                self.failures.append(repr(error))


async def kill_and_restart(swarm: LocalSwarm, ends_at: float) -> int:
    rng = random.Random(SEED)
    n_killed = 0
    while time.monotonic() + KILL_EVERY_S / 2 < ends_at:
        await asyncio.sleep(KILL_EVERY_S / 3)
        victim = rng.choice(swarm.peers)
        await victim.kill()
        n_killed += 1
        await asyncio.sleep(KILL_EVERY_S / 3)
        await swarm.restart(victim)
        await asyncio.sleep(KILL_EVERY_S / 3)
    return n_killed


async def test_nothing_fails_and_nothing_grows(swarm: LocalSwarm) -> None:
    assert swarm.backbone is not None
    url = swarm.backbone.ready["url"]
    ends_at = time.monotonic() + DURATION_S
    clients = Clients(url, ends_at)
    work = asyncio.create_task(clients.run())
    killing = asyncio.create_task(kill_and_restart(swarm, ends_at))
    await asyncio.sleep(WARM_UP_S)
    sizes: dict[int, int] = {}

    def measure() -> None:
        watched: list[Child] = [swarm.backbone, *swarm.peers]  # type: ignore[list-item]
        for child in watched:
            if child.is_running:
                sizes.setdefault(child.pid, rss_bytes(child.pid))

    measure()
    await work
    n_killed = await killing
    assert clients.failures == []
    assert n_killed >= DURATION_S / KILL_EVERY_S - 1
    assert clients.n_answered > 10 * n_killed
    assert clients.n_left > 0
    for child in [swarm.backbone, *swarm.peers]:
        if child.pid in sizes:  # those that were started again meanwhile are warming up still
            grown = rss_bytes(child.pid) / sizes[child.pid] - 1
            assert grown < GROWTH, f"{child.home.name} grew by {grown:.1%} from {sizes[child.pid] >> 20} MiB"
    await asyncio.sleep(5)
    before = {child.pid: cpu_s(child.pid) for child in [swarm.backbone, *swarm.peers]}
    await asyncio.sleep(10)
    for child in [swarm.backbone, *swarm.peers]:
        assert (cpu_s(child.pid) - before[child.pid]) / 10 < IDLE_CPU, f"{child.home.name} is not idle"
