"""A peer for `bench relay`, in a process of its own: can be called through a relay, and answers dispatches like `star_member`.

`python -m swarm.bench.relay_member swarm://NODEID@HOST:PORT` prints one JSON line with its node id, its port and its voucher, and
ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from swarm import event_loop
from swarm.bench.standard_input import standard_input
from swarm.bench.star_member import answer
from swarm.identity import Identity
from swarm.net.endpoint import Endpoint
from swarm.net.relay_client import SERVES, RelayAddress, RelayClient
from swarm.registry.client import parse_registry
from swarm.wire import messages as m


async def serve(relay: str) -> None:
    """Serve until stdin ends."""
    (where,) = parse_registry(relay)
    identity = Identity.generate()
    endpoint = Endpoint(identity, host="127.0.0.1", handler=answer, serves=[m.Dispatch])
    client = RelayClient(endpoint, on_leg=lambda leg: _ignore(endpoint.add_channel(leg.channel, leg.address)))
    endpoint.add_handler(SERVES, client.serve)
    endpoint.on_other = client.receive
    async with endpoint:
        keeping = asyncio.create_task(client.run([RelayAddress(address=where.address, node=where.node)], n=1))
        changed = asyncio.Event()
        client.on_change = changed.set
        await changed.wait()
        told = {"node_id": str(identity.node_id), "endpoint": endpoint.port, "voucher": client.vouchers()[0].hex()}
        print(json.dumps(told), flush=True)
        await (await standard_input()).read()
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        client.close()


def _ignore(_: object) -> None:
    pass


if __name__ == "__main__":
    event_loop.run(serve(sys.argv[1]))
