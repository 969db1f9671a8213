"""Connections by node: dialled once however many ask, kept while they live, dialled anew after they died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from swarm.errors import ConnectionLost, NetworkError, RemoteProtocolError, SwarmError
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress
from swarm.net.connection import Connection
from swarm.net.endpoint import DIAL_TIMEOUT_S, Endpoint

logger = logging.getLogger(__name__)


class Pool:
    """Live connections to known nodes, over one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connections: dict[NodeId, Connection] = {}
        self._dialling: dict[NodeId, asyncio.Task[Connection]] = {}  # owned here: `close` cancels and awaits them
        self._is_closed = False

    def connection(self, node: NodeId) -> Connection | None:
        """Return the open connection to `node`, if there is one now."""
        connection = self._connections.get(node)
        if connection is not None and not connection.is_open:
            del self._connections[node]
            return None
        return connection

    async def connect(
        self, node: NodeId, addresses: Sequence[SocketAddress], *, timeout_s: float = DIAL_TIMEOUT_S
    ) -> Connection:
        """Return an open connection to `node`, trying its addresses in turn. `timeout_s` bounds each address.

        Raises:
            NetworkError, RemoteProtocolError: none of the addresses works; the last one's error.
        """
        connection = self.connection(node)
        if connection is not None:
            return connection
        if self._is_closed:
            raise ConnectionLost("the pool is closed")
        task = self._dialling.get(node)
        if task is None:
            task = asyncio.create_task(self._dial(node, addresses, timeout_s), name=f"dial {node.short}")
            self._dialling[node] = task
            task.add_done_callback(lambda done: self._forget_dialling(node, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                raise ConnectionLost("the pool is closed") from None  # its caller was not cancelled, only the dialling
            raise

    async def close(self) -> None:
        """End dialling and close every connection."""
        self._is_closed = True
        tasks = list(self._dialling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _forget_dialling(self, node: NodeId, task: asyncio.Task[Connection]) -> None:
        del self._dialling[node]
        if not task.cancelled():
            task.exception()  # seen: the callers may all have gone

    async def _dial(self, node: NodeId, addresses: Sequence[SocketAddress], timeout_s: float) -> Connection:
        error: SwarmError = ConnectionLost(f"node {node.short} has no address")
        for address in addresses:
            try:
                connection = await self._endpoint.dial(address, expected=node, timeout_s=timeout_s)
            except (NetworkError, RemoteProtocolError) as failure:
                logger.debug("cannot reach node %s: %s", node.short, failure)
                error = failure
                continue
            self._connections[node] = connection
            return connection
        raise error
