"""A peer's part of `bench links`, in a process of its own: answers dispatches over both kinds of link, ready for the next.

`python -m swarm.bench.link_member HOST` prints one JSON line with its node id and its port, and ends when its stdin does.
"""

from __future__ import annotations

import json
import sys

from swarm import event_loop
from swarm.bench.standard_input import standard_input
from swarm.bench.star_member import answer
from swarm.identity import Identity
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.readiness import Readiness, is_worthwhile
from swarm.net.tls_link import TlsLink
from swarm.net.tls_links import TlsListener
from swarm.wire import messages as m


class Member:
    """Answers as `star_member`, and is ready for each asker's next dispatch over QUIC, as a peer is."""

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        self._readiness: Readiness | None = None

    async def answer(self, connection: Connection, request: m.Request) -> m.Response:
        """Return as many zeros as the dispatch asks for."""
        if isinstance(connection, TlsLink) or not is_worthwhile() or self.endpoint is None:
            return await answer(connection, request)
        if self._readiness is None:
            self._readiness = Readiness(self.endpoint)
        self._readiness.ended()
        result = await answer(connection, request)
        self._readiness.began((request, result))
        return result


async def serve(host: str) -> None:
    """Serve until stdin ends."""
    member = Member()
    identity = Identity.generate()
    async with (
        Endpoint(identity, host=host, handler=member.answer, serves=[m.Dispatch]) as endpoint,
        TlsListener(endpoint, host=host),
    ):
        member.endpoint = endpoint
        print(json.dumps({"node_id": str(identity.node_id), "port": endpoint.port}), flush=True)
        await (await standard_input()).read()


if __name__ == "__main__":
    event_loop.run(serve(sys.argv[1]))
