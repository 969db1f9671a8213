"""Two nodes brought together by real relays on loopback: they find the direct path, and survive a relay's end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from relay.daemon import RelayConfig, RelayDaemon, RelayReady
from swarm.errors import NetworkError, RemoteProtocolError
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.net import path_finder as path_finder_module
from swarm.net.addresses import parse_address
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.path_finder import PathFinder
from swarm.net.pool import Pool
from swarm.net.relay_client import RelayAddress
from swarm.wire import messages as m
from tests import sample_records

LIMIT_S = 10.0


async def answer(connection: Connection, request: m.Request) -> m.Response:
    return m.Status(data=b"{}")


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Relay:
    """A relay daemon in this process."""

    def __init__(self) -> None:
        self._ready: asyncio.Future[RelayReady] = asyncio.get_running_loop().create_future()
        config = RelayConfig(host="127.0.0.1", port=0, http_port=None)
        self.task = asyncio.create_task(RelayDaemon(config, Identity.generate()).run(self._ready.set_result))

    async def address(self) -> RelayAddress:
        ready = await self._ready
        _, _, where = ready.registry.rpartition("@")
        return RelayAddress(address=parse_address(where), node=None)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@contextlib.asynccontextmanager
async def two_nodes(
    *, is_relays_only: bool
) -> AsyncIterator[tuple[list[Relay], PathFinder, PathFinder, Pool, Endpoint]]:
    """Yield two relays, the called node's finder, the caller's, the caller's pool, and the called endpoint."""
    relays = [Relay(), Relay()]
    addresses = [await relay.address() for relay in relays]
    async with (
        Endpoint(Identity.generate(), host="127.0.0.1", handler=answer, serves=(m.GetStatus,)) as called,
        Endpoint(Identity.generate(), host="127.0.0.1") as caller,
        PathFinder(called, takes_calls=True, is_relays_only=is_relays_only) as called_finder,
        PathFinder(caller, takes_calls=False, is_relays_only=is_relays_only) as caller_finder,
    ):
        pool = Pool(caller, caller_finder)
        keeping = asyncio.create_task(called_finder.relays.run(lambda: addresses))
        await until(lambda: len(called_finder.relays.vouchers()) == 2)
        yield relays, called_finder, caller_finder, pool, called
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await pool.close()
    for relay in relays:
        await relay.end()


def record(finder: PathFinder, endpoint: Endpoint) -> object:
    """Return an announcement of a node that can be reached through relays only: at its address nobody listens."""
    face = finder.face("127.0.0.1:9")
    return sample_records.sample_announcement(
        endpoint.identity.node_id,
        model=ModelId(b"m" * 32),
        addresses=("127.0.0.1:9",),
        is_public=False,
        vouchers=face.vouchers,
    )


async def test_a_relayed_connection_works_at_once_and_becomes_direct() -> None:
    async with two_nodes(is_relays_only=False) as (_, called_finder, _, pool, called):
        connection = await pool.reach(record(called_finder, called))  # type: ignore[arg-type]
        assert connection.path.is_relayed
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        await until(lambda: not connection.path.is_relayed)
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        report = pool.report(called.identity.node_id)
        assert report is not None
        assert report.path.startswith("direct 127.0.0.1:")
        assert not report.why_relayed


async def test_a_relay_that_ends_is_replaced_by_the_other_under_the_connection() -> None:
    async with two_nodes(is_relays_only=True) as (relays, called_finder, _, pool, called):
        connection = await pool.reach(record(called_finder, called))  # type: ignore[arg-type]
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        at = connection.path.address[1]
        ports = [(await relay.address()).address[1] for relay in relays]
        used = relays[ports.index(at)]
        await until(lambda: connection.monitor is not None and len(connection.monitor.views) == 2)
        ending = asyncio.create_task(used.end())
        while not ending.done():
            await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
            await asyncio.sleep(0.01)
        for _ in range(50):
            await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        assert connection.path.address[1] != at
        assert connection.is_open


async def test_a_node_whose_relays_know_nothing_of_it_cannot_be_reached() -> None:
    async with two_nodes(is_relays_only=True) as (_, called_finder, caller_finder, _, _):
        vouchers = called_finder.face("127.0.0.1:9").vouchers
        stranger = Identity.generate().node_id
        caller_finder.know(stranger, [*vouchers, "%%%"])
        with pytest.raises((NetworkError, RemoteProtocolError)):
            await caller_finder.dial_relayed(stranger)


async def test_a_channel_without_a_connection_is_ended_and_a_used_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay lets a node have few channels: a stranger that only opens them must not hold them all."""
    monkeypatch.setattr(path_finder_module, "UNUSED_S", 0.5)
    async with two_nodes(is_relays_only=True) as (_, called_finder, caller_finder, pool, called):
        connection = await pool.reach(record(called_finder, called))  # type: ignore[arg-type]
        await until(lambda: connection.monitor is not None and len(connection.monitor.views) == 2)
        used = set(called._channels)
        assert len(used) == 2, "one of them spare"
        idle = await caller_finder.relays.connect(called.identity.node_id, called_finder.relays.vouchers()[0])
        await until(lambda: idle.channel in called._channels)
        await until(lambda: idle.channel not in called._channels)
        await asyncio.sleep(2 * path_finder_module.UNUSED_S)
        assert set(called._channels) == used
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
