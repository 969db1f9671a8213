"""The relay process, first form: it carries a registry node. Forwarding for NAT-bound peers comes on top of this."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from relay.outward import outward_host
from relay.quotas import TokenBucket
from swarm import __version__
from swarm.errors import Overloaded
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import format_address, is_loopback
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.registry.node import SERVES, RegistryNode
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

LOCAL_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where this machine reaches a relay that listens everywhere
EXPIRE_S = 5.0  # between two sweeps of the table; lookups never see an expired record anyway
# Announcements on one connection. A node renews its at most 8 records every 15 s, each in at most 2 tries, and tries again a
# second after a failure. A hostile record costs up to some 10 ms of the loop (measured on one core), so 1 % of it.
ANNOUNCE_PER_S, ANNOUNCE_BURST = 1.0, 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Where the relay listens, and `host:port` of where others reach it, if that is not this machine's own address."""

    host: str = "0.0.0.0"
    port: int = 7440
    advertise: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayReady:
    """What is needed to reach this relay.

    Attributes:
        address, registry: for processes on this machine.
        public: `swarm://NODEID@host:port` for everybody else; None: only this machine reaches the relay, or its address is
            not known.
        is_local: whether it listens to this machine only.
    """

    node: str
    address: str
    registry: str
    public: str | None
    is_local: bool


class RelayDaemon:
    """Serves the registry until it is cancelled."""

    def __init__(self, config: RelayConfig, identity: Identity, *, now: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._identity = identity
        self._now = now
        self._registry = RegistryNode(now=now)
        self._started = now()
        self._buckets: weakref.WeakKeyDictionary[Connection, TokenBucket] = weakref.WeakKeyDictionary()

    async def run(self, on_ready: Callable[[RelayReady], None]) -> None:
        """Serve; calls `on_ready` once the socket is bound.

        Raises:
            UserError: the port is taken.
        """
        endpoint = Endpoint(
            self._identity,
            host=self._config.host,
            port=self._config.port,
            handler=self._handle,
            serves=(*SERVES, m.GetStatus),
        )
        async with endpoint:
            ready = self._ready(endpoint.port)
            logger.info("registry %s listens on UDP %s", self._identity.node_id.short, ready.address)
            on_ready(ready)
            while True:
                await asyncio.sleep(EXPIRE_S)
                self._registry.table.expire(self._now())

    def answer(self, asker: NodeId, request: m.Request, *, host: str | None = None) -> m.Response:
        """Return the answer to a request of the authenticated node `asker`; for the rest see `RegistryNode.answer`."""
        if isinstance(request, m.GetStatus):
            return m.Status(data=json.dumps(self._status()).encode())
        return self._registry.answer(asker, request, host=host)

    async def _handle(self, connection: Connection, request: m.Request) -> m.Response:
        if isinstance(request, m.Announce):
            self._take_turn(connection)
        return self.answer(connection.remote, request, host=connection.remote_address)

    def _take_turn(self, connection: Connection) -> None:
        """Raise Overloaded, before anything is read, if the connection announces too often."""
        now = self._now()
        bucket = self._buckets.get(connection)
        if bucket is None:
            bucket = TokenBucket(rate_per_s=ANNOUNCE_PER_S, burst=ANNOUNCE_BURST, now=now)
            self._buckets[connection] = bucket
        wait_s = bucket.take(now)
        if wait_s:
            raise Overloaded(
                f"too many announcements: expected at most {ANNOUNCE_PER_S:g} a second", retry_after_s=wait_s
            )

    def _ready(self, port: int) -> RelayReady:
        node, host = str(self._identity.node_id), self._config.host
        local_host = LOCAL_HOST.get(host, host)
        address = format_address((local_host, port))
        is_local = host not in LOCAL_HOST and is_loopback(host)
        others: str | None = None
        if self._config.advertise is not None:
            others = self._config.advertise
        elif host in LOCAL_HOST:
            outward = outward_host(socket.AF_INET6 if ":" in host else socket.AF_INET)
            others = None if outward is None else format_address((outward, port))
        elif not is_local:
            others = address
        return RelayReady(
            node=node,
            address=address,
            registry=f"swarm://{node}@{address}",
            public=None if others is None else f"swarm://{node}@{others}",
            is_local=is_local,
        )

    def _status(self) -> dict[str, object]:
        return {
            "role": "relay",
            "version": __version__,
            "uptime_s": round(self._now() - self._started, 1),
            "n_records": len(self._registry.table),
            "record_bytes": self._registry.table.n_bytes,
        }
