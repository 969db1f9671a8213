"""The relay's requests: what is granted, to whom, how often, and what everybody is told at its end. In virtual time."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from relay.quotas import Limits
from relay.service import CONNECT_BURST
from swarm.errors import RemoteRefused
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net import relay_packets as p
from swarm.wire import messages as m
from swarm.wire.vouchers import read_voucher, sign_voucher
from tests import virtual_time
from tests.virtual_relay import WALL, Link, VirtualNode, VirtualRelay
from tests.virtual_time import now

R, OTHER, A, B = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 5))
A_AT, B_AT = ("198.51.100.1", 5000), ("198.51.100.2", 6000)
RESERVE = m.Reserve(lifetime_ms=60_000)


class World:
    def __init__(self, limits: Limits | None = None) -> None:
        self.relay = VirtualRelay(R, ("192.0.2.1", 7440), limits)
        self.a = VirtualNode(A, A_AT, [self.relay])
        self.b = VirtualNode(B, B_AT, [self.relay])
        self.asked: list[tuple[str, m.Request]] = []
        for name, node in (("a", self.a), ("b", self.b)):
            node.client.serve = self._take(name)  # type: ignore[method-assign]
        self.link_a, self.link_b = Link(self.relay, self.a), Link(self.relay, self.b)

    def _take(self, name: str) -> Callable[[Any, m.Request], Coroutine[Any, Any, m.Done]]:
        async def take(_: Any, request: m.Request) -> m.Done:
            self.asked.append((name, request))
            return m.Done()

        return take

    async def reserved(self, link: Link | None = None) -> m.Reserved:
        answer = await (link or self.link_b).request(RESERVE, timeout_s=4.0)
        assert isinstance(answer, m.Reserved)
        return answer

    async def connect(self, voucher: bytes, node: NodeId = B.node_id) -> m.Leg:
        answer = await self.link_a.request(m.Connect(node_id=node, voucher=voucher), timeout_s=4.0)
        assert isinstance(answer, m.Channel)
        return answer.leg


def run(main: Callable[[World], Coroutine[Any, Any, None]], limits: Limits | None = None) -> None:
    async def whole() -> None:
        world = World(limits)
        await main(world)
        world.relay.service.stop()

    virtual_time.run(whole())


def test_a_reservation_says_all_that_a_node_needs() -> None:
    async def main(world: World) -> None:
        answer = await world.reserved()
        assert (answer.ttl_ms, answer.n_channels, answer.observed_address) == (60_000, 64, "198.51.100.2:6000")
        voucher = read_voucher(answer.voucher)
        assert (voucher.relay, voucher.node, voucher.addresses) == (R.node_id, B.node_id, ("192.0.2.1:7440",))
        assert abs(voucher.ends_at_ms - (WALL + 60) * 1e3) < 1000
        board = world.relay.service.switchboard
        assert answer.leg.cookie == board.cookie(answer.leg.channel, B_AT, now())
        assert (answer.leg.side, answer.leg.generation) == (p.CALLED, board.generation)

    run(main)


def test_a_call_is_announced_with_the_callers_name_and_its_own_key() -> None:
    async def main(world: World) -> None:
        ours = await world.connect((await world.reserved()).voucher)
        ((to, incoming),) = world.asked
        assert to == "b"
        assert isinstance(incoming, m.Incoming)
        assert (incoming.caller, incoming.leg.channel) == (A.node_id, ours.channel)
        assert (ours.side, incoming.leg.side) == (p.CALLER, p.CALLED)
        assert ours.key != incoming.leg.key

    run(main)


def test_only_this_relays_own_voucher_for_that_node_opens_a_channel_and_only_in_its_time() -> None:
    async def main(world: World) -> None:
        good = (await world.reserved()).voucher
        await world.reserved(world.link_a)
        soon = round((WALL + 60) * 1e3)
        address = ("192.0.2.1:7440",)
        foreign = sign_voucher(OTHER, node=B.node_id, ends_at_ms=soon, addresses=address)
        anothers = sign_voucher(R, node=OTHER.node_id, ends_at_ms=soon, addresses=address)
        over = sign_voucher(R, node=B.node_id, ends_at_ms=round((WALL - 1) * 1e3), addresses=address)
        for voucher in (foreign, anothers, over, good[:-1], b""):
            with pytest.raises(RemoteRefused, match="voucher"):
                await world.connect(voucher)
        assert world.asked == []
        await world.connect(good)

    run(main)


def test_a_connection_that_calls_too_often_is_put_off() -> None:
    async def main(world: World) -> None:
        voucher = (await world.reserved()).voucher
        refusals = []
        for _ in range(int(CONNECT_BURST) + 10):
            try:
                await world.connect(voucher)
            except RemoteRefused as error:
                refusals.append(str(error))
        assert any("too many calls" in each for each in refusals)

    run(main)


def test_a_node_that_is_away_is_said_to_be_and_its_reservation_waits_for_it() -> None:
    async def main(world: World) -> None:
        voucher = (await world.reserved()).voucher
        world.link_b.close()
        with pytest.raises(RemoteRefused, match="away") as caught:
            await world.connect(voucher)
        assert caught.value.retry_after_s == 2.0
        world.link_b = Link(world.relay, world.b)
        await world.reserved()
        await world.connect(voucher)

    run(main)


def test_the_loser_of_a_reservation_is_told() -> None:
    async def main(world: World) -> None:
        await world.reserved()
        second = Link(world.relay, world.b)
        await world.reserved(second)
        await asyncio.sleep(0.1)
        ((to, notice),) = world.asked
        assert to == "b"
        assert isinstance(notice, m.Notice)
        assert notice.kind == m.NoticeKind.REPLACED

    run(main)


def test_at_its_end_it_tells_callers_and_called_and_takes_nothing_new() -> None:
    async def main(world: World) -> None:
        voucher = (await world.reserved()).voucher
        await world.connect(voucher)
        world.asked.clear()
        begun = now()
        draining = asyncio.create_task(world.relay.service.drain(3.0))
        await asyncio.sleep(0.2)
        told = dict(world.asked)
        assert set(told) == {"a", "b"}
        for notice in told.values():
            assert isinstance(notice, m.Notice)
            assert (notice.kind, notice.in_ms) == (m.NoticeKind.DRAINING, 3000)
        for request in (RESERVE, m.Connect(node_id=B.node_id, voucher=voucher)):
            with pytest.raises(RemoteRefused, match="restarts"):
                await world.link_a.request(request, timeout_s=1.0)
        await draining
        assert now() - begun == pytest.approx(3.0, abs=0.2)

    run(main)


def test_with_no_channel_there_is_nothing_to_wait_for_at_its_end() -> None:
    async def main(world: World) -> None:
        await world.reserved()
        begun = now()
        await world.relay.service.drain(30.0)
        assert now() - begun < 2.0

    run(main)


def test_what_is_above_a_rate_leaves_by_the_timer_in_order() -> None:
    async def main(world: World) -> None:
        ours = await world.connect((await world.reserved()).voucher)
        incoming = world.asked[0][1]
        assert isinstance(incoming, m.Incoming)
        for leg, node in ((ours, world.a), (incoming.leg, world.b)):
            bind = p.Control(
                type=p.PacketType.BIND, channel=leg.channel, generation=leg.generation, side=leg.side, cookie=leg.cookie
            )
            node.send_raw([p.encode(bind, leg.key)], world.relay.address)
        await asyncio.sleep(0.1)
        sent = [p.relayed(ours.channel, bytes([at]) * 991) for at in range(55)]
        world.b.heard.clear()
        world.a.send_raw(sent, world.relay.address)
        await asyncio.sleep(0.025)
        assert 30 <= len(world.b.heard) < 55
        await asyncio.sleep(0.1)
        assert world.b.heard == sent

    run(main, Limits(channel_bit_s=8_000_000))


def test_a_thousand_idle_reservations_and_200_channels_take_little_memory() -> None:
    """Of the relay's own; a connection's is QUIC's."""

    async def main(world: World) -> None:
        reservations, board = world.relay.service.reservations, world.relay.service.switchboard
        tracemalloc.start()
        nodes = [NodeId(n.to_bytes(32, "big")) for n in range(1000)]
        for node in nodes:
            link: Any = world.link_a.server
            reservations.reserve(node, link, network="", lifetime_s=60.0, is_open=lambda _: True, now=now())
        of_reservations = tracemalloc.get_traced_memory()[0]
        for at in range(200):
            reservations.connect(nodes[at], nodes[999 - at], now())
        of_channels = tracemalloc.get_traced_memory()[0] - of_reservations
        tracemalloc.stop()
        assert board.n_open == 1200
        assert of_reservations / 1000 < 4_000
        assert of_channels / 200 < 8_000

    run(main)
