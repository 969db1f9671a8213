"""The relay process, first form: it carries a registry node. Forwarding for NAT-bound peers comes on top of this."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm import __version__
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import format_address
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.registry.node import SERVES, RegistryNode
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

SHOWN_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # nobody can dial "any address"; others know theirs of this machine
EXPIRE_S = 5.0  # between two sweeps of the table; lookups never see an expired record anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Where the relay listens."""

    host: str = "0.0.0.0"
    port: int = 7440


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayReady:
    """What others need to reach this relay."""

    node: str
    address: str
    registry: str


class RelayDaemon:
    """Serves the registry until it is cancelled."""

    def __init__(self, config: RelayConfig, identity: Identity, *, now: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._identity = identity
        self._now = now
        self._registry = RegistryNode(now=now)
        self._started = now()

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
            address = format_address((SHOWN_HOST.get(self._config.host, self._config.host), endpoint.port))
            node = str(self._identity.node_id)
            logger.info("registry %s listens on UDP %s", self._identity.node_id.short, address)
            on_ready(RelayReady(node=node, address=address, registry=f"swarm://{node}@{address}"))
            while True:
                await asyncio.sleep(EXPIRE_S)
                self._registry.table.expire(self._now())

    def answer(self, asker: NodeId, request: m.Request) -> m.Response:
        """Return the answer to a request of the authenticated node `asker`; raises what `RegistryNode.answer` does."""
        if isinstance(request, m.GetStatus):
            return m.Status(data=json.dumps(self._status()).encode())
        return self._registry.answer(asker, request)

    async def _handle(self, connection: Connection, request: m.Request) -> m.Response:
        return self.answer(connection.remote, request)

    def _status(self) -> dict[str, object]:
        return {
            "role": "relay",
            "version": __version__,
            "uptime_s": round(self._now() - self._started, 1),
            "n_records": len(self._registry.table),
            "record_bytes": self._registry.table.n_bytes,
        }
