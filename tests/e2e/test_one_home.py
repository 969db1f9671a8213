"""Several processes of one user on one machine, as the README's recipe has it: they share a folder, never a key."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from swarm.emulation.processes import LocalSwarm
from tests.e2e.conftest import wait_healthy


async def test_two_joins_from_one_home_are_two_peers(tmp_path: Path, tiny_moe: Path) -> None:
    async with LocalSwarm(tmp_path / "children") as processes:
        backbone = await processes.start_backbone(tiny_moe / "model-Q8_0.gguf")
        joined: list[tuple[asyncio.subprocess.Process, dict[str, Any]]] = []
        try:
            for experts in ("0-15", "16-31"):
                joined.append(await start(tmp_path / "home", "join", "--experts", experts, processes.registry))
            assert len({ready["node"] for _, ready in joined}) == 2
            await wait_healthy(backbone.ready["url"])
            # Both stay: neither replaces the other's announcement at its next renewal.
            await asyncio.sleep(3)
            await wait_healthy(backbone.ready["url"], timeout_s=0.5)
        finally:
            for process, _ in joined:
                process.kill()
                await process.wait()


async def start(
    home: Path, command: str, option: str, value: str, registry: str
) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "swarm",
        command,
        option,
        value,
        "--host",
        "127.0.0.1",
        "--registry",
        registry,
        "--json",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"SWARM_HOME": str(home)},
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return process, json.loads(await process.stdout.readline())
