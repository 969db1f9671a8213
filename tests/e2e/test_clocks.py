"""Wrong clocks do not matter: processes an hour off in both directions find each other, and a clock may jump back under way.

The children's clock is the system's plus what a file says, read at each look, so that it can jump (`sitecustomize`, which Python
imports before anything else).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from swarm.emulation.processes import Child, LocalSwarm
from swarm.identity import Identity
from swarm.ids import ModelId, NodeId
from swarm.net.endpoint import Endpoint
from swarm.registry.announcer import RENEW_S, TTL_S
from swarm.registry.client import RegistryClient, parse_registry
from tests.e2e.conftest import wait_healthy

HOUR_S = 3600
N_EXPERT = 32
BODY = {"prompt": "The :mod:`json` module provides", "max_tokens": 12, "temperature": 0}
SITECUSTOMIZE = """
import datetime, os, time

if (_path := os.environ.get("TEST_CLOCK_FILE")) is not None:
    _time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime

    def _offset_s():
        with open(_path) as file:
            return int(file.read())

    class _Datetime(_datetime):
        @classmethod
        def now(cls, tz=None):
            return _datetime.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls):
            return cls.now(datetime.timezone.utc).replace(tzinfo=None)

    time.time = lambda: _time() + _offset_s()
    time.time_ns = lambda: _time_ns() + _offset_s() * 1_000_000_000
    datetime.datetime = _Datetime

    import swarm.registry.announcer

    swarm.registry.announcer.RENEW_S = 3.0  # so that a renewal need not be waited for long
"""


class Clock:
    """The clock of the children that are started within `applied`."""

    def __init__(self, folder: Path, name: str, offset_s: int) -> None:
        self._path = folder / f"{name}.clock"
        self._site = folder / "site"
        self._site.mkdir(exist_ok=True)
        (self._site / "sitecustomize.py").write_text(SITECUSTOMIZE)
        self.set(offset_s)

    def set(self, offset_s: int) -> None:
        """Jump; written beside it and renamed, for a child may read at any moment."""
        temporary = self._path.with_suffix(".new")
        temporary.write_text(str(offset_s))
        temporary.replace(self._path)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(self._site))
            patch.setenv("TEST_CLOCK_FILE", str(self._path))
            yield


async def complete(url: str, *, within_s: float = 0.0) -> str:
    """Return the answer to a request; asked again where an expert is unavailable, until `within_s` is over."""
    deadline = time.monotonic() + within_s
    async with aiohttp.ClientSession() as client:
        while True:
            async with client.post(f"{url}/completions", json=BODY) as answer:
                if answer.status == 200:
                    text: str = (await answer.json())["choices"][0]["text"]
                    return text
                assert answer.status == 503
                assert time.monotonic() < deadline, await answer.text()
            await asyncio.sleep(0.2)


class Looker:
    """Asks the registry as a stranger would, by the system's clock."""

    def __init__(self, registry: RegistryClient, model: ModelId) -> None:
        self._registry, self._model = registry, model

    async def seq_of(self, node: NodeId) -> int | None:
        """Return the seq that a peer is listed with, None if it is not."""
        records = await self._registry.holders(self._model)
        return next((record.seq for record in records if record.node == node), None)

    async def wait_above(self, node: NodeId, seq: int, timeout_s: float) -> int:
        """Return the next seq that a peer is listed with; it must be listed all the while."""
        deadline = time.monotonic() + timeout_s
        while (found := await self.seq_of(node)) is None or found <= seq:
            assert found is not None, "its record has gone"
            assert time.monotonic() < deadline, "its record is not renewed"
            await asyncio.sleep(0.5)
        return found


@contextlib.asynccontextmanager
async def looking(swarm: LocalSwarm) -> AsyncIterator[Looker]:
    async with Endpoint(Identity.generate(), host="127.0.0.1") as endpoint:
        registry = RegistryClient(endpoint, parse_registry(swarm.registry))
        try:
            [offer] = await registry.offers()
            yield Looker(registry, offer.model)
        finally:
            await registry.close()


def node_of(peer: Child) -> NodeId:
    return NodeId.parse(peer.ready["node"])


async def test_an_hour_off_and_jumping_back(tmp_path: Path, tiny_moe: Path) -> None:
    model = tiny_moe / "model-Q4_K_M.gguf"
    late, early = Clock(tmp_path, "late", -HOUR_S), Clock(tmp_path, "early", HOUR_S)
    async with LocalSwarm(tmp_path / "children") as swarm:  # its relay has the system's clock
        with late.applied():
            backbone = await swarm.start_backbone(model)
        url = backbone.ready["url"]
        with early.applied():
            peer = await swarm.add_peer(range(N_EXPERT), "--model", str(model))
        node = node_of(peer)
        await wait_healthy(url)  # two hours between them: the record is live, the handshake passes
        expected = await complete(url)

        async with looking(swarm) as looker:
            seq = await looker.seq_of(node)
            assert seq is not None
            assert abs(seq / 1000 - time.time() - HOUR_S) < 120, "the shifted clock is the one in use"
            early.set(-HOUR_S)  # two hours back, in mid-run: the next renewal is news all the same
            await looker.wait_above(node, seq, 3 * RENEW_S)
            assert await complete(url) == expected

            # Restarted by the set-back clock, with its count lost, while the registry still knows the old one.
            seq = await looker.seq_of(node)
            await peer.kill()
            for file in peer.home.rglob("*.seq"):
                file.unlink()
            with early.applied():
                peer = await swarm.restart(peer)
            assert node_of(peer) == node
            assert seq is not None
            await looker.wait_above(node, seq, TTL_S / 2)
        # The backbone may still ask on the connection to the process that was killed.
        assert await complete(url, within_s=20.0) == expected
