"""A node without a model, for tests on the virtual internet: `python member.py peer|backbone HOST SWARM://... [REST_S]`.

A peer announces one expert and answers GET_STATUS. A backbone obeys lines of JSON on its standard input, and answers each:
{"reach": node}: connect, {"ask": node, "n": 5, "every_s": 0.01}: requests, {"report": node}: how it is reached. With REST_S it
dials back for a relay that often, so that a test need not wait between two checks.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.net import reachability
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.path_finder import PathFinder
from swarm.net.pool import Pool
from swarm.net.relay_client import RelayAddress
from swarm.registry.announcer import TTL_S, Announcer, SequenceNumbers
from swarm.registry.client import RegistryClient, parse_registry
from swarm.registry.records import ExpertAnnouncement
from swarm.wire import messages as m

MODEL = ModelId(b"internet" * 4)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def answer(connection: Connection, request: m.Request) -> m.Response:
    return m.Status(data=b"{}")


async def peer(endpoint: Endpoint, finder: PathFinder, registry: RegistryClient, relays: list[RelayAddress]) -> None:
    identity = endpoint.identity

    def record(seq: int, address: str) -> ExpertAnnouncement:
        face = finder.face(address)
        return ExpertAnnouncement(
            node=identity.node_id,
            seq=seq,
            ttl_s=TTL_S,
            model=MODEL,
            model_name="internet",
            experts=ExpertSet({0: frozenset((0,))}),
            addresses=face.addresses,
            exact_kernels=False,
            wire_versions=(1,),
            is_public=face.is_public,
            vouchers=face.vouchers,
        )

    announcer = Announcer(registry, identity, SequenceNumbers(None), record)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(announcer.run())
        tasks.create_task(finder.keep_reachable(relays, announcer.announce_soon))
        while len(finder.relays.vouchers()) < len(relays):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await announcer.is_announced.wait()
        say(event="ready", node=str(identity.node_id), is_public=finder.is_public(), mapping=finder.mapping().name)
        await asyncio.Event().wait()


async def backbone(endpoint: Endpoint, finder: PathFinder, registry: RegistryClient) -> None:
    pool = Pool(endpoint, finder)
    await registry.observed_address()
    say(event="ready", node=str(endpoint.identity.node_id), mapping=finder.mapping().name)
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop.add_reader(0, lambda: lines.put_nowait(sys.stdin.readline()))
    while line := await lines.get():
        command = json.loads(line)
        try:
            say(**await obey(command, pool, registry))
        except (SwarmError, LookupError) as error:
            say(error=str(error) or type(error).__name__)


async def obey(command: dict[str, Any], pool: Pool, registry: RegistryClient) -> dict[str, Any]:
    if "reach" in command:
        records = {record.node: record for record in await registry.holders(MODEL)}
        start = time.monotonic()
        connection = await pool.reach(records[NodeId.parse(command["reach"])])
        return {"took_s": time.monotonic() - start, "path": str(connection.path)}
    node = NodeId.parse(command.get("ask") or command["report"])
    if "ask" in command:
        took: list[float] = []
        for _ in range(command["n"]):
            connection = pool.connection(node)
            if connection is None:
                raise LookupError("the connection is lost")
            start = time.monotonic()
            await connection.request(m.GetStatus(), timeout_s=5.0)
            took.append(time.monotonic() - start)
            await asyncio.sleep(command.get("every_s", 0.01))
        return {"took_s": took}
    report = pool.report(node)
    if report is None:
        raise LookupError("there is no connection")
    return {
        "path": report.path,
        "is_relayed": report.is_relayed,
        "why": report.why_relayed,
        "rtt_s": report.rtt_s,
        "n_switches": report.n_switches,
    }


async def main() -> None:
    role, host, where = sys.argv[1:4]
    if len(sys.argv) > 4:
        reachability.CHECK_REST_S = float(sys.argv[4]) * reachability.N_HELPERS
    nodes = parse_registry(where)
    async with (
        Endpoint(Identity.generate(), host=host, handler=answer, serves=(m.GetStatus,)) as endpoint,
        PathFinder(endpoint, takes_calls=role == "peer") as finder,
    ):
        registry = RegistryClient(finder, nodes)
        if role == "peer":
            await peer(
                endpoint, finder, registry, [RelayAddress(address=each.address, node=each.node) for each in nodes]
            )
        else:
            await backbone(endpoint, finder, registry)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    asyncio.run(main())
