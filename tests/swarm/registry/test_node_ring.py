"""A registry node's shell: calls are performed, watches wait, a leave is told. In memory, in virtual time."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from swarm.errors import Overloaded
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.net.endpoint import Endpoint
from swarm.registry import answers as answers_module
from swarm.registry import node as node_module
from swarm.registry.announcer import SequenceNumbers
from swarm.registry.membership import MEMBER_TTL_S
from swarm.registry.node import (
    MAX_WATCHES_PER_MODEL,
    MAX_WATCHES_PER_PREFIX,
    WATCH_S,
    RegistryNode,
    RingMember,
)
from swarm.registry.records import RegistryNodeRecord, SignedRecord, sign
from swarm.wire import messages as m
from tests import virtual_time
from tests.fake_network import FakeEndpoint, FakeNetwork, FakeNode
from tests.sample_records import sample_announcement
from tests.virtual_time import now

A, B, C, PEER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3, 4))
MODEL, OTHER_MODEL = ModelId(b"m" * 32), ModelId(b"n" * 32)


def announcement(seq: int, *, model: ModelId = MODEL, experts: range = range(4)) -> SignedRecord:
    record = sample_announcement(
        PEER.node_id, seq=seq, model=model, experts=ExpertSet.of([0], experts), addresses=("192.0.2.1:1",)
    )
    return sign(record, PEER)


class Rings:
    """Registry nodes on a fake network, each run by a task."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.nodes: dict[NodeId, RegistryNode] = {}
        self.fakes: dict[NodeId, FakeNode] = {}
        self.tasks: dict[NodeId, asyncio.Task[None]] = {}

    def start(self, identity: Identity, *seeds: int, has_ids: bool = True, stores: bool = True) -> RegistryNode:
        n = (A, B, C).index(identity)
        node = RegistryNode(now=now, own=identity.node_id)
        self.nodes[identity.node_id] = node
        self.fakes[identity.node_id] = FakeNode(node_id=identity.node_id, answer=node.answer)
        self.network.nodes[f"198.51.{n}.1", 7440] = self.fakes[identity.node_id]
        member = RingMember(
            node,
            cast(Endpoint, FakeEndpoint(self.network, identity)),
            identity,
            SequenceNumbers(None),
            address=f"198.51.{n}.1:7440" if stores else None,
            seeds=[((f"198.51.{k}.1", 7440), (A, B, C)[k].node_id if has_ids else None) for k in seeds],
            now=now,
        )
        self.tasks[identity.node_id] = asyncio.create_task(member.run())
        return node

    def view(self, identity: Identity) -> set[NodeId]:
        return set(self.nodes[identity.node_id].replica.membership.ring.members)

    async def stop(self, *identities: Identity) -> None:
        for identity in identities or (A, B, C):
            if (task := self.tasks.pop(identity.node_id, None)) is not None:
                task.cancel()
                await asyncio.wait([task])
                self.fakes[identity.node_id].is_up = False


@pytest.mark.parametrize("has_ids", [True, False])
def test_nodes_find_each_other_by_one_seed_with_or_without_its_id(has_ids: bool) -> None:
    async def main() -> None:
        them = Rings()
        them.start(A)
        them.start(B, 0, has_ids=has_ids)
        them.start(C, 0, has_ids=has_ids)
        await asyncio.sleep(30)
        everybody = {A.node_id, B.node_id, C.node_id}
        assert [them.view(each) for each in (A, B, C)] == [everybody] * 3
        await them.stop()

    virtual_time.run(main())


def test_a_seed_that_is_not_there_yet_is_found_later() -> None:
    async def main() -> None:
        them = Rings()
        them.start(B, 0, has_ids=False)
        await asyncio.sleep(30)
        them.start(A)
        await asyncio.sleep(30)
        assert them.view(B) == {A.node_id, B.node_id}
        await them.stop()

    virtual_time.run(main())


def test_who_leaves_is_forgotten_at_once_and_who_dies_when_its_lease_ends() -> None:
    async def main() -> None:
        them = Rings()
        them.start(A)
        them.start(B, 0)
        them.start(C, 0)
        await asyncio.sleep(60)
        await them.stop(C)
        await asyncio.sleep(0.1)
        assert them.view(A) == them.view(B) == {A.node_id, B.node_id}
        them.tasks[B.node_id].cancel()
        them.fakes[B.node_id].is_up = False
        them.fakes[B.node_id].lose_connections()
        await asyncio.sleep(MEMBER_TTL_S + 10)
        assert them.view(A) == {A.node_id}
        await them.stop()

    virtual_time.run(main())


def test_a_node_that_only_follows_refuses_records_and_is_in_nobodys_ring() -> None:
    async def main() -> None:
        them = Rings()
        them.start(A)
        follower = them.start(B, 0, stores=False)
        await asyncio.sleep(30)
        assert them.view(A) == them.view(B) == {A.node_id}
        with pytest.raises(LookupError, match="stores no records"):
            follower.answer(PEER.node_id, m.Announce(record=announcement(1).to_bytes()))
        await them.stop()

    virtual_time.run(main())


def test_records_reach_the_other_replicas_of_a_small_ring() -> None:
    async def main() -> None:
        them = Rings()
        node = them.start(A)
        them.start(B, 0)
        await asyncio.sleep(20)
        node.answer(PEER.node_id, m.Announce(record=announcement(1).to_bytes()))
        await asyncio.sleep(40)
        assert len(them.nodes[B.node_id].table) == 1
        await them.stop()

    virtual_time.run(main())


# Watching


async def watch(node: RegistryNode, cursor: int, model: ModelId = MODEL) -> m.Changes:
    answer = await node.serve(C.node_id, m.Watch(model_id=model, cursor=cursor))
    assert isinstance(answer, m.Changes)
    return answer


def test_a_watch_is_answered_when_its_model_changes_and_not_before() -> None:
    async def main() -> None:
        node = RegistryNode(now=now)
        start = await watch(node, 0)
        waiting = [asyncio.create_task(watch(node, start.cursor)) for _ in range(2)]
        other = asyncio.create_task(watch(node, start.cursor, OTHER_MODEL))
        await asyncio.sleep(5)
        assert not any(task.done() for task in waiting)
        node.answer(PEER.node_id, m.Announce(record=announcement(1).to_bytes()))
        await asyncio.sleep(0.001)
        for task in waiting:
            assert [data for _, data in task.result().records] == [announcement(1).to_bytes()]
        assert not other.done()
        again = asyncio.create_task(watch(node, waiting[0].result().cursor))
        node.answer(PEER.node_id, m.Announce(record=announcement(2).to_bytes()))
        await asyncio.sleep(1)
        assert not again.done(), "a renewal is no news"
        assert (await other).records == ()
        assert (await again).records == ()

    virtual_time.run(main())


def test_a_watch_ends_without_news_before_anybody_gives_it_up() -> None:
    async def main() -> None:
        node = RegistryNode(now=now)
        start = await watch(node, 0)
        began = now()
        assert await watch(node, start.cursor) == start
        assert now() - began == pytest.approx(WATCH_S)
        assert not node._watching

    virtual_time.run(main())


def test_watches_are_bounded_and_a_cancelled_one_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(node_module, "MAX_WATCHES", 1)
        node = RegistryNode(now=now)
        start = await watch(node, 0)
        first = asyncio.create_task(watch(node, start.cursor))
        await asyncio.sleep(1)
        with pytest.raises(Overloaded):
            await watch(node, start.cursor)
        first.cancel()
        await asyncio.wait([first])
        await watch(node, 0)
        assert not node._watching

    virtual_time.run(main())


def test_one_asker_has_few_watches_of_a_model_and_one_network_has_not_all() -> None:
    async def main() -> None:
        node = RegistryNode(now=now)
        start = await watch(node, 0)
        tasks: list[asyncio.Task[m.Response]] = []

        async def fits(asker: NodeId, host: str, model: ModelId = MODEL) -> bool:
            request = m.Watch(model_id=model, cursor=start.cursor)
            tasks.append(asyncio.create_task(node.serve(asker, request, host=host)))
            await asyncio.sleep(0.001)
            return not tasks[-1].done()

        taken = [await fits(A.node_id, "192.0.2.1") for _ in range(MAX_WATCHES_PER_MODEL + 2)]
        assert taken == [True] * MAX_WATCHES_PER_MODEL + [False] * 2
        assert await fits(A.node_id, "192.0.2.1", OTHER_MODEL)
        keys = [Identity.from_seed(bytes([50 + n]) * 32).node_id for n in range(40)]
        n_taken = sum([await fits(key, "192.0.2.9") for key in keys])
        assert n_taken == MAX_WATCHES_PER_PREFIX - MAX_WATCHES_PER_MODEL - 1
        assert await fits(B.node_id, "198.51.100.1")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not node._watching
        assert not node._n_watches_of
        assert not node._n_watches_from

    virtual_time.run(main())


def test_what_a_member_pushes_is_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(answers_module, "READ_SLICE_S", 0.0)
        node = RegistryNode(now=now, own=A.node_id)
        record = RegistryNodeRecord(node=B.node_id, seq=1, ttl_s=MEMBER_TTL_S, addresses=("198.51.1.1:1",))
        node.replica.membership.learn(record, sign(record, B), now(), is_proved=True)
        n_ticks = 0

        def tick() -> None:
            nonlocal n_ticks
            n_ticks += 1
            asyncio.get_running_loop().call_soon(tick)

        told = tuple((60_000, announcement(seq, model=ModelId(bytes([seq]) * 32)).to_bytes()) for seq in range(1, 9))
        tick()
        await node.serve(B.node_id, m.Push(records=told, wanted=()), host="198.51.1.1")
        assert n_ticks >= len(told)
        assert len(node.table) == len(told)

    virtual_time.run(main())


def test_a_name_is_probed_at_one_address_and_a_member_at_two() -> None:
    async def main() -> None:
        them = Rings()
        node = them.start(A)
        record = RegistryNodeRecord(
            node=B.node_id, seq=1, ttl_s=MEMBER_TTL_S, addresses=tuple(f"203.0.113.{n}:1" for n in range(8))
        )
        node.replica.membership.learn(record, sign(record, B), now())
        await asyncio.sleep(8)
        assert them.network.count("dial", B.node_id) == 1
        await them.stop()

    virtual_time.run(main())
