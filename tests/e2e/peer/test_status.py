"""What a real peer tells scripts and shows people: its plan, that it is ready, its state, and that it leaves."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from swarm.emulation.processes import Child, LocalSwarm
from tests.e2e.conftest import wait_healthy
from tests.terminal import Terminal

LIMIT_S = 60.0
BODY = {"prompt": "The :mod:`json` module provides", "max_tokens": 8, "temperature": 0}


async def told(peer: Child, event: str) -> list[dict[str, Any]]:
    """Return the events of a kind that a peer has printed lately, once there is one."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        events = [json.loads(line) for line in peer.last_lines if line.startswith("{")]
        if found := [each for each in events if each["event"] == event]:
            return found
        assert time.monotonic() < deadline, peer.last_lines
        await asyncio.sleep(0.05)


async def complete(url: str) -> None:
    async with aiohttp.ClientSession() as client, client.post(f"{url}/completions", json=BODY) as answer:
        assert answer.status == 200


async def test_scripts_are_told_the_plan_that_it_is_ready_and_each_change_of_state(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with LocalSwarm(tmp_path) as processes:
        backbone = await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf")
        url, node = backbone.ready["url"], backbone.ready["node"]
        peer = await processes.add_peer(range(32))
        (plan,) = await told(peer, "plan")
        assert (plan["n_blocks"], plan["publisher"]) == (192, node)
        assert plan["fetch_bytes"] == plan["slice_bytes"] > 0
        await wait_healthy(url)
        await complete(url)
        deadline = time.monotonic() + LIMIT_S
        while [each["node"] for each in (await told(peer, "status"))[-1]["backbones"]] != [node]:
            assert time.monotonic() < deadline, peer.last_lines
            await asyncio.sleep(0.1)
        status = (await told(peer, "status"))[-1]
        assert status["standing"] == "serving"
        assert status["backbones"][0]["path"].startswith("direct 127.0.0.1:")
        assert status["n_rows"] > 0


async def test_at_a_terminal_the_state_is_shown_and_ctrl_c_says_that_it_drains(tmp_path: Path, tiny_moe: Path) -> None:
    async with LocalSwarm(tmp_path) as processes:
        backbone = await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf")
        environment = os.environ | {
            "SWARM_HOME": str(tmp_path / "volunteer"),
            "SWARM_REGISTRY": processes.registry,
            "OMP_NUM_THREADS": "1",
        }
        command = (sys.executable, "-m", "swarm", "join", "--experts", "0-31", "--yes", "--host", "127.0.0.1")
        async with Terminal.running(command, environment) as terminal:
            await terminal.until("This is what joining takes:")
            await terminal.until("serving for")
            assert "Join?" not in terminal.text
            await wait_healthy(backbone.ready["url"])
            await complete(backbone.ready["url"])
            await terminal.until("1 backbone")
            await terminal.until(f"backbones {backbone.ready['node'][:8]} direct")
            terminal.interrupt()
            await terminal.until("Leaving: what is under way is finished")
            async with asyncio.timeout(LIMIT_S):
                assert await terminal.process.wait() == 0
            await terminal.until_gone("serving for")
        config = (tmp_path / "volunteer" / "config" / "config.toml").read_text()
        assert f'registry = "{processes.registry}"' in config


async def test_who_says_no_gets_nothing_and_gives_nothing(tmp_path: Path, tiny_moe: Path) -> None:
    async with LocalSwarm(tmp_path) as processes:
        await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf")
        environment = os.environ | {"SWARM_HOME": str(tmp_path / "volunteer"), "SWARM_REGISTRY": processes.registry}
        command = (sys.executable, "-m", "swarm", "join", "--experts", "0-31", "--host", "127.0.0.1")
        async with Terminal.running(command, environment) as terminal:
            await terminal.until("Join? [Y/n]")
            terminal.type("n")
            async with asyncio.timeout(LIMIT_S):
                assert await terminal.process.wait() == 1
            await terminal.until("nothing was fetched or joined, as you said")
        assert not list((tmp_path / "volunteer").glob("cache/blocks/*/blk.*"))
        assert not (tmp_path / "volunteer" / "config" / "config.toml").exists()
