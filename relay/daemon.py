"""The relay process: it carries a registry node, and packets between nodes that cannot reach each other (`service`).

Alone it is a ring of one. Told of others (`ring`), it becomes a member of their ring, if others can reach it: see `Store`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from relay.counts import of_bridges, of_endpoint, of_registry, of_service
from relay.metrics import Metric
from relay.outward import outward_host
from relay.quotas import Limits
from relay.service import SERVES as RELAY_SERVES
from relay.service import RelayService
from swarm import __version__
from swarm.errors import Overloaded
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.ip import plain_ip
from swarm.net.addresses import format_address, is_loopback, parse_address
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.reachability import ReachBroker
from swarm.registry.announcer import SequenceNumbers
from swarm.registry.client import RegistryAddress
from swarm.registry.gatherer import Gatherer
from swarm.registry.leaderboard import Ledger
from swarm.registry.networks import Scope, host_of, scope_of
from swarm.registry.node import SERVES, RegistryNode, RingMember
from swarm.token_bucket import TokenBucket
from swarm.wire import messages as m

if TYPE_CHECKING:
    from relay.web_socket import SocketBridges

logger = logging.getLogger(__name__)

LOCAL_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where this machine reaches a relay that listens everywhere
EXPIRE_S = 5.0  # between two sweeps of the table; lookups never see an expired record anyway
SWEEP_S = 1.0  # between two looks for idle channels and reservations that have run out
# Announcements on one connection, and what others than members pass on. A node renews its at most 8 records every 15 s, each in
# at most 2 tries, and tries again a second after a failure. A hostile record costs up to some 10 ms of the loop
# (measured on one core), so 1 % of it.
ANNOUNCE_PER_S, ANNOUNCE_BURST = 1.0, 16.0
# Everything else: a backbone looks up to five times a second while experts are missing, another registry node calls up to twice.
READ_PER_S, READ_BURST = 10.0, 60.0


class Store(StrEnum):
    """Whether a registry node stores records and is a member of the ring.

    AUTO: if those that it forms a ring with can reach it: it was given an address to advertise, or its own reaches as far as
    theirs. Alone, it always stores.
    """

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """What an operator asked for.

    Attributes:
        advertise: `host:port` of where others reach it, if that is not this machine's own address.
        addresses: the same as IP literals, for those who call through this relay; empty: of `advertise`.
        ring: registry nodes to form a ring with.
        publishers: whose models may be offered here; None: anybody's.
        receipts_from: backbones whose receipts count for the leaderboard; none: there is none.
        state: the folder for its sequence numbers; None keeps none.
        limits: what those get whose packets it carries.
        drain_s: how long it goes on for those that it carries packets for, once it is told to end.
        http_port: TCP port of its web pages; 0 lets the system choose, None: there are none.
    """

    host: str = "0.0.0.0"
    port: int = 7440
    advertise: str | None = None
    addresses: tuple[str, ...] = ()
    ring: tuple[RegistryAddress, ...] = ()
    store: Store = Store.AUTO
    publishers: frozenset[NodeId] | None = None
    receipts_from: frozenset[NodeId] = frozenset()
    state: Path | None = None
    limits: Limits = field(default_factory=Limits)
    drain_s: float = 5.0
    http_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayReady:
    """What is needed to reach this relay.

    Attributes:
        address, registry: for processes on this machine.
        public: `swarm://NODEID@host:port` for everybody else; None: only this machine reaches the relay, or its address is
            not known.
        is_local: whether it listens to this machine only.
        http: where this machine finds its web pages, if it has any.
    """

    node: str
    address: str
    registry: str
    public: str | None
    is_local: bool
    http: str | None = None


class RelayDaemon:
    """Serves the registry and carries packets until it is cancelled; then it drains.

    Attributes:
        http_port: TCP port of its web pages, once they are served; 0: there are none.
    """

    def __init__(self, config: RelayConfig, identity: Identity, *, now: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self.service = RelayService(
            identity,
            config.limits,
            generation=int(time.time()) & 0xFFFFFFFF,  # higher than of an earlier life, and a u32
            secret=os.urandom(32),
            now=now,
        )
        self._identity = identity
        self._now = now
        self._registry = RegistryNode(
            now=now, own=identity.node_id, stores=config.store is not Store.NEVER, publishers=config.publishers
        )
        self._endpoint: Endpoint | None = None
        self._bridges: SocketBridges | None = None
        self._gatherer: Gatherer | None = None  # of receipts; None: none count here
        self.http_port = 0
        self._started = now()
        self._announcing: weakref.WeakKeyDictionary[Connection, TokenBucket] = weakref.WeakKeyDictionary()
        self._reading: weakref.WeakKeyDictionary[Connection, TokenBucket] = weakref.WeakKeyDictionary()

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
            serves=(*SERVES, *RELAY_SERVES, m.GetStatus),
        )
        self._endpoint = endpoint
        async with endpoint:
            ready = self._ready(endpoint.port)
            self.service.attach(endpoint.send_raw, self._relay_addresses(ready))
            endpoint.on_other = self.service.on_packets
            ReachBroker(endpoint, now=self._now)
            logger.info("registry %s listens on UDP %s", self._identity.node_id.short, ready.address)
            path = None if self._config.state is None else self._config.state / f"{self._identity.node_id}.seq"
            member = RingMember(
                self._registry,
                endpoint,
                self._identity,
                SequenceNumbers(path),
                address=self._ring_address(ready),
                seeds=[(each.address, each.node) for each in self._config.ring],
                now=self._now,
            )
            async with contextlib.AsyncExitStack() as stack:
                ready = await self._open_http(stack, ready)
                tasks = await stack.enter_async_context(asyncio.TaskGroup())
                tasks.create_task(member.run())
                if self._gatherer is not None:
                    tasks.create_task(self._gatherer.run())
                on_ready(ready)
                try:
                    await self._sweep()
                except asyncio.CancelledError:
                    await self.service.drain(self._config.drain_s)  # a second signal ends it at once
                    raise
                finally:
                    self.service.stop()

    async def _open_http(self, stack: contextlib.AsyncExitStack, ready: RelayReady) -> RelayReady:
        """Begin to serve web pages, if there are to be any."""
        if self._config.http_port is None:
            return ready
        from relay.record_map import RecordMap
        from relay.web import serve_http  # 20 MB that a relay without web pages need not have
        from relay.web_socket import SocketBridges
        from swarm.web.map_server import add_map

        join = f"swarm join --experts auto --registry {ready.public or ready.registry}"
        ledger = Ledger(self._config.receipts_from)
        make_map = RecordMap(self._registry.table, join=join, now=self._now, ledger=ledger)
        if ledger.trusted:
            self._gatherer = Gatherer(ledger, lambda: self._connected(make_map.named()), now=self._now)
        self._bridges = SocketBridges(parse_address(ready.address))
        if self._endpoint is not None:
            self._endpoint.host_behind = self._bridges.host_behind
            self.service.real_host = self._endpoint.real_host
        port = await stack.enter_async_context(
            serve_http(
                host=self._config.host,
                port=self._config.http_port,
                metrics=self.metrics,
                is_draining=lambda: self.service.is_draining,
                bridges=self._bridges,
                add_pages=lambda app: add_map(app, make_map),
            )
        )
        self.http_port = port
        return replace(ready, http=f"http://{format_address((parse_address(ready.address)[0], port))}")

    def _connected(self, nodes: Collection[NodeId]) -> dict[NodeId, Connection]:
        """Return an open connection to each of these nodes that has one."""
        found = [] if self._endpoint is None else self._endpoint.open_connections()
        return {connection.remote: connection for connection in found if connection.remote in nodes}

    async def _sweep(self) -> None:
        expire_at = self._now() + EXPIRE_S
        while True:
            await asyncio.sleep(SWEEP_S)
            self.service.sweep()
            if self._now() >= expire_at:
                self._registry.table.expire(self._now())
                expire_at = self._now() + EXPIRE_S

    def answer(self, asker: NodeId, request: m.Request, *, host: str | None = None) -> m.Response:
        """Return the answer to a request of the authenticated node `asker`; for the rest see `RegistryNode.answer`."""
        if isinstance(request, m.GetStatus):
            return m.Status(data=json.dumps(self._status()).encode())
        return self._registry.answer(asker, request, host=host)

    async def _handle(self, connection: Connection, request: m.Request) -> m.Response:
        is_stranger = not self._registry.replica.is_member(connection.remote)
        is_announcement = isinstance(request, m.Announce) or (isinstance(request, m.Push) and is_stranger)
        self._take_turn(connection, is_announcement=is_announcement)
        if isinstance(request, m.GetStatus):
            return self.answer(connection.remote, request)
        if isinstance(request, RELAY_SERVES):
            return await self.service.serve(connection, request)
        return await self._registry.serve(connection.remote, request, host=connection.remote_address)

    def _take_turn(self, connection: Connection, *, is_announcement: bool) -> None:
        """Raise Overloaded, before anything is read, if the connection announces or asks too often."""
        now = self._now()
        buckets, rate_per_s, burst, what = (
            (self._announcing, ANNOUNCE_PER_S, ANNOUNCE_BURST, "announcements")
            if is_announcement
            else (self._reading, READ_PER_S, READ_BURST, "requests")
        )
        bucket = buckets.get(connection)
        if bucket is None:
            bucket = buckets[connection] = TokenBucket(rate_per_s=rate_per_s, burst=burst, now=now)
        wait_s = bucket.take(now)
        if wait_s:
            raise Overloaded(f"too many {what}: expected at most {rate_per_s:g} a second", retry_after_s=wait_s)

    def _ring_address(self, ready: RelayReady) -> str | None:
        """Return where the ring's other members reach this one; None: it is no member."""
        if self._config.store is Store.NEVER:
            return None
        address = ready.address if ready.public is None else ready.public.rpartition("@")[2]
        try:
            scope = scope_of(host_of(address))
        except ValueError:  # a name: records carry IP literals
            if self._config.ring:
                logger.warning("a ring's members need an IP address to --advertise: got %s", address)
            return None
        if self._config.store is Store.ALWAYS or self._config.advertise is not None:
            return address
        farthest = max((scope_of(each.address[0]) for each in self._config.ring), default=Scope.MACHINE)
        if scope >= farthest:
            return address
        logger.warning("%s reaches less far than the ring: it stores nothing; give --advertise HOST:PORT", address)
        return None

    def _relay_addresses(self, ready: RelayReady) -> tuple[str, ...]:
        """Return where callers reach this relay, as it stands in vouchers: IP literals."""
        if self._config.addresses:
            return self._config.addresses
        address = ready.address if ready.public is None else ready.public.rpartition("@")[2]
        try:
            plain_ip(host_of(address))
        except ValueError:
            logger.warning("callers find a relay by an IP address: got %s, and %s serves them", address, ready.address)
            address = ready.address
        if self._config.host == "::" and self._config.advertise is None:  # both kinds of IP, and most callers have IPv4
            outward = outward_host(socket.AF_INET)
            if outward is not None:
                return (format_address((outward, parse_address(address)[1])), address)
        return (address,)

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

    def metrics(self) -> list[Metric]:
        """Return what is counted here."""
        counted = of_service(self.service, uptime_s=self._now() - self._started)
        counted += of_registry(self._registry)
        if self._bridges is not None:
            counted += of_bridges(self._bridges)
        if self._endpoint is not None:
            counted += of_endpoint(self._endpoint)
        return counted

    def _status(self) -> dict[str, object]:
        return {
            "role": "relay",
            "version": __version__,
            "uptime_s": round(self._now() - self._started, 1),
            "n_records": len(self._registry.table),
            "record_bytes": self._registry.table.n_bytes,
            "n_members": len(self._registry.replica.membership.ring),
            "is_member": self._registry.replica.membership.is_storing,
            "n_reservations": self.service.reservations.n_reservations,
            "n_channels": self.service.reservations.n_channels,
            "n_passed": self.service.switchboard.n_passed,
            "bytes_passed": self.service.switchboard.n_passed_bytes,
            "bytes_sent": self._endpoint.bytes_sent if self._endpoint is not None else 0,
            "bytes_received": self._endpoint.bytes_received if self._endpoint is not None else 0,
        }
