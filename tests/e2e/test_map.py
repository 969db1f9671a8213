"""Volunteers that choose by themselves, and a map that promises only what a request really gets. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from peer.auto import OVERHEAD_BYTES
from swarm.emulation.processes import Child, LocalSwarm
from swarm.ids import ExpertSet, parse_index_set
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from tests.e2e.conftest import N_EXPERT, wait_healthy

PROMPT = {"prompt": "The json module can be used to", "max_tokens": 40, "temperature": 0}


async def probe(url: str, **fields: Any) -> int:
    """Return the HTTP status of a short completion."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(url + "/completions", json=PROMPT | {"max_tokens": 2} | fields) as answer,
    ):
        await answer.read()
        return answer.status


async def map_at(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as client, client.get(url.removesuffix("/v1") + "/map.json") as answer:
        shown: dict[str, Any] = await answer.json()
        return shown


async def agreed(url: str, *, servable: bool) -> dict[str, Any]:
    """Return the map once it says so; whatever it says until then, a probe right after must have got the same."""
    deadline = time.monotonic() + 20
    while True:
        shown = await map_at(url)
        status = await probe(url)
        again = await map_at(url)
        if shown["servable"] == again["servable"]:
            assert status == (200 if shown["servable"] else 503), shown
        if again["servable"] is servable:
            return again
        assert time.monotonic() < deadline, again
        await asyncio.sleep(0.1)


async def test_what_the_map_calls_servable_is_what_a_request_gets(tmp_path: Path, tiny_moe: Path) -> None:
    """Scenario 10 (a green page while blocks are missing), and 11: killed and back within seconds, with one entry."""
    async with LocalSwarm(tmp_path) as processes:
        backbone = await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf")
        url = backbone.ready["url"]
        await agreed(url, servable=False)
        first = await processes.add_peer(range(16))
        shown = await agreed(url, servable=False)
        assert shown["models"][0]["missing"]["0"] == "16-31"
        second = await processes.add_peer(range(16, 32))
        shown = await agreed(url, servable=True)
        assert {peer["id"] for peer in shown["peers"]} == {first.ready["node"], second.ready["node"]}
        assert [peer["state"] for peer in shown["peers"]] == ["in use", "in use"]
        assert all(peer["rtt_ms"] > 0 and peer["path"] == "direct" for peer in shown["peers"])
        assert shown["join"] == "swarm join --experts auto", "the registry is on loopback"
        assert "127.0.0.1" not in json.dumps(shown), "nobody's address is shown"
        await second.kill()
        assert await probe(url) == 503
        shown = await agreed(url, servable=False)
        gone = next(peer for peer in shown["peers"] if peer["id"] == second.ready["node"])
        assert gone["state"] != "in use"
        assert gone["state_since"] >= gone["seen_since"]
        await processes.restart(second)
        shown = await agreed(url, servable=True)
        assert len(shown["peers"]) == 2, "who comes back is the same one"
        async with aiohttp.ClientSession() as client, client.get(url.removesuffix("/v1") + "/map/plain") as answer:
            text = await answer.text()
        assert first.ready["node"][:8] in text
        assert "Can be served" in text


def held(peer: Child) -> ExpertSet:
    """Return what a peer's ready line says: `experts 1-2 of layers 0-3; experts ...`."""
    by_layer: dict[int, frozenset[int]] = {}
    for group in peer.ready["experts"].split("; "):
        experts, layers = group.removeprefix("experts ").split(" of layers ")
        by_layer |= dict.fromkeys(parse_index_set(layers), parse_index_set(experts))
    return ExpertSet(by_layer)


async def assignments(registry: str, home: Path) -> dict[str, int]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm", "peers", "--registry", registry, "--json"),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"SWARM_HOME": str(home)},
    )
    out, _ = await process.communicate()
    (model,) = json.loads(out)["models"]
    return {peer["node"]: peer["n_assignments"] for peer in model["peers"]}


async def test_two_who_join_at_once_share_the_work(tmp_path: Path, tiny_moe: Path) -> None:
    path = tiny_moe / "model-Q4_K_M.gguf"
    with GgufFile(path) as file:
        spec = read_spec(file)
    half = sum(spec.block_size_bytes(layer) for layer in spec.moe_layers) * N_EXPERT // 2
    async with LocalSwarm(tmp_path) as processes:
        backbone = await processes.start_backbone(path)
        url = backbone.ready["url"]
        options = ("--memory", f"{OVERHEAD_BYTES + half}B", "--disk", "100MB")
        peers = await asyncio.gather(*(processes.add_peer("auto", *options) for _ in range(2)))
        first, second = map(held, peers)
        assert len(first) == len(second) == len(spec.all_experts) // 2
        assert not set(first) & set(second)
        await wait_healthy(url)
        assert await probe(url, max_tokens=40) == 200
        done = await assignments(processes.registry, tmp_path / "asker")
        assert min(done.values()) >= 0.3 * sum(done.values())
