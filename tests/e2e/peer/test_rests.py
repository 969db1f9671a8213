"""A peer rests outside its hours and while others need the machine, finishes what it has, and comes back. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from swarm.emulation.processes import Child, LocalSwarm
from swarm.identity import Identity
from swarm.ids import ModelId, NodeId
from swarm.net.endpoint import Endpoint
from swarm.registry.client import RegistryClient, parse_registry
from tests.e2e.conftest import wait_healthy
from tests.e2e.test_clocks import HOUR_S, Clock

LIMIT_S = 60.0  # a rest is noticed within seconds on an idle machine
BODY = {"prompt": "The :mod:`json` module provides", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
# The load of the machine is what a file says, and patience is short.
BUSY_BY_FILE = """
import os

if (_path := os.environ.get("TEST_LOAD_FILE")) is not None:
    import psutil
    import peer.limits

    peer.limits.BUSY_FOR_S, peer.limits.IDLE_FOR_S = 1.0, 3.0

    def _cpu_percent(*_):
        with open(_path) as file:
            return float(file.read())

    psutil.cpu_percent = _cpu_percent
"""


class Watched:
    """A swarm in which everything is held twice: by the peer that may rest, and by another."""

    def __init__(self, url: str, resting: Child, registry: RegistryClient, model: ModelId) -> None:
        self.url = url
        self.node = NodeId.parse(resting.ready["node"])
        self._registry = registry
        self._model = model
        self.client = aiohttp.ClientSession()

    async def until(self, *, is_announced: bool) -> None:
        """Return when the peer that may rest is announced, or is not."""
        deadline = time.monotonic() + LIMIT_S
        while any(each.node == self.node for each in await self._registry.holders(self._model)) is not is_announced:
            assert time.monotonic() < deadline, f"expected {is_announced}"
            await asyncio.sleep(0.1)

    async def until_shown(self, *, is_used: bool) -> None:
        """Return when the backbone shows that it uses that peer, or does not: scenario 10, nobody asks it in vain."""
        deadline = time.monotonic() + LIMIT_S / 2  # before the lease of its announcement would have ended
        while True:
            async with self.client.get(self.url.removesuffix("/v1") + "/map.json") as answer:
                peers = {peer["id"]: peer["state"] for peer in (await answer.json())["peers"]}
            state = peers.get(str(self.node), "not seen yet")
            if (state in ("in use", "on trial")) is is_used:
                return
            assert time.monotonic() < deadline, state
            await asyncio.sleep(0.1)

    async def complete(self) -> str:
        async with self.client.post(f"{self.url}/completions", json=BODY) as answer:
            assert answer.status == 200, await answer.text()
            text: str = (await answer.json())["choices"][0]["text"]
            return text


@contextlib.asynccontextmanager
async def watched(
    folder: Path, model: Path, *options: str, environment: contextlib.AbstractContextManager[None]
) -> AsyncIterator[Watched]:
    async with (
        LocalSwarm(folder / "children") as swarm,
        Endpoint(Identity.generate(), host="127.0.0.1") as endpoint,
    ):
        backbone = await swarm.start_backbone(model)
        url = backbone.ready["url"]
        await swarm.add_peer(range(32))
        with environment:
            resting = await swarm.add_peer(range(32), *options)
        await wait_healthy(url)
        registry = RegistryClient(endpoint, parse_registry(swarm.registry))
        (offer,) = await registry.offers()
        made = Watched(url, resting, registry, offer.model)
        try:
            await made.until(is_announced=True)
            yield made
        finally:
            await made.client.close()
            await registry.close()


async def rests_and_returns(made: Watched, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Let a rest begin and end, each under a request: no token is lost or changed."""
    expected = await made.complete()
    for change, is_announced in ((begin, False), (end, True)):
        asked = asyncio.create_task(made.complete())
        change()
        await made.until(is_announced=is_announced)
        await made.until_shown(is_used=is_announced)
        assert await asked == expected
        assert await made.complete() == expected


async def test_outside_its_hours_a_peer_drains_and_comes_back_for_them(tmp_path: Path, tiny_moe: Path) -> None:
    now = datetime.datetime.now()
    hours = [(now + datetime.timedelta(hours=each)).strftime("%H:%M") for each in (-3, 3)]
    clock = Clock(tmp_path, "volunteer", 0)
    schedule = ("--schedule", "-".join(hours))
    model = tiny_moe / "model-Q4_K_M.gguf"
    async with watched(tmp_path, model, *schedule, environment=clock.applied()) as made:
        await rests_and_returns(made, lambda: clock.set(6 * HOUR_S), lambda: clock.set(0))


async def test_a_peer_rests_while_others_need_the_machine_and_comes_back(tmp_path: Path, tiny_moe: Path) -> None:
    load = tmp_path / "load"

    def set_load(percent: int) -> None:
        temporary = load.with_suffix(".new")
        temporary.write_text(str(percent))
        temporary.replace(load)

    @contextlib.contextmanager
    def applied():  # type: ignore[no-untyped-def]
        (tmp_path / "sitecustomize.py").write_text(BUSY_BY_FILE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(tmp_path))
            patch.setenv("TEST_LOAD_FILE", str(load))
            yield

    set_load(5)
    model = tiny_moe / "model-Q4_K_M.gguf"
    async with watched(tmp_path, model, "--pause-when-busy", environment=applied()) as made:
        await rests_and_returns(made, lambda: set_load(1000), lambda: set_load(0))
