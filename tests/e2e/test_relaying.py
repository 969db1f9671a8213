"""Relaying over real sockets: reservations, calls, packets, and what happens when the relay goes, comes back, or forgets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relay.daemon import RelayConfig, RelayDaemon, RelayReady
from swarm.bench.star_member import answer
from swarm.bench.transport import bench_dispatch
from swarm.errors import NetworkError, RemoteRefused, SwarmError
from swarm.identity import Identity
from swarm.net import relay_packets as p
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.relay_client import SERVES, RelayAddress, RelayClient, RelayLeg
from swarm.registry.client import parse_registry
from swarm.wire import messages as m
from tests.e2e.test_relay import start_relay

RELAY, PEER, BACKBONE = (Identity.from_seed(bytes([n]) * 32) for n in (11, 12, 13))


class Node:
    """A node that uses relays: an endpoint, its client, and what comes through its channels."""

    def __init__(self, identity: Identity) -> None:
        self.legs: asyncio.Queue[RelayLeg] = asyncio.Queue()
        self.packets: asyncio.Queue[bytes] = asyncio.Queue()
        self.endpoint = Endpoint(identity, host="127.0.0.1", handler=answer, serves=[m.Dispatch])
        self.endpoint.add_handler(SERVES, self._handle)
        self.client = RelayClient(self.endpoint, on_leg=self.legs.put_nowait)
        self.endpoint.on_other = self._on_other

    async def _handle(self, connection: Connection, request: m.Request) -> m.Response:
        return await self.client.serve(connection, request)

    def _on_other(self, datagrams: Sequence[bytes], address: Any) -> None:
        for data in datagrams:
            if data[0] == p.RELAY:
                self.packets.put_nowait(data)
        self.client.receive(datagrams, address)

    def send(self, leg: RelayLeg, payload: bytes) -> None:
        self.endpoint.send_raw([p.relayed(leg.channel, payload)], leg.address)


@contextlib.asynccontextmanager
async def node(identity: Identity) -> AsyncIterator[Node]:
    made = Node(identity)
    async with made.endpoint:
        yield made
        made.client.close()


@contextlib.asynccontextmanager
async def relay(port: int = 0, **options: Any) -> AsyncIterator[tuple[RelayDaemon, RelayAddress]]:
    ready: asyncio.Future[RelayReady] = asyncio.get_running_loop().create_future()
    config = RelayConfig(host="127.0.0.1", port=port, **{"drain_s": 0.0, **options})
    daemon = RelayDaemon(config, RELAY)
    task = asyncio.create_task(daemon.run(ready.set_result))
    task.add_done_callback(lambda _: ready.cancel())
    try:
        address = (await ready).address.rpartition(":")
        yield daemon, RelayAddress(address=(address[0], int(address[2])), node=RELAY.node_id)
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(what: Callable[[], object], within_s: float) -> float:
    """Wait for something to become true; return how long it took."""
    begun = time.monotonic()
    async with asyncio.timeout(within_s):
        while not what():  # noqa: ASYNC110  # what it asks has no event
            await asyncio.sleep(0.01)
    return time.monotonic() - begun


@contextlib.asynccontextmanager
async def reserved(peer: Node, *relays: RelayAddress) -> AsyncIterator[None]:
    task = asyncio.create_task(peer.client.run(relays))
    try:
        await until(lambda: len(peer.client.vouchers()) == min(2, len(relays)), 5.0)
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def call(backbone: Node, peer: Node) -> tuple[RelayLeg, RelayLeg]:
    """Open a channel and see a packet pass in each direction; return both legs."""
    ours = await backbone.client.connect(PEER.node_id, peer.client.vouchers()[0])
    theirs = await asyncio.wait_for(peer.legs.get(), 2.0)
    assert (theirs.remote, theirs.channel) == (BACKBONE.node_id, ours.channel)
    await until(lambda: ours.is_bound and theirs.is_bound, 2.0)
    for sender, leg, receiver in ((backbone, ours, peer), (peer, theirs, backbone)):
        sender.send(leg, b"payload")
        async with asyncio.timeout(2.0):
            assert await receiver.packets.get() == p.relayed(ours.channel, b"payload")
    return ours, theirs


async def test_a_call_by_voucher_reaches_a_reserved_node_and_packets_pass_both_ways() -> None:
    async with relay() as (daemon, where), node(PEER) as peer, node(BACKBONE) as backbone, reserved(peer, where):
        ours, _ = await call(backbone, peer)
        assert daemon.service.reservations.n_channels == 1
        ours.close()
        await until(lambda: daemon.service.reservations.n_channels == 0, 2.0)


async def test_packets_right_behind_the_bind_pass() -> None:
    async with relay() as (_, where), node(PEER) as peer, node(BACKBONE) as backbone, reserved(peer, where):
        ours = await backbone.client.connect(PEER.node_id, peer.client.vouchers()[0])
        backbone.send(ours, b"at once")
        async with asyncio.timeout(2.0):
            assert await peer.packets.get() == p.relayed(ours.channel, b"at once")


async def test_who_has_no_reservation_cannot_be_called() -> None:
    async with relay() as (_, where), node(PEER) as peer, node(BACKBONE) as backbone:
        async with reserved(peer, where):
            voucher = peer.client.vouchers()[0]
        with pytest.raises(RemoteRefused, match="no reservation"):
            await backbone.client.connect(PEER.node_id, voucher)


async def test_a_reservation_ends_with_its_client() -> None:
    async with relay() as (daemon, where), node(PEER) as peer:
        async with reserved(peer, where):
            assert daemon.service.reservations.n_reservations == 1
        await until(lambda: daemon.service.reservations.n_reservations == 0, 2.0)


async def called_within(backbone: Node, peer: Node, within_s: float) -> float:
    """Try to call until it works; return how long it took."""
    begun = time.monotonic()
    async with asyncio.timeout(within_s):
        while True:
            for voucher in peer.client.vouchers():
                try:
                    await backbone.client.connect(PEER.node_id, voucher)
                except (NetworkError, RemoteRefused):
                    continue
                await peer.legs.get()
                return time.monotonic() - begun
            await asyncio.sleep(0.05)


async def test_a_killed_relay_starts_on_its_port_at_once_and_peers_can_be_called_within_5_s(tmp_path: Path) -> None:
    """Scenarios 19, 20 and 25."""
    process, ready = await start_relay(tmp_path)
    (place,) = parse_registry(ready["registry"])
    where = RelayAddress(address=place.address, node=place.node)
    try:
        async with node(PEER) as peer, node(BACKBONE) as backbone, reserved(peer, where):
            (before,) = peer.client.vouchers()
            process.kill()
            await process.wait()
            assert peer.client.vouchers() == (before,)
            process, again = await start_relay(tmp_path, "--port", str(place.address[1]))
            assert again["registry"] == ready["registry"], "the same key and port"
            assert await called_within(backbone, peer, 5.0) < 5.0
            assert peer.client.vouchers() != (before,)
    finally:
        process.terminate()
        await process.wait()


async def test_a_peer_that_starts_while_the_relay_is_down_is_there_soon_after_it_comes(tmp_path: Path) -> None:
    """Scenario 20, the other half."""
    process, ready = await start_relay(tmp_path)
    (place,) = parse_registry(ready["registry"])
    process.terminate()
    await process.wait()
    async with node(PEER) as peer, node(BACKBONE) as backbone:
        keeping = asyncio.create_task(peer.client.run([RelayAddress(address=place.address, node=place.node)]))
        await asyncio.sleep(2.5)
        assert not keeping.done()
        process, _ = await start_relay(tmp_path, "--port", str(place.address[1]))
        try:
            assert await called_within(backbone, peer, 5.0) < 5.0
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            process.terminate()
            await process.wait()


async def test_a_relay_that_forgets_a_peer_without_a_word_is_reminded() -> None:
    """Scenario 21: what the relay still sends, it sends; only the way back is gone."""
    async with relay() as (daemon, where), node(PEER) as peer, node(BACKBONE) as backbone, reserved(peer, where):
        held = daemon.service.reservations.find(PEER.node_id)
        assert held is not None
        daemon.service.reservations.release(PEER.node_id, held.channel)
        with pytest.raises(RemoteRefused, match="no reservation"):
            await backbone.client.connect(PEER.node_id, peer.client.vouchers()[0])
        assert await called_within(backbone, peer, 5.0) < 5.0


async def test_of_two_processes_with_one_key_the_newer_is_served_and_the_other_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Scenario 23: no storm."""
    async with relay() as (daemon, where), node(PEER) as older, node(PEER) as newer, node(BACKBONE) as backbone:
        reservations = daemon.service.reservations
        async with reserved(older, where):
            first = reservations.find(PEER.node_id)
            assert first is not None
            with caplog.at_level(logging.WARNING, logger="swarm.net.relay_client"):
                async with reserved(newer, where):
                    second = reservations.find(PEER.node_id)
                    assert second is not None
                    assert second.channel != first.channel
                    await until(lambda: "another process" in caplog.text, 2.0)
                    await asyncio.sleep(2.0)
                    assert reservations.find(PEER.node_id) is second, "they fight"
                    await backbone.client.connect(PEER.node_id, newer.client.vouchers()[0])
                    assert newer.legs.qsize() == 1
                    assert older.legs.empty()


async def test_a_relay_that_drains_tells_and_goes_on_for_its_channels() -> None:
    async with (
        relay(drain_s=3.0) as (daemon, where),
        node(PEER) as peer,
        node(BACKBONE) as backbone,
        reserved(peer, where),
    ):
        ours, theirs = await call(backbone, peer)
        voucher = peer.client.vouchers()[0]
        draining = asyncio.create_task(daemon.service.drain(1.0))
        await asyncio.sleep(0.1)
        with pytest.raises(RemoteRefused, match="restarts"):
            await backbone.client.connect(PEER.node_id, voucher)
        backbone.send(ours, b"still")
        async with asyncio.timeout(2.0):
            assert await peer.packets.get() == p.relayed(theirs.channel, b"still")
        ours.close()
        await until(draining.done, 1.0)


async def test_a_relay_that_is_terminated_serves_its_channels_a_little_longer(tmp_path: Path) -> None:
    process, ready = await start_relay(tmp_path, "--drain", "1s")
    (place,) = parse_registry(ready["registry"])
    where = RelayAddress(address=place.address, node=place.node)
    try:
        async with node(PEER) as peer, node(BACKBONE) as backbone, reserved(peer, where):
            ours, _ = await call(backbone, peer)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.4)
            backbone.send(ours, b"still")
            async with asyncio.timeout(2.0):
                assert await peer.packets.get() == p.relayed(ours.channel, b"still")
            assert await asyncio.wait_for(process.wait(), 5.0) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_reservations_stand_at_two_relays_and_one_of_them_may_die() -> None:
    other = Identity.from_seed(bytes([14]) * 32)
    async with node(PEER) as peer, node(BACKBONE) as backbone, relay() as (_, first):
        ready: asyncio.Future[RelayReady] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(RelayDaemon(RelayConfig(host="127.0.0.1", port=0), other).run(ready.set_result))
        (place,) = parse_registry((await ready).registry)
        async with reserved(peer, first, RelayAddress(address=place.address, node=place.node)):
            assert len(peer.client.vouchers()) == 2
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: any(each.connection is None for each in peer.client.reservations), 5.0)
            assert len(peer.client.vouchers()) == 2, "it is published until it really runs out"
            await call(backbone, peer)


# By HTTP


async def test_a_node_whose_udp_is_blocked_comes_in_by_web_socket() -> None:
    """Nothing listens at the address's UDP port; its TCP port is the relay's."""
    async with relay(http_port=0) as (daemon, _), node(PEER) as peer, node(BACKBONE) as backbone:
        blocked = RelayAddress(address=("127.0.0.1", daemon.http_port), node=RELAY.node_id)
        async with reserved(peer, blocked):
            await call(backbone, peer)
            connection = await quic_over(backbone, peer)
            result = await connection.request(bench_dispatch(12_288, 12_288), timeout_s=5.0)
            assert isinstance(result, m.Result)


async def test_metrics_and_health_say_how_the_relay_is() -> None:
    async with relay(http_port=0) as (daemon, where), node(PEER) as peer, node(BACKBONE) as backbone:
        url = f"http://127.0.0.1:{daemon.http_port}"
        async with reserved(peer, where), aiohttp.ClientSession() as http:
            await call(backbone, peer)
            async with http.get(f"{url}/metrics") as answer_:
                text = await answer_.text()
                assert answer_.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            lines = set(text.splitlines())
            assert {
                "swarm_relay_reservations 1.0",
                "swarm_relay_channels 1.0",
                "swarm_relay_packets_total 2.0",
            } <= lines
            assert "# TYPE swarm_relay_dropped_packets_total counter" in lines
            async with http.get(f"{url}/health") as answer_:
                assert (answer_.status, await answer_.json()) == (200, {"status": "ok"})
            async with http.get(f"{url}/map.json") as answer_:
                shown = await answer_.json()
                assert (shown["source"], shown["models"]) == ("registry", [])
                assert shown["join"].startswith("swarm join --experts auto --registry swarm://")
            async with http.get(f"{url}/map") as answer_:
                assert answer_.content_type == "text/html"
            daemon.service.is_draining = True
            async with http.get(f"{url}/health") as answer_:
                assert (answer_.status, await answer_.json()) == (503, {"status": "draining"})


# A relay that means ill


async def quic_over(backbone: Node, peer: Node) -> Connection:
    """Return a QUIC connection through a new channel."""
    ours = await backbone.client.connect(PEER.node_id, peer.client.vouchers()[0])
    theirs = await asyncio.wait_for(peer.legs.get(), 2.0)
    peer.endpoint.add_channel(theirs.channel, theirs.address)
    path = backbone.endpoint.add_channel(ours.channel, ours.address)
    return await backbone.endpoint.dial(path, expected=PEER.node_id)


@pytest.mark.parametrize("evil", ["alters", "replays", "reorders", "drops"])
async def test_a_relay_that_meddles_reads_nothing_and_forges_nothing(evil: str) -> None:
    rng = random.Random(evil)
    seen: list[bytes] = []
    kept: list[tuple[list[bytes], Any]] = []
    async with relay() as (daemon, where), node(PEER) as peer, node(BACKBONE) as backbone, reserved(peer, where):
        endpoint = daemon._endpoint
        assert endpoint is not None
        honest = endpoint.send_raw
        is_evil = False

        def meddle(datagrams: Sequence[bytes], address: Any) -> None:
            datagrams = list(datagrams)
            if datagrams[0][0] != p.RELAY or not is_evil:
                honest(datagrams, address)
                return
            seen.extend(datagrams)
            if evil == "alters":
                for at, data in enumerate(datagrams):
                    if rng.random() < 0.2:
                        changed = bytearray(data)
                        changed[rng.randrange(p.RELAY_HEAD_BYTES, len(data))] ^= 1 << rng.randrange(8)
                        datagrams[at] = bytes(changed)
            elif evil == "drops":
                datagrams = [data for data in datagrams if rng.random() > 0.1]
            elif evil == "replays":
                kept.append((datagrams, address))
                honest(*rng.choice(kept))
            elif evil == "reorders":
                rng.shuffle(datagrams)
            if datagrams:
                honest(datagrams, address)

        daemon.service.attach(meddle, (f"127.0.0.1:{where.address[1]}",))
        connection = await quic_over(backbone, peer)
        is_evil = True
        request = bench_dispatch(12_288, 12_288)
        request.rows[:] = 1.25
        n_answers = 0
        for _ in range(30):
            try:
                result = await connection.request(request, timeout_s=5.0)
            except SwarmError:  # at worst a failover
                connection = await quic_over(backbone, peer)
                continue
            assert isinstance(result, m.Result)
            assert not result.rows.any(), "not what the peer answered"
            n_answers += 1
        assert n_answers >= 25
        assert len(seen) > 300
        plain = request.rows.tobytes()[:32]
        assert not any(plain in data for data in seen), "the relay could read the rows"
