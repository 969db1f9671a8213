"""Real sockets on loopback: a connection through a relay's channel, its move to a direct path and back, a new address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from swarm.identity import Identity
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.paths import RELAY_TYPE, Path
from swarm.wire import messages as m

SERVER = Identity.from_seed(b"server" + bytes(26))
CLIENT = Identity.from_seed(b"client" + bytes(26))
CHANNEL = b"channel1"
LIMIT_S = 10.0
PLAIN = b"what only both ends may read"


async def status(connection: Connection, request: m.Request) -> m.Response:
    return m.Status(data=PLAIN)


class Forwarder(asyncio.DatagramProtocol):
    """Passes RELAY packets of a channel from each leg to the other; `spoil` may change or drop them."""

    def __init__(self) -> None:
        self.legs: list[Any] = []
        self.n_passed = 0
        self.spoil: Callable[[bytes], list[bytes]] = lambda data: [data]
        self.seen: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.address = transport.get_extra_info("sockname")

    def datagram_received(self, data: bytes, address: Any) -> None:
        if data[0] == RELAY_TYPE and address in self.legs:
            self.n_passed += 1
            self.seen.append(data)
            for each in self.spoil(data):
                self._transport.sendto(each, self.legs[1 - self.legs.index(address)])

    def inject(self, data: bytes, leg: int) -> None:
        self._transport.sendto(data, self.legs[leg])


class Shutter(asyncio.DatagramProtocol):
    """Stands for a server's direct address; closed, it passes nothing. `rebind` gives it another address towards the server."""

    def __init__(self, to: Any) -> None:
        self.to, self.client = to, None
        self.is_open = True
        self.n_passed = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._front, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self.address = self._front.get_extra_info("sockname")
        await self.rebind()

    async def rebind(self) -> None:
        loop = asyncio.get_running_loop()
        self._back, _ = await loop.create_datagram_endpoint(lambda: _Back(self), local_addr=("127.0.0.1", 0))

    def datagram_received(self, data: bytes, address: Any) -> None:
        self.client = address
        if self.is_open:
            self.n_passed += 1
            self._back.sendto(data, self.to)

    def came_back(self, data: bytes) -> None:
        if self.is_open and self.client is not None:
            self._front.sendto(data, self.client)


class _Back(asyncio.DatagramProtocol):
    def __init__(self, shutter: Shutter) -> None:
        self._shutter = shutter

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        if self._shutter._back is self._transport:  # of a former address nothing comes back
            self._shutter.came_back(data)


@contextlib.asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Forwarder, Endpoint, Endpoint, Connection]]:
    """Yield a forwarder, server, client, and the client's connection through the forwarder."""
    loop = asyncio.get_running_loop()
    transport, forwarder = await loop.create_datagram_endpoint(Forwarder, local_addr=("127.0.0.1", 0))
    async with (
        Endpoint(SERVER, host="127.0.0.1", handler=status, serves=(m.GetStatus,)) as server,
        Endpoint(CLIENT, host="127.0.0.1") as client,
    ):
        forwarder.legs = [("127.0.0.1", client.port), ("127.0.0.1", server.port)]
        server.add_channel(CHANNEL, forwarder.address)
        connection = await client.dial(client.add_channel(CHANNEL, forwarder.address), expected=SERVER.node_id)
        yield forwarder, server, client, connection
    transport.close()


async def ask(connection: Connection) -> float:
    """Return how long one request took."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
    return loop.time() - start


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def server_side(server: Endpoint) -> Connection:
    return next(iter(server._connections))


async def test_a_connection_through_a_channel_works_and_needs_no_probe() -> None:
    async with relayed() as (forwarder, _, _, connection):
        await ask(connection)
        assert connection.path.is_relayed
        assert connection.address is None
        assert connection.monitor is None
        assert forwarder.n_passed > 4


async def test_it_moves_to_a_direct_path_that_works_and_both_sides_use_it() -> None:
    async with relayed() as (forwarder, server, client, connection):
        client.add_path(connection, ("127.0.0.1", server.port))
        await until(lambda: not connection.path.is_relayed and not server_side(server).path.is_relayed)
        for _ in range(3):
            await ask(connection)
        await asyncio.sleep(0.05)
        n_passed = forwarder.n_passed
        for _ in range(20):
            await ask(connection)
        assert forwarder.n_passed - n_passed <= 2, "nothing but a probe that keeps the channel warm"


async def test_a_blackholed_direct_path_is_left_within_a_second_and_taken_again_when_it_is_back() -> None:
    async with relayed() as (_, server, client, connection):
        shutter = Shutter(("127.0.0.1", server.port))
        await shutter.start()
        client.add_path(connection, shutter.address)
        await until(lambda: not connection.path.is_relayed and not server_side(server).path.is_relayed)
        shutter.is_open = False
        assert await ask(connection) < 1.0
        assert connection.path.is_relayed
        for _ in range(10):
            await ask(connection)
        shutter.is_open = True
        await until(lambda: not connection.path.is_relayed)
        await ask(connection)


async def test_a_client_whose_nat_gives_it_another_address_is_followed_there() -> None:
    async with Endpoint(SERVER, host="127.0.0.1", handler=status, serves=(m.GetStatus,)) as server:
        shutter = Shutter(("127.0.0.1", server.port))
        await shutter.start()
        async with Endpoint(CLIENT, host="127.0.0.1") as client:
            connection = await client.dial(shutter.address, expected=SERVER.node_id)
            await ask(connection)
            before = server_side(server).path
            await shutter.rebind()
            assert await ask(connection) < 0.5, "3 round trips + 250 ms, of which loopback's are nothing"
            assert server_side(server).path != before
            assert connection.path == Path(address=shutter.address)


async def test_a_relay_that_alters_repeats_and_reorders_causes_no_more_than_delay() -> None:
    async with relayed() as (forwarder, _, _, connection):
        held: list[bytes] = []

        def spoil(data: bytes) -> list[bytes]:
            held.append(data)
            kind = forwarder.n_passed % 4
            if kind == 0:
                return [data[:-1] + bytes((data[-1] ^ 1,)), data]
            if kind == 1:
                return [data, data]
            return [data, held[len(held) // 2]]

        forwarder.spoil = spoil
        for _ in range(20):
            await ask(connection)
        assert all(PLAIN not in data for data in forwarder.seen)
        assert connection.is_open


async def test_forged_and_repeated_probes_move_nothing() -> None:
    async with relayed() as (forwarder, server, client, connection):
        client.add_path(connection, ("127.0.0.1", server.port))
        await until(lambda: not server_side(server).path.is_relayed)
        probes = [data for data in forwarder.seen if data[9] == 0x22]
        assert probes
        used = server_side(server).path
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.bind(("127.0.0.1", 0))
            for data in probes:
                forwarder.inject(data, 1)
                stranger.sendto(data[9:], ("127.0.0.1", server.port))
                stranger.sendto(data[9:-1] + b"?", ("127.0.0.1", server.port))
        for _ in range(5):
            await ask(connection)
        assert server_side(server).path == used


async def test_dual_stack_takes_both_kinds_and_tells_plain_addresses() -> None:
    async with (
        Endpoint(SERVER, host="::", handler=status, serves=(m.GetStatus,)) as server,
        Endpoint(CLIENT, host="::") as client,
        Endpoint(CLIENT, host="127.0.0.1") as four,
    ):
        assert server.families == {4, 6}
        for endpoint, host in ((client, "127.0.0.1"), (client, "::1"), (four, "127.0.0.1")):
            connection = await endpoint.dial((host, server.port), expected=SERVER.node_id)
            await ask(connection)
            where = f"[{host}]" if ":" in host else host
            assert connection.observed_address == f"{where}:{endpoint.port}"
            assert str(connection.path) == f"{where}:{server.port}"
