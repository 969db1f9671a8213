"""Every kind of host reaches every other, on the best path that their networks allow. It fills the table in docs/network.md."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from swarm.emulation.hosts import Host
from swarm.emulation.nat import NatKind
from tests.e2e.internet.world import Program, World, world

KINDS = (
    "public v4",
    "public v6",
    "full-cone",
    "address-restricted",
    "port-restricted",
    "symmetric",
    "CGNAT",
    "same NAT",
    "UDP-blocked",
)
DOCUMENT = Path(__file__).parents[3] / "docs" / "network.md"
START, END = "<!-- matrix: written by tests/e2e/internet/test_matrix.py -->", "<!-- end of matrix -->"
SETTLE_S = 7.0  # from the first request: a hole is punched within a second, and given up after five
LONGEST_SETTLE_S = 60.0  # on a busy machine


def expected(backbone: str, peer: str) -> str:
    """Return the best path there can be. Two hosts behind one router count as such; all others are behind different ones."""
    pair = {backbone, peer}
    if "UDP-blocked" in pair:
        return "WebSocket" if backbone == "UDP-blocked" else "relay"  # the peer's half, which the backbone does not see
    if "public v6" in pair:
        return "direct" if len(pair) == 1 else "relay"  # the others have IPv4 only
    if pair <= {"symmetric"}:
        return "relay"
    if "symmetric" in pair and pair & {"port-restricted", "CGNAT", "same NAT"}:
        return "relay"
    return "direct"


async def place(made: World, kind: str, role: str, shared: dict[str, Host]) -> Host:
    """Make a host of a kind."""
    name = f"{role} {kind}"
    if kind == "public v4":
        return await made.internet.public(name)
    if kind == "public v6":
        return await made.internet.public(name, has_v4=False, has_v6=True)
    if kind == "CGNAT":
        provider = await made.internet.router(f"{name} provider", NatKind.PORT_RESTRICTED)
        home = await made.internet.router(f"{name} home", NatKind.PORT_RESTRICTED, behind=provider)
        return await made.internet.inside(name, home)
    if kind == "same NAT":
        return shared[role]
    return (await made.behind(name, NatKind(kind.lower())))[0]


def path_of(report: dict[str, Any], peer: str) -> str:
    """Return the path to a kind of peer: direct, relay or WebSocket, and whether it is not said why."""
    path = "WebSocket" if "WebSocket" in report["path"] else "relay" if report["is_relayed"] else "direct"
    if path != "direct" and not report["why"] and not peer.startswith("public"):
        path += ", unexplained"
    return path


async def reach_all(backbone: Program, own_kind: str, peers: dict[str, str]) -> dict[str, str]:
    """Return the path that a backbone has to each peer in the end: direct, relay or WebSocket; or what went wrong."""
    found: dict[str, str] = {}
    for kind, node in peers.items():
        reached = await backbone.ask(reach=node)
        asked = await backbone.ask(ask=node, n=3)
        if "error" in reached or "error" in asked:
            found[kind] = f"fails: {reached.get('error') or asked.get('error')}"
        elif kind.startswith("public") and str(reached["path"]).startswith("relay"):
            found[kind] = "relay first"  # unless there is no other way, nothing of a public peer goes through a relay
    await asyncio.sleep(SETTLE_S)
    end = time.monotonic() + LONGEST_SETTLE_S - SETTLE_S
    for kind, node in peers.items():
        while time.monotonic() < end and "error" not in (report := await backbone.ask(report=node)):
            if path_of(report, kind) == expected(own_kind, kind):
                break
            await asyncio.sleep(0.2)
    for kind, node in peers.items():
        report = await backbone.ask(report=node)
        asked = await backbone.ask(ask=node, n=3)
        if "error" in report or "error" in asked:
            found.setdefault(kind, f"fails: {report.get('error') or asked.get('error')}")
            continue
        path = path_of(report, kind)
        if found.get(kind) == "relay first" and path != "direct":
            del found[kind]
        found.setdefault(kind, path)
    return found


def table(found: dict[str, dict[str, str]]) -> str:
    """Return the matrix as Markdown."""
    lines = ["| backbone \\ peer | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 1) + "|"]
    lines += ["| " + " | ".join((row, *(found[row][column] for column in KINDS))) + " |" for row in KINDS]
    return "\n".join(lines)


async def test_every_pair_works_on_the_best_path_there_is(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        router = await made.internet.router("shared", NatKind.PORT_RESTRICTED)
        shared = {role: await made.internet.inside(role, router) for role in ("peer", "backbone")}
        hosts = {(role, kind): await place(made, kind, role, shared) for role in ("peer", "backbone") for kind in KINDS}

        async def start(role: str, kind: str) -> tuple[Program, str]:
            host, is_v6 = hosts[role, kind], kind == "public v6"
            program, ready = await made.member(role, host, home=f"{role}-{kind.replace(' ', '-')}", is_v6=is_v6)
            return program, str(ready["node"])

        peers: dict[str, str] = {}
        backbones: dict[str, Program] = {}
        for kind in KINDS:
            (_, peers[kind]), (backbones[kind], _) = await asyncio.gather(start("peer", kind), start("backbone", kind))
        rows = await asyncio.gather(*(reach_all(backbone, kind, peers) for kind, backbone in backbones.items()))
        found = dict(zip(KINDS, rows, strict=True))
    text = table(found)
    wrong = [
        f"{backbone} to {peer}: got {found[backbone][peer]}, expected {expected(backbone, peer)}"
        for backbone in KINDS
        for peer in KINDS
        if found[backbone][peer] != expected(backbone, peer)
    ]
    assert not wrong, "\n".join([*wrong, text])
    document = DOCUMENT.read_text()
    before, _, rest = document.partition(START)
    _, _, after = rest.partition(END)
    if os.environ.get("SWARM_WRITE_DOCS"):
        DOCUMENT.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}")
    elif text not in document:
        pytest.fail(f"docs/network.md has another table; set SWARM_WRITE_DOCS=1 to write it\n{text}")
