"""A node on qh3 and a node on aioquic are the same to each other. Needs the extra `fast`."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from swarm.errors import IdentityMismatch, UserError
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.net import admission
from swarm.net import serving as serving_module
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.quic_driver import driver_class
from swarm.wire import messages as m

pytest.importorskip("qh3", reason="needs qh3: pip install 'moe-swarm[fast]'")

SERVER = Identity.from_seed(b"server" + bytes(26))
CLIENT = Identity.from_seed(b"client" + bytes(26))
LIMIT_S = 10.0
PAIRS = list(itertools.product(("aioquic", "qh3"), repeat=2))


async def answer(connection: Connection, request: m.Request) -> m.Response:
    assert isinstance(request, m.GetBlock)
    return m.BlockBytes(data=bytes([request.layer]) * (request.expert * 1000))


def endpoint(monkeypatch: pytest.MonkeyPatch, library: str, identity: Identity, **options: object) -> Endpoint:
    monkeypatch.setenv("SWARM_QUIC", library)
    made = Endpoint(identity, host="127.0.0.1", **options)  # type: ignore[arg-type]
    assert driver_class().__name__.lower().startswith(library)
    return made


def block(layer: int, size_kb: int) -> m.GetBlock:
    return m.GetBlock(model_id=ModelId(bytes(32)), layer=layer, expert=size_kb)


@pytest.mark.parametrize(("server_library", "client_library"), PAIRS)
async def test_any_pair_speaks(monkeypatch: pytest.MonkeyPatch, server_library: str, client_library: str) -> None:
    server = endpoint(monkeypatch, server_library, SERVER, handler=answer, serves=[m.GetBlock])
    client = endpoint(monkeypatch, client_library, CLIENT)
    async with server, client:
        connection = await client.dial(("127.0.0.1", server.port), expected=SERVER.node_id)
        assert connection.remote == SERVER.node_id
        for size_kb in (0, 1, 12, 2000):
            got = await connection.request(block(7, size_kb), timeout_s=LIMIT_S)
            assert got == m.BlockBytes(data=bytes([7]) * (size_kb * 1000))


@pytest.mark.parametrize(("server_library", "client_library"), PAIRS)
async def test_more_streams_than_are_allowed_at_first_wait(
    monkeypatch: pytest.MonkeyPatch, server_library: str, client_library: str
) -> None:
    monkeypatch.setattr(serving_module, "MAX_BULKY_PER_CONNECTION", 200)
    server = endpoint(monkeypatch, server_library, SERVER, handler=answer, serves=[m.GetBlock])
    client = endpoint(monkeypatch, client_library, CLIENT)
    async with server, client:
        connection = await client.dial(("127.0.0.1", server.port), expected=SERVER.node_id)
        for _ in range(2):
            requests = (connection.request(block(at, 1), timeout_s=LIMIT_S) for at in range(200))
            got = await asyncio.gather(*requests)
            assert got == [m.BlockBytes(data=bytes([at]) * 1000) for at in range(200)]


@pytest.mark.parametrize(("server_library", "client_library"), PAIRS)
async def test_another_node_is_refused(
    monkeypatch: pytest.MonkeyPatch, server_library: str, client_library: str
) -> None:
    server = endpoint(monkeypatch, server_library, SERVER, handler=answer, serves=[m.GetBlock])
    client = endpoint(monkeypatch, client_library, CLIENT)
    async with server, client:
        with pytest.raises(IdentityMismatch):
            await client.dial(("127.0.0.1", server.port), expected=CLIENT.node_id)


@pytest.mark.parametrize(("server_library", "client_library"), PAIRS)
async def test_a_client_proves_its_address_when_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, server_library: str, client_library: str
) -> None:
    monkeypatch.setattr(admission, "RETRY_FROM", 0)
    server = endpoint(monkeypatch, server_library, SERVER, handler=answer, serves=[m.GetBlock])
    client = endpoint(monkeypatch, client_library, CLIENT)
    async with server, client:
        connection = await client.dial(("127.0.0.1", server.port), expected=SERVER.node_id)
        assert server.n_retries >= 1  # a first flight of qh3 is two datagrams
        got = await connection.request(block(7, 100), timeout_s=LIMIT_S)
        assert got == m.BlockBytes(data=bytes([7]) * 100_000)


async def test_qh3_bounds_the_streams_that_the_other_side_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qh3Driver.n_streams counts none, since its core refuses more than it allowed: 100 at a time."""
    server = endpoint(monkeypatch, "qh3", SERVER, handler=answer, serves=[m.GetBlock])
    client = endpoint(monkeypatch, "aioquic", CLIENT)
    async with server, client:
        connection = await client.dial(("127.0.0.1", server.port), expected=SERVER.node_id)
        connection.quic._remote_max_streams_bidi = 1 << 20  # a client that heeds no limit
        connection.quic.send_stream_data(4 * 300, b"\x32")
        connection.flush()
        await asyncio.wait_for(connection.wait_gone(), LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            while server._connections:  # noqa: ASYNC110 - what is waited for tells nobody
                await asyncio.sleep(0.005)


def test_an_unknown_library_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_QUIC", "quiche")
    with pytest.raises(UserError, match="got 'quiche', expected aioquic or qh3"):
        Endpoint(CLIENT, host="127.0.0.1")
