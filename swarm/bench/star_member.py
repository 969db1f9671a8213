"""One member of a star, in a process of its own: answers dispatches over our Endpoint, bare QUIC, bare TLS and bare UDP.

It computes nothing, or, where the request says so, only passes the time as experts would (`busy`).

`python -m swarm.bench.star_member` prints one JSON line with its node id and its four ports, and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import json
import struct

import numpy as np

from swarm import event_loop
from swarm.bench.bare_links import QuicSocket, TlsStreams, UdpSocket
from swarm.bench.busy import Busy
from swarm.bench.standard_input import standard_input
from swarm.identity import Identity
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec

# The model tag of a benchmark's dispatch: how many float32 to answer with, and before that, microseconds to wait and to compute.
TAG = struct.Struct("<IHH")
MAX_VALUES = 4 << 20


_busy = Busy()


async def answer(connection: Connection, request: m.Request) -> m.Response:
    """Return as many zeros as the dispatch asks for."""
    assert isinstance(request, m.Dispatch)  # nothing else is served
    n_values, wait_us, busy_us = TAG.unpack(request.model_tag)
    if wait_us:
        await asyncio.sleep(wait_us / 1e6)
    _busy.compute(busy_us)
    rows = np.zeros((1, min(n_values, MAX_VALUES)), np.float32)
    return m.Result(codec=RowCodec.F32, rows=rows, compute_us=0, queue_us=0)


async def serve() -> None:
    """Serve until stdin ends."""
    identity = Identity.generate()
    async with Endpoint(identity, host="127.0.0.1", handler=answer, serves=[m.Dispatch]) as endpoint:
        quic, udp = QuicSocket(_busy), UdpSocket(_busy)
        tls = await TlsStreams(_busy).serve()
        ports = {"endpoint": endpoint.port, "quic": quic.address[1], "udp": udp.address[1], "tls": tls}
        print(json.dumps({"node_id": str(identity.node_id), **ports}), flush=True)
        await (await standard_input()).read()


if __name__ == "__main__":
    event_loop.run(serve())
