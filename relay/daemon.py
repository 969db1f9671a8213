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
from swarm.net.addresses import format_address
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.registry.node import SERVES, RegistryNode
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

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

    def __init__(self, config: RelayConfig, identity: Identity) -> None:
        self._config = config
        self._identity = identity
        self._registry = RegistryNode()
        self._started = time.monotonic()

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
            shown_host = "127.0.0.1" if self._config.host == "0.0.0.0" else self._config.host
            address = format_address((shown_host, endpoint.port))
            node = str(self._identity.node_id)
            logger.info("registry %s listens on UDP %s", self._identity.node_id.short, address)
            on_ready(RelayReady(node=node, address=address, registry=f"swarm://{node}@{address}"))
            while True:
                await asyncio.sleep(EXPIRE_S)
                self._registry.table.expire(time.monotonic())

    async def _handle(self, connection: Connection, request: m.Request) -> m.Response:
        if isinstance(request, m.GetStatus):
            return m.Status(data=json.dumps(self._status()).encode())
        return self._registry.answer(connection.remote, request)

    def _status(self) -> dict[str, object]:
        return {
            "role": "relay",
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "n_records": len(self._registry.table),
            "record_bytes": self._registry.table.n_bytes,
        }
