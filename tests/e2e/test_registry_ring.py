"""A ring of eight real registry processes: they find each other, store and find records, and lose some without losing those."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from swarm.emulation.processes import Child, LocalSwarm
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.net.endpoint import Endpoint
from swarm.registry.client import RegistryClient, parse_registry
from swarm.registry.records import ExpertAnnouncement, Record, SignedRecord, Withdrawal, sign
from swarm.registry.records import RecordKind as Kind

MODEL = ModelId(b"m" * 32)
N_EXPERT = 64
READER, *PEERS = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 10))


def announcement(identity: Identity, seq: int) -> SignedRecord:
    first = PEERS.index(identity) * N_EXPERT // len(PEERS)
    record = ExpertAnnouncement(
        node=identity.node_id,
        seq=seq,
        ttl_s=60,
        model=MODEL,
        model_name="tiny",
        experts=ExpertSet.of([0, 1], range(first, first + N_EXPERT // len(PEERS))),
        addresses=("127.0.0.1:9",),
        exact_kernels=False,
        wire_versions=(1,),
    )
    return sign(record, identity)


@contextlib.asynccontextmanager
async def client_of(registry: str, identity: Identity) -> AsyncIterator[RegistryClient]:
    async with Endpoint(identity, host="127.0.0.1") as endpoint:
        client = RegistryClient(endpoint, parse_registry(registry))
        yield client
        await client.close()


async def wait_members(client: RegistryClient, n_members: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (found := len(await client.members())) != n_members:
        assert time.monotonic() < deadline, f"{found} members, expected {n_members}"
        await asyncio.sleep(0.3)
        client.forget_view()


async def wait_holders(client: RegistryClient, expected: set[NodeId], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (found := {record.node for record in await client.holders(MODEL, N_EXPERT)}) != expected:
        assert time.monotonic() < deadline, f"found {len(found)}, expected {len(expected)}"
        await asyncio.sleep(0.3)


async def test_eight_processes_are_one_registry(tmp_path: Path) -> None:
    async with LocalSwarm(tmp_path) as swarm, contextlib.AsyncExitStack() as stack:
        assert swarm.relay is not None
        others: list[Child] = await asyncio.gather(*(swarm.add_relay() for _ in range(7)))
        reader = await stack.enter_async_context(client_of(swarm.registry, READER))
        await wait_members(reader, 8, 60.0)

        clients: dict[NodeId, RegistryClient] = {}
        for identity in PEERS:  # each by another registry node: they are one
            registry = (others[len(clients) % 7]).ready["registry"]
            clients[identity.node_id] = await stack.enter_async_context(client_of(registry, identity))
            await wait_members(clients[identity.node_id], 8, 30.0)
            assert await clients[identity.node_id].publish(announcement(identity, 5)) == 5
        everybody = set(clients)
        assert {record.node for record in await reader.holders(MODEL, N_EXPERT)} == everybody

        news: asyncio.Queue[Record] = asyncio.Queue()
        watching = asyncio.create_task(reader.watch(MODEL, lambda records: [news.put_nowait(each) for each in records]))
        await asyncio.sleep(1.0)  # until the watches stand; what comes before is found by looking
        leaver = PEERS[0]
        gone = Withdrawal(node=leaver.node_id, seq=6, model=MODEL, withdraws=Kind.EXPERTS)
        await clients[leaver.node_id].publish(sign(gone, leaver))
        async with asyncio.timeout(5.0):  # a replica that has just come by an older record tells of that as well
            while (told := await news.get()).kind is not Kind.WITHDRAWAL:
                assert told.seq == 5
        assert (told.node, told.seq) == (leaver.node_id, 6)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await wait_holders(reader, everybody - {leaver.node_id}, 10.0)

        await asyncio.gather(*(child.kill() for child in others[:2]))
        await wait_holders(reader, everybody - {leaver.node_id}, 10.0)
        again = [identity for identity in PEERS[1:] if identity is not leaver]
        for identity in again:  # renewals go on; a client whose own registry node is dead knows the others
            assert await clients[identity.node_id].publish(announcement(identity, 7)) == 7
        holders = await reader.holders(MODEL, N_EXPERT)
        assert [record.seq for record in holders] == [7] * len(again)
        await others[2].stop()
        await wait_holders(reader, everybody - {leaver.node_id}, 10.0)
