"""`--max-upload` under load: what a peer really sends keeps to its cap, and the swarm's speed follows the cap."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from swarm.bench.testbed import free_port
from swarm.emulation.hub import EmulatedPaths
from swarm.emulation.path import PathSpec
from swarm.emulation.processes import LocalSwarm
from swarm.net.addresses import format_address
from tests.e2e.conftest import wait_healthy

N_CLIENTS = 4
MINUTE_S = 60.0
WARM_UP_S = 4.0
IP_UDP_BYTES = 28  # of each packet, which the emulator counts and a cap does not
CAPS_BYTES_S = (500_000, 1_000_000)  # what two shared cores can exceed


@dataclass(frozen=True)
class Measured:
    """One minute: what the capped peer sent, and what the backbone got done."""

    up_bytes_s: float
    rows_s: float
    n_failed: int


async def rows_done(client: aiohttp.ClientSession, url: str) -> float:
    async with client.get(url.removesuffix("/v1") + "/metrics") as answer:
        text = await answer.text()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("swarm_rows_total "))


async def received(client: aiohttp.ClientSession, url: str, *paths: str) -> float:
    """Return the bytes that came to a backbone so far on these kinds of path."""
    async with client.get(url.removesuffix("/v1") + "/metrics") as answer:
        text = await answer.text()
    return sum(
        float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("swarm_network_bytes_total{")
        and 'direction="back"' in line
        and any(f'path="{path}"' in line for path in paths)
    )


async def ask(client: aiohttp.ClientSession, url: str, rng: random.Random) -> bool:
    """Have a prompt read that nobody has sent before; return whether it was answered."""
    prompt = " ".join(rng.choice(("json", "module", "the", "thread", "import", "object")) for _ in range(200))
    async with client.post(f"{url}/completions", json={"prompt": prompt, "max_tokens": 1}) as answer:
        await answer.read()
        return answer.status == 200


async def measured(folder: Path, model: Path, cap_bytes_s: int, seconds: float) -> Measured:
    async with LocalSwarm(folder) as swarm, EmulatedPaths() as hub, aiohttp.ClientSession() as client:
        # QUIC alone: what goes over a TLS link on one host does not pass the emulator.
        backbone = await swarm.start_backbone(model, "--prefix-cache", "0B", "--no-tls-links")
        url = backbone.ready["url"]
        port = free_port()
        front = await hub.front(spec=PathSpec(), to=("127.0.0.1", port))
        way_out = ("--port", str(port), "--advertise", format_address(front))
        await swarm.add_peer(range(16), "--max-upload", f"{cap_bytes_s}B", *way_out)
        await swarm.add_peer(range(16, 32))
        await wait_healthy(url)
        n_failed, is_over = 0, False

        async def load(number: int) -> None:
            nonlocal n_failed
            rng = random.Random(number)
            while not is_over:
                n_failed += not await ask(client, url, rng)

        async def sent() -> int:
            stats = await hub.stats()
            way = stats.ways["front0/back"]
            return int(way.bytes_delivered - IP_UDP_BYTES * way.n_delivered)

        async with asyncio.TaskGroup() as tasks:
            for number in range(N_CLIENTS):
                tasks.create_task(load(number))
            await asyncio.sleep(WARM_UP_S)
            began, before, rows = time.monotonic(), await sent(), await rows_done(client, url)
            await asyncio.sleep(seconds)
            ended, after, rows_after = time.monotonic(), await sent(), await rows_done(client, url)
            is_over = True
        took_s = ended - began
        return Measured((after - before) / took_s, (rows_after - rows) / took_s, n_failed)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_cap_holds_over_a_minute_and_the_swarms_speed_follows_it(tmp_path: Path, tiny_moe: Path) -> None:
    found = []
    for cap in CAPS_BYTES_S:
        result = await measured(tmp_path / str(cap), tiny_moe / "model-Q4_K_M.gguf", cap, MINUTE_S)
        print(
            f"cap {cap} bytes/s: sent {result.up_bytes_s:.0f}/s, {result.rows_s:.0f} rows/s, {result.n_failed} failed"
        )
        assert result.up_bytes_s <= 1.05 * cap, "within 5 % over a minute"
        assert result.up_bytes_s >= 0.85 * cap, "what is given is used"
        assert result.n_failed == 0
        found.append(result)
    assert found[1].rows_s / found[0].rows_s == pytest.approx(CAPS_BYTES_S[1] / CAPS_BYTES_S[0], rel=0.15)


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_a_cap_holds_over_tls_links_too(tmp_path: Path, tiny_moe: Path) -> None:
    """One peer has all experts; what it sent is what its backbone received, by the backbone's own count."""
    cap = CAPS_BYTES_S[0]
    async with LocalSwarm(tmp_path) as swarm, aiohttp.ClientSession() as client:
        backbone = await swarm.start_backbone(tiny_moe / "model-Q4_K_M.gguf", "--prefix-cache", "0B")
        url = backbone.ready["url"]
        await swarm.add_peer(range(32), "--max-upload", f"{cap}B")
        await wait_healthy(url)
        is_over = False

        async def load(number: int) -> None:
            rng = random.Random(number)
            while not is_over:
                await ask(client, url, rng)

        async with asyncio.TaskGroup() as tasks:
            for number in range(N_CLIENTS):
                tasks.create_task(load(number))
            await asyncio.sleep(WARM_UP_S)
            began, before = time.monotonic(), await received(client, url, "direct", "tls", "unix")
            over_links = await received(client, url, "tls", "unix")
            await asyncio.sleep(MINUTE_S)
            took_s = time.monotonic() - began
            sent = await received(client, url, "direct", "tls", "unix") - before
            over_links = await received(client, url, "tls", "unix") - over_links
            is_over = True
        print(f"cap {cap} bytes/s: sent {sent / took_s:.0f}/s, {over_links / sent:.3f} of it over links")
        assert over_links > 0.5 * sent
        assert 0.85 * cap <= sent / took_s <= 1.05 * cap
