"""TLS links beside QUIC connections over real sockets: opened where they are wanted, and never a reason for a lost answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
from collections.abc import AsyncIterator, Callable

import pytest

from swarm.errors import ConnectionLost
from swarm.net.connection import Connection
from swarm.net.fast_links import FastLinks
from swarm.net.tls_link import TlsLink
from swarm.wire import messages as m
from swarm.wire.session import KEEPALIVE_S, LOST_AFTER_S
from tests.e2e.net.test_tls_links import CLIENT, SERVER, TIMEOUT_S, Handler, World, dispatch, until, value, world

N_CUTS = 20


class Clock:
    """Moves by itself; `skip` lets a retry's time pass."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.skipped_s


@contextlib.asynccontextmanager
async def fast_links(clock: Clock) -> AsyncIterator[FastLinks]:
    links = FastLinks(CLIENT, now=clock)
    try:
        yield links
    finally:
        await links.close()


async def opened(links: FastLinks, w: World, clock: Clock) -> TlsLink:
    """Return the link, once it is there."""
    clock.skipped_s += 1000.0  # whatever failed before
    await until(lambda: links.best(SERVER.node_id, w.connection) is not None)
    link = links.best(SERVER.node_id, w.connection)
    assert link is not None
    return link


def ask(links: FastLinks, connection: Connection) -> asyncio.Future[m.Response]:
    """Ask as the dispatcher does."""
    again = functools.partial(connection.start, dispatch(), timeout_s=TIMEOUT_S)
    link = links.best(SERVER.node_id, connection)
    return again() if link is None else link.start(dispatch(), timeout_s=TIMEOUT_S, retry=again)


async def test_a_first_ping_that_met_a_busy_machine_does_not_make_the_path_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    async with world(Handler()) as w, fast_links(clock) as links:
        monkeypatch.setattr(w.connection, "rtt_s", 0.05)
        monkeypatch.setattr(w.connection.driver, "least_rtt_s", lambda: 0.001)  # qh3 does not tell
        await opened(links, w, clock)


async def test_until_a_link_is_open_dispatches_go_over_quic() -> None:
    clock = Clock()
    async with world(Handler()) as w, fast_links(clock) as links:
        assert value(await ask(links, w.connection)) == 1.0
        link = await opened(links, w, clock)
        sent = link.bytes_sent
        assert value(await ask(links, w.connection)) == 1.0
        assert link.bytes_sent > sent
        assert w.listener.n_links == 1


def cut(link: TlsLink, accepted: TlsLink) -> None:
    """Let the client's end go without a word."""
    assert link._transport is not None
    link._transport.abort()


def close(link: TlsLink, accepted: TlsLink) -> None:
    link.close()


def reset(link: TlsLink, accepted: TlsLink) -> None:
    """Let the server's end answer with RST."""
    assert accepted._transport is not None
    connected = accepted._transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted._transport.abort()


def stall(link: TlsLink, accepted: TlsLink) -> None:
    """Let nothing come in any more."""
    assert link._transport is not None
    link._transport.pause_reading()


@pytest.mark.parametrize("fail", [cut, close, reset, stall])
async def test_a_link_that_fails_twenty_times_in_mid_request_loses_no_answer(
    fail: Callable[[TlsLink, TlsLink], None],
) -> None:
    handler = Handler()
    async with world(handler) as w:
        for _ in range(N_CUTS):
            link = await w.dial()
            assert value(await link.request(dispatch(), timeout_s=TIMEOUT_S)) == 1.0
            (accepted,) = w.listener._links
            handler.gate.clear()
            before = handler.n_asked
            again = functools.partial(w.connection.start, dispatch(), timeout_s=TIMEOUT_S)
            answer = link.start(dispatch(), timeout_s=TIMEOUT_S, retry=again)
            await until(lambda before=before: handler.n_asked > before)  # type: ignore[misc]
            fail(link, accepted)
            handler.gate.set()
            began = asyncio.get_running_loop().time()
            assert value(await answer) == 1.0
            assert asyncio.get_running_loop().time() - began < 5 * 0.2
            assert link.n_retried == 1
            link.close()
            await until(lambda: w.listener.n_links == 0)


async def test_a_link_that_failed_is_left_alone_for_a_while() -> None:
    clock = Clock()
    async with world(Handler()) as w, fast_links(clock) as links:
        link = await opened(links, w, clock)
        assert link._transport is not None
        link._transport.abort()
        await until(lambda: not link.is_open)
        assert links.best(SERVER.node_id, w.connection) is None
        clock.skipped_s += 1.0
        assert links.best(SERVER.node_id, w.connection) is None
        await opened(links, w, clock)


async def test_while_it_is_stalled_dispatches_go_over_quic() -> None:
    clock = Clock()
    async with world(Handler()) as w, fast_links(clock) as links:
        link = await opened(links, w, clock)
        assert value(await ask(links, w.connection)) == 1.0
        assert link._transport is not None
        link._transport.pause_reading()
        assert value(await ask(links, w.connection)) == 1.0
        assert link.is_stalled
        assert links.best(SERVER.node_id, w.connection) is None
        assert value(await ask(links, w.connection)) == 1.0
        link._transport.resume_reading()
        await until(lambda: links.best(SERVER.node_id, w.connection) is link)
        assert value(await ask(links, w.connection)) == 1.0


@pytest.mark.parametrize("why", ["long", "relayed"])
async def test_a_path_that_is_no_longer_short_and_direct_closes_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    async with world(Handler()) as w, fast_links(clock) as links:
        link = await opened(links, w, clock)
        if why == "long":
            monkeypatch.setattr(w.connection, "rtt_s", 0.05)
            monkeypatch.setattr(w.connection.driver, "least_rtt_s", lambda: 0.04)
        else:
            monkeypatch.setattr(type(w.connection.path), "is_relayed", property(lambda path: True))
        clock.skipped_s += 1.0
        assert links.best(SERVER.node_id, w.connection) is None
        assert not link.is_open
        assert value(await ask(links, w.connection)) == 1.0


@pytest.mark.parametrize("who", ["client", "server"])
async def test_a_connection_that_ends_takes_its_link_along_and_what_waits_there(who: str) -> None:
    """Who is given up, bars us or rests closes the connection: nothing may still come by another door."""
    clock, handler = Clock(), Handler()
    async with world(handler) as w, fast_links(clock) as links:
        link = await opened(links, w, clock)
        handler.gate.clear()
        answer = ask(links, w.connection)
        await until(lambda: handler.n_asked == 1)
        if who == "client":
            w.connection.close()
            assert not link.is_open
        else:
            (accepted,) = w.server.open_connections()
            accepted.close()
        with pytest.raises(ConnectionLost):
            await answer
        assert not link.is_open
        await until(lambda: w.listener.n_links == 0)
        await until(lambda: handler.n_cancelled == 1)
        assert links.n_open == 0


@pytest.mark.slow
async def test_where_udp_dies_the_link_answers_until_that_is_noticed_and_then_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    async with world(Handler()) as w, fast_links(clock) as links:
        link = await opened(links, w, clock)
        monkeypatch.setattr(w.connection, "receive", lambda flight, now: None)
        loop = asyncio.get_running_loop()
        died, slowest_s = loop.time(), 0.0
        while w.connection.is_open:
            assert loop.time() - died < 2 * (KEEPALIVE_S + LOST_AFTER_S)
            began = loop.time()
            try:
                assert value(await ask(links, w.connection)) == 1.0
            except ConnectionLost:
                assert not w.connection.is_open
            slowest_s = max(slowest_s, loop.time() - began)
            await asyncio.sleep(0.05)
        assert slowest_s < 5 * 0.2
        assert loop.time() - died >= KEEPALIVE_S, "nothing was asked over it"
        assert not link.is_open
        assert links.n_open == 0


async def test_a_node_without_a_listener_is_reached_over_quic_alone() -> None:
    clock = Clock()
    async with world(Handler()) as w, fast_links(clock) as links:
        await w.listener.__aexit__(None, None, None)
        clock.skipped_s += 1000.0
        assert links.best(SERVER.node_id, w.connection) is None
        place = links._places[SERVER.node_id]
        await until(lambda: place.opening is None)
        assert value(await ask(links, w.connection)) == 1.0
        assert links.n_open == 0


async def test_links_that_are_being_opened_are_given_up_at_the_end() -> None:
    async with world(Handler()) as w:
        links = FastLinks(CLIENT)
        await until(lambda: w.connection.rtt_s is not None)
        links.best(SERVER.node_id, w.connection)
        await links.close()
        assert links.best(SERVER.node_id, w.connection) is None
        assert links.n_open == 0
