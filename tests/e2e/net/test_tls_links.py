"""TLS links over real sockets: whom they let in, that they answer as QUIC does, and that nothing is lost when they fail."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from swarm.errors import ConnectionLost, IdentityMismatch, NetworkError, RemoteProtocolError, RemoteRefused
from swarm.identity import Identity
from swarm.net import tls_links
from swarm.net.byte_counts import PathKind, tls_bytes
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.serving import Handler as ServingHandler
from swarm.net.tcp_losses import payload
from swarm.net.tls_link import TlsLink
from swarm.net.tls_links import (
    CONGESTION_CONTROLS,
    MAX_HANDSHAKES,
    MAX_HANDSHAKES_PER_HOST,
    MAX_LINKS_PER_NODE,
    TlsListener,
    client_context,
    dial_tls,
    unix_name,
)
from swarm.net.tls_records import RecordKind, encode_record
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec
from swarm.wire.session import ALPN

# Of this process: a node's Unix socket has its name for the whole host, where another run of the tests may be under way.
CLIENT, SERVER, OTHER = (Identity.from_seed(os.getpid().to_bytes(31, "big") + bytes([n])) for n in (1, 2, 3))
TIMEOUT_S = 5.0
N_LATE = 3


def dispatch(n_embd: int = 64, layer: int = 0) -> m.Dispatch:
    return m.Dispatch(
        model_tag=bytes(8),
        layer=layer,
        rows_codec=RowCodec.F32,
        result_codec=RowCodec.F32,
        row_counts=np.array([1], np.uint8),
        expert_ids=np.array([0], np.uint16),
        weights=np.array([1.0], np.float32),
        rows=np.full((1, n_embd), 0.5, np.float32),
    )


class World:
    """A server with both doors, a client, and its QUIC connection."""

    def __init__(self, server: Endpoint, listener: TlsListener, client: Endpoint, connection: Connection) -> None:
        self.server, self.listener, self.client, self.connection = server, listener, client, connection

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.listener.port

    async def dial(self, *, by_unix: bool = False) -> TlsLink:
        where = unix_name(SERVER.node_id) if by_unix else self.address
        return await dial_tls(CLIENT, where, expected=SERVER.node_id, counts=self.client.counts)


class Handler:
    """Doubles the rows; holds what it is asked while `gate` is closed."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.n_asked = self.n_cancelled = 0

    async def __call__(self, connection: Connection, request: m.Request) -> m.Response:
        assert isinstance(request, m.Dispatch)
        assert connection.remote == CLIENT.node_id
        self.n_asked += 1
        if request.layer == 9:
            raise LookupError("no such layer")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.n_cancelled += 1
            raise
        return m.Result(codec=RowCodec.F32, rows=request.rows * 2, compute_us=1, queue_us=1)


@contextlib.asynccontextmanager
async def both_doors(handler: ServingHandler) -> AsyncIterator[tuple[Endpoint, TlsListener]]:
    """A server whose TCP port is free, too: what others left behind on this machine may have taken the number."""
    for _ in range(50):
        async with contextlib.AsyncExitStack() as stack:
            endpoint = Endpoint(SERVER, host="127.0.0.1", handler=handler, serves=[m.Dispatch])
            server = await stack.enter_async_context(endpoint)
            listener = await stack.enter_async_context(TlsListener(server, host="127.0.0.1"))
            if listener.port:
                yield server, listener
                return
    raise AssertionError("no port is free for UDP and TCP")


@contextlib.asynccontextmanager
async def world(handler: Handler, *, connects: bool = True) -> AsyncIterator[World]:
    async with both_doors(handler) as (server, listener), Endpoint(CLIENT, host="127.0.0.1") as client:
        connection = await client.dial(("127.0.0.1", server.port), expected=SERVER.node_id)
        if not connects:
            connection.close()
            await connection.wait_gone()
            await until(lambda: not server.is_connected(CLIENT.node_id))
        yield World(server, listener, client, connection)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)


def value(answer: m.Response) -> float:
    assert isinstance(answer, m.Result)
    return float(answer.rows[0, 0])


@pytest.mark.parametrize("by_unix", [False, True])
async def test_a_dispatch_is_answered_as_over_quic(by_unix: bool) -> None:
    async with world(Handler()) as w:
        link = await w.dial(by_unix=by_unix)
        assert link.remote == SERVER.node_id
        for n_embd in (64, 200_000):  # one record, and several
            over_tls = await link.request(dispatch(n_embd), timeout_s=TIMEOUT_S)
            over_quic = await w.connection.request(dispatch(n_embd), timeout_s=TIMEOUT_S)
            assert isinstance(over_tls, m.Result)
            assert isinstance(over_quic, m.Result)
            np.testing.assert_array_equal(over_tls.rows, over_quic.rows)
        with pytest.raises(RemoteRefused, match="no such layer"):
            await link.request(dispatch(layer=9), timeout_s=TIMEOUT_S)
        assert link.is_open, "a refusal does not end it"
        link.close()


def test_on_uvloop_as_programs_run_the_unix_socket_is_found_too() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with world(Handler()) as w:
            link = await w.dial(by_unix=True)
            assert value(await link.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
            link.close()

    uvloop.run(main())


async def test_a_node_that_is_gone_without_a_word_does_not_keep_its_link() -> None:
    """The server never pings, and a stream that carries nothing lasts for ever: 1,024 of them would be all there are."""
    async with world(Handler()) as w:
        link = await w.dial()
        (accepted,) = w.listener._links
        assert accepted._transport is not None
        accepted_socket = accepted._transport.get_extra_info("socket")
        assert accepted_socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        link.close()


async def test_answers_that_nobody_takes_count_with_those_over_quic() -> None:
    """Else each of 1,024 links could hold megabytes, whatever the endpoint's bound."""
    async with world(Handler()) as w:
        link = await w.dial(by_unix=True)
        held = w.server.serving.answers
        assert link._transport is not None
        asked = [link.start(dispatch(400_000), timeout_s=TIMEOUT_S) for _ in range(4)]  # 1.6 MB each way
        link._transport.pause_reading()
        await until(lambda: held.n_bytes > 0)
        link._transport.resume_reading()
        await asyncio.gather(*asked)
        await until(lambda: held.n_bytes == 0)
        asked = [link.start(dispatch(400_000), timeout_s=TIMEOUT_S) for _ in range(4)]
        link._transport.pause_reading()
        await until(lambda: held.n_bytes > 0)
        link.close()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: held.n_bytes == 0)


async def test_many_requests_at_once_each_get_their_own_answer() -> None:
    async with world(Handler()) as w:
        link = await w.dial()
        answers = [link.start(dispatch(1 + n), timeout_s=TIMEOUT_S) for n in range(60)]
        for n, answer in enumerate(await asyncio.gather(*answers)):
            assert isinstance(answer, m.Result)
            assert answer.rows.shape == (1, 1 + n)
        link.close()


async def test_a_link_s_sockets_send_a_message_at_once() -> None:
    async with world(Handler()) as w:
        link = await w.dial()
        (accepted,) = w.listener._links
        for end in (link, accepted):
            assert end._transport is not None
            own = end._transport.get_extra_info("socket")
            used = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1))
            assert used in CONGESTION_CONTROLS
        link.close()


async def test_a_dispatch_over_two_links_is_computed_once_and_answered_on_both() -> None:
    handler = Handler()
    async with world(handler) as w:
        first, second = await w.dial(), await w.dial()
        assert first.takes_copies
        first.second, first.is_copying = second, True
        for n in range(20):
            before = second.bytes_received
            assert value(await first.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
            await until(lambda before=before: second.bytes_received > before)  # type: ignore[misc]
            assert handler.n_asked == n + 1
        assert len(w.listener._copies) == 0

        handler.gate.clear()  # the first link ends while its request is computed, and takes the second along
        again = functools.partial(w.connection.start, dispatch(), timeout_s=TIMEOUT_S)
        answer = first.start(dispatch(), timeout_s=TIMEOUT_S, retry=again)
        await until(lambda: handler.n_asked > 20)
        first.close()
        handler.gate.set()
        assert value(await answer) == 1.0
        await until(lambda: w.listener.n_links == 0)
        assert len(w.listener._copies) == 0


async def test_an_older_node_is_sent_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_links, "COPIES_ALPN", ALPN)  # when the server makes its context
    async with world(Handler()) as w:
        monkeypatch.undo()
        link = await w.dial()
        assert not link.takes_copies
        assert value(await link.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
        link.close()


async def test_another_node_at_the_address_is_not_trusted() -> None:
    async with world(Handler()) as w:
        with pytest.raises(IdentityMismatch, match="another node"):
            await dial_tls(CLIENT, w.address, expected=OTHER.node_id)


async def dial_and_ask(w: World) -> m.Response:
    link = await w.dial()
    return await link.request(dispatch(), timeout_s=TIMEOUT_S)


async def test_who_has_no_quic_connection_is_not_let_in() -> None:
    handler = Handler()
    async with world(handler, connects=False) as w:
        with pytest.raises(NetworkError):
            await dial_and_ask(w)
        assert handler.n_asked == 0


async def test_nobody_there_is_a_network_error() -> None:
    with pytest.raises(ConnectionLost):
        await dial_tls(CLIENT, ("127.0.0.1", 9), expected=SERVER.node_id, timeout_s=1.0)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        encode_record(0, RecordKind.END, 3) + b"abc",  # a request before the greetings
        bytes(4) + b"\0" + b"\xff\xff\xff",  # a record that would take 16 MB
        encode_record(1, RecordKind.END, 5) + b"\x02\x10\x00\x00\x00",  # a hello that is cut short
    ],
)
async def test_a_stranger_s_bytes_end_its_link_and_nothing_else(data: bytes) -> None:
    async with world(Handler()) as w:
        reader, writer = await asyncio.open_connection(
            *w.address, ssl=client_context(), server_hostname="swarm.invalid"
        )
        writer.write(data)
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                while await reader.read(1000):
                    pass
        writer.close()
        assert value(await w.connection.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
        link = await w.dial()
        assert value(await link.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
        link.close()


async def test_a_link_that_ends_in_mid_request_loses_nothing() -> None:
    handler = Handler()
    async with world(handler) as w:
        link = await w.dial()
        handler.gate.clear()
        quic = w.connection

        def again() -> asyncio.Future[m.Response]:
            return quic.start(dispatch(), timeout_s=TIMEOUT_S)

        answers = [link.start(dispatch(), timeout_s=TIMEOUT_S, retry=again) for _ in range(3)]
        alone = link.start(dispatch(), timeout_s=TIMEOUT_S)
        await until(lambda: handler.n_asked == 4)
        assert link._transport is not None
        link._transport.abort()
        with pytest.raises(ConnectionLost):
            await alone
        await until(lambda: handler.n_cancelled == 4)  # the server does not go on with what nobody waits for
        handler.gate.set()
        assert [value(answer) for answer in await asyncio.gather(*answers)] == [1.0] * 3
        assert link.n_retried == 3
        with pytest.raises(ConnectionLost):
            link.start(dispatch(), timeout_s=TIMEOUT_S)


async def test_what_is_late_is_asked_over_quic() -> None:
    handler = Handler()
    async with world(handler) as w:
        link = await w.dial()
        await link.request(dispatch(), timeout_s=TIMEOUT_S)
        assert link._transport is not None
        quic, asked = w.connection, 0
        link._reader.feed = lambda data: []  # type: ignore[method-assign]  # a path that swallows what comes back

        def again() -> asyncio.Future[m.Response]:
            nonlocal asked
            asked += 1
            return quic.start(dispatch(), timeout_s=TIMEOUT_S)

        loop = asyncio.get_running_loop()
        for _ in range(N_LATE):
            began = loop.time()
            assert value(await link.start(dispatch(), timeout_s=TIMEOUT_S, retry=again)) == 1.0
            assert loop.time() - began < 5 * 0.25
        assert asked == N_LATE
        link.close()


async def test_a_request_that_is_given_up_is_given_up_at_the_server() -> None:
    handler = Handler()
    async with world(handler) as w:
        link = await w.dial()
        handler.gate.clear()
        answer = link.start(dispatch(), timeout_s=TIMEOUT_S)
        await until(lambda: handler.n_asked == 1)
        answer.cancel()
        await until(lambda: handler.n_cancelled == 1)
        assert link.is_open
        link.close()


async def test_an_answer_that_nobody_asked_for_ends_the_link() -> None:
    async with world(Handler()) as w:
        link = await w.dial()
        link.data_received(encode_record(40, RecordKind.END, 5) + b"\x11\0\0\0\0")
        assert not link.is_open
        with pytest.raises(RemoteProtocolError):
            link.start(dispatch(), timeout_s=TIMEOUT_S)


async def test_a_host_without_a_quic_connection_does_not_even_get_a_handshake() -> None:
    async with world(Handler(), connects=False) as w:
        reader, writer = await asyncio.open_connection(*w.address)
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.read(1) == b""
        writer.close()
        assert w.listener.n_refused == 1
        assert w.listener.n_links == 0


@pytest.mark.parametrize(("by_unix", "bound"), [(False, MAX_HANDSHAKES_PER_HOST), (True, MAX_HANDSHAKES)])
async def test_hosts_that_never_finish_their_handshakes_are_bounded_and_given_up_at_the_end(
    by_unix: bool, bound: int
) -> None:
    async with world(Handler()) as w:
        writers = []
        for _ in range(bound + 5):
            if by_unix:
                _, writer = await asyncio.open_unix_connection(unix_name(SERVER.node_id))
            else:
                _, writer = await asyncio.open_connection(*w.address)
            writers.append(writer)
        await until(lambda: w.listener.n_refused == 5)
        assert len(w.listener._handshakes) == bound
        for writer in writers:
            writer.close()
        await until(lambda: not w.listener._handshakes)
        link = await w.dial()
        assert value(await link.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
        link.close()


async def test_a_host_that_never_greets_is_bounded_as_one_that_never_shakes_hands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tls_links, "MAX_HANDSHAKES_PER_HOST", 2)
    async with world(Handler()) as w:
        writers = []
        for n in range(2):
            connecting = asyncio.open_connection(*w.address, ssl=client_context(), server_hostname="swarm.invalid")
            writers.append((await connecting)[1])
            await until(lambda n=n: w.listener.n_links == n + 1 and not w.listener._handshakes)  # type: ignore[misc]
        with pytest.raises(NetworkError):
            await w.dial()
        assert w.listener.n_refused == 1
        for writer in writers:
            writer.transport.abort()
        await until(lambda: not w.listener._unclosed)
        links = []
        for _ in range(3):
            links.append(await w.dial())
            await until(lambda: not w.listener._handshakes)
        assert all(link.is_open for link in links), "those that are open do not count"
        for link in links:
            link.close()


async def test_a_link_ends_with_the_connection_of_its_node_at_the_server_as_well() -> None:
    """Else whoever was let in once could go on asking, whatever became of its connection."""
    async with world(Handler()) as w:
        link, again = await w.dial(), await w.client.dial(("127.0.0.1", w.server.port), expected=SERVER.node_id)
        w.connection.close()
        await w.connection.wait_gone()
        await until(lambda: len(w.server.open_connections()) == 1)
        assert value(await link.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0, "there is another one"
        again.close()
        await until(lambda: w.listener.n_links == 0)
        await until(lambda: not link.is_open)


async def test_of_a_node_with_too_many_links_the_oldest_goes() -> None:
    async with world(Handler()) as w:
        links = [await w.dial() for _ in range(MAX_LINKS_PER_NODE)]
        assert all(link.is_open for link in links)
        newest = await w.dial()
        await until(lambda: not links[0].is_open)
        assert w.listener.n_links == MAX_LINKS_PER_NODE
        for link in (*links[1:], newest):
            assert value(await link.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
            link.close()


async def test_there_are_no_more_links_than_files_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_links, "MAX_LINKS", 2)
    async with world(Handler()) as w:
        links = [await w.dial(by_unix=by_unix) for by_unix in (False, True)]
        for by_unix in (False, True):
            with pytest.raises(NetworkError):
                await w.dial(by_unix=by_unix)
        assert w.listener.n_refused == 2
        assert value(await w.connection.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
        for link in links:
            assert value(await link.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
            link.close()
        await until(lambda: not w.listener._unclosed)
        (await w.dial()).close()


async def test_who_does_not_take_the_last_word_holds_a_socket_no_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tls_links, "SHUTDOWN_TIMEOUT_S", 0.2)
    async with world(Handler()) as w:
        link = await w.dial()
        assert link._transport is not None
        link._transport.pause_reading()
        for each in list(w.listener._links):
            each.close()
        assert w.listener.n_links == 0
        assert len(w.listener._unclosed) == 1, "its file counts"
        await until(lambda: not w.listener._unclosed)
        link.close()


async def test_without_files_left_nobody_is_accepted_for_a_while_and_nothing_spins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_tried = 0

    def accept(listening: socket.socket) -> tuple[socket.socket, object]:
        nonlocal n_tried
        n_tried += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with world(Handler()) as w:
        monkeypatch.setattr(tls_links, "REST_S", 0.5)
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", accept)
            dialling = asyncio.create_task(w.dial())
            await until(lambda: n_tried > 0)
            await asyncio.sleep(0.1)
            assert n_tried < 10, "instead of some thousands"
        link = await dialling
        assert value(await link.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
        link.close()


@pytest.mark.parametrize("by_unix", [False, True])
async def test_its_bytes_count_with_both_sides_others(by_unix: bool) -> None:
    """Caps on traffic and what is shown of it are the endpoint's counters."""
    kind = PathKind.UNIX if by_unix else PathKind.TLS
    async with world(Handler()) as w:
        link = await w.dial(by_unix=by_unix)
        before = [(each.bytes_sent, each.bytes_received) for each in (w.client, w.server)]
        direct = w.client.counts.now().by_kind[PathKind.DIRECT]
        await link.request(dispatch(10_000), timeout_s=TIMEOUT_S)
        for each, (sent, received) in zip((w.client, w.server), before, strict=True):
            assert 40_000 < each.bytes_sent - sent < 41_000
            assert 40_000 < each.bytes_received - received < 41_000
            assert each.counts.links(kind).sent > 40_000
        assert (w.client.counts.now().by_kind[PathKind.DIRECT] - direct).sent < 1000
        moved = w.client.counts.links()
        link.close()
        after = w.client.counts.links()
        assert (after.sent >= moved.sent, after.received) == (True, moved.received), "what has ended still counts"
        await until(lambda: w.listener.n_links == 0)
        assert w.server.counts.links(kind).sent > 40_000


async def what_was_written_is_what_arrives(w: World) -> None:
    """Compare what a link says where no kernel tells with what the other side's kernel has received."""
    link = await w.dial()
    (accepted,) = w.listener._links
    assert accepted._socket is not None

    def written() -> int:
        return tls_bytes(link.bytes_sent, link._n_tls_sent)

    await link.request(dispatch(), timeout_s=TIMEOUT_S)  # what was written when it opened has arrived
    arrived, before = payload(accepted._socket), written()
    if arrived is None:
        pytest.skip("no kernel tells")
    for n_embd in (1, 64, 4095, 4096, 5000, 200_000):
        await link.request(dispatch(n_embd), timeout_s=TIMEOUT_S)
    now = payload(accepted._socket)
    assert now is not None
    assert now[1] - arrived[1] == written() - before
    assert link.wire_bytes().sent >= now[1], "the handshake too"
    link.close()


async def test_what_tls_adds_to_what_is_written_is_known() -> None:
    async with world(Handler()) as w:
        await what_was_written_is_what_arrives(w)


def test_what_tls_adds_is_known_on_uvloop_as_programs_run() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with world(Handler()) as w:
            await what_was_written_is_what_arrives(w)

    uvloop.run(main())
