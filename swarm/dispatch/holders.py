"""Keeps the placement true: watches the registry, shakes hands with a peer before it counts, drops those that fail.

What is known of a peer comes from three places, and each can take back only its own word:
- the registry lists it, at a seq; left out, it stays for its ttl while its connection lives, because a registry may have
  restarted with an empty table, or withhold;
- a connection to it is open: without one it does not count, with a new one it counts again;
- a request failed though the connection lives, or for breaking the protocol: it is down until it announces a higher seq.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from swarm.dispatch.placement import Placement
from swarm.errors import ExpertUnavailable, NetworkError, RemoteProtocolError, SwarmError
from swarm.ids import ModelId, NodeId
from swarm.net.addresses import SocketAddress, parse_address
from swarm.net.connection import Connection
from swarm.net.pool import Pool
from swarm.registry.client import Registry
from swarm.registry.records import ExpertAnnouncement

logger = logging.getLogger(__name__)

REFRESH_S = 2.0  # between two looks at the registry; guessed: one small datagram each way
MIN_REFRESH_S = 0.1  # however often somebody asks for news
RETRY_S = 10.0  # until a peer that did not answer is tried again, unless it announces itself anew
MAX_HOLDERS = 256  # peers a backbone connects to; guessed
REDIAL_TIMEOUT_S = 2.0  # in the middle of a request


class Holders:
    """The live holders of one model's experts, as this backbone sees them."""

    def __init__(
        self,
        registry: Registry,
        pool: Pool,
        placement: Placement,
        model: ModelId,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.placement = placement
        self._registry = registry
        self._pool = pool
        self._model = model
        self._now = now
        self._announced: dict[NodeId, ExpertAnnouncement] = {}
        self._missed_since: dict[NodeId, float] = {}  # of those: when the registry first left it out
        self._greeting: set[NodeId] = set()
        self._failed: dict[NodeId, tuple[int, float]] = {}  # node -> (seq, when to try again)
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Refresh for ever. A registry that is away changes nothing: what is known goes on being used."""
        was_lost = False
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    self._learn(await self._registry.holders(self._model))
                    was_lost = False
                except SwarmError as error:
                    if not was_lost:
                        logger.warning("cannot ask the registry, going on with the known peers: %s", error)
                    was_lost = True
                for record in self._strangers():
                    self._greeting.add(record.node)
                    tasks.create_task(self._greet(record))
                self._apply()
                await asyncio.sleep(MIN_REFRESH_S)
                try:
                    async with asyncio.timeout(REFRESH_S - MIN_REFRESH_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()

    def missing(self) -> dict[int, tuple[int, ...]]:
        """Return layer -> experts that no live peer holds; empty when the model can be served."""
        return self.placement.all_missing()

    def require_all(self) -> None:
        """Raise ExpertUnavailable when some expert has no live holder."""
        for layer, experts in self.missing().items():
            raise ExpertUnavailable(layer, experts, "no live peer holds them")

    async def wait_complete(self, timeout_s: float) -> None:
        """Return when every expert has a live holder; raises ExpertUnavailable after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.missing():
                    self._changed.clear()
                    self._wake.set()
                    try:
                        async with asyncio.timeout(2 * MIN_REFRESH_S):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
        except TimeoutError:
            self.require_all()

    def mark_down(self, node: NodeId, error: SwarmError) -> None:
        """Use a peer no more because a request ended with `error`, and look for news at once.

        Where only the connection was lost, the peer counts again once it has been greeted again; after anything else, once
        it announces a higher seq.
        """
        is_lost = isinstance(error, NetworkError) and self._pool.connection(node) is None
        if is_lost:
            self._apply()
        elif self.placement.mark_down(node):
            logger.warning("peer %s is down: %s", node.short, error)
        self._wake.set()

    async def connection(self, node: NodeId) -> Connection:
        """Return an open connection to a holder; raises NetworkError or RemoteProtocolError."""
        connection = self._pool.connection(node)
        if connection is not None:
            return connection
        record = self._announced.get(node)
        if record is None:
            raise NetworkError(f"peer {node.short} is no longer announced")
        return await self._pool.connect(node, _addresses(record), timeout_s=REDIAL_TIMEOUT_S)

    def _learn(self, listed: Sequence[ExpertAnnouncement]) -> None:
        """Take in what the registry lists now."""
        now = self._now()
        left_out = self._announced.keys() - {record.node for record in listed}
        self._missed_since = {node: self._missed_since.get(node, now) for node in left_out}
        known = {
            node: record
            for node, record in self._announced.items()
            if self._pool.connection(node) is not None and now < self._missed_since.get(node, now) + record.ttl_s
        }  # first, so that a flood of new names pushes out nobody in use
        for record in listed:
            former = self._announced.get(record.node)
            known[record.node] = former if former is not None and former.seq > record.seq else record  # no replays
        if len(known) > MAX_HOLDERS:
            logger.debug("%d peers are announced, considering %d", len(known), MAX_HOLDERS)
        self._announced = dict(list(known.items())[:MAX_HOLDERS])

    def _strangers(self) -> list[ExpertAnnouncement]:
        """Return the announcements of peers that must be dialled now; with those being greeted at most MAX_HOLDERS."""
        strangers: list[ExpertAnnouncement] = []
        now = self._now()
        for node, record in self._announced.items():
            connection = self._pool.connection(node)
            if connection is not None and connection.address not in _addresses(record):
                connection.close()  # the peer has restarted or moved, and says so
                connection = None
            seq, retry_at = self._failed.get(node, (-1, 0.0))
            if len(self._greeting) + len(strangers) >= MAX_HOLDERS:
                break  # those that were announced and are gone still hold their places; the rest waits for the next look
            if connection is None and node not in self._greeting and (record.seq > seq or now >= retry_at):
                strangers.append(record)
        for node in self._failed.keys() - self._announced.keys():
            del self._failed[node]
        return strangers

    async def _greet(self, record: ExpertAnnouncement) -> None:
        try:
            await self._pool.connect(record.node, _addresses(record))
            self._failed.pop(record.node, None)
        except (NetworkError, RemoteProtocolError) as error:
            if record.node not in self._failed:
                logger.warning("peer %s is announced but cannot be used: %s", record.node.short, error)
            self._failed[record.node] = (record.seq, self._now() + RETRY_S)
        finally:
            self._greeting.discard(record.node)
        self._apply()

    def _apply(self) -> None:
        """Let the placement know the announcements of the peers that are connected now."""
        usable = [record for node, record in self._announced.items() if self._pool.connection(node) is not None]
        if self.placement.update(usable):
            logger.info("%d peers are in use; %d layers lack experts", len(usable), len(self.missing()))
            self._changed.set()


def _addresses(record: ExpertAnnouncement) -> list[SocketAddress]:
    return [parse_address(text) for text in record.addresses]  # a record's addresses are checked when it is made
