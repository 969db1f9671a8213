"""A home whose line is down for a while: scenario 14 of the field (petals#254: a peer vanishes after an outage, silently)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from swarm.emulation.nat import NatKind
from swarm.registry.announcer import TTL_S
from tests.e2e.internet.world import World, world

ASK = Path(__file__).with_name("ask_json.py")
OTHERS = ("relay0", "relay1", "outer")


async def map_at(made: World, host: Any, base: str) -> dict[str, Any]:
    program = await made.start(host, str(ASK), f"{base}/map.json", home="ask")
    return await program.event()


async def until_servable(made: World, host: Any, base: str, *, is_servable: bool, within_s: float) -> dict[str, Any]:
    """Return the map once it says so."""
    end = time.monotonic() + within_s
    while True:
        shown = await map_at(made, host, base)
        if shown["servable"] is is_servable:
            return shown
        assert time.monotonic() < end, shown
        await asyncio.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_after_an_outage_longer_than_a_lease_a_peer_behind_nat_is_back_by_itself(
    tmp_path: Path, tiny_moe: Path
) -> None:
    """The line is down for longer than the registry remembers anybody; ten minutes are no different from there on."""
    async with world(tmp_path) as made:
        outer = await made.internet.public("outer")
        home, _ = await made.behind("home", NatKind.PORT_RESTRICTED)
        common = ("--registry", made.registry, "--json", "--until-eof", "--host", "::")
        model = ("--model", str(tiny_moe / "model-Q4_K_M.gguf"))
        serve = ("-m", "swarm", "serve", *model, *common, "--gateway", "127.0.0.1:8080")
        backbone = await made.start(outer, *serve, home="backbone")
        base = (await backbone.event())["url"].removesuffix("/v1")
        peer = await made.start(home, "-m", "swarm", "join", *model, *common, "--experts", "0-31", home="peer")
        node = (await peer.event())["node"]
        await until_servable(made, outer, base, is_servable=True, within_s=30)

        for other in OTHERS:
            await made.internet.cut("home-router", other)
        cut_at = time.time()
        await until_servable(made, outer, base, is_servable=False, within_s=30)
        await asyncio.sleep(TTL_S + 10)
        (shown,) = (each for each in (await map_at(made, outer, base))["peers"] if each["id"] == node)
        assert shown["state"] == "gone", "offline, and it is said so"
        assert cut_at - 2 <= shown["state_since"] <= time.time() - 1, "and since when"

        for other in OTHERS:
            await made.internet.cut("home-router", other, is_cut=False)
        begun = time.monotonic()
        await until_servable(made, outer, base, is_servable=True, within_s=60)
        print(f"back after {time.monotonic() - begun:.1f} s")
        (shown,) = (each for each in (await map_at(made, outer, base))["peers"] if each["id"] == node)
        assert shown["state"] in ("in use", "on trial")
