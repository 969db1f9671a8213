"""What users and operators see of a peer that lies: over HTTP, in `swarm peers`, on the map, and after a restart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp

from swarm.emulation.processes import LocalSwarm, contiguous_shares
from tests.e2e.conftest import N_EXPERT, wait_healthy

N_PEERS = 3
BODY = {"prompt": "The :mod:`json` module provides", "max_tokens": 60, "temperature": 0}


async def answer(url: str, **changes: Any) -> str:
    """Return the text of a whole answer."""
    async with aiohttp.ClientSession() as client, client.post(f"{url}/completions", json=BODY | changes) as response:
        body = await response.json()
        assert response.status == 200, body
        text: str = body["choices"][0]["text"]
        return text


async def stream(url: str) -> tuple[list[str], dict[str, Any] | None]:
    """Return a streamed answer's pieces, one for each token, and its error if it ends with one."""
    texts: list[str] = []
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/completions", json=BODY | {"stream": True}) as response,
    ):
        assert response.status == 200
        async for line in response.content:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                error: dict[str, Any] = chunk["error"]
                return texts, error
            texts += [choice["text"] for choice in chunk["choices"]]
    return texts, None


async def swarm_peers(registry: str, home: Path) -> list[dict[str, Any]]:
    """Return the peers of the only model, as `swarm peers --json` has them."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm", "peers", "--registry", registry, "--json"),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"SWARM_HOME": str(home)},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    (model,) = json.loads(out)["models"]
    peers: list[dict[str, Any]] = model["peers"]
    return peers


async def states_on_the_map(url: str) -> dict[str, str]:
    async with aiohttp.ClientSession() as client, client.get(url.removesuffix("/v1") + "/map.json") as response:
        return {peer["id"]: peer["state"] for peer in (await response.json())["peers"]}


async def test_a_lying_peer_is_caught_told_of_and_not_forgotten(tmp_path: Path, tiny_moe: Path) -> None:
    model = tiny_moe / "model-Q8_0.gguf"
    shares = contiguous_shares(N_EXPERT, N_PEERS)
    async with LocalSwarm(tmp_path / "children") as swarm:
        for index in range(N_PEERS):
            held = sorted({*shares[index], *shares[(index + 1) % N_PEERS]})
            liar = ("swarm.bench.cheating_peer", "noise")
            await swarm.add_peer(held, "--model", str(model), "--exact-kernels", program=liar)
        options = ("--exact-kernels", "--wire", "exact", "--audit", "20%")
        backbone = await swarm.start_backbone(model, *options)
        url = backbone.ready["url"]
        await wait_healthy(url)
        while len(await states_on_the_map(url)) < N_PEERS:  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0.1)
        honest = await answer(url)

        swarm.peers[0].signal(signal.SIGUSR1)
        texts, error = await stream(url)
        used = swarm.peers[0].ready["node"]
        states = await states_on_the_map(url)
        if error is None:  # it was not used for this text, or caught in time
            assert "".join(texts) == honest
        else:
            assert error["code"] == "audit_failed"
            n_audited = error["last_audited_token"]
            assert honest.startswith("".join(texts[:n_audited]))
        for _ in range(20):
            if states[used] == "caught":
                break
            await answer(url, prompt="def main(): return")
            states = await states_on_the_map(url)
        assert states[used] == "caught"
        assert await answer(url) == honest
        assert await answer(url) == "".join((await stream(url))[0]) == honest

        peers = {peer["node"]: peer for peer in await swarm_peers(swarm.registry, tmp_path / "asker")}
        (verdict,) = peers[used]["audits"]
        assert verdict["verdict"] == "caught"
        assert verdict["by"] == backbone.ready["node"]
        assert verdict["reason"]
        assert all(each["audits"][0]["verdict"] != "caught" for node, each in peers.items() if node != used)

        swarm.peers[0].signal(signal.SIGUSR2)  # honest again, which changes nothing
        await backbone.stop()
        backbone = await swarm.start_backbone(model, *options)
        url = backbone.ready["url"]
        await wait_healthy(url)
        assert await answer(url) == honest
        assert (await states_on_the_map(url))[used] == "caught"
