"""When a node counts as public: who dialled it, and who was let do so. Real sockets are in tests/e2e/internet."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest

from swarm.errors import ConnectionLost, Overloaded, Refused, RemoteProtocolError, RemoteRefused
from swarm.ids import NodeId
from swarm.net.paths import Path
from swarm.net.reachability import CHECK_REST_S, Reach, ReachBroker, ReachChecker, Verdict, classify, judge
from swarm.wire import messages as m
from swarm.wire.messages import Mapping

NODE = NodeId(b"n" * 32)
NONCE = b"N" * m.NONCE_BYTES


class FakeConnection:
    """One side of a connection; `answers` is what a request on it gives."""

    def __init__(self, host: str, *, is_client: bool = False, answer: Any = None, is_relayed: bool = False) -> None:
        self.remote, self.is_client, self.is_open = NODE, is_client, True
        self.remote_address = None if is_client else host
        self.address = (host, 7440) if is_client else None
        self.path = Path(address=(host, 7440), channel=b"channel1" if is_relayed else b"")
        self.requests: list[m.Request] = []
        self._answer = answer

    async def request(self, message: m.Request, *, timeout_s: float) -> m.Response:
        self.requests.append(message)
        answer = self._answer(message) if callable(self._answer) else self._answer
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return cast(m.Response, answer)

    def close(self) -> None:
        self.is_open = False


class FakeEndpoint:
    """Connections, and the hosts that were sent to."""

    def __init__(self, *connections: FakeConnection, contacted: tuple[str, ...] = ()) -> None:
        self.port = 5000
        self.connections = list(connections)
        self.handlers: dict[type[m.Request], Any] = {}
        self.dialled: list[Any] = []
        self._contacted = contacted

    def add_handler(self, kinds: Any, handler: Any) -> None:
        self.handlers |= dict.fromkeys(kinds, handler)

    def open_connections(self) -> list[FakeConnection]:
        return self.connections

    def has_contacted(self, host: str, *, within_s: float) -> bool:
        return host in self._contacted

    async def dial(self, address: Any, *, expected: NodeId, timeout_s: float) -> FakeConnection:
        self.dialled.append((address, expected))
        return FakeConnection(address[0], is_client=True, answer=m.Done())


def checker(hosts: list[str], *, contacted: tuple[str, ...] = (), n_asked: int = 2) -> Verdict:
    """Return the verdict after a relay has let these hosts dial."""

    async def run() -> Verdict:
        async def answer(request: m.Request) -> m.Response:
            assert isinstance(request, m.CheckReach)
            for host in hosts:
                await endpoint.handlers[m.Reached](FakeConnection(host), m.Reached(nonce=request.nonce))
            return m.Checked(n_asked=n_asked, n_reached=len(hosts))

        relay = FakeConnection("198.51.100.1", is_client=True, answer=answer)
        endpoint = FakeEndpoint(relay, contacted=contacted)
        return (await ReachChecker(cast(Any, endpoint)).check())[4]

    return asyncio.run(run())


def test_two_hosts_that_were_never_sent_to_make_it_public() -> None:
    assert checker(["203.0.113.1", "203.0.113.2"]) is Verdict.PUBLIC


def test_one_is_enough_only_where_the_relay_knew_no_more() -> None:
    assert checker(["203.0.113.1"], n_asked=1) is Verdict.PUBLIC
    assert checker(["203.0.113.1"], n_asked=2) is Verdict.CLOSED


def test_dialling_back_from_an_address_that_was_sent_to_never_makes_it_public() -> None:
    """Behind an address-restricted NAT the relay's own dial comes through (go-libp2p's issue 3467)."""
    assert checker(["198.51.100.1"] * 3, contacted=("198.51.100.1",)) is Verdict.CLOSED
    assert checker(["203.0.113.1", "203.0.113.1"]) is Verdict.CLOSED, "one host twice is one host"


def test_nobody_to_try_says_nothing() -> None:
    assert checker([], n_asked=0) is Verdict.UNKNOWN
    assert checker([], n_asked=2) is Verdict.CLOSED


def test_a_host_of_the_other_kind_of_ip_says_nothing_about_this_one() -> None:
    assert checker(["2001:db8::1", "2001:db8:1::1"]) is Verdict.CLOSED


async def test_only_who_may_be_asked_makes_it_closed() -> None:
    """Any node that was dialled could say so."""
    stranger, relay = (
        FakeConnection(host, is_client=True, answer=m.Checked(n_asked=2, n_reached=0))
        for host in ("198.51.100.1", "198.51.100.2")
    )
    endpoint = FakeEndpoint(stranger, relay)
    reach = ReachChecker(cast(Any, endpoint))
    assert (await reach.check(lambda connection: False))[4] is Verdict.UNKNOWN
    assert (await reach.check(lambda connection: connection.address == relay.address))[4] is Verdict.CLOSED
    assert (len(stranger.requests), len(relay.requests)) == (0, 1)


async def test_a_nonce_that_was_not_asked_for_is_refused() -> None:
    endpoint = FakeEndpoint()
    ReachChecker(cast(Any, endpoint))
    with pytest.raises(Refused):
        await endpoint.handlers[m.Reached](FakeConnection("203.0.113.1"), m.Reached(nonce=NONCE))


@pytest.mark.parametrize(
    ("error", "verdict"), [(ConnectionLost("gone"), Verdict.UNKNOWN), (Overloaded("later"), Verdict.UNKNOWN)]
)
async def test_a_relay_that_does_not_answer_changes_nothing(error: Exception, verdict: Verdict) -> None:
    endpoint = FakeEndpoint(FakeConnection("198.51.100.1", is_client=True, answer=error))
    assert (await ReachChecker(cast(Any, endpoint)).check())[4] is verdict


async def test_a_helper_dials_only_for_its_own_relays_where_a_node_can_be_and_not_often() -> None:
    endpoint = FakeEndpoint()
    ReachChecker(cast(Any, endpoint))
    dial_back = endpoint.handlers[m.DialBack]
    order = m.DialBack(node_id=NODE, nonce=NONCE, address="203.0.113.9:4")
    with pytest.raises(Refused):
        await dial_back(FakeConnection("203.0.113.1"), order)
    relay = FakeConnection("198.51.100.1", is_client=True)
    assert await dial_back(relay, order) == m.Done()
    assert endpoint.dialled == [(("203.0.113.9", 4), NODE)]
    with pytest.raises(Overloaded):
        await dial_back(relay, order)
    for address in ("127.0.0.1:4", "224.0.0.1:4", "0.0.0.0:4", "nonsense"):
        other = FakeConnection("198.51.100.2", is_client=True)
        with pytest.raises(RemoteProtocolError):
            await dial_back(other, m.DialBack(node_id=NODE, nonce=NONCE, address=address))
    assert len(endpoint.dialled) == 1


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_a_relay_sends_two_helpers_from_other_hosts_to_where_it_sees_the_asker() -> None:
    helpers = [FakeConnection(f"203.0.113.{i}", answer=m.Done()) for i in (1, 1, 2, 3)]
    useless = [
        FakeConnection("198.51.100.7"),  # the asker's own host
        FakeConnection("2001:db8::1"),
        FakeConnection("127.0.0.1"),
        FakeConnection("203.0.113.4", is_client=True),
        FakeConnection("203.0.113.5", is_relayed=True),
    ]
    broker = ReachBroker(cast(Any, FakeEndpoint(*helpers, *useless)), now=Clock(), rng=random.Random(1))
    answer = await broker.serve(cast(Any, FakeConnection("198.51.100.7")), m.CheckReach(port=4, nonce=NONCE))
    assert answer == m.Checked(n_asked=2, n_reached=2)
    asked = [each for each in helpers if each.requests]
    assert len({each.remote_address for each in asked}) == 2
    assert all(each.requests == [m.DialBack(node_id=NODE, nonce=NONCE, address="198.51.100.7:4")] for each in asked)
    assert not any(each.requests for each in useless)


async def test_a_relay_counts_helpers_that_failed_and_lets_no_host_ask_often() -> None:
    now = Clock()
    failed = RemoteRefused("refused: it did not answer there", remote_code=m.ErrorCode.NOT_FOUND)
    busy = RemoteRefused("refused: a moment ago", remote_code=m.ErrorCode.BUSY)
    endpoint = FakeEndpoint(FakeConnection("203.0.113.1", answer=failed), FakeConnection("203.0.113.2", answer=busy))
    broker = ReachBroker(cast(Any, endpoint), now=now, rng=random.Random(1))
    asker = cast(Any, FakeConnection("198.51.100.7"))
    assert await broker.serve(asker, m.CheckReach(port=4, nonce=NONCE)) == m.Checked(n_asked=1, n_reached=0)
    with pytest.raises(Overloaded):
        await broker.serve(cast(Any, FakeConnection("198.51.100.7")), m.CheckReach(port=5, nonce=NONCE))
    now.now += CHECK_REST_S
    await broker.serve(asker, m.CheckReach(port=4, nonce=NONCE))
    n_asked = len(endpoint.connections[0].requests)
    for bad in (
        FakeConnection("198.51.100.8", is_relayed=True),
        FakeConnection("198.51.100.8", is_client=True),
        FakeConnection("127.0.0.1"),  # it came by WebSocket, and a helper would take the order for a violation
    ):
        with pytest.raises(Refused):
            await broker.serve(cast(Any, bad), m.CheckReach(port=4, nonce=NONCE))
    assert len(endpoint.connections[0].requests) == n_asked


@pytest.mark.parametrize(
    ("mappings", "verdicts", "reach"),
    [
        ({4: Mapping.NONE}, {4: Verdict.PUBLIC}, Reach.PUBLIC),
        ({4: Mapping.SAME}, {4: Verdict.PUBLIC}, Reach.PUBLIC),  # a port is forwarded
        ({4: Mapping.VARYING, 6: Mapping.NONE}, {6: Verdict.PUBLIC}, Reach.PUBLIC),
        ({4: Mapping.NONE}, {4: Verdict.CLOSED}, Reach.PUNCHABLE),  # a firewall
        ({4: Mapping.NONE}, {4: Verdict.UNKNOWN}, Reach.UNKNOWN),
        ({4: Mapping.SAME}, {4: Verdict.CLOSED}, Reach.PUNCHABLE),
        ({4: Mapping.VARYING}, {4: Verdict.CLOSED}, Reach.RELAYED),
        ({4: Mapping.BLOCKED, 6: Mapping.BLOCKED}, {}, Reach.RELAYED),
        ({4: Mapping.UNKNOWN}, {}, Reach.UNKNOWN),
    ],
)
def test_the_best_kind_of_ip_counts(mappings: dict[int, Mapping], verdicts: dict[int, Verdict], reach: Reach) -> None:
    assert classify(mappings, verdicts) is reach


def test_what_came_in_counts_whatever_the_relay_says() -> None:
    assert judge(n_asked=0, n_hosts=0) is Verdict.UNKNOWN
    assert judge(n_asked=0, n_hosts=1) is Verdict.PUBLIC
    assert judge(n_asked=2, n_hosts=2) is Verdict.PUBLIC
