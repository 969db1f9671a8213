"""The pool over real endpoints: one connection for many askers, and a new one after the server's restart."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import ConnectionLost, IdentityMismatch, NetworkError
from swarm.identity import Identity
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.pool import Pool
from swarm.wire import messages as m

SERVER = Identity.from_seed(b"server" + bytes(26))
OTHER = Identity.from_seed(b"other." + bytes(26))
CLIENT = Identity.from_seed(b"client" + bytes(26))
LIMIT_S = 10.0


async def answer(connection: Connection, request: m.Request) -> m.Response:
    return m.Status(data=b"{}")


def listen(identity: Identity = SERVER, port: int = 0) -> Endpoint:
    return Endpoint(identity, host="127.0.0.1", port=port, handler=answer, serves=[m.GetStatus])


async def test_many_askers_share_one_connection_and_a_restart_gets_a_new_one() -> None:
    async with Endpoint(CLIENT, host="127.0.0.1") as client:
        pool = Pool(client)
        async with listen() as server:
            port = server.port
            connections = await asyncio.gather(
                *(pool.connect(SERVER.node_id, [("127.0.0.1", port)], timeout_s=LIMIT_S) for _ in range(10))
            )
            assert len(set(map(id, connections))) == 1
            assert len(server._connections) == 1
            assert pool.connection(SERVER.node_id) is connections[0]
        await asyncio.wait_for(connections[0].wait_gone(), LIMIT_S)
        assert pool.connection(SERVER.node_id) is None
        with pytest.raises(NetworkError):
            await pool.connect(SERVER.node_id, [("127.0.0.1", port)], timeout_s=0.1)
        async with listen(port=port):
            again = await pool.connect(SERVER.node_id, [("127.0.0.1", port)], timeout_s=LIMIT_S)
            assert await again.request(m.GetStatus(), timeout_s=LIMIT_S) == m.Status(data=b"{}")
            await pool.close()
            assert not again.is_open


async def test_an_address_where_another_node_answers_is_passed_over() -> None:
    async with listen(OTHER) as wrong, listen() as right, Endpoint(CLIENT, host="127.0.0.1") as client:
        pool = Pool(client)
        addresses = [("127.0.0.1", wrong.port), ("127.0.0.1", right.port)]
        connection = await pool.connect(SERVER.node_id, addresses, timeout_s=LIMIT_S)
        assert connection.address == addresses[1]
        with pytest.raises(IdentityMismatch):
            await pool.connect(CLIENT.node_id, addresses[:1], timeout_s=LIMIT_S)
        await pool.close()


async def test_an_endpoint_that_ends_ends_the_dials_of_its_pool() -> None:
    async with Endpoint(CLIENT, host="127.0.0.1") as client:
        pool = Pool(client)
        async with Endpoint(OTHER, host="127.0.0.1") as deaf:  # serves nothing, so it answers nobody
            dialling = asyncio.ensure_future(pool.connect(OTHER.node_id, [("127.0.0.1", deaf.port)], timeout_s=LIMIT_S))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert client._connections
    with pytest.raises(ConnectionLost):
        await asyncio.wait_for(dialling, LIMIT_S)
    await pool.close()
