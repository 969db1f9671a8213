"""Which of a node's addresses and relays the pool tries, when, and what it keeps; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from swarm.errors import ConnectionLost, DeadlineExceeded, SwarmError
from swarm.ids import NodeId
from swarm.net import pool as pool_module
from swarm.net.addresses import format_address
from swarm.net.paths import Path
from swarm.net.pool import Pool
from tests import virtual_time

NODE = NodeId(bytes(32))
FIRST, SECOND = ("192.0.2.1", 1), ("192.0.2.2", 1)
NEVER = 1000.0


@dataclass(eq=False)
class FakeConnection:
    path: Path
    is_open: bool = True
    rtt_s: float | None = 0.02
    why_relayed: str = ""
    monitor: Any = None

    def close(self) -> None:
        self.is_open = False


@dataclass(eq=False)
class World:
    """Stands for endpoint and finder: how long each way takes to open, and when each was tried."""

    takes_s: dict[Any, float | SwarmError]
    has_relay: bool = True
    tried: list[tuple[float, Any]] = field(default_factory=list)
    made: list[FakeConnection] = field(default_factory=list)
    spares: list[Any] = field(default_factory=list)
    relays: Any = None

    async def dial(self, address: Any, *, expected: NodeId, timeout_s: float) -> FakeConnection:
        return await self._open(address, Path(address=address), timeout_s)

    async def dial_relayed(self, node: NodeId, *, timeout_s: float) -> FakeConnection:
        return await self._open("relay", Path(address=FIRST, channel=b"channel1"), timeout_s)

    def has_relays(self, node: NodeId) -> bool:
        return self.has_relay

    def know(self, node: NodeId, vouchers: Sequence[str]) -> None:
        pass

    def add_spare(self, connection: Any, node: NodeId) -> None:
        self.spares.append(connection)

    async def _open(self, way: Any, path: Path, timeout_s: float) -> FakeConnection:
        self.tried.append((round(virtual_time.now() - 1000.0, 3), way))
        takes_s = self.takes_s[way]
        if isinstance(takes_s, SwarmError):
            raise takes_s
        if takes_s > timeout_s:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded("no answer")
        await asyncio.sleep(takes_s)
        made = FakeConnection(path)
        self.made.append(made)
        return made


@dataclass(frozen=True)
class Record:
    addresses: tuple[str, ...]
    is_public: bool = True
    node: NodeId = NODE
    vouchers: tuple[str, ...] = ("voucher",)


def reach(world: World, *, is_public: bool = True, addresses: Sequence[tuple[str, int]] = (FIRST, SECOND)) -> Any:
    """Return the connection, or what was raised."""

    async def run() -> Any:
        pool = Pool(cast(Any, world), cast(Any, world))
        record = Record(tuple(format_address(each) for each in addresses), is_public)
        try:
            return await pool.reach(record)
        except SwarmError as error:
            return error
        finally:
            await asyncio.sleep(0)

    return virtual_time.run(run())


def test_a_second_address_begins_after_a_head_start_and_the_first_to_open_is_taken() -> None:
    world = World({FIRST: NEVER, SECOND: 0.1}, has_relay=False)
    assert reach(world).path.address == SECOND
    assert world.tried == [(0.0, FIRST), (pool_module.ADDRESS_AFTER_S, SECOND)]


def test_one_that_fails_lets_the_next_begin_at_once() -> None:
    world = World({FIRST: ConnectionLost("no way there"), SECOND: 0.1}, has_relay=False)
    assert reach(world).path.address == SECOND
    assert world.tried == [(0.0, FIRST), (0.0, SECOND)]


def test_nothing_of_a_public_node_goes_through_a_relay_while_its_address_answers() -> None:
    world = World({FIRST: 0.5, SECOND: NEVER, "relay": 0.01})
    assert not reach(world).path.is_relayed
    assert "relay" not in [way for _, way in world.tried]
    assert world.spares == []


def test_the_relays_of_a_public_node_come_late_or_when_all_else_has_failed() -> None:
    world = World({FIRST: NEVER, SECOND: NEVER, "relay": 0.1})
    assert reach(world).path.is_relayed
    assert world.tried[-1] == (pool_module.RELAY_AFTER_S, "relay")
    world = World({FIRST: ConnectionLost("no way"), SECOND: ConnectionLost("no way"), "relay": 0.1})
    assert reach(world).path.is_relayed
    assert world.tried[-1] == (0.0, "relay")


def test_a_node_behind_nat_is_tried_both_ways_at_once_and_keeps_a_relay_beside_a_direct_path() -> None:
    world = World({FIRST: NEVER, "relay": 0.1})
    assert reach(world, is_public=False, addresses=[FIRST]).path.is_relayed
    assert world.tried == [(0.0, FIRST), (0.0, "relay")]
    assert world.spares == []
    world = World({FIRST: 0.05, "relay": 0.1})
    connection = reach(world, is_public=False, addresses=[FIRST])
    assert not connection.path.is_relayed
    assert world.spares == [connection]


def test_of_two_that_open_in_the_same_moment_one_is_closed() -> None:
    world = World({FIRST: 0.1, "relay": 0.1})
    connection = reach(world, is_public=False, addresses=[FIRST])
    assert [made.is_open for made in world.made] == [made is connection for made in world.made]


@pytest.mark.parametrize("is_public", [True, False])
def test_when_nothing_works_the_last_error_is_told(is_public: bool) -> None:
    world = World({FIRST: NEVER, SECOND: NEVER, "relay": ConnectionLost("no relay")})
    assert isinstance(reach(world, is_public=is_public), (DeadlineExceeded, ConnectionLost))
