"""What networks do to connections under way, on the virtual internet (scenarios 17, 18 and 22 of the field, and rebinding).

The limits are those that users feel, with slack for a busy machine; the figures are in docs/network.md.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from swarm.emulation.nat import NatKind
from tests.e2e.internet.world import Program, world

STALL_LIMIT_S = 2.0  # 0.37 s at most on a quiet machine, a second is promised; fivefold slack


async def until(backbone: Program, node: str, *, is_relayed: bool, within_s: float) -> dict[str, Any]:
    """Return the report once the path is of this kind."""
    end = time.monotonic() + within_s
    report: dict[str, Any] = {}
    while time.monotonic() < end:
        report = await backbone.ask(report=node)
        if report.get("is_relayed") is is_relayed:
            return report
        await asyncio.sleep(0.1)
    raise AssertionError(f"after {within_s:g} s: {report}")


async def explained(backbone: Program, node: str, *, within_s: float) -> dict[str, Any]:
    """Return the report once it says why the path is relayed."""
    end = time.monotonic() + within_s
    while not (report := await backbone.ask(report=node)).get("why"):
        assert time.monotonic() < end, report
        await asyncio.sleep(0.1)
    return report


async def longest_s(backbone: Program, node: str, n: int, event: Any, *, after_s: float = 0.5) -> float:
    """Return the longest of n requests, one after the other, in whose midst something happens."""
    asking = asyncio.ensure_future(backbone.ask(ask=node, n=n, every_s=0.0))
    await asyncio.sleep(after_s)
    await event
    answer = await asking
    assert "error" not in answer, answer
    assert len(answer["took_s"]) == n
    return float(max(answer["took_s"]))


async def test_a_blackholed_direct_path_gives_way_to_the_relay_and_comes_back_with_nothing_lost(tmp_path: Path) -> None:
    async with world(tmp_path, n_relays=2) as made:
        host, _ = await made.behind("inner", NatKind.PORT_RESTRICTED)
        _, peer = await made.member("peer", host, home="peer")
        backbone, _ = await made.member("backbone", await made.internet.public("outer"), home="backbone")
        await backbone.ask(reach=peer["node"])
        await until(backbone, peer["node"], is_relayed=False, within_s=10.0)
        await asyncio.sleep(1.0)
        stall_s = await longest_s(backbone, peer["node"], 100, made.internet.cut("outer", "inner-router"))
        print(f"blackhole: longest request {stall_s * 1e3:.0f} ms")
        assert stall_s < STALL_LIMIT_S
        await until(backbone, peer["node"], is_relayed=True, within_s=5.0)
        back = made.internet.cut("outer", "inner-router", is_cut=False)
        assert await longest_s(backbone, peer["node"], 100, back) < STALL_LIMIT_S
        await until(backbone, peer["node"], is_relayed=False, within_s=20.0)


@pytest.mark.parametrize("who", ["peer", "backbone"])
async def test_a_nat_that_forgets_its_mapping_in_mid_flight_costs_a_short_stall(who: str, tmp_path: Path) -> None:
    async with world(tmp_path, n_relays=2) as made:
        host, router = await made.behind("inner", NatKind.PORT_RESTRICTED)
        outer = await made.internet.public("outer")
        _, peer = await made.member("peer", host if who == "peer" else outer, home="peer")
        backbone, _ = await made.member("backbone", outer if who == "peer" else host, home="backbone")
        await backbone.ask(reach=peer["node"])
        await until(backbone, peer["node"], is_relayed=False, within_s=10.0)
        await asyncio.sleep(1.0)
        stall_s = await longest_s(backbone, peer["node"], 100, made.internet.rebind(router, host))
        print(f"rebinding of the {who}'s NAT: longest request {stall_s * 1e3:.0f} ms")
        assert stall_s < STALL_LIMIT_S
        await until(backbone, peer["node"], is_relayed=False, within_s=20.0)


async def test_two_symmetric_nats_stay_relayed_and_it_is_said_why(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        a, _ = await made.behind("a", NatKind.SYMMETRIC)
        b, _ = await made.behind("b", NatKind.SYMMETRIC)
        _, peer = await made.member("peer", a, home="peer")
        backbone, _ = await made.member("backbone", b, home="backbone")
        start = time.monotonic()
        reached = await backbone.ask(reach=peer["node"])
        assert "error" not in reached
        assert time.monotonic() - start < 5.0
        report = await explained(backbone, peer["node"], within_s=40.0)  # a hole is given up after five seconds
        assert report["is_relayed"]
        assert "symmetric" in report["why"]
        assert "error" not in await backbone.ask(ask=peer["node"], n=5)
        assert (await backbone.ask(report=peer["node"]))["is_relayed"]


@pytest.mark.slow
async def test_twenty_seconds_of_silence_keep_a_direct_path(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        host, _ = await made.behind("inner", NatKind.PORT_RESTRICTED)
        _, peer = await made.member("peer", host, home="peer")
        backbone, _ = await made.member("backbone", await made.internet.public("outer"), home="backbone")
        await backbone.ask(reach=peer["node"])
        await until(backbone, peer["node"], is_relayed=False, within_s=10.0)
        for _ in range(3):
            await asyncio.sleep(20.0)
            assert max((await backbone.ask(ask=peer["node"], n=3))["took_s"]) < 0.5
            report = await backbone.ask(report=peer["node"])
            assert not report["is_relayed"]
            assert report["n_switches"] == 1
