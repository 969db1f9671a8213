"""The registry client in a ring larger than a place's replicas: who is told, who is asked, what goes on when they are away.

In memory, in virtual time; the small rings are in test_client.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from swarm.errors import NetworkError, Overloaded
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.net.endpoint import Endpoint
from swarm.registry import answers as answers_module
from swarm.registry import view as view_module
from swarm.registry.cache import RegistryCache
from swarm.registry.client import (
    FRESH_S,
    WATCH_REST_S,
    RegistryAddress,
    RegistryClient,
)
from swarm.registry.contacts import MAX_DIALLED, SUSPECT_S
from swarm.registry.membership import MAX_PER_PREFIX, MEMBER_TTL_S
from swarm.registry.node import RegistryNode
from swarm.registry.records import (
    NO_MODEL,
    ModelOffer,
    Record,
    RecordKind,
    RegistryNodeRecord,
    RoutingHistogram,
    SignedRecord,
    Withdrawal,
    sign,
    verify,
)
from swarm.registry.ring import N_REPLICAS, THE_DIRECTORY, Ring
from swarm.registry.view import MEMBERS_RETRY_S, MEMBERS_S, REQUEST_TIMEOUT_S
from swarm.wire import messages as m
from tests import virtual_time
from tests.fake_network import FakeEndpoint, FakeNetwork, FakeNode
from tests.sample_records import sample_announcement, sample_offer
from tests.virtual_time import now

US, A, B = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
MODEL, OTHER_MODEL = ModelId(b"m" * 32), ModelId(b"n" * 32)


def announcement(identity: Identity, seq: int, *, model: ModelId = MODEL, experts: range = range(4)) -> SignedRecord:
    record = sample_announcement(
        identity.node_id, seq=seq, model=model, experts=ExpertSet.of([0], experts), addresses=("192.0.2.77:1",)
    )
    return sign(record, identity)


def offer(identity: Identity, seq: int, *, n_expert: int = 40, model: ModelId = MODEL) -> SignedRecord:
    record = sample_offer(identity.node_id, seq=seq, model=model, n_expert=n_expert, addresses=("192.0.2.77:2",))
    return sign(record, identity)


class RingOfTwelve:
    """Twelve registry nodes that know each other, and clients that were told of the first."""

    def __init__(self, n_nodes: int = 12) -> None:
        self.network = FakeNetwork()
        self.clients: list[RegistryClient] = []
        self.identities = [Identity.from_seed(bytes([100 + n]) * 32) for n in range(n_nodes)]
        self.nodes: dict[NodeId, RegistryNode] = {}
        self.fakes: dict[NodeId, FakeNode] = {}
        for n, identity in enumerate(self.identities):
            node = RegistryNode(now=now, own=identity.node_id, pick=lambda size: 0)
            fake = FakeNode(node_id=identity.node_id, answer=node.answer, observed_address=f"198.51.100.{n}:9")
            self.nodes[identity.node_id], self.fakes[identity.node_id] = node, fake
            self.network.nodes[self.address(n)] = fake
        self.introduce(seq=1)

    def address(self, n: int) -> tuple[str, int]:
        return f"198.51.{n}.1", 7440

    def introduce(self, seq: int, *, without: NodeId | None = None) -> None:
        for n, identity in enumerate(self.identities):
            record = RegistryNodeRecord(
                node=identity.node_id, seq=seq, ttl_s=MEMBER_TTL_S, addresses=(f"198.51.{n}.1:7440",)
            )
            signed = sign(record, identity)
            for node_id, node in self.nodes.items():
                if node_id == identity.node_id:
                    node.replica.membership.set_own(record, signed, now())
                elif identity.node_id != without:
                    node.replica.membership.learn(record, signed, now(), is_proved=True)

    def client(self, *seeds: int, cache: RegistryCache | None = None) -> RegistryClient:
        addresses = [RegistryAddress(address=self.address(n), node=self.identities[n].node_id) for n in seeds or (0,)]
        client = RegistryClient(cast(Endpoint, FakeEndpoint(self.network, US)), addresses, cache=cache)
        self.clients.append(client)
        return client

    def client_of(self, identity: Identity) -> RegistryClient:
        addresses = [RegistryAddress(address=self.address(0), node=self.identities[0].node_id)]
        client = RegistryClient(cast(Endpoint, FakeEndpoint(self.network, identity)), addresses)
        self.clients.append(client)
        return client

    @property
    def ring(self) -> Ring:
        return self.nodes[self.identities[0].node_id].replica.membership.ring

    def holding(self, identity: Identity) -> set[NodeId]:
        """Return the registry nodes that have a live record of a node."""
        return {
            node_id
            for node_id, node in self.nodes.items()
            if any(identity.node_id == key[0] and slot.signed for key, slot in node.table._slots.items())
        }

    def n_requests(self) -> dict[NodeId, int]:
        return {node: self.network.count("request", node) for node in self.nodes}


@pytest.fixture
def asks_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom a client asks beside its seeds is drawn otherwise: one that has left says itself that it is there."""
    monkeypatch.setattr(random, "sample", lambda of, n: sorted(of, key=lambda contact: contact.addresses[0])[:n])


def run(main: Callable[[RingOfTwelve], Coroutine[Any, Any, None]]) -> None:

    async def and_close() -> None:
        them = RingOfTwelve()
        await main(them)
        for client in them.clients:
            await client.close()

    virtual_time.run(and_close())


def test_a_record_goes_to_the_five_of_each_of_its_places_and_is_found_in_one_round_trip() -> None:
    async def main(them: RingOfTwelve) -> None:
        client = them.client_of(A)
        assert await client.publish(announcement(A, 4, experts=range(40))) == 4
        expected = {node for bucket in range(3) for node in them.ring.closest((MODEL, bucket))}
        assert them.holding(A) == expected
        reader = them.client()
        assert set(await reader.members()) == set(them.nodes)
        await reader.holders(MODEL, 16)  # dials
        before, started = them.n_requests(), now()
        assert [record.seq for record in await reader.holders(MODEL, 16)] == [4]
        asked = {node for node, n in them.n_requests().items() if n > before[node]}
        assert asked == set(them.ring.closest((MODEL, 0)))
        assert now() - started == pytest.approx(0.01), "one round trip"

    run(main)


def test_the_number_of_experts_comes_from_the_offers_and_is_asked_for_once() -> None:
    async def main(them: RingOfTwelve) -> None:
        await them.client_of(B).publish(offer(B, 1, n_expert=40))
        await them.client_of(A).publish(announcement(A, 4, experts=range(33, 40)))
        reader = them.client()
        assert [record.node for record in await reader.holders(MODEL)] == [A.node_id]
        await asyncio.sleep(1.0)  # until the slower dials are done
        before = sum(them.n_requests().values())
        await reader.holders(MODEL)
        wanted = {node for bucket in range(3) for node in them.ring.closest((MODEL, bucket))}
        assert sum(them.n_requests().values()) - before == len(wanted), "one request to each, whatever it stores"

    run(main)


def test_offers_of_all_models_come_from_the_directory_and_records_from_everywhere() -> None:
    async def main(them: RingOfTwelve) -> None:
        await them.client_of(B).publish(offer(B, 1))
        await them.client_of(A).publish(offer(A, 1, model=OTHER_MODEL))
        await them.client_of(A).publish(announcement(A, 4, model=OTHER_MODEL))
        reader = them.client()
        assert {each.model for each in await reader.offers()} == {MODEL, OTHER_MODEL}
        assert {each.model for each in await reader.offers(MODEL)} == {MODEL}
        kinds = [each.kind for each in await reader.records()]
        assert sorted(kinds) == [RecordKind.EXPERTS, RecordKind.MODEL, RecordKind.MODEL]
        assert set(them.ring.closest(THE_DIRECTORY)) <= them.holding(B)

    run(main)


def test_histograms_are_found_by_model() -> None:
    async def main(them: RingOfTwelve) -> None:
        record = RoutingHistogram(
            node=B.node_id, seq=1, ttl_s=300, model=MODEL, n_tokens=9, window_s=60, loads=((0, "f00d"),)
        )
        await them.client_of(B).publish(sign(record, B))
        reader = them.client()
        assert await reader.histograms(MODEL) == [record]
        assert await reader.histograms(OTHER_MODEL) == []

    run(main)


def test_a_withdrawal_follows_its_record() -> None:
    async def main(them: RingOfTwelve) -> None:
        client = them.client_of(A)
        await client.publish(announcement(A, 4, experts=range(40)))
        gone = Withdrawal(node=A.node_id, seq=5, model=MODEL, withdraws=RecordKind.EXPERTS)
        await client.publish(sign(gone, A))
        assert them.holding(A) == set()
        assert await them.client().holders(MODEL, 40) == []

    run(main)


def test_a_replica_that_is_down_delays_a_reader_little_and_once() -> None:
    async def main(them: RingOfTwelve) -> None:
        await them.client_of(A).publish(announcement(A, 4))
        reader = them.client()
        await reader.members()
        near = [node for node in them.ring.closest((MODEL, 0)) if node != them.identities[0].node_id]
        for node in near[:2]:
            them.fakes[node].is_up = False
        started = now()
        assert len(await reader.holders(MODEL, 16)) == 1
        assert now() - started <= 1.01, "two round trips of a guessed half second"
        await asyncio.sleep(5.0)  # until the dials have failed
        started = now()
        assert len(await reader.holders(MODEL, 16)) == 1
        assert now() - started <= 0.05, "others are asked in their place"

    run(main)


def test_replicas_that_fall_silent_are_noticed_though_each_lookup_gives_them_up_early() -> None:
    async def main(them: RingOfTwelve) -> None:
        await them.client_of(A).publish(announcement(A, 4))
        reader = them.client()
        for _ in range(3):
            await reader.holders(MODEL, 16)  # all are dialled, and their round trips known
        near = [node for node in them.ring.closest((MODEL, 0)) if node != them.identities[0].node_id]
        for node in near[:2]:
            them.fakes[node].is_up = False  # without a word: their connections look open
        took = []
        for _ in range(6):
            started = now()
            assert len(await reader.holders(MODEL, 16)) == 1
            took.append(round(now() - started, 3))
            await asyncio.sleep(0.5)
        assert max(took[:2]) <= 0.06, "two round trips, or a moment"
        assert took[-1] == 0.01, "others are asked in their place"

    run(main)


def test_a_writer_tells_others_in_place_of_one_that_is_down_and_it_again_when_it_is_back() -> None:
    async def main(them: RingOfTwelve) -> None:
        client = them.client_of(A)
        near = them.ring.closest((MODEL, 0), N_REPLICAS + 1)
        down = next(node for node in near if node != them.identities[0].node_id)
        await client.members()
        them.fakes[down].is_up = False
        await client.publish(announcement(A, 4))
        assert them.holding(A) == set(near[:N_REPLICAS]) - {down}
        await client.publish(announcement(A, 5))
        assert them.holding(A) == set(near) - {down}
        them.fakes[down].is_up = True
        await asyncio.sleep(SUSPECT_S + 1e-3)
        await client.publish(announcement(A, 6))
        assert down in them.holding(A)

    run(main)


def test_a_view_that_is_out_of_date_is_asked_for_anew_and_the_record_told_again() -> None:
    async def main(them: RingOfTwelve) -> None:
        client = them.client_of(A)
        await client.members()
        for fake in list(them.fakes.values()):
            inner = fake.answer

            def refuse_once(asker: NodeId, request: m.Request, fake: FakeNode = fake, inner: Any = inner) -> Any:
                if isinstance(request, m.Announce):
                    fake.answer = inner
                    raise LookupError("these records are stored at other registry nodes")
                return inner(asker, request)

            fake.answer = refuse_once
        n_members = sum(them.n_requests().values())
        assert await client.publish(announcement(A, 4)) == 4
        assert sum(them.n_requests().values()) - n_members >= 2 * N_REPLICAS + 1

    run(main)


@pytest.mark.usefixtures("asks_the_first")
def test_members_are_asked_for_now_and_then_and_more_often_while_a_named_one_is_away() -> None:
    async def main(them: RingOfTwelve) -> None:
        client = them.client(0)
        assert len(await client.members()) == 12
        gone = them.identities[-1]
        left = Withdrawal(node=gone.node_id, seq=2, model=NO_MODEL, withdraws=RecordKind.REGISTRY)
        for node in them.nodes.values():
            node.replica.membership.learn(left, sign(left, gone), now())
        assert len(await client.members()) == 12
        await asyncio.sleep(MEMBERS_S + 1e-3)  # a float may fall short of the sum by its last bit
        assert len(await client.members()) == 11
        second = them.client(0, 1)
        them.fakes[them.identities[1].node_id].is_up = False
        await second.members()
        before = them.network.count("request", them.identities[0].node_id)
        await asyncio.sleep(MEMBERS_RETRY_S + 1e-3)
        await second.members()
        assert them.network.count("request", them.identities[0].node_id) == before + 1

    run(main)


def test_once_the_ring_is_known_the_named_node_may_be_away() -> None:
    async def main(them: RingOfTwelve) -> None:
        client = them.client_of(A)
        await client.publish(announcement(A, 4))
        them.fakes[them.identities[0].node_id].is_up = False
        them.fakes[them.identities[0].node_id].lose_connections()
        await asyncio.sleep(MEMBERS_S + 1e-3)  # a float may fall short of the sum by its last bit
        assert await client.publish(announcement(A, 5)) == 5
        assert [record.seq for record in await client.holders(MODEL, 16)] == [5]

    run(main)


def test_ground_members_of_one_network_get_one_replica_in_a_clients_ring_too() -> None:
    async def main(them: RingOfTwelve) -> None:
        assert set((await them.client().members()).values()) == {f"198.51.{n}.0/24" for n in range(12)}

    run(main)


@pytest.mark.parametrize("n_down", [2, 5])
def test_a_member_that_goes_out_of_the_view_under_a_look_up_does_not_end_it(n_down: int) -> None:
    async def main(them: RingOfTwelve) -> None:
        await them.client_of(A).publish(announcement(A, 4))
        reader = them.client()
        await reader.members()
        near = [node for node in them.ring.closest((MODEL, 0)) if node != them.identities[0].node_id]
        for node in near[:n_down]:
            them.fakes[node].is_up = False
        looking = asyncio.create_task(reader.holders(MODEL, 16))
        await asyncio.sleep(0.5)
        spares = [each for each in them.identities if each.node_id not in (*near, them.identities[0].node_id)]
        for gone in spares + [each for each in them.identities if each.node_id in near]:
            left = Withdrawal(node=gone.node_id, seq=2, model=NO_MODEL, withdraws=RecordKind.REGISTRY)
            for node in them.nodes.values():
                node.replica.membership.learn(left, sign(left, gone), now())
        reader.forget_view()
        assert len(await reader.members()) < 12
        assert {record.node for record in await looking} <= {A.node_id}

    run(main)


@pytest.mark.usefixtures("asks_the_first")
def test_a_contact_that_has_left_the_view_is_closed_later() -> None:
    async def main(them: RingOfTwelve) -> None:
        reader = them.client()
        await reader.members()
        gone = them.identities[-1]
        connection = await reader._view.contact(gone.node_id).connect()
        left = Withdrawal(node=gone.node_id, seq=2, model=NO_MODEL, withdraws=RecordKind.REGISTRY)
        for node in them.nodes.values():
            node.replica.membership.learn(left, sign(left, gone), now())
        await asyncio.sleep(MEMBERS_S + 1e-3)  # a float may fall short of the sum by its last bit
        assert gone.node_id not in await reader.members()
        assert reader._view.contact(gone.node_id).connection is connection, "a look-up may still hold the old ring"
        await asyncio.sleep(MEMBERS_S + 1e-3)  # a float may fall short of the sum by its last bit
        await reader.members()
        assert not connection.is_open
        with pytest.raises(NetworkError, match="no member any more"):
            reader._view.contact(gone.node_id)

    run(main)


def test_a_member_with_many_dead_addresses_delays_a_writer_by_one_deadline() -> None:
    async def main(them: RingOfTwelve) -> None:
        client = them.client_of(A)
        hostile = next(
            identity
            for identity in (Identity.from_seed(n.to_bytes(32)) for n in range(10_000, 20_000))
            if Ring({**them.ring.members, identity.node_id: None}).closest((MODEL, 0))[0] == identity.node_id
        )
        dead = tuple(f"203.0.113.{n}:1" for n in range(8))
        record = RegistryNodeRecord(node=hostile.node_id, seq=1, ttl_s=MEMBER_TTL_S, addresses=dead)
        for node in them.nodes.values():
            node.replica.membership.learn(record, sign(record, hostile), now(), is_proved=True)
        assert hostile.node_id in await client.members()
        started = now()
        assert await client.publish(announcement(A, 4)) == 4
        assert 1.0 < now() - started <= REQUEST_TIMEOUT_S + 0.1
        await asyncio.sleep(60.0)
        assert them.network.count("dial", hostile.node_id) == MAX_DIALLED

    run(main)


# Who is believed to be a member


def lie(fake: FakeNode, members: list[tuple[Identity, str]]) -> None:
    """Let a registry node name these members, and nobody else."""
    records = []
    for identity, address in members:
        record = RegistryNodeRecord(node=identity.node_id, seq=1, ttl_s=MEMBER_TTL_S, addresses=(address,))
        records.append((60_000, sign(record, identity).to_bytes()))
    inner = fake.answer

    def answer(asker: NodeId, request: m.Request) -> m.Response | None:
        return (
            m.Members(gone=(), records=tuple(records)) if isinstance(request, m.GetMembers) else inner(asker, request)
        )

    fake.answer = answer


def test_one_liars_names_enter_no_view() -> None:
    async def main(them: RingOfTwelve) -> None:
        fakes = [(Identity.from_seed(bytes([50 + n]) * 32), f"203.{n}.113.1:1") for n in range(40)]
        lie(them.fakes[them.identities[2].node_id], fakes)
        members = set(await them.client(0, 1, 2).members())
        assert members == set(them.nodes)

    run(main)


@pytest.mark.parametrize("network", ["203.0.113.{}:1", "10.0.0.{}:1", "127.0.0.{}:1"])
def test_one_network_gets_its_share_of_a_view_and_no_more(network: str) -> None:
    async def main(them: RingOfTwelve) -> None:
        fakes = [(Identity.from_seed(bytes([50 + n]) * 32), network.format(n + 1)) for n in range(40)]
        lie(them.fakes[them.identities[0].node_id], fakes)
        assert len(await them.client(0).members()) == MAX_PER_PREFIX

    run(main)


def test_a_view_is_bounded_and_what_is_asked_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "MAX_MEMBERS", 7)

    async def main(them: RingOfTwelve) -> None:
        fakes = [(Identity.from_seed(bytes([50 + n]) * 32), f"203.{n}.113.1:1") for n in range(40)]
        fake = them.fakes[them.identities[0].node_id]
        lie(fake, fakes)
        inner, known = fake.answer, []

        def answer(asker: NodeId, request: m.Request) -> m.Response | None:
            if isinstance(request, m.GetMembers):
                known.append(len(request.known))
            return inner(asker, request)

        fake.answer = answer
        client = them.client(0)
        assert len(await client.members()) == 7
        client.forget_view()
        await client.members()
        assert known == [0, 7]

    run(main)


def test_an_offer_of_this_machine_is_not_believed_from_another_ones_replica() -> None:
    async def main(them: RingOfTwelve) -> None:
        record = verify(offer(B, 1))
        assert isinstance(record, ModelOffer)
        here = sign(dataclasses.replace(record, addresses=("127.0.0.1:2",)), B)
        for node in them.nodes.values():
            node.table.put_verified(verify(here), here, owner=None, now=now())
        assert [each.node for each in await them.client(0).offers(MODEL)] == [B.node_id], "it is not trusted either"
        local = FakeNode(node_id=US.node_id, answer=RegistryNode(now=now, own=US.node_id).answer)
        them.network.nodes["127.0.0.1", 7440] = local
        lie(local, [(each, f"198.51.{n}.1:7440") for n, each in enumerate(them.identities)])
        addresses = [RegistryAddress(address=("127.0.0.1", 7440), node=US.node_id)]
        client = RegistryClient(cast(Endpoint, FakeEndpoint(them.network, A)), addresses)
        them.clients.append(client)
        assert len(await client.members()) == 12
        assert await client.offers(MODEL) == []

    run(main)


# Watching


def test_a_watch_that_is_always_answered_at_once_rests_between() -> None:
    async def main(them: RingOfTwelve) -> None:
        for fake in them.fakes.values():
            inner = fake.answer

            def hasty(asker: NodeId, request: m.Request, inner: Any = inner) -> Any:
                return m.Changes(cursor=1, records=()) if isinstance(request, m.Watch) else inner(asker, request)

            fake.answer = hasty
        await them.client_of(B).publish(offer(B, 1, n_expert=16))
        reader = them.client()
        task = asyncio.create_task(reader.watch(MODEL, lambda news: None))
        await asyncio.sleep(1.0)
        before = sum(them.n_requests().values())
        await asyncio.sleep(10.0)
        assert sum(them.n_requests().values()) - before <= 2 * 10.0 / WATCH_REST_S
        task.cancel()
        await asyncio.wait([task])

    run(main)


@pytest.mark.parametrize(("asked_s", "n_tries"), [(1.0, 10), (0.0, 40), (3600.0, 2), (None, 2)])
def test_a_watch_that_is_put_off_waits_as_long_as_it_is_told_within_bounds(asked_s: float | None, n_tries: int) -> None:
    async def main(them: RingOfTwelve) -> None:
        await them.client_of(B).publish(offer(B, 1, n_expert=16))
        first = them.ring.closest((MODEL, 0))[0]
        n_asked = 0
        for node, fake in them.fakes.items():
            inner = fake.answer

            def busy(asker: NodeId, request: m.Request, node: NodeId = node, inner: Any = inner) -> Any:
                nonlocal n_asked
                if not isinstance(request, m.Watch):
                    return inner(asker, request)
                n_asked += node == first
                if asked_s is None:
                    raise LookupError("not here")
                raise Overloaded("too many", retry_after_s=asked_s)

            fake.answer = busy
        reader = them.client()
        task = asyncio.create_task(reader.watch(MODEL, lambda news: None))
        await asyncio.sleep(1.0)
        before = n_asked
        await asyncio.sleep(10.0)
        assert n_asked - before == pytest.approx(n_tries, abs=3 if n_tries > 10 else 1)
        task.cancel()
        await asyncio.wait([task])

    run(main)


def test_a_watch_that_does_not_stand_keeps_nobody_from_asking() -> None:
    async def main(them: RingOfTwelve) -> None:
        await them.client_of(B).publish(offer(B, 1, n_expert=16))
        for fake in them.fakes.values():
            inner = fake.answer

            def busy(asker: NodeId, request: m.Request, inner: Any = inner) -> Any:
                if isinstance(request, m.Watch):
                    raise Overloaded("too many", retry_after_s=25.0)
                return inner(asker, request)

            fake.answer = busy
        reader = them.client()
        task = asyncio.create_task(reader.watch(MODEL, lambda news: None))
        await asyncio.sleep(1.0)
        for _ in range(3):
            before = sum(them.n_requests().values())
            await reader.holders(MODEL)
            assert sum(them.n_requests().values()) > before
        task.cancel()
        await asyncio.wait([task])

    run(main)


def test_a_watch_tells_of_what_is_new_until_it_is_cancelled() -> None:
    async def main(them: RingOfTwelve) -> None:
        told: list[Record] = []
        reader = them.client()
        await them.client_of(B).publish(offer(B, 1, n_expert=16))
        client = them.client_of(A)
        await client.publish(announcement(A, 1))
        task = asyncio.create_task(reader.watch(MODEL, told.extend))
        await asyncio.sleep(1.0)
        assert told == [], "what was there already is no news"
        await client.publish(announcement(A, 2, experts=range(8)))
        await asyncio.sleep(1.0)
        assert {(record.node, record.seq) for record in told} == {(A.node_id, 2)}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main)


def test_while_a_watch_stands_a_large_ring_is_not_asked_again_until_it_tells_of_news() -> None:
    async def main(them: RingOfTwelve) -> None:
        reader = them.client()
        await them.client_of(B).publish(offer(B, 1, n_expert=16))
        client = them.client_of(A)
        await client.publish(announcement(A, 1))
        task = asyncio.create_task(reader.watch(MODEL, lambda news: None))
        await asyncio.sleep(1.0)

        async def n_asked() -> int:
            before = sum(them.n_requests().values())
            assert [record.node for record in await reader.holders(MODEL)] == [A.node_id]
            return sum(them.n_requests().values()) - before

        assert [await n_asked() > 0, await n_asked() > 0] == [True, False]
        await client.publish(announcement(A, 2, experts=range(8)))
        await asyncio.sleep(1.0)
        assert [record.seq for record in await reader.holders(MODEL)] == [2]
        assert await n_asked() == 0
        await asyncio.sleep(FRESH_S + 1e-3)
        assert await n_asked() > 0
        task.cancel()
        await asyncio.wait([task])
        assert await n_asked() > 0, "without a watch every question is asked"

    run(main)


def test_a_signature_is_checked_once_however_many_replicas_tell_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    n_checked = 0

    def count(signed: SignedRecord) -> Record:
        nonlocal n_checked
        n_checked += 1
        return verify(signed)

    async def main(them: RingOfTwelve) -> None:
        nonlocal n_checked
        await them.client_of(A).publish(announcement(A, 1))
        reader = them.client()
        await reader.members()
        monkeypatch.setattr(answers_module, "verify", count)
        for _ in range(3):
            assert len(await reader.holders(MODEL, 16)) == 1
        assert n_checked == 1

    run(main)


def test_a_watch_outlives_its_registry_nodes() -> None:
    async def main(them: RingOfTwelve) -> None:
        told: list[Record] = []
        reader = them.client()
        await them.client_of(B).publish(offer(B, 1, n_expert=16))
        task = asyncio.create_task(reader.watch(MODEL, told.extend))
        await asyncio.sleep(1.0)
        for fake in them.fakes.values():
            fake.is_up = False
            fake.lose_connections()
        await asyncio.sleep(20.0)
        for fake in them.fakes.values():
            fake.is_up = True
        await asyncio.sleep(20.0)
        await them.client_of(A).publish(announcement(A, 2))
        await asyncio.sleep(1.0)
        assert {record.node for record in told} == {A.node_id}
        task.cancel()
        await asyncio.wait([task])

    run(main)


# What is kept on disk


class MemoryCache(RegistryCache):
    """A cache whose file is a variable: virtual time knows no threads."""

    def __init__(self, content: tuple[list[SignedRecord], list[SignedRecord]] = ([], [])) -> None:
        super().__init__(Path("nowhere"))
        self.content = content
        self.n_saved = 0

    def load(self) -> tuple[list[SignedRecord], list[SignedRecord]]:
        return self.content

    def save(self, members: Any, records: Any) -> None:
        self.content = list(members), list(records)
        self.n_saved += 1


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", here)


def test_with_no_registry_node_left_a_new_client_goes_on_with_what_was_found_last_time() -> None:
    cache = MemoryCache()

    async def main(them: RingOfTwelve) -> None:
        await them.client_of(B).publish(offer(B, 1, n_expert=16))
        await them.client_of(A).publish(announcement(A, 4))
        first = them.client(cache=cache)
        await first.offers(MODEL)
        await asyncio.sleep(120)
        assert cache.n_saved == 1
        for fake in them.fakes.values():
            fake.is_up = False
        second = them.client(cache=cache)
        assert [record.node for record in await second.offers(MODEL)] == [B.node_id]

    run(main)


def test_the_members_of_last_time_are_tried_when_the_named_one_is_away() -> None:
    cache = MemoryCache()

    async def main(them: RingOfTwelve) -> None:
        await them.client_of(A).publish(announcement(A, 4))
        await them.client(cache=cache).holders(MODEL, 16)
        them.fakes[them.identities[0].node_id].is_up = False
        assert len(cache.content[0]) == 12
        second = them.client(cache=cache)
        assert [record.seq for record in await second.holders(MODEL, 16)] == [4]

    run(main)


def test_a_client_that_was_answered_once_says_when_nobody_answers_any_more() -> None:
    cache = MemoryCache()

    async def main(them: RingOfTwelve) -> None:
        client = them.client(cache=cache)
        await them.client_of(A).publish(announcement(A, 4))
        assert len(await client.holders(MODEL, 16)) == 1
        for fake in them.fakes.values():
            fake.is_up = False
            fake.lose_connections()
        with pytest.raises(NetworkError):
            await client.holders(MODEL, 16)

    run(main)


def test_a_forged_record_in_the_cache_is_not_used() -> None:
    good = announcement(A, 4)
    forged = SignedRecord(payload=good.payload.replace(b'"seq":4', b'"seq":9'), signature=good.signature)

    async def main(them: RingOfTwelve) -> None:
        for fake in them.fakes.values():
            fake.is_up = False
        client = them.client(cache=MemoryCache(([forged], [forged, good])))
        assert [record.seq for record in await client.holders(MODEL, 16)] == [4]

    run(main)
