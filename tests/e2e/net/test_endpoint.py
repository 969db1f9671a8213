"""Real sockets on loopback: endpoints that dial, ask, refuse, die and close. Every wait has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import pytest

from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ExpertsNotHeld,
    IdentityMismatch,
    LocalProtocolError,
    NetworkError,
    Overloaded,
    Refused,
    RemoteProtocolError,
    RemoteRefused,
    UserError,
    VersionRefused,
)
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.net import admission, answer_budget
from swarm.net import connection as connection_module
from swarm.net import serving as serving_module
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.paths import Path
from swarm.net.quic_driver import driver_class
from swarm.net.serving import Handler
from swarm.wire import messages as m
from swarm.wire import session as s
from swarm.wire.frames import encode

SERVER = Identity.from_seed(b"server" + bytes(26))
CLIENT = Identity.from_seed(b"client" + bytes(26))
MODEL = ModelId(bytes(32))
SERVED = (m.GetBlock, m.GetStatus, m.Lookup)
LIMIT_S = 10.0  # of every wait here: far above what it takes, far below a test's timeout


@pytest.fixture(autouse=True)
async def nothing_is_left(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """After each test: no task but the test's own, and nothing that asyncio complained about."""
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def block(size: int) -> m.GetBlock:
    """Ask for a block of `size` bytes, by the numbers that `answer` reads."""
    return m.GetBlock(model_id=MODEL, layer=size >> 16, expert=size & 0xFFFF)


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


async def answer(connection: Connection, request: m.Request) -> m.Response:
    """Give blocks at once, and a status that says who asked; a lookup is never answered."""
    if isinstance(request, m.GetBlock):
        return m.BlockBytes(data=content((request.layer << 16) + request.expert))
    if isinstance(request, m.GetStatus):
        return m.Status(data=str(connection.remote).encode())
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def listen(handler: Handler = answer, serves: Iterable[type[m.Request]] = SERVED, **options: object) -> Endpoint:
    return Endpoint(SERVER, host="127.0.0.1", handler=handler, serves=serves, **options)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def linked(handler: Handler = answer) -> AsyncIterator[tuple[Endpoint, Endpoint, Connection]]:
    """A server, a client, and the client's open connection."""
    async with listen(handler) as server, Endpoint(CLIENT, host="127.0.0.1") as client:
        yield server, client, await dial(client, server)


async def dial(client: Endpoint, server: Endpoint) -> Connection:
    return await client.dial(("127.0.0.1", server.port), expected=SERVER.node_id, timeout_s=LIMIT_S)


def server_side(server: Endpoint) -> Connection:
    """Return the server's end of its only connection."""
    (connection,) = server._connections
    return connection


async def eventually(condition: Callable[[], bool]) -> None:
    """Return once `condition()` holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.005)


def assert_holds_nothing(endpoint: Endpoint) -> None:
    assert not endpoint._connections
    assert not endpoint._by_cid
    assert not endpoint._cids
    assert not endpoint._serving


# Requests and answers


@pytest.mark.parametrize("size", [0, 1, 1200, 65_536, 2_000_000])
async def test_a_block_arrives_whole(size: int) -> None:
    async with linked() as (_, _, connection):
        got = await connection.request(block(size), timeout_s=LIMIT_S)
        assert got == m.BlockBytes(data=content(size))


async def test_each_side_learns_who_the_other_is() -> None:
    async with linked() as (server, client, connection):
        got = await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        assert got == m.Status(data=str(CLIENT.node_id).encode())
        assert connection.remote == SERVER.node_id
        assert connection.observed_address == f"127.0.0.1:{client.port}"
        assert connection.address == ("127.0.0.1", server.port)
        assert connection.is_client
        assert not server_side(server).is_client


async def test_fifty_requests_at_once_get_each_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "MAX_BULKY_PER_CONNECTION", 50)
    async with linked() as (server, _, connection):
        sizes = [1 + 997 * n for n in range(50)]
        answers = await asyncio.gather(*(connection.request(block(size), timeout_s=LIMIT_S) for size in sizes))
        assert answers == [m.BlockBytes(data=content(size)) for size in sizes]
        await eventually(lambda: not server._serving)


async def test_a_server_asks_its_client_too() -> None:
    async with (
        listen() as server,
        Endpoint(CLIENT, host="127.0.0.1", handler=answer, serves=SERVED) as client,
    ):
        await dial(client, server)
        asker = server_side(server)
        await asyncio.wait_for(asker.wait_open(), LIMIT_S)
        got = await asker.request(m.GetStatus(), timeout_s=LIMIT_S)
        assert got == m.Status(data=str(SERVER.node_id).encode())


async def test_the_round_trip_is_measured() -> None:
    async with linked() as (_, _, connection):
        await eventually(lambda: connection.rtt_s is not None)
        assert connection.rtt_s is not None
        assert 0 < connection.rtt_s < LIMIT_S


async def test_an_unserved_request_is_refused_and_the_link_lives() -> None:
    async with linked() as (_, _, connection):
        with pytest.raises(RemoteRefused, match="MANIFEST") as caught:
            await connection.request(m.GetManifest(model_id=MODEL), timeout_s=LIMIT_S)
        assert caught.value.remote_code == m.ErrorCode.NOT_ALLOWED
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (LookupError("no such block"), m.ErrorCode.NOT_FOUND, "no such block"),
        (Refused("not from you"), m.ErrorCode.INTERNAL, "not from you"),
        (Overloaded("queue is full"), m.ErrorCode.BUSY, "queue is full"),
        (NetworkError("a secret host is gone"), m.ErrorCode.INTERNAL, "internal error"),
        (UserError("cannot read /a/secret/path"), m.ErrorCode.INTERNAL, "internal error"),
        (KeyError("a secret of ours"), m.ErrorCode.INTERNAL, "internal error"),
        (ZeroDivisionError("a secret of ours"), m.ErrorCode.INTERNAL, "internal error"),
        (asyncio.CancelledError(), m.ErrorCode.INTERNAL, "cancelled"),
    ],
)
async def test_a_handlers_exception_is_a_refusal_and_the_endpoint_lives(
    error: BaseException, code: m.ErrorCode, text: str
) -> None:
    async def fail(connection: Connection, request: m.Request) -> m.Response:
        if isinstance(request, m.Lookup):
            raise error
        return await answer(connection, request)

    async with linked(fail) as (server, _, connection):
        with pytest.raises(RemoteRefused) as caught:
            await connection.request(m.Lookup(model_id=None), timeout_s=LIMIT_S)
        assert caught.value.remote_code == code
        assert text in str(caught.value)
        assert "secret" not in str(caught.value)
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        await eventually(lambda: not server._serving)


def answers_later(answers: list[asyncio.Future[m.Response]]) -> Handler:
    """A handler that returns futures, which it leaves to the test."""

    def handler(connection: Connection, request: m.Request) -> asyncio.Future[m.Response]:
        answers.append(asyncio.get_running_loop().create_future())
        return answers[-1]

    return handler


async def test_a_handler_may_answer_by_a_future_without_a_task() -> None:
    answers: list[asyncio.Future[m.Response]] = []
    async with linked(answers_later(answers)) as (server, _, connection):
        asked = connection.start(m.GetStatus(), timeout_s=LIMIT_S)
        n_tasks = len(asyncio.all_tasks())
        await eventually(lambda: len(answers) == 1)
        assert len(asyncio.all_tasks()) == n_tasks
        answers[0].set_result(m.Status(data=b"later"))
        assert await asked == m.Status(data=b"later")
        await eventually(lambda: not server._serving)
        assert not server._serving.n_short


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ExpertsNotHeld("not these"), m.ErrorCode.NOT_FOUND),
        (LookupError("nothing"), m.ErrorCode.NOT_FOUND),
        (Overloaded("later"), m.ErrorCode.BUSY),
        (ValueError("a bug"), m.ErrorCode.INTERNAL),
    ],
)
async def test_a_futures_exception_is_a_refusal_and_the_link_lives(error: Exception, code: m.ErrorCode) -> None:
    answers: list[asyncio.Future[m.Response]] = []
    async with linked(answers_later(answers)) as (_, _, connection):
        asked = connection.start(m.GetStatus(), timeout_s=LIMIT_S)
        await eventually(lambda: len(answers) == 1)
        answers[0].set_exception(error)
        with pytest.raises(RemoteRefused) as caught:
            await asked
        assert caught.value.remote_code == code
        assert connection.is_open


async def test_a_futures_protocol_error_closes_the_link() -> None:
    answers: list[asyncio.Future[m.Response]] = []
    async with linked(answers_later(answers)) as (_, _, connection):
        asked = connection.start(m.GetStatus(), timeout_s=LIMIT_S)
        await eventually(lambda: len(answers) == 1)
        answers[0].set_exception(RemoteProtocolError("not like this"))
        with pytest.raises(ConnectionLost):
            await asked


async def test_a_handler_that_raises_at_once_is_a_refusal() -> None:
    def handler(connection: Connection, request: m.Request) -> asyncio.Future[m.Response]:
        raise Overloaded("not now")

    async with linked(handler) as (_, _, connection):
        with pytest.raises(RemoteRefused) as caught:
            await connection.start(m.GetStatus(), timeout_s=LIMIT_S)
        assert caught.value.remote_code == m.ErrorCode.BUSY


async def test_a_cancelled_future_gives_the_request_up_on_both_sides() -> None:
    answers: list[asyncio.Future[m.Response]] = []
    async with linked(answers_later(answers)) as (server, _, connection):
        asked = [connection.start(m.GetStatus(), timeout_s=LIMIT_S) for _ in range(2)]
        await eventually(lambda: len(answers) == 2)
        asked[0].cancel()
        await eventually(lambda: answers[0].cancelled())
        answers[1].set_result(m.Status(data=b"the other"))
        assert await asked[1] == m.Status(data=b"the other")
        await eventually(lambda: not server._serving)
        assert not server._serving.n_short
        assert not connection._answers


async def test_a_future_cancelled_in_the_tick_of_its_start_is_given_up_too() -> None:
    answers: list[asyncio.Future[m.Response]] = []
    async with linked(answers_later(answers)) as (_, _, connection):
        connection.start(m.GetStatus(), timeout_s=LIMIT_S).cancel()
        asked = connection.start(m.GetStatus(), timeout_s=LIMIT_S)
        await eventually(lambda: any(not each.done() for each in answers))
        answers[-1].set_result(m.Status(data=b"whole"))
        assert await asked == m.Status(data=b"whole")
        assert not connection._answers


async def test_who_starts_on_a_dead_connection_is_told_at_once() -> None:
    async with linked() as (_, _, connection):
        connection.close()
        with pytest.raises(ConnectionLost):
            connection.start(m.GetStatus(), timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    "wrong",
    [m.BlockBytes(data=b""), m.Status(data=bytes(5 << 20)), m.Status(data="not bytes"), None],  # type: ignore[arg-type]
)
async def test_an_answer_that_cannot_be_sent_is_a_refusal_and_the_endpoint_lives(wrong: m.Response) -> None:
    async def mistake(connection: Connection, request: m.Request) -> m.Response:
        return wrong if isinstance(request, m.GetStatus) else await answer(connection, request)

    async with linked(mistake) as (_, _, connection):
        with pytest.raises(RemoteRefused, match="internal error"):
            await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        assert await connection.request(block(5), timeout_s=LIMIT_S) == m.BlockBytes(data=content(5))


async def test_requests_beyond_the_bound_are_told_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "MAX_SERVING", 2)
    async with linked() as (server, _, connection):
        waiting = [
            asyncio.ensure_future(connection.request(m.Lookup(model_id=None), timeout_s=LIMIT_S)) for _ in range(2)
        ]
        await eventually(lambda: len(server._serving) == 2)
        with pytest.raises(RemoteRefused) as caught:
            await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        assert caught.value.remote_code == m.ErrorCode.BUSY
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await eventually(lambda: not server._serving)
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)


async def test_one_connection_cannot_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "MAX_SERVING_PER_CONNECTION", 3)
    async with linked() as (server, client, connection):
        waiting = [
            asyncio.ensure_future(connection.request(m.Lookup(model_id=None), timeout_s=LIMIT_S)) for _ in range(3)
        ]
        await eventually(lambda: len(server._serving) == 3)
        with pytest.raises(RemoteRefused) as caught:
            await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        assert caught.value.remote_code == m.ErrorCode.BUSY
        other = await dial(client, server)
        await other.request(m.GetStatus(), timeout_s=LIMIT_S)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await eventually(lambda: not server._serving)
        assert not server._serving.n_short
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)


async def test_an_answer_larger_than_asked_for_closes_the_link() -> None:
    async with linked() as (_, _, connection):
        got = await connection.request(block(1000), timeout_s=LIMIT_S, max_answer_bytes=1000)
        assert got == m.BlockBytes(data=content(1000))
        with pytest.raises(RemoteProtocolError, match="got 1001, expected at most 1000"):
            await connection.request(block(1001), timeout_s=LIMIT_S, max_answer_bytes=1000)


async def test_requests_of_all_connections_share_one_budget() -> None:
    """Two strangers announce much and send half of it; a third one is told BUSY, until they are gone."""
    serves = (m.Announce, m.GetStatus)

    async def take(connection: Connection, request: m.Request) -> m.Response:
        return (
            m.Accepted(is_new=True, highest_seq=1)
            if isinstance(request, m.Announce)
            else await answer(connection, request)
        )

    async with (
        listen(take, serves, held_request_bytes=20_000) as server,
        Endpoint(CLIENT, host="127.0.0.1") as client,
    ):
        strangers = [await dial(client, server) for _ in range(2)]
        asker = await dial(client, server)
        assert await asker.request(m.Announce(record=bytes(10_000)), timeout_s=LIMIT_S) == m.Accepted(
            is_new=True, highest_seq=1
        )
        for stranger in strangers:
            stranger.quic.send_stream_data(0, encode(m.Announce(record=bytes(12_000)))[:7_000])
            stranger.flush()
        await eventually(lambda: server._requests.n_bytes == 2 * (7_000 - 5))
        with pytest.raises(RemoteRefused) as caught:
            await asker.request(m.Announce(record=bytes(10_000)), timeout_s=LIMIT_S)
        assert caught.value.remote_code == m.ErrorCode.BUSY
        for stranger in strangers:
            stranger.close()
        await eventually(lambda: server._requests.n_bytes == 0)
        await asker.request(m.Announce(record=bytes(10_000)), timeout_s=LIMIT_S)


# Giving up


async def test_a_handler_is_cancelled_when_its_asker_gives_up() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(connection: Connection, request: m.Request) -> m.Response:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError("unreachable")

    async with linked(wait) as (server, _, connection):
        asking = asyncio.ensure_future(connection.request(m.GetStatus(), timeout_s=LIMIT_S))
        await asyncio.wait_for(started.wait(), LIMIT_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(ended.wait(), LIMIT_S)
        await eventually(lambda: not server._serving)
        assert connection.is_open
        assert not connection._answers


async def test_a_late_answer_is_a_deadline_exceeded_and_the_link_lives() -> None:
    async with linked() as (server, _, connection):
        with pytest.raises(DeadlineExceeded):
            await connection.request(m.Lookup(model_id=None), timeout_s=0.05)
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        await eventually(lambda: not server._serving)


async def test_answers_and_cancellations_that_cross_do_no_harm() -> None:
    """The asker gives up at about the moment at which the answer leaves."""

    async def soon(connection: Connection, request: m.Request) -> m.Response:
        await asyncio.sleep(0)
        return m.Status(data=bytes(3000))

    rng = random.Random(3)
    async with linked(soon) as (server, _, connection):
        for _ in range(30):
            asking = [asyncio.ensure_future(connection.request(m.GetStatus(), timeout_s=LIMIT_S)) for _ in range(5)]
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            for each in asking[: rng.randrange(6)]:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        await eventually(lambda: not server._serving)
        assert server_side(server).is_open


async def test_a_request_that_is_stopped_in_the_packet_that_brings_it_does_no_harm() -> None:
    """QUIC resets our half of the stream before the session sees the request and refuses it."""
    async with linked() as (server, _, connection):
        for request in (m.GetManifest(model_id=MODEL), m.GetStatus()) * 10:
            asking = asyncio.ensure_future(connection.request(request, timeout_s=LIMIT_S))
            await asyncio.sleep(0)  # it is handed to QUIC, and leaves at the end of this tick
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        assert server_side(server).is_open


# Who is there


async def test_another_node_than_expected_is_refused() -> None:
    async with listen() as server, Endpoint(CLIENT, host="127.0.0.1") as client:
        with pytest.raises(IdentityMismatch, match=SERVER.node_id.short):
            await client.dial(("127.0.0.1", server.port), expected=CLIENT.node_id, timeout_s=LIMIT_S)
        assert await dial(client, server)


async def test_without_an_expectation_the_dialler_learns_who_it_is() -> None:
    async with listen() as server, Endpoint(CLIENT, host="127.0.0.1") as client:
        connection = await client.dial(("127.0.0.1", server.port), expected=None, timeout_s=LIMIT_S)
        assert connection.remote == SERVER.node_id


async def test_two_wire_versions_apart_the_dialler_is_told_and_the_other_side_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        listen(versions=(3, 4)) as server,
        Endpoint(CLIENT, host="127.0.0.1", versions=(1, 2)) as client,
        Endpoint(CLIENT, host="127.0.0.1", versions=(2, 3)) as newer,
    ):
        with pytest.raises(VersionRefused, match=r"this program is too old: .* wire version 1, 2, the other side 3, 4"):
            await dial(client, server)
        (warning,) = (each.getMessage() for each in caplog.records if "too old" in each.getMessage())
        assert "got [1, 2], expected one of [3, 4]; the node that connects is too old" in warning
        connection = await dial(newer, server)
        assert connection.version == 3
        assert await connection.request(block(5), timeout_s=LIMIT_S) == m.BlockBytes(data=content(5))


async def test_a_node_that_serves_nothing_takes_no_connection() -> None:
    async with Endpoint(SERVER, host="127.0.0.1") as server, Endpoint(CLIENT, host="127.0.0.1") as client:
        with pytest.raises(DeadlineExceeded):
            await client.dial(("127.0.0.1", server.port), expected=None, timeout_s=0.1)
        assert_holds_nothing(server)


# Endings


async def test_dialling_a_dead_port_ends_at_the_deadline_and_leaves_nothing() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        async with Endpoint(CLIENT, host="127.0.0.1") as client:
            with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1"):
                await client.dial(silent.getsockname(), expected=SERVER.node_id, timeout_s=0.1)
            assert not any(each.is_open for each in client._connections)
        assert_holds_nothing(client)


async def test_a_cancelled_dial_leaves_nothing() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        async with Endpoint(CLIENT, host="127.0.0.1") as client:
            dialling = asyncio.ensure_future(client.dial(silent.getsockname(), expected=None, timeout_s=LIMIT_S))
            await asyncio.sleep(0)
            dialling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dialling
        assert_holds_nothing(client)


async def test_a_remote_close_fails_what_waits() -> None:
    async with linked() as (server, client, connection):
        waiting = [
            asyncio.ensure_future(connection.request(m.Lookup(model_id=None), timeout_s=LIMIT_S)) for _ in range(3)
        ]
        await eventually(lambda: len(server._serving) == 3)
        server_side(server).close()
        errors = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), LIMIT_S)
        assert [type(error) for error in errors] == [ConnectionLost] * 3
        await asyncio.wait_for(connection.wait_gone(), LIMIT_S)
        assert_holds_nothing(client)
        await eventually(lambda: not server._connections and not server._serving)
        assert_holds_nothing(server)
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                await connection.request(m.GetStatus(), timeout_s=LIMIT_S)


async def test_a_dead_connections_error_does_not_grow_with_each_use() -> None:
    async with linked() as (_, _, connection):
        connection.close()
        depths = []
        for _ in range(5):
            with pytest.raises(ConnectionLost) as caught:
                await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
            depths.append(len(caught.traceback))
        assert len(set(depths)) == 1


async def test_the_end_of_a_server_ends_its_links_and_its_handlers() -> None:
    ended = asyncio.Event()

    async def wait(connection: Connection, request: m.Request) -> m.Response:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError("unreachable")

    async with Endpoint(CLIENT, host="127.0.0.1") as client:
        async with listen(wait) as server:
            connection = await dial(client, server)
            asking = asyncio.ensure_future(connection.request(m.GetStatus(), timeout_s=LIMIT_S))
            await eventually(lambda: bool(server._serving))
        assert ended.is_set()
        assert_holds_nothing(server)
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(asking, LIMIT_S)
        with pytest.raises(ConnectionLost):
            _ = server.port
        with pytest.raises(ConnectionLost):
            await server.dial(("127.0.0.1", 1), expected=None)


async def test_the_end_of_a_client_fails_what_waits_and_a_dial_under_way() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        async with listen() as server:
            async with Endpoint(CLIENT, host="127.0.0.1") as client:
                connection = await dial(client, server)
                asking = asyncio.ensure_future(connection.request(m.Lookup(model_id=None), timeout_s=LIMIT_S))
                dialling = asyncio.ensure_future(client.dial(silent.getsockname(), expected=None, timeout_s=LIMIT_S))
                await eventually(lambda: len(client._connections) == 2)
            for each in (asking, dialling):
                with pytest.raises(ConnectionLost):
                    await asyncio.wait_for(each, LIMIT_S)
            assert_holds_nothing(client)
            await eventually(lambda: not server._connections and not server._serving)
            assert_holds_nothing(server)


async def test_no_timer_is_left_after_the_end() -> None:
    async with linked() as (server, _, connection):
        other = server_side(server)
    await asyncio.sleep(0)  # the flush that was due
    assert connection._timer is None
    assert other._timer is None


async def test_an_exception_in_the_body_still_closes_all() -> None:
    async def body() -> None:
        async with linked() as (server, client, _):
            kept.extend((server, client))
            raise ZeroDivisionError

    kept: list[Endpoint] = []
    with pytest.raises(ZeroDivisionError):
        await body()
    for endpoint in kept:
        assert_holds_nothing(endpoint)


async def test_a_silent_server_is_given_up_while_an_answer_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "PING_AFTER_S", 0.05)
    monkeypatch.setattr(s, "LOST_AFTER_S", 0.3)
    loop = asyncio.get_running_loop()
    async with linked() as (server, client, connection):
        assert server._socket is not None
        loop.remove_reader(server._socket)  # as when its process is stopped, or its cable pulled
        started = loop.time()
        with pytest.raises(ConnectionLost, match="silent"):
            await connection.request(m.Lookup(model_id=None), timeout_s=LIMIT_S)
        assert 0.25 < loop.time() - started < 5 * 0.3
        assert not connection.is_open
        loop.add_reader(server._socket, server._on_readable)
        assert await dial(client, server)


async def test_a_slow_handler_is_not_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "PING_AFTER_S", 0.02)
    monkeypatch.setattr(s, "LOST_AFTER_S", 0.25)
    async with linked() as (_, _, connection):
        with pytest.raises(DeadlineExceeded):
            await connection.request(m.Lookup(model_id=None), timeout_s=0.6)
        assert connection.is_open


async def test_a_quiet_link_is_kept_alive_and_its_death_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "KEEPALIVE_S", 0.05)
    monkeypatch.setattr(s, "LOST_AFTER_S", 0.25)
    async with linked() as (server, _, connection):
        await asyncio.sleep(0.5)
        assert connection.is_open
        assert server._socket is not None
        asyncio.get_running_loop().remove_reader(server._socket)
        await eventually(lambda: not connection.is_open)


# Violations


async def test_a_handlers_protocol_error_closes_the_link() -> None:
    async def accuse(connection: Connection, request: m.Request) -> m.Response:
        raise RemoteProtocolError("a record that nobody signed")

    async with linked(accuse) as (server, _, connection):
        with pytest.raises(ConnectionLost, match="nobody signed"):
            await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        await eventually(lambda: not server._connections and not server._serving)
        assert_holds_nothing(server)


@pytest.mark.parametrize(
    ("stream", "data", "text"),
    [
        (40, b"\x7f\0\0\0\0", "unknown frame type"),
        (40, b"\x33\0\0\0\0", "not a request"),
        (42, b"hello", "does not use"),  # a stream of one direction
    ],
)
async def test_bytes_outside_the_protocol_close_that_link_alone(stream: int, data: bytes, text: str) -> None:
    async with linked() as (server, client, good):
        bad = await dial(client, server)
        waiting = asyncio.ensure_future(bad.request(m.Lookup(model_id=None), timeout_s=LIMIT_S))
        bad.quic.send_stream_data(stream, data, True)
        bad.flush()
        with pytest.raises(ConnectionLost, match=text):
            await asyncio.wait_for(waiting, LIMIT_S)
        assert await good.request(block(9), timeout_s=LIMIT_S) == m.BlockBytes(data=content(9))


@pytest.mark.skipif(
    driver_class().__name__ == "Qh3Driver",
    reason="qh3 tells nobody how many streams the other side has open; its core bounds them, see test_qh3",
)
async def test_more_streams_than_exchanges_allow_close_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream opens all below it in QUIC, whether they carry anything or not."""
    monkeypatch.setattr(connection_module, "MAX_STREAMS", 50)
    async with linked() as (server, _, connection):
        connection.quic.send_stream_data(4 * 60, b"\x40")
        connection.flush()
        await asyncio.wait_for(connection.wait_gone(), LIMIT_S)
        await eventually(lambda: not server._connections and not server._serving)


async def test_datagrams_that_are_not_ours_do_nothing() -> None:
    rng = random.Random(4)
    async with linked() as (server, _, connection):
        n_cids = len(server._by_cid)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.connect(("127.0.0.1", server.port))
            for _ in range(300):
                stranger.send(rng.randbytes(rng.choice([0, 1, 20, 60, 1200, 1400])))
            for cid in list(server._by_cid):  # short headers of a live connection, but nothing that decrypts
                stranger.send(b"\x40" + cid + rng.randbytes(40))
        assert await connection.request(block(1000), timeout_s=LIMIT_S) == m.BlockBytes(data=content(1000))
        assert len(server._connections) == 1
        assert len(server._by_cid) == n_cids


async def test_a_host_keeps_its_share_of_connections_and_gets_a_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_PER_HOST", 2)
    monkeypatch.setattr(
        admission, "plain_ip", lambda host: ipaddress.IPv4Address("192.0.2.1")
    )  # this machine is not bounded
    async with linked() as (server, client, first):
        second = await dial(client, server)
        assert await second.request(block(9), timeout_s=LIMIT_S) == m.BlockBytes(data=content(9))
        with pytest.raises(DeadlineExceeded):
            await client.dial(("127.0.0.1", server.port), expected=SERVER.node_id, timeout_s=0.3)
        assert server.n_refused >= 1
        first.close()
        await eventually(lambda: len(server._connections) == 1)
        third = await dial(client, server)
        assert await third.request(block(9), timeout_s=LIMIT_S) == m.BlockBytes(data=content(9))


async def test_who_comes_through_a_port_of_this_machine_is_counted_as_the_host_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one WebSocket could take every place that a relay has: this machine itself is not bounded."""
    monkeypatch.setattr(admission, "MAX_PER_HOST", 2)
    async with linked() as (server, client, _):
        server.host_behind = {client.port: "192.0.2.9"}.get
        assert server.real_host(("127.0.0.1", client.port)) == "192.0.2.9"
        assert server.real_host(("198.51.100.1", client.port)) == "198.51.100.1", "only of this machine's own ports"
        for _ in range(2):
            await dial(client, server)
        with pytest.raises(DeadlineExceeded):
            await client.dial(("127.0.0.1", server.port), expected=SERVER.node_id, timeout_s=0.3)


async def test_damaged_first_packets_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of half-open connections is bounded, and each ends at its own deadline."""
    monkeypatch.setattr(s, "GREETING_DEADLINE_S", 0.2)
    monkeypatch.setattr(admission, "RETRY_FROM", 10)
    rng = random.Random(5)
    async with listen() as server:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.connect(("127.0.0.1", server.port))
            for _ in range(40):
                stranger.send(first_packet(rng))
        await eventually(lambda: server.n_retries == 30)
        assert len(server._connections) == 10
        await eventually(lambda: not server._connections and not server._serving)
        assert_holds_nothing(server)
        async with Endpoint(CLIENT, host="127.0.0.1") as client:
            assert await dial(client, server)


def first_packet(rng: random.Random, token: bytes = b"") -> bytes:
    """Return an INITIAL of version 1 with two connection ids of its own; the rest decrypts to nothing."""
    ids = b"\x08" + rng.randbytes(8) + b"\x08" + rng.randbytes(8)
    return b"\xc0\0\0\0\1" + ids + bytes([len(token)]) + token + b"\x44\xa0" + rng.randbytes(1200)


async def test_a_flood_of_first_packets_does_not_keep_a_client_out() -> None:
    """It comes from one socket that never reads, so none of its packets proves an address."""
    rng = random.Random(6)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        async with listen() as server, Endpoint(CLIENT, host="127.0.0.1") as client:
            stranger.connect(("127.0.0.1", server.port))

            async def flood(n: int) -> None:
                for _ in range(n):
                    stranger.send(first_packet(rng))
                    await asyncio.sleep(0)

            await flood(400)
            await eventually(lambda: server.n_retries >= 400 - admission.RETRY_FROM)
            going_on = asyncio.create_task(flood(100_000))
            try:
                # Far below s.GREETING_DEADLINE_S, at which the first places become free again.
                connection = await client.dial(("127.0.0.1", server.port), expected=SERVER.node_id, timeout_s=4.0)
                assert await connection.request(block(9), timeout_s=LIMIT_S) == m.BlockBytes(data=content(9))
            finally:
                going_on.cancel()
            assert len(server._admission) == admission.RETRY_FROM
            assert server.n_refused == 0


async def test_a_retry_is_smaller_than_its_cause_and_a_forged_token_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "RETRY_FROM", 0)
    rng = random.Random(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(LIMIT_S)
        async with listen() as server:
            stranger.connect(("127.0.0.1", server.port))
            stranger.send(first_packet(rng, token=rng.randbytes(60)))
            stranger.send(first_packet(rng))
            retry = await asyncio.to_thread(stranger.recv, 2000)
            assert retry[0] & 0xF0 == 0xF0  # RFC 9000 section 17.2.5
            assert len(retry) < 200
            assert server.n_retries == 1
            assert_holds_nothing(server)


async def test_a_client_that_proves_its_address_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RETRY_FROM", 0)
    async with linked() as (server, _, connection):
        assert server.n_retries >= 1  # a first flight of qh3 is two datagrams
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)
        assert len(server._admission) == 0


async def test_proved_clients_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RETRY_FROM", 0)
    monkeypatch.setattr(admission, "MAX_HALF_OPEN", 0)
    async with listen() as server, Endpoint(CLIENT, host="127.0.0.1") as client:
        with pytest.raises(DeadlineExceeded):
            await client.dial(("127.0.0.1", server.port), expected=None, timeout_s=0.3)
        assert server.n_refused >= 1
        assert_holds_nothing(server)


async def test_an_exception_inside_quic_ends_only_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as (server, client, bad):
        good = await dial(client, server)

        def explode(*args: object, **kwargs: object) -> None:
            raise KeyError("a bug that a datagram found")

        monkeypatch.setattr(bad.quic, "receive_datagram", explode)
        with pytest.raises(RemoteProtocolError, match="KeyError"):
            await bad.request(m.GetStatus(), timeout_s=LIMIT_S)
        await good.request(m.GetStatus(), timeout_s=LIMIT_S)


# The socket


async def test_a_port_in_use_is_the_users_mistake() -> None:
    async with listen() as server:
        with pytest.raises(UserError, match="--port"):
            await Endpoint(CLIENT, host="127.0.0.1", port=server.port).__aenter__()


async def test_a_full_socket_drops_and_quic_sends_again() -> None:
    async with linked() as (server, _, connection):
        send, n_sent = server._send, 0

        def sometimes_full(path: Path, flight: Sequence[bytes]) -> None:
            nonlocal n_sent
            for datagram in flight:
                n_sent += 1
                if n_sent % 7 != 0:
                    send(path, [datagram])

        server_side(server)._send = sometimes_full
        got = await connection.request(block(200_000), timeout_s=LIMIT_S)
        assert got == m.BlockBytes(data=content(200_000))
        assert n_sent > 100


@pytest.mark.parametrize("is_cutting", [True, False])
async def test_flights_arrive_whole_in_one_call_or_many(is_cutting: bool) -> None:
    async with linked() as (server, client, connection):
        for endpoint in (server, client):
            assert endpoint._flights is not None
            endpoint._flights.is_cutting &= is_cutting
        got = await connection.request(block(1_000_000), timeout_s=LIMIT_S)
        assert got == m.BlockBytes(data=content(1_000_000))
        assert server.bytes_sent > 1_000_000
        assert client.bytes_received == server.bytes_sent + server.repair_bytes
        assert server.n_send_drops == client.n_send_drops == 0


async def test_a_request_that_cannot_be_written_is_our_own_mistake_and_waits_for_nothing() -> None:
    async with linked() as (_, _, connection):
        with pytest.raises(LocalProtocolError):
            await connection.request(m.Announce(record=bytes(1 << 20)), timeout_s=LIMIT_S)
        assert not connection._answers
        await connection.request(m.GetStatus(), timeout_s=LIMIT_S)


async def test_nothing_of_a_request_is_logged_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="swarm")
    async with linked() as (_, _, connection):
        await connection.request(block(10), timeout_s=LIMIT_S)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("swarm")] == []


async def test_an_asker_that_takes_no_answers_does_not_fill_our_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(serving_module, "MAX_BULKY_PER_CONNECTION", 20)
    size, n_made = 600_000, 0

    async def counting(connection: Connection, request: m.Request) -> m.Response:
        nonlocal n_made
        n_made += 1
        return await answer(connection, request)

    async with linked(counting) as (server, client, connection):
        tasks = [asyncio.ensure_future(connection.request(block(size), timeout_s=LIMIT_S)) for _ in range(20)]
        await asyncio.sleep(0)  # the requests are made
        connection.flush()
        asyncio.get_running_loop().remove_reader(client._socket)  # from here on it reads nothing
        await eventually(lambda: n_made > 0)
        await asyncio.sleep(0.2)
        assert n_made <= 3, "one more than fit into 1 MB"
        assert server_side(server).n_unsent_bytes() <= 3 * size
        asyncio.get_running_loop().add_reader(client._socket, client._on_readable)
        answers = await asyncio.gather(*tasks)
        assert n_made == 20
        assert all(isinstance(each, m.BlockBytes) and len(each.data) == size for each in answers)


@contextlib.asynccontextmanager
async def strangers_who_do_not_read(server: Endpoint, n: int, n_blocks: int, size: int) -> AsyncIterator[Endpoint]:
    """Each asks on a connection of its own for blocks, and reads nothing after the greetings."""
    async with Endpoint(Identity.from_seed(bytes(32)), host="127.0.0.1") as endpoint:
        asking = []
        for _ in range(n):
            connection = await dial(endpoint, server)
            asking += [
                asyncio.ensure_future(connection.request(block(size), timeout_s=6 * LIMIT_S)) for _ in range(n_blocks)
            ]
            await asyncio.sleep(0)  # the requests are made
            connection.flush()
        asyncio.get_running_loop().remove_reader(endpoint._socket)
        yield endpoint
    await asyncio.gather(*asking, return_exceptions=True)


async def test_askers_that_do_not_read_leave_places_and_memory_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold all there is; those who come later wait until the slow ones are found out."""
    monkeypatch.setattr(connection_module, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(s, "LOST_AFTER_S", 60.0)  # else the strangers, who hear nothing, give up by themselves
    monkeypatch.setattr(answer_budget, "PACE_S", 0.5)
    monkeypatch.setattr(serving_module, "ROOM_CHECK_S", 0.1)
    size = 2 << 20
    async with (
        listen(held_answer_bytes=3 << 20) as server,
        Endpoint(CLIENT, host="127.0.0.1") as client,
        strangers_who_do_not_read(server, 4, 100, size),
    ):
        honest = await dial(client, server)
        await eventually(lambda: server._serving.answers.is_full)
        assert len(server._serving) <= 4 * serving_module.MAX_BULKY_PER_CONNECTION
        assert server._serving.answers.n_bytes <= (3 << 20) + serving_module.N_BULKY_AT_ONCE * size
        with pytest.raises(RemoteRefused) as caught:  # what is not bulky does not wait
            await honest.request(m.GetStatus(), timeout_s=LIMIT_S)
        assert caught.value.remote_code == m.ErrorCode.BUSY
        got = await honest.request(block(size), timeout_s=3 * LIMIT_S)  # the strangers have 60 s
        assert got == m.BlockBytes(data=content(size))


async def test_a_request_that_finds_no_room_in_time_is_told_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "ROOM_TIMEOUT_S", 0.2)
    async with (
        listen(held_answer_bytes=1 << 20) as server,
        Endpoint(CLIENT, host="127.0.0.1") as client,
        strangers_who_do_not_read(server, 1, 1, 2 << 20),
    ):
        honest = await dial(client, server)
        await eventually(lambda: server._serving.answers.is_full)
        with pytest.raises(RemoteRefused) as caught:
            await honest.request(block(10), timeout_s=LIMIT_S)
        assert caught.value.remote_code == m.ErrorCode.BUSY
        await eventually(lambda: len(server._serving) == 0)
        assert not server._serving.n_bulky


async def test_what_was_taken_is_held_no_longer() -> None:
    async with linked() as (server, _, connection):
        for _ in range(3):
            await connection.request(block(300_000), timeout_s=LIMIT_S)
        await eventually(lambda: server._serving.answers.n_bytes == 0)
