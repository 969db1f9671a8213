"""What an operator sees while `swarm serve` runs on a terminal, and that nothing is shown where nobody looks."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import aiohttp
import pytest

from swarm.emulation.processes import LocalSwarm
from tests.e2e.conftest import N_EXPERT, wait_healthy
from tests.terminal import Terminal

LIMIT_S = 60.0
BODY = {"prompt": "The :mod:`json` module provides", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("option", ["", "--quiet"])
async def test_speed_slots_peers_coverage_and_audits_are_shown_unless_asked_not_to(
    tmp_path: Path, tiny_moe: Path, option: str
) -> None:
    async with LocalSwarm(tmp_path) as processes:
        environment = os.environ | {
            "SWARM_HOME": str(tmp_path / "operator"),
            "SWARM_REGISTRY": processes.registry,
            "OMP_NUM_THREADS": "1",
        }
        arguments = ("serve", "--model", str(tiny_moe / "model-Q4_K_M.gguf"), "--host", "127.0.0.1")
        command = (sys.executable, "-m", "swarm", *arguments, "--gateway", "127.0.0.1:0", *option.split())
        async with Terminal.running(command, environment) as terminal:
            await terminal.until("Rows travel as")
            found = re.search(r"http://\S+/v1", terminal.text)
            assert found is not None
            if not option:
                await terminal.until("0 of 4 slots busy, 0 waiting")
                await terminal.until("0 peers; 0.0% of experts have a holder, 192 have none; 0 audits")
            await processes.add_peers(2, N_EXPERT)
            await wait_healthy(found[0])
            async with aiohttp.ClientSession() as client, client.post(f"{found[0]}/completions", json=BODY) as answer:
                assert answer.status == 200
            if option:
                assert "slots busy" not in terminal.text
            else:
                await terminal.until("2 peers (2 by TLS); every expert has a holder")
                await terminal.until("tokens/s, 8 in all; 0 of 4 slots busy")
            terminal.interrupt()
            async with asyncio.timeout(LIMIT_S):
                assert await terminal.process.wait() == 0
            await terminal.until_gone("slots busy")
