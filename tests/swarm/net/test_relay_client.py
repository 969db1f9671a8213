"""A node keeps its reservations through all that befalls relays, and calls through them. The real relay, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import swarm.net.relay_channel
import swarm.net.relay_client
from swarm.errors import ConnectionLost, NetworkError, Refused, RemoteProtocolError, RemoteRefused
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.relay_client import (
    LIFETIME_S,
    MAX_CALLED_THROUGH,
    MIN_KEEPALIVE_S,
    REPLACED_REST_S,
    RelayAddress,
    RelayClient,
)
from swarm.wire import messages as m
from swarm.wire.vouchers import read_voucher, sign_voucher
from tests import virtual_time
from tests.virtual_relay import LATENCY_S, Link, VirtualNode, VirtualRelay
from tests.virtual_time import now

R1, R2, R3, PEER, BACKBONE = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 6))
RELAYS = ((R1, ("192.0.2.1", 7440)), (R2, ("192.0.2.2", 7440)), (R3, ("192.0.2.3", 7440)))
PEER_AT, BACKBONE_AT, MOVED_TO = ("198.51.100.1", 5000), ("198.51.100.2", 6000), ("198.51.100.9", 7000)


@pytest.fixture(autouse=True)
def _virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (swarm.net.relay_client, swarm.net.relay_channel):
        monkeypatch.setattr(module, "clock", now)


class World:
    def __init__(self, n_relays: int = 1) -> None:
        self.relays = [VirtualRelay(identity, address) for identity, address in RELAYS[:n_relays]]
        self.peer = VirtualNode(PEER, PEER_AT, self.relays)
        self.backbone = VirtualNode(BACKBONE, BACKBONE_AT, self.relays, seed=1)
        self.tasks: list[asyncio.Task[None]] = []
        self.sweeping = asyncio.create_task(self._sweep())

    @property
    def where(self) -> list[RelayAddress]:
        return [RelayAddress(address=each.address, node=each.identity.node_id) for each in self.relays]

    def keep(self, node: VirtualNode | None = None) -> asyncio.Task[None]:
        task = asyncio.create_task((node or self.peer).client.run(self.where))
        self.tasks.append(task)
        return task

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for relay in self.relays:
                relay.service.sweep()

    async def call(self) -> Any:
        """Call the peer by any of its vouchers; raises what the last of them gave."""
        error: Exception | None = None
        for voucher in self.peer.client.vouchers():
            try:
                return await self.backbone.client.connect(PEER.node_id, voucher)
            except (NetworkError, RemoteRefused) as failure:
                error = failure
        raise error or ConnectionLost("no voucher")

    async def callable_after(self, limit_s: float) -> float:
        """Return how long it takes until the peer can be called."""
        begun = now()
        while True:
            try:
                await self.call()
            except (NetworkError, RemoteRefused):
                assert now() < begun + limit_s, "it cannot be called"
                await asyncio.sleep(0.05)
            else:
                return now() - begun


def run(main: Any, n_relays: int = 1) -> None:
    """Run `main(world)` in virtual time."""

    async def whole() -> None:
        world = World(n_relays)
        try:
            await main(world)
        finally:
            for task in [*world.tasks, world.sweeping]:
                task.cancel()
            for node in (world.peer, world.backbone):
                node.client.close()
            await asyncio.gather(*world.tasks, world.sweeping, return_exceptions=True)
            for relay in world.relays:
                relay.service.stop()
            await asyncio.sleep(10.0)  # what was started last ends

    virtual_time.run(whole())


def test_two_of_the_relays_are_reserved_at_and_their_vouchers_are_there() -> None:
    async def main(world: World) -> None:
        changes: list[int] = []
        world.peer.client.on_change = lambda: changes.append(len(world.peer.client.vouchers()))
        world.keep()
        await asyncio.sleep(0.2)
        said = [read_voucher(each) for each in world.peer.client.vouchers()]
        assert {each.relay for each in said} == {R1.node_id, R2.node_id}
        assert {each.node for each in said} == {PEER.node_id}
        assert changes == [1, 2]
        assert world.relays[2].n_dials == 0

    run(main, n_relays=3)


def test_a_call_gives_both_ends_a_bound_leg_of_one_channel() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(0.2)
        ours = await world.call()
        (theirs,) = world.peer.legs
        assert (ours.channel, ours.address, ours.remote) == (theirs.channel, RELAYS[0][1], PEER.node_id)
        assert theirs.remote == BACKBONE.node_id
        await asyncio.sleep(3 * LATENCY_S)
        assert ours.is_bound
        assert theirs.is_bound
        ours.close()
        await asyncio.sleep(0.2)
        assert world.relays[0].service.reservations.n_channels == 0
        await asyncio.sleep(60.0)
        assert theirs.is_lost, "its keepalives are not answered any more"

    run(main)


def test_a_reservation_is_renewed_long_before_it_ends_and_stays_the_same() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(1.0)
        held = world.relays[0].service.reservations.find(PEER.node_id)
        assert held is not None
        channel, lowest = held.channel, LIFETIME_S
        for _ in range(600):
            await asyncio.sleep(1.0)
            assert world.relays[0].service.reservations.find(PEER.node_id) is held
            lowest = min(lowest, held.ends_at - now())
        assert held.channel == channel
        assert lowest >= 0.6 * LIFETIME_S
        assert world.relays[0].n_dials == 1

    run(main)


def test_an_idle_reservation_costs_less_than_a_packet_a_second() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(1.0)
        n = len(world.peer.sent)
        await asyncio.sleep(100.0)
        assert 50 <= len(world.peer.sent) - n <= 100

    run(main)


@pytest.mark.parametrize("away_s", [0.0, 1.0, 20.0])
def test_a_relay_that_starts_again_has_its_peers_back_within_5_s(away_s: float) -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(7.3)
        (before,) = world.peer.client.vouchers()
        world.relays[0].is_up = False
        await asyncio.sleep(away_s)
        assert world.peer.client.vouchers() == (before,), "it is published until it really runs out"
        world.relays[0].is_up = True
        world.relays[0].start()
        assert await world.callable_after(5.0) < 5.0

    run(main)


def test_a_voucher_goes_when_the_relay_has_been_away_for_its_whole_time() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(1.0)
        world.relays[0].is_up = False
        await asyncio.sleep(0.5 * LIFETIME_S)
        assert len(world.peer.client.vouchers()) == 1
        await asyncio.sleep(0.5 * LIFETIME_S + 1.0)
        assert world.peer.client.vouchers() == ()

    run(main)


def test_a_peer_that_starts_while_its_relay_is_down_is_there_soon_after_it_comes() -> None:
    async def main(world: World) -> None:
        world.relays[0].is_up = False
        world.keep()
        await asyncio.sleep(33.0)
        world.relays[0].is_up = True
        assert await world.callable_after(5.0) < 5.0

    run(main)


def test_a_relay_that_forgets_a_peer_without_a_word_is_reminded_without_a_new_connection() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(4.0)
        reservations = world.relays[0].service.reservations
        held = reservations.find(PEER.node_id)
        assert held is not None
        reservations.release(PEER.node_id, held.channel)
        assert await world.callable_after(5.0) < 5.0
        assert world.relays[0].n_dials == 2, "the peer's one connection, and the backbone's"

    run(main)


def test_another_relay_is_taken_when_one_is_away_for_long() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(1.0)
        world.relays[0].is_up = False
        await asyncio.sleep(30.0)
        live = {each.relay for each in world.peer.client.reservations if each.connection is not None}
        assert live == {R2.node_id, R3.node_id}

    run(main, n_relays=3)


def test_one_relay_under_two_addresses_has_one_reservation_and_no_fight_over_it() -> None:
    async def main(world: World) -> None:
        relay = world.relays[0]
        world.peer._relays["192.0.2.77", 7440] = relay
        nameless = [RelayAddress(address=address, node=None) for address in (RELAYS[0][1], ("192.0.2.77", 7440))]
        world.tasks.append(asyncio.create_task(world.peer.client.run(nameless)))
        await asyncio.sleep(1.0)
        held = relay.service.reservations.find(PEER.node_id)
        assert held is not None
        channel = held.channel
        await asyncio.sleep(100.0)
        assert held.channel == channel
        assert relay.service.reservations.find(PEER.node_id) is held
        assert len(world.peer.client.vouchers()) == 1

    run(main)


def test_a_relay_that_becomes_known_later_is_used() -> None:
    async def main(world: World) -> None:
        known = world.where[:1]
        world.tasks.append(asyncio.create_task(world.peer.client.run(lambda: known)))
        await asyncio.sleep(30.0)
        assert len(world.peer.client.vouchers()) == 1
        known.append(world.where[1])
        await asyncio.sleep(10.0)
        assert len(world.peer.client.vouchers()) == 2

    run(main, n_relays=2)


def test_a_relay_that_drains_is_left_for_another_at_once() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(1.0)
        draining = asyncio.create_task(world.relays[0].service.drain(5.0))
        await asyncio.sleep(0.5)
        live = {each.relay for each in world.peer.client.reservations if each.connection is not None}
        assert live == {R2.node_id, R3.node_id}
        await draining

    run(main, n_relays=3)


def test_an_only_relay_that_drains_is_held_to_its_end() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(1.0)
        await world.relays[0].service.drain(1.0)
        (held,) = world.peer.client.reservations
        assert held.connection is not None
        world.relays[0].start()
        assert await world.callable_after(5.0) < 5.0

    run(main)


def test_of_two_processes_with_one_key_the_newer_is_served_and_the_other_rests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(world: World) -> None:
        other = VirtualNode(PEER, MOVED_TO, world.relays, seed=2)
        world.keep()
        await asyncio.sleep(1.0)
        with caplog.at_level(logging.WARNING, logger="swarm.net.relay_client"):
            theirs = world.keep(other)
            await asyncio.sleep(0.3 * REPLACED_REST_S)
        assert world.relays[0].n_dials == 2, "they fight"
        assert len([each for each in caplog.records if "another process" in each.message]) == 1
        assert other.client.reservations[0].connection is not None
        theirs.cancel()
        await asyncio.sleep(REPLACED_REST_S)
        assert world.peer.client.reservations[0].connection is not None, "the key is free again"
        other.client.close()

    run(main)


def test_a_rebound_nat_heals_without_anything_being_lost() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(1.0)
        await world.call()
        (theirs,) = world.peer.legs
        await asyncio.sleep(1.0)
        world.peer.move(MOVED_TO)
        await asyncio.sleep(2.5)  # the reservation's keepalive finds it out, and the channel's leg is checked with it
        board = world.relays[0].service.switchboard
        assert board.bound_to(theirs.channel, 1) == MOVED_TO
        assert world.relays[0].n_dials == 2
        assert not theirs.is_lost

    run(main)


def test_a_call_that_is_not_wanted_is_refused_and_leaves_nothing() -> None:
    async def main(world: World) -> None:
        def refuse(_: object) -> None:
            raise Refused("not today")

        world.peer.client._on_leg = refuse
        world.keep()
        await asyncio.sleep(0.2)
        with pytest.raises(RemoteRefused, match="not today"):
            await world.call()
        await asyncio.sleep(0.1)
        assert world.relays[0].service.reservations.n_channels == 0
        assert len(world.peer.client._legs) == 1, "the reservation's own"

    run(main)


def test_a_peer_that_does_not_answer_the_relay_costs_a_caller_a_few_seconds() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(0.2)
        world.peer.is_deaf = True
        begun = now()
        with pytest.raises(RemoteRefused, match="does not answer") as caught:
            await world.call()
        assert now() - begun < 4.0
        assert caught.value.retry_after_s is not None
        assert world.relays[0].service.reservations.n_channels == 0

    run(main)


def test_a_voucher_of_another_node_or_a_damaged_one_goes_nowhere() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(0.2)
        (voucher,) = world.peer.client.vouchers()
        n_dials = world.relays[0].n_dials
        for node, data in ((BACKBONE.node_id, voucher), (PEER.node_id, voucher[:-1]), (PEER.node_id, b"")):
            with pytest.raises(RemoteProtocolError):
                await world.backbone.client.connect(node, data)
        assert world.relays[0].n_dials == n_dials

    run(main)


def test_only_our_relays_may_call_and_only_on_the_connection_that_we_made() -> None:
    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(0.2)
        leg = m.Leg(
            channel=b"CHANNEL0", generation=1, side=1, key=b"k" * 32, cookie=bytes(16), idle_ms=1, rate_kbit_s=1
        )
        stranger: Any = Link(world.relays[0], world.peer)
        with pytest.raises(Refused):
            await world.peer.client.serve(stranger, m.Incoming(caller=BACKBONE.node_id, leg=leg))
        stranger.is_client = False
        with pytest.raises(Refused):
            await world.peer.client.serve(stranger, m.Notice(kind=m.NoticeKind.REPLACED, in_ms=0, detail=""))
        assert world.peer.legs == []

    run(main)


def test_a_relay_cannot_make_us_keep_legs_without_end_nor_send_without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.net.relay_client.MAX_LEGS", 2)

    async def main(world: World) -> None:
        world.keep()
        await asyncio.sleep(0.2)
        connection: Any = world.peer.client.reservations[0].connection

        def call(channel: bytes) -> m.Incoming:
            leg = m.Leg(
                channel=channel, generation=1, side=1, key=b"k" * 32, cookie=bytes(16), idle_ms=0, rate_kbit_s=1
            )
            return m.Incoming(caller=BACKBONE.node_id, leg=leg)

        await world.peer.client.serve(connection, call(b"CHANNEL0"))  # beside the reservation's own
        with pytest.raises(Refused):
            await world.peer.client.serve(connection, call(b"CHANNEL1"))
        (leg,) = world.peer.legs
        assert leg._binder._keepalive_s == MIN_KEEPALIVE_S

    run(main)


def test_what_is_kept_of_relays_that_calls_went_through_is_bounded() -> None:
    """Vouchers of strangers name any number of relays."""

    class FakeRelay:
        def __init__(self, address: Any) -> None:
            self.address = self.source = address
            self.is_open = True

        async def request(self, message: m.Request, *, timeout_s: float) -> m.Response:
            if self.address != RELAYS[0][1]:
                raise RemoteRefused("nobody by that name", remote_code=m.ErrorCode.NOT_FOUND)
            leg = m.Leg(
                channel=bytes(8), generation=1, side=0, key=bytes(32), cookie=bytes(16), idle_ms=60_000, rate_kbit_s=1
            )
            return m.Channel(leg=leg)

        def start(self, message: m.Request, *, timeout_s: float) -> Any:
            raise ConnectionLost("over")

        def close(self) -> None:
            self.is_open = False

    class FakeEndpoint:
        port = 1

        def __init__(self) -> None:
            self.dialled: list[FakeRelay] = []

        async def dial(self, address: Any, *, expected: NodeId | None, timeout_s: float = 0.0) -> Any:
            await asyncio.sleep(0.01)
            self.dialled.append(FakeRelay(address))
            return self.dialled[-1]

        def send_raw(self, datagrams: Any, address: Any) -> None:
            pass

    async def main() -> None:
        endpoint = FakeEndpoint()
        client = RelayClient(endpoint)
        vouchers = [
            sign_voucher(
                Identity.from_seed(number.to_bytes(32, "big")),
                node=PEER.node_id,
                ends_at_ms=1,
                addresses=(RELAYS[0][1][0] + ":7440" if number == 1 else f"203.0.113.{number}:7440",),
            )
            for number in range(1, MAX_CALLED_THROUGH + 40)
        ]
        leg = await client.connect(PEER.node_id, vouchers[0])
        for voucher in vouchers[1:]:
            with pytest.raises(RemoteRefused):
                await client.connect(PEER.node_id, voucher)
        is_open = [relay.is_open for relay in endpoint.dialled]
        assert is_open == [True] + [False] * 39 + [True] * (MAX_CALLED_THROUGH - 1), (
            "the oldest went, but the one in use"
        )
        assert len(client._called_through) == MAX_CALLED_THROUGH
        assert (client._dialling, client._n_reaching) == ({}, {})
        n_dialled = len(endpoint.dialled)
        for outcome in await asyncio.gather(
            *(client.connect(PEER.node_id, vouchers[5]) for _ in range(3)), return_exceptions=True
        ):
            assert isinstance(outcome, RemoteRefused)
        assert len(endpoint.dialled) == n_dialled + 1, "three at once dial once"
        leg.close()
        client.close()

    virtual_time.run(main())


def test_where_udp_does_not_get_a_bridge_is_opened_and_closed_with_its_use() -> None:
    class FakeBridge:
        address = RELAYS[1][1]
        is_open = True

        def close(self) -> None:
            self.is_open = False

    async def main(world: World) -> None:
        opened: list[tuple[Any, FakeBridge]] = []

        async def open_bridge(relay: Any, port: int) -> FakeBridge:
            opened.append((relay, FakeBridge()))
            assert port == PEER_AT[1]
            return opened[-1][1]

        node = VirtualNode(PEER, PEER_AT, world.relays, open_bridge=open_bridge)
        world.relays[0].is_up = False  # at its own address; the bridge leads to the other one
        where = RelayAddress(address=RELAYS[0][1], node=R2.node_id)
        task = asyncio.create_task(node.client.run([where]))
        await asyncio.sleep(5.0)
        assert [relay for relay, _ in opened] == [RELAYS[0][1]]
        (held,) = node.client.reservations
        assert held.relay == R2.node_id
        task.cancel()
        await asyncio.wait([task])
        node.client.close()
        assert not opened[0][1].is_open

    run(main, n_relays=2)


@pytest.mark.parametrize("does_answer", [True, False])
def test_two_dials_at_once_share_a_bridge_and_each_hears_of_its_failure(does_answer: bool) -> None:
    class FakeBridge:
        address = RELAYS[1][1]
        is_open = True

        def close(self) -> None:
            self.is_open = False

    async def main(world: World) -> None:
        opened: list[FakeBridge] = []

        async def open_bridge(relay: Any, port: int) -> FakeBridge:
            bridge = FakeBridge()
            opened.append(bridge)
            await asyncio.sleep(0.1)
            return bridge

        node = VirtualNode(PEER, PEER_AT, world.relays, open_bridge=open_bridge)
        world.relays[0].is_up = False
        world.relays[1].is_up = does_answer
        dials = [node.client.dial(RELAYS[0][1], R2.node_id) for _ in range(2)]
        outcomes = await asyncio.gather(*dials, return_exceptions=True)
        assert all(isinstance(each, Link if does_answer else NetworkError) for each in outcomes), outcomes
        assert sum(each.is_open for each in opened) == does_answer
        node.client.close()
        assert not any(each.is_open for each in opened)

    run(main, n_relays=2)


def test_a_refused_reservation_is_asked_for_again_later_and_not_at_once() -> None:
    async def main(world: World) -> None:
        relay = world.relays[0]
        relay.service.is_draining = True
        world.keep()
        await asyncio.sleep(20.0)
        assert 5 <= relay.n_dials <= 25
        relay.service.is_draining = False
        await asyncio.sleep(3.0)
        assert len(world.peer.client.vouchers()) == 1

    run(main)
