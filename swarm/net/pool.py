"""Connections by node: dialled once however many ask, kept while they live, dialled anew after they died.

A node's addresses and its relays are tried side by side, each with a head start for the better one: the address named first, then
the others, then the relays (`path_finder`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.errors import ConnectionLost, NetworkError, RemoteProtocolError, SwarmError
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress, parse_address
from swarm.net.connection import Connection
from swarm.net.endpoint import DIAL_TIMEOUT_S, Endpoint
from swarm.net.path_finder import PathFinder

logger = logging.getLogger(__name__)

# Head starts. An address: RFC 8305 has 250 ms. A relay of a node whose address others have reached: longer than a busy machine's
# handshake takes, so that no dispatch goes through a relay without need; of one behind NAT: none. Guessed.
ADDRESS_AFTER_S = 0.25
RELAY_AFTER_S = 2.0
SETTLE_CHECK_S = 0.05


class Reachable(Protocol):
    """What a node's record says of how it is reached."""

    @property
    def node(self) -> NodeId:
        """Whose record it is."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port`, the first is preferred."""
        ...

    @property
    def is_public(self) -> bool:
        """Whether others have reached it there."""
        ...

    @property
    def vouchers(self) -> tuple[str, ...]:
        """Of its relays, base64url."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PathReport:
    """How a node is reached now, for people.

    Attributes:
        path: `direct 192.0.2.1:7440`, `relay 192.0.2.2:7440` or `relay by WebSocket`.
        why_relayed: why it is not direct, if that is known; empty for a direct one.
        n_switches: how often the path has changed.
    """

    path: str
    is_relayed: bool
    rtt_s: float | None
    why_relayed: str
    n_switches: int


class Pool:
    """Live connections to known nodes, over one endpoint."""

    def __init__(self, endpoint: Endpoint, finder: PathFinder | None = None) -> None:
        """`finder`: for nodes behind NAT; None: only what can be dialled is reached."""
        self._endpoint = endpoint
        self._finder = finder
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

    def report(self, node: NodeId) -> PathReport | None:
        """Return how `node` is reached now; None: it is not."""
        connection = self.connection(node)
        if connection is None:
            return None
        monitor, path = connection.monitor, connection.path
        text = str(path) if path.is_relayed else f"direct {path}"
        if path.is_relayed and self._finder is not None and self._finder.relays.has_bridge:
            text = "relay by WebSocket"
        return PathReport(
            path=text,
            is_relayed=path.is_relayed,
            rtt_s=connection.rtt_s,
            why_relayed=connection.why_relayed if path.is_relayed else "",
            n_switches=0 if monitor is None else monitor.n_switches,
        )

    async def settled_report(self, node: NodeId, timeout_s: float) -> PathReport | None:
        """Return how `node` is reached once a hole was punched, or it is known why not, or this time is over."""
        until = asyncio.get_running_loop().time() + timeout_s
        while (report := self.report(node)) is not None and report.is_relayed and not report.why_relayed:
            if asyncio.get_running_loop().time() >= until:
                break
            await asyncio.sleep(SETTLE_CHECK_S)
        return report

    def reports(self) -> dict[NodeId, PathReport]:
        """Return how every connected node is reached now."""
        found = {node: self.report(node) for node in list(self._connections)}
        return {node: report for node, report in found.items() if report is not None}

    def know(self, who: Reachable) -> None:
        """Learn what a node announces now, for channels that are opened later."""
        if self._finder is not None:
            self._finder.know(who.node, who.vouchers)

    async def reach(self, who: Reachable, *, timeout_s: float = DIAL_TIMEOUT_S) -> Connection:
        """Return an open connection to whom a record is of: `connect`, with all that it says."""
        self.know(who)
        addresses = [parse_address(text) for text in who.addresses]  # checked when the record was made
        return await self.connect(who.node, addresses, is_public=who.is_public, timeout_s=timeout_s)

    async def connect(
        self,
        node: NodeId,
        addresses: Sequence[SocketAddress],
        *,
        is_public: bool = True,
        timeout_s: float = DIAL_TIMEOUT_S,
    ) -> Connection:
        """Return an open connection to `node`. `timeout_s` bounds each address.

        Args:
            is_public: others have reached it at its addresses; if not, its relays (see `know`) are tried at once, too.

        Raises:
            NetworkError, RemoteProtocolError: nothing works; the last error.
        """
        connection = self.connection(node)
        if connection is not None:
            return connection
        if self._is_closed:
            raise ConnectionLost("the pool is closed")
        task = self._dialling.get(node)
        if task is None:
            task = asyncio.create_task(self._dial(node, addresses, is_public, timeout_s), name=f"dial {node.short}")
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

    async def _dial(
        self, node: NodeId, addresses: Sequence[SocketAddress], is_public: bool, timeout_s: float
    ) -> Connection:
        dial = functools.partial(self._endpoint.dial, expected=node, timeout_s=timeout_s)
        dials: list[tuple[float, Callable[[], Awaitable[Connection]]]] = [
            (i * ADDRESS_AFTER_S, functools.partial(dial, address)) for i, address in enumerate(addresses)
        ]
        finder = self._finder
        if finder is not None and finder.has_relays(node):
            after_s = RELAY_AFTER_S if is_public and addresses else 0.0
            dials.append((after_s, functools.partial(finder.dial_relayed, node, timeout_s=timeout_s)))
        connection = await (dials[0][1]() if len(dials) == 1 else _first(node, dials))
        if finder is not None and not is_public and not connection.path.is_relayed:
            finder.add_spare(connection, node)
        self._connections[node] = connection
        return connection


async def _first(node: NodeId, dials: Sequence[tuple[float, Callable[[], Awaitable[Connection]]]]) -> Connection:
    """Return the connection that is open first; each dial begins at its time, or as soon as all those before have failed.

    Raises:
        NetworkError, RemoteProtocolError: all have failed; the last one's error.
    """
    error: SwarmError = ConnectionLost(f"node {node.short} has no address")
    loop = asyncio.get_running_loop()
    start, waiting = loop.time(), list(dials)
    tasks: set[asyncio.Future[Connection]] = set()
    try:
        while waiting or tasks:
            while waiting and (not tasks or loop.time() >= start + waiting[0][0] - 1e-6):
                tasks.add(asyncio.ensure_future(waiting.pop(0)[1]()))
            until_s = start + waiting[0][0] - loop.time() + 1e-6 if waiting else None
            done, tasks = await asyncio.wait(tasks, timeout=until_s, return_when=asyncio.FIRST_COMPLETED)
            opened: list[Connection] = []
            for task in done:
                failure = task.exception()
                if failure is None:
                    opened.append(task.result())
                elif isinstance(failure, (NetworkError, RemoteProtocolError)):
                    logger.debug("cannot reach node %s: %s", node.short, failure)
                    error = failure
                else:
                    raise failure
            for connection in opened[1:]:
                connection.close()
            if opened:
                return opened[0]
        raise error
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_close_late)


def _close_late(task: asyncio.Future[Connection]) -> None:
    """A dial that was given up may have been done in the same moment."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()
