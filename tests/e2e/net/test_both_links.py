"""What both kinds of link must hold: who is at the other end is proved, and damage ends the link that it came on and no other."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from swarm.errors import ConnectionLost, IdentityMismatch, RemoteProtocolError, RemoteRefused, SwarmError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.tls_link import TlsLink
from swarm.net.tls_links import TlsListener, dial_tls, unix_name
from swarm.net.tls_records import encode_exchange
from swarm.wire import messages as m
from swarm.wire.frames import encode
from tests.e2e.net.test_tls_links import CLIENT, OTHER, SERVER, TIMEOUT_S, both_doors, dispatch, value

KINDS = ("quic", "tls", "unix")
Link = Connection | TlsLink
AN_EXCHANGE = 40  # of the client; far from those that the tests use


class World:
    """A server with all doors, and any number of clients, each with its QUIC connection."""

    server: Endpoint
    listener: TlsListener

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self.asked: list[NodeId] = []
        self.answer: Callable[[m.Dispatch], m.Result] = lambda request: m.Result(
            codec=request.result_codec, rows=request.rows * 2, compute_us=0, queue_us=0
        )
        self.given_up = asyncio.Event()

    async def handle(self, connection: Connection, request: m.Request) -> m.Response:
        """Answer as `answer` says; layer 9 never."""
        assert isinstance(request, m.Dispatch)
        self.asked.append(connection.remote)
        if request.layer == 9:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()
        return self.answer(request)

    async def endpoint(self, identity: Identity) -> Endpoint:
        """Return a new client."""
        return await self._stack.enter_async_context(Endpoint(identity, host="127.0.0.1"))

    async def dial(self, kind: str, identity: Identity, *, expected: NodeId = SERVER.node_id) -> Link:
        """Return an open link of that kind; a TLS link's node has its QUIC connection, too."""
        address = ("127.0.0.1", self.server.port)
        if kind == "quic":
            endpoint = await self.endpoint(identity)
            return await endpoint.dial(address, expected=expected, timeout_s=TIMEOUT_S)
        if not self.server.is_connected(identity.node_id):
            honest = {each.node_id: each for each in (CLIENT, OTHER)}[identity.node_id]
            await (await self.endpoint(honest)).dial(address, expected=SERVER.node_id, timeout_s=TIMEOUT_S)
        where = unix_name(SERVER.node_id) if kind == "unix" else ("127.0.0.1", self.listener.port)
        link = await dial_tls(identity, where, expected=expected, timeout_s=TIMEOUT_S)
        self._stack.callback(link.close)
        return link


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        made = World(stack)
        made.server, made.listener = await stack.enter_async_context(both_doors(made.handle))
        yield made


def send_raw(link: Link, data: bytes) -> None:
    """Send these bytes as a whole exchange."""
    if isinstance(link, TlsLink):
        link._write(encode_exchange(AN_EXCHANGE, data, is_end=True))
    else:
        link.driver.send_stream_data(4 * (AN_EXCHANGE // 2), data, True)
        link.flush()


async def ask(link: Link, layer: int = 0) -> float:
    return value(await link.request(dispatch(layer=layer), timeout_s=TIMEOUT_S))


async def ended(link: Link) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while link.is_open:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)


class Liar(Identity):
    """Says that it is another node than its key's, or signs something else than it is asked to."""

    def __init__(self, key: Identity, *, name: Identity, says: bytes = b"") -> None:
        super().__init__(key.private_key)
        self.node_id = name.node_id
        self._says = says

    def sign(self, statement: bytes) -> bytes:
        return super().sign(self._says or statement)


@pytest.mark.parametrize("kind", KINDS)
async def test_both_ends_know_who_is_there(world: World, kind: str) -> None:
    link = await world.dial(kind, CLIENT)
    assert await ask(link) == 1.0
    assert link.remote == SERVER.node_id
    assert world.asked == [CLIENT.node_id]


@pytest.mark.parametrize("kind", KINDS)
async def test_another_node_at_the_address_is_refused(world: World, kind: str) -> None:
    with pytest.raises(IdentityMismatch):
        await world.dial(kind, CLIENT, expected=OTHER.node_id)
    assert world.asked == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "liar",
    [Liar(CLIENT, name=OTHER), Liar(CLIENT, name=CLIENT, says=b"what was signed for another server or nonce")],
    ids=["another's name", "another statement"],
)
async def test_who_cannot_prove_its_name_is_not_let_in(world: World, kind: str, liar: Liar) -> None:
    async def dial_and_ask() -> float:
        return await ask(await world.dial(kind, liar))

    with pytest.raises(SwarmError):
        await dial_and_ask()
    assert world.asked == []
    assert await ask(await world.dial(kind, CLIENT)) == 1.0


def cut(data: bytes) -> bytes:
    return data[:-7]


def flipped(data: bytes) -> bytes:
    """Return it with another number of rows in its head, so that nothing after it fits."""
    damaged = bytearray(data)
    damaged[5 + 16] ^= 0x40
    return bytes(damaged)


DISPATCH = encode(dispatch())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "data",
    [
        cut(DISPATCH),
        flipped(DISPATCH),
        DISPATCH + b"more",
        b"\x7f\0\0\0\0",  # a type that nobody knows
        b"\x11\0\0\0\0",  # an answer where a request is due
        b"\x10\xff\xff\xff\xff",  # 4 GB
        *(random.Random(seed).randbytes(64 + seed) for seed in range(4)),
    ],
    ids=lambda data: data[:8].hex(),
)
async def test_damage_ends_its_link_and_no_other(world: World, kind: str, data: bytes) -> None:
    good, bad = await world.dial(kind, CLIENT), await world.dial(kind, OTHER)
    assert await ask(bad) == 1.0
    world.asked.clear()
    send_raw(bad, data)
    await ended(bad)
    assert world.asked == []
    assert await ask(good) == 1.0


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_larger_than_asked_for_ends_the_link(world: World, kind: str) -> None:
    link = await world.dial(kind, CLIENT)
    world.answer = lambda request: m.Result(
        codec=request.result_codec, rows=np.zeros((1, 5000), np.float32), compute_us=0, queue_us=0
    )
    with pytest.raises(RemoteProtocolError, match="larger than asked for"):
        await link.request(dispatch(), timeout_s=TIMEOUT_S, max_answer_bytes=1000)
    await ended(link)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_to_another_question_ends_nothing_but_is_refused(world: World, kind: str) -> None:
    """A handler's mistake is told as one; the link lives."""
    link = await world.dial(kind, CLIENT)
    world.answer = lambda request: m.Done()  # type: ignore[assignment, return-value]
    with pytest.raises(RemoteRefused):
        await ask(link)
    world.answer = lambda request: m.Result(codec=request.result_codec, rows=request.rows, compute_us=0, queue_us=0)
    assert await ask(link) == 0.5


@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_that_leaves_fails_what_waits_at_it(world: World, kind: str) -> None:
    link = await world.dial(kind, CLIENT)
    waiting = link.start(dispatch(layer=9), timeout_s=TIMEOUT_S)
    async with asyncio.timeout(TIMEOUT_S):
        while not world.asked:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
    link.close()
    with pytest.raises(ConnectionLost):
        await waiting
    await asyncio.wait_for(world.given_up.wait(), TIMEOUT_S)
