"""A backbone's part of `bench links`, in a process of its own: the same dispatch over QUIC, over TLS, and as the policy chooses.

Three askers, each a node with its own QUIC connection, take turns: what one learns of the path the others do not know.

`python -m swarm.bench.link_asker NODEID HOST PORT SIZE_OUT SIZE_BACK BUSY_US N_WARM_UP N` prints one JSON line: the seconds of
each dispatch by kind of asker, and how many of them the policy's asker sent over TLS.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

from swarm import event_loop
from swarm.bench.transport import bench_dispatch
from swarm.errors import NetworkError, SwarmError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.fast_links import FastLinks
from swarm.net.readiness import Readiness, is_worthwhile
from swarm.net.tls_link import TlsLink
from swarm.net.tls_links import dial_tls
from swarm.wire import messages as m

TIMEOUT_S = 30.0
KINDS = ("quic", "tls", "auto")
ORDER_SEED = 1


class Asker(ABC):
    """One node that asks the member."""

    def __init__(self, identity: Identity, endpoint: Endpoint, connection: Connection) -> None:
        self.identity = identity
        self.connection = connection
        self._readiness = Readiness(endpoint) if is_worthwhile() else None
        self.n_over_tls = 0

    @abstractmethod
    async def link(self) -> TlsLink | None:
        """Return the link for the next dispatch; None: QUIC."""

    async def ask(self, dispatch: m.Dispatch) -> float:
        """Return the seconds until the answer."""
        link = await self.link()
        began = time.perf_counter()
        over_quic = functools.partial(self.connection.start, dispatch, timeout_s=TIMEOUT_S)
        if link is not None:
            self.n_over_tls += 1
            await link.start(dispatch, timeout_s=TIMEOUT_S, retry=over_quic)
            return time.perf_counter() - began
        if self._readiness is None:
            await over_quic()
            return time.perf_counter() - began
        self._readiness.began()
        answer = await over_quic()
        self._readiness.ended((dispatch, answer))
        return time.perf_counter() - began


class QuicAsker(Asker):
    """Uses QUIC alone."""

    async def link(self) -> TlsLink | None:
        """Return None."""
        return None


class TlsAsker(Asker):
    """Uses TLS whatever the path is like; what a link does not finish goes over QUIC, and it is opened again at once."""

    _link: TlsLink | None = None

    async def link(self) -> TlsLink | None:
        """Return an open link; None: none can be opened now."""
        if self._link is None or not self._link.is_open:
            try:
                address = self.connection.path.address
                self._link = await dial_tls(self.identity, (address[0], address[1]), expected=self.connection.remote)
            except NetworkError:
                return None
        return self._link


class AutoAsker(Asker):
    """Uses what the policy chooses, as a backbone does."""

    _links: FastLinks | None = None

    async def link(self) -> TlsLink | None:
        """Return the policy's choice."""
        if self._links is None:
            self._links = FastLinks(self.identity)
        return self._links.best(self.connection.remote, self.connection)


async def measure(
    node: NodeId, address: tuple[str, int], dispatch: m.Dispatch, n_warm_up: int, n: int
) -> dict[str, Any]:
    """Return the seconds of `n` dispatches by kind of asker, in turn; those before are not counted."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    identities = {kind: Identity.generate() for kind in KINDS}
    async with (
        Endpoint(identities["quic"]) as quic,
        Endpoint(identities["tls"]) as tls,
        Endpoint(identities["auto"]) as auto,
    ):
        made = {"quic": (QuicAsker, quic), "tls": (TlsAsker, tls), "auto": (AutoAsker, auto)}
        askers = {
            kind: make(identities[kind], endpoint, await endpoint.dial(address, expected=node))
            for kind, (make, endpoint) in made.items()
        }
        order = random.Random(ORDER_SEED)
        for turn in range(n_warm_up + n):
            if turn == n_warm_up:
                askers["auto"].n_over_tls = 0
            # Drawn, since what came before a dispatch changes its time by a sixth.
            for kind in order.sample(KINDS, len(KINDS)):
                taken_s = await askers[kind].ask(dispatch)
                if turn >= n_warm_up:
                    seconds[kind].append(taken_s)
        return {"seconds": seconds, "n_auto_over_tls": askers["auto"].n_over_tls}


async def main() -> None:
    """Measure, and print."""
    node, host, *numbers = sys.argv[1:]
    port, size_out, size_back, busy_us, n_warm_up, n = map(int, numbers)
    dispatch = bench_dispatch(size_out, size_back, busy_s=busy_us / 1e6)
    try:
        told = await measure(NodeId.parse(node), (host, port), dispatch, n_warm_up, n)
    except SwarmError as error:
        told = {"error": str(error)}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    event_loop.run(main())
