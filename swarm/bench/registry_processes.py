"""The registry's ring in real processes on this machine: relays, and clients that announce and look up over QUIC.

The figures have the names of the simulation's. A third of the relays is killed half-way, and look-ups go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.emulation.processes import Child, LocalSwarm
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.net.endpoint import Endpoint
from swarm.registry.announcer import RENEW_S, TTL_S, Announcer, SequenceNumbers
from swarm.registry.client import RegistryClient, parse_registry
from swarm.registry.records import ExpertAnnouncement
from swarm.wire import messages as m

FORM_TIMEOUT_S = 60.0  # for the processes to start and to know each other
N_LOOKUPS = 60  # in each of three parts: all up, some killed, after the next renewals
ASK_EVERY_S = 0.11  # registry nodes let an asker have ten requests a second
SETTLE_S = 1.3 * RENEW_S
N_EXPERT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """What to start."""

    n_nodes: int = 8
    n_peers: int = 16
    seed: int = 1


async def measure_processes(options: ProcessOptions) -> dict[str, Any]:
    """Return the figures of look-ups in a ring of real relays, before and after a third of them is killed."""
    rng = random.Random(options.seed)
    model = ModelId(rng.randbytes(32))
    with tempfile.TemporaryDirectory() as folder:
        async with LocalSwarm(Path(folder)) as swarm, contextlib.AsyncExitStack() as stack:
            started = time.monotonic()
            relays = [swarm.relay, *await asyncio.gather(*(swarm.add_relay() for _ in range(options.n_nodes - 1)))]
            reader_end, reader = await stack.enter_async_context(_client(swarm.registry, Identity.generate()))
            await _wait_formed(reader, options.n_nodes)
            formed_s = time.monotonic() - started
            identities = [Identity.from_seed(rng.randbytes(32)) for _ in range(options.n_peers)]
            expected = {identity.node_id for identity in identities}
            for n, identity in enumerate(identities):
                _, client = await stack.enter_async_context(_client(swarm.registry, identity))
                await stack.enter_async_context(_announcing(client, identity, model, n, options.n_peers))
            bytes_before, counted_from = await _relay_bytes(reader_end, relays), time.monotonic()
            before = await _look_up(reader, reader_end, model, expected)
            n_bytes = await _relay_bytes(reader_end, relays) - bytes_before
            counted_s = time.monotonic() - counted_from
            killed = [relay for relay in relays[1:] if relay is not None][: options.n_nodes // 3]
            await asyncio.gather(*(relay.kill() for relay in killed))
            after = await _look_up(reader, reader_end, model, expected)
            await asyncio.sleep(SETTLE_S)  # meanwhile renewals find other relays in place of the dead
            renewed = await _look_up(reader, reader_end, model, expected)
    looked = before + after + renewed
    times = [each.seconds for each in looked]
    return {
        "n_nodes": options.n_nodes,
        "n_peers": options.n_peers,
        "n_killed": len(killed),
        "ring_formed_s": round(formed_s, 2),
        "n_lookups": len(times),
        "lookup_success": statistics.mean(each.is_right for each in looked),
        "lookup_success_after_kill": statistics.mean(each.is_right for each in after + renewed),
        "median_round_trips": statistics.median(each.n_rounds for each in looked),
        "median_lookup_ms": round(1000 * statistics.median(each.seconds for each in before), 2),
        "median_lookup_after_kill_ms": round(1000 * statistics.median(each.seconds for each in renewed), 2),
        "max_lookup_ms": round(1000 * max(times), 1),
        "bytes_per_lookup": round(statistics.median(each.n_bytes for each in before)),
        "bytes_per_s_per_node": round(n_bytes / counted_s / options.n_nodes),  # UDP payload, with those look-ups
    }


@contextlib.asynccontextmanager
async def _client(registry: str, identity: Identity) -> AsyncIterator[tuple[Endpoint, RegistryClient]]:
    async with Endpoint(identity, host="127.0.0.1") as endpoint:
        client = RegistryClient(endpoint, parse_registry(registry))
        try:
            yield endpoint, client
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def _announcing(
    client: RegistryClient, identity: Identity, model: ModelId, index: int, n_peers: int
) -> AsyncIterator[None]:
    """Announce a peer before the block, and go on until its end."""
    first = N_EXPERT * index // n_peers
    experts = ExpertSet.of(range(4), range(first, max(N_EXPERT * (index + 1) // n_peers, first + 1)))

    def make_record(seq: int, address: str) -> ExpertAnnouncement:
        return ExpertAnnouncement(
            node=identity.node_id,
            seq=seq,
            ttl_s=TTL_S,
            model=model,
            model_name="real",
            experts=experts,
            addresses=(address,),
            exact_kernels=False,
            wire_versions=(1,),
        )

    announcer = Announcer(client, identity, SequenceNumbers(None), make_record)
    task = asyncio.create_task(announcer.run())
    try:
        await announcer.is_announced.wait()
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _wait_formed(client: RegistryClient, n_nodes: int) -> None:
    async with asyncio.timeout(FORM_TIMEOUT_S):
        while len(await client.members()) < n_nodes:
            await asyncio.sleep(0.2)
            client.forget_view()


@dataclass(frozen=True, slots=True)
class _LookedUp:
    seconds: float
    is_right: bool
    n_rounds: int
    n_bytes: int  # both ways, at the reader


async def _relay_bytes(endpoint: Endpoint, relays: Sequence[Child | None]) -> int:
    """Return the bytes that all relays have sent and received, by their own word."""
    total = 0
    for relay in relays:
        assert relay is not None
        (address,) = parse_registry(relay.ready["registry"])
        connection = await endpoint.dial(address.address, expected=address.node)
        answer = await connection.request(m.GetStatus(), timeout_s=5.0)
        assert isinstance(answer, m.Status)
        status = json.loads(answer.data)
        total += status["bytes_sent"] + status["bytes_received"]
        connection.close()
    return total


async def _look_up(
    client: RegistryClient, endpoint: Endpoint, model: ModelId, expected: set[NodeId]
) -> list[_LookedUp]:
    """Look the whole model up again and again."""
    found = []
    for _ in range(N_LOOKUPS):
        started, n_bytes = time.perf_counter(), endpoint.bytes_sent + endpoint.bytes_received
        try:
            holders = {record.node for record in await client.holders(model, N_EXPERT)}
        except SwarmError:
            holders = set()
        n_bytes = endpoint.bytes_sent + endpoint.bytes_received - n_bytes
        found.append(_LookedUp(time.perf_counter() - started, holders == expected, client.n_rounds, n_bytes))
        await asyncio.sleep(ASK_EVERY_S)
    return found
