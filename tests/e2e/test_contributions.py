"""What peers present is what the backbone counted: at the gateway, at a relay, in the file. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from swarm.cli.receipts import check
from swarm.emulation.processes import Child, LocalSwarm
from swarm.files import Folders
from swarm.identity import Identity
from tests.e2e.conftest import wait_healthy

SOON_S = 90.0  # a peer asks 5 s after its first dispatch, a relay within 12 s after that; fivefold
# In the children everybody asks sooner; Python imports this before anything else.
IMPATIENT = """
import peer.receipts
import swarm.registry.gatherer
import swarm.registry.leaderboard

peer.receipts.LEAST_ASK_S, peer.receipts.QUIET_S = 1.0, 0.5
swarm.registry.gatherer.LEAST_S = 1.0
swarm.registry.leaderboard.BOARD_S = 1.0
"""


async def get(url: str, path: str) -> str:
    async with aiohttp.ClientSession() as client, client.get(url.removesuffix("/v1") + path) as answer:
        assert answer.status == 200
        return await answer.text()


async def generate(url: str, n_tokens: int) -> None:
    asked = {"prompt": "The json module can be used to", "max_tokens": n_tokens, "temperature": 0}
    async with aiohttp.ClientSession() as client, client.post(url + "/completions", json=asked) as answer:
        assert answer.status == 200, await answer.text()


async def board(url: str, is_wanted: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Return the rows of a map's leaderboard once they are as wanted."""
    deadline = time.monotonic() + SOON_S
    while True:
        shown = json.loads(await get(url, "/map.json"))["leaderboard"]
        if is_wanted(shown["rows"]):
            rows: list[dict[str, Any]] = shown["rows"]
            return rows
        assert time.monotonic() < deadline, shown
        await asyncio.sleep(0.3)


async def counted(url: str) -> dict[str, int]:
    """Return the backbone's own count of pairs by the peer's short id."""
    text = await get(url, "/metrics")
    return {
        peer: int(float(n)) for peer, n in re.findall(r'^swarm_assignments_total\{peer="(\w+)"\} (\S+)$', text, re.M)
    }


async def command(home: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code of a swarm command, and what it printed as JSON."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm", *arguments, "--json"),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"SWARM_HOME": str(home)},
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(out) if out else {}


async def eventually(look: Callable[[], Awaitable[bool]]) -> None:
    """Return once `look` says so: a busy machine may miss a deadline, and is asked again."""
    deadline = time.monotonic() + SOON_S
    while not await look():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.3)


def receipts_of(peer: Child) -> Path:
    (path,) = Folders.below(peer.home).state.glob("*.receipts")
    return path


async def test_totals_are_what_the_backbone_counted_wherever_they_are_shown(
    tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(IMPATIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    key = Identity.load_or_create(Folders.below(tmp_path / "backbone").config / "serve.key")
    async with LocalSwarm(tmp_path) as processes:
        relay = await processes.add_relay("--receipts-from", str(key.node_id))
        backbone = await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf", "--audit", "0")
        ann = await processes.add_peer(range(24), "--name", "Ann")
        bob = await processes.add_peer(range(24, 32), "--name", "Bob <b>\u202e")
        url = backbone.ready["url"]
        await wait_healthy(url)
        await generate(url, 12)
        own = await counted(url)
        names = {ann.ready["node"]: "Ann", bob.ready["node"]: "Bob <b>"}
        expected = [(names[peer.ready["node"]], own[peer.ready["node"][:8]]) for peer in (ann, bob)]
        assert expected[0][1] > expected[1][1] > 0

        def is_counted(rows: list[dict[str, Any]]) -> bool:
            return [(row["name"], row["pairs"]) for row in rows] == expected

        rows = await board(url, is_counted)
        assert all(row["points"] == row["pairs"] >= row["rows"] > 0 for row in rows), "nobody else held these experts"
        assert await board(relay.ready["http"], is_counted) == rows, "by receipts alone"

        asker = tmp_path / "asker"
        where = ("--registry", processes.registry)

        async def is_listed() -> bool:
            _, report = await command(asker, "peers", "--leaderboard", *where)
            return bool(report and report["leaderboard"]["rows"] == rows)

        async def is_presented() -> bool:
            code, checked = await command(asker, "receipts", "verify", "--peer", ann.ready["node"][:10], *where)
            return code == 0 and [each["pairs"] for each in checked["peers"]] == [expected[0][1]]

        await asyncio.gather(eventually(is_listed), eventually(is_presented))

        await backbone.stop()
        backbone = await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf", "--audit", "0")
        url = backbone.ready["url"]
        await wait_healthy(url)
        await board(url, is_counted)  # of the former run, by its own signature
        await generate(url, 3)
        now = await counted(url)
        sums = [(name, n + now[peer.ready["node"][:8]]) for (name, n), peer in zip(expected, (ann, bob), strict=True)]
        assert sums[0][1] > expected[0][1]
        await board(url, lambda rows: [(row["name"], row["pairs"]) for row in rows] == sums)

        for peer, (_, n_pairs) in zip((ann, bob), sums, strict=True):

            async def is_kept(peer: Child = peer, n_pairs: int = n_pairs) -> bool:
                return bool(check(receipts_of(peer).read_text().split())["peers"][0]["pairs"] == n_pairs)

            await eventually(is_kept)
            code, checked = await command(asker, "receipts", "verify", str(receipts_of(peer)))
            (total,) = checked["peers"]
            assert (code, total["peer"], total["pairs"]) == (0, peer.ready["node"], n_pairs)
        first, *others = receipts_of(ann).read_text().splitlines()
        changed = tmp_path / "changed"
        changed.write_text("\n".join([first[:20] + ("A" if first[20] != "A" else "B") + first[21:], *others]))
        code, checked = await command(asker, "receipts", "verify", str(changed))
        assert (code, checked["n_bad"]) == (1, 1), "by one letter"
