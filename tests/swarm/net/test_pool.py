"""The pool's own rules, over an endpoint that only pretends to dial."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from swarm.errors import ConnectionLost, DeadlineExceeded, IdentityMismatch, SwarmError
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress
from swarm.net.endpoint import Endpoint
from swarm.net.pool import Pool

NODE, OTHER = NodeId(bytes(32)), NodeId(bytes(31) + b"\1")
GOOD, BAD, WRONG = ("192.0.2.1", 1), ("192.0.2.2", 1), ("192.0.2.3", 1)


class FakeConnection:
    is_open = True

    def close(self) -> None:
        self.is_open = False


class FakeEndpoint:
    """Dials when `go` is set: GOOD works, BAD is late, WRONG is somebody else."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.dialled: list[tuple[SocketAddress, NodeId, float]] = []

    async def dial(self, address: SocketAddress, *, expected: NodeId, timeout_s: float) -> FakeConnection:
        self.dialled.append((address, expected, timeout_s))
        await self.go.wait()
        errors: dict[SocketAddress, SwarmError] = {BAD: DeadlineExceeded("late"), WRONG: IdentityMismatch("wrong")}
        if address in errors:
            raise errors[address]
        return FakeConnection()


@pytest.fixture
def endpoint() -> FakeEndpoint:
    return FakeEndpoint()


@pytest.fixture
async def pool(endpoint: FakeEndpoint) -> AsyncIterator[Pool]:
    pool = Pool(cast(Endpoint, endpoint))
    yield pool
    await pool.close()
    assert not pool._dialling


async def settle(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition()` holds, a hundred turns at most."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came about")


async def test_many_who_ask_share_one_dial(pool: Pool, endpoint: FakeEndpoint) -> None:
    asking = [asyncio.ensure_future(pool.connect(NODE, [GOOD], timeout_s=2.0)) for _ in range(5)]
    await settle(lambda: bool(endpoint.dialled))
    assert pool.connection(NODE) is None
    endpoint.go.set()
    connections = await asyncio.gather(*asking)
    assert endpoint.dialled == [(GOOD, NODE, 2.0)]
    assert all(each is connections[0] for each in connections)
    assert await pool.connect(NODE, [GOOD]) is connections[0]
    assert pool.connection(NODE) is connections[0]
    assert len(endpoint.dialled) == 1


async def test_a_dead_connection_is_dialled_anew(pool: Pool, endpoint: FakeEndpoint) -> None:
    endpoint.go.set()
    first = await pool.connect(NODE, [GOOD])
    first.close()
    assert pool.connection(NODE) is None
    second = await pool.connect(NODE, [GOOD])
    assert second is not first
    assert second.is_open


async def test_nodes_have_connections_of_their_own(pool: Pool, endpoint: FakeEndpoint) -> None:
    endpoint.go.set()
    assert await pool.connect(NODE, [GOOD]) is not await pool.connect(OTHER, [GOOD])
    assert [expected for _, expected, _ in endpoint.dialled] == [NODE, OTHER]


async def test_addresses_are_tried_in_turn(pool: Pool, endpoint: FakeEndpoint) -> None:
    endpoint.go.set()
    assert (await pool.connect(NODE, [WRONG, BAD, GOOD])).is_open
    assert [address for address, _, _ in endpoint.dialled] == [WRONG, BAD, GOOD]


async def test_when_none_works_the_last_error_is_told_and_the_next_asker_dials_again(
    pool: Pool, endpoint: FakeEndpoint
) -> None:
    endpoint.go.set()
    with pytest.raises(IdentityMismatch):
        await pool.connect(NODE, [BAD, WRONG])
    await settle(lambda: not pool._dialling)
    with pytest.raises(DeadlineExceeded):
        await pool.connect(NODE, [BAD])
    with pytest.raises(ConnectionLost, match="no address"):
        await pool.connect(OTHER, [])


async def test_an_asker_that_gives_up_does_not_end_the_others_dial(pool: Pool, endpoint: FakeEndpoint) -> None:
    first, second = (asyncio.ensure_future(pool.connect(NODE, [GOOD])) for _ in range(2))
    await settle(lambda: bool(endpoint.dialled))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    endpoint.go.set()
    assert (await second).is_open
    assert len(endpoint.dialled) == 1


async def test_a_closed_pool_fails_who_waits_and_who_comes_later(pool: Pool, endpoint: FakeEndpoint) -> None:
    waiting = asyncio.ensure_future(pool.connect(NODE, [GOOD]))
    await settle(lambda: bool(endpoint.dialled))
    await pool.close()
    with pytest.raises(ConnectionLost, match="pool is closed"):
        await waiting  # it was not cancelled itself, and must not look as if it was
    with pytest.raises(ConnectionLost, match="pool is closed"):
        await pool.connect(NODE, [GOOD])


async def test_closing_closes_every_connection(pool: Pool, endpoint: FakeEndpoint) -> None:
    endpoint.go.set()
    connections = [await pool.connect(node, [GOOD]) for node in (NODE, OTHER)]
    await pool.close()
    assert [each.is_open for each in connections] == [False, False]
    assert pool.connection(NODE) is None
