"""Relays and their clients in virtual time: the real `RelayService` and `RelayClient` over links in memory.
Needs tests.virtual_time.

A relay can be down, start again (and then knows nobody), or lose packets; links then behave as QUIC's do: nothing answers, and
after LOST_AFTER_S the client's end is closed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from relay.quotas import Limits
from relay.service import RelayService
from swarm.errors import ConnectionLost, DeadlineExceeded, Leaving, Overloaded, Refused, RemoteRefused, SwarmError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress, format_address
from swarm.net.relay_client import RelayClient, RelayLeg
from swarm.wire import messages as m
from tests.virtual_time import now

LATENCY_S = 0.01  # one way
LOST_AFTER_S = 3.0
WALL = 1_800_000_000.0


async def _no_bridge(relay: SocketAddress, port: int) -> Any:
    """The default would open a real socket, whose real time a virtual one does not wait for."""
    raise ConnectionLost("no WebSockets in memory")


class VirtualRelay:
    """A relay at an address; `nodes` are who may hear from it."""

    def __init__(self, identity: Identity, address: SocketAddress, limits: Limits | None = None) -> None:
        self.identity, self.address = identity, address
        self._limits = limits or Limits()
        self.is_up = True
        self.n_dials = 0
        self.nodes: dict[SocketAddress, VirtualNode] = {}
        self._life = 0
        self.start()

    def start(self) -> None:
        """Begin a new life."""
        self._life += 1
        self.service = RelayService(
            self.identity,
            self._limits,
            generation=self._life,
            secret=bytes([self._life]) * 32,
            now=now,
            wall=lambda: WALL,
        )
        self.service.attach(self._send, (format_address(self.address),))

    def life(self) -> int:
        """Return which life this is; 0 while it is down."""
        return self._life if self.is_up else 0

    def _send(self, datagrams: Sequence[bytes], address: Any) -> None:
        node = self.nodes.get(address)
        if node is not None and self.is_up:
            asyncio.get_running_loop().call_later(LATENCY_S, node.hear, list(datagrams), self.address)


class Link:
    """A connection to a relay: what the client holds of it."""

    is_client = True

    def __init__(self, relay: VirtualRelay, node: VirtualNode) -> None:
        self.remote = relay.identity.node_id
        self.address = relay.address
        self.server = ServerEnd(self, node)
        self.error: SwarmError | None = None
        self._relay, self._life = relay, relay.life()
        self._gone = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self.error is None

    @property
    def is_alive(self) -> bool:
        """Whether the relay still knows it."""
        return self.error is None and self._relay.life() == self._life

    async def wait_gone(self) -> None:
        await self._gone.wait()

    def close(self, error: SwarmError | None = None) -> None:
        self.error = self.error or error or ConnectionLost("closed by this side")
        self._gone.set()

    def start(self, message: m.Request, *, timeout_s: float) -> asyncio.Future[m.Response]:
        if self.error is not None:
            raise self.error
        return asyncio.ensure_future(self.request(message, timeout_s=timeout_s))

    async def request(self, message: m.Request, *, timeout_s: float) -> m.Response:
        if self.error is not None:
            raise self.error
        if not self.is_alive:
            await asyncio.sleep(min(timeout_s, LOST_AFTER_S))
            if timeout_s < LOST_AFTER_S:
                raise DeadlineExceeded("no answer within the deadline")
            self.close(ConnectionLost("silent for 3.0 s"))
            raise ConnectionLost("silent for 3.0 s")
        await asyncio.sleep(2 * LATENCY_S)
        return await _answer(self._relay.service.serve(self.server, message))  # type: ignore[arg-type]


class ServerEnd:
    """What the relay holds of a link."""

    def __init__(self, link: Link, node: VirtualNode) -> None:
        self.remote = node.identity.node_id
        self._link, self._node = link, node

    @property
    def is_open(self) -> bool:
        return self._link.is_alive

    @property
    def source(self) -> SocketAddress:
        return self._node.address

    def start(self, message: m.Request, *, timeout_s: float) -> asyncio.Future[m.Response]:
        if not self.is_open:
            raise ConnectionLost("gone")
        return asyncio.ensure_future(self._ask(message, timeout_s))

    async def _ask(self, message: m.Request, timeout_s: float) -> m.Response:
        if self._node.is_deaf:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded("no answer within the deadline")
        await asyncio.sleep(2 * LATENCY_S)
        return await _answer(self._node.client.serve(self._link, message))  # type: ignore[arg-type]


class VirtualNode:
    """A node at an address: an endpoint's stand-in, and its client.

    Attributes:
        is_deaf: it answers no relay's requests.
        sent, heard: packets to and from relays.
    """

    def __init__(
        self,
        identity: Identity,
        address: SocketAddress,
        relays: Sequence[VirtualRelay],
        *,
        on_leg: Callable[[RelayLeg], None] | None = None,
        open_bridge: Callable[[SocketAddress, int], Awaitable[Any]] | None = None,
        seed: int = 0,
    ) -> None:
        self.identity, self.address = identity, address
        self.is_deaf = False
        self.sent: list[bytes] = []
        self.heard: list[bytes] = []
        self.legs: list[RelayLeg] = []
        self._relays = {relay.address: relay for relay in relays}
        for relay in relays:
            relay.nodes[address] = self
        self.client = RelayClient(
            self,  # type: ignore[arg-type]
            on_leg=on_leg or self.legs.append,
            rng=random.Random(seed),
            open_bridge=open_bridge or _no_bridge,
        )

    @property
    def port(self) -> int:
        return self.address[1]

    def move(self, address: SocketAddress) -> None:
        """Let the world see this node at another address, as a NAT does that started again."""
        for relay in self._relays.values():
            del relay.nodes[self.address]
            relay.nodes[address] = self
        self.address = address

    def hear(self, datagrams: Sequence[bytes], address: SocketAddress) -> None:
        self.heard += datagrams
        self.client.receive(datagrams, address)

    async def dial(self, address: SocketAddress, *, expected: NodeId | None, timeout_s: float = 4.0) -> Link:
        relay = self._relays.get(address)
        if relay is None or not relay.is_up:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s")
        relay.n_dials += 1
        await asyncio.sleep(4 * LATENCY_S)
        assert expected in (None, relay.identity.node_id)
        return Link(relay, self)

    def send_raw(self, datagrams: Sequence[bytes], address: SocketAddress) -> None:
        self.sent += datagrams
        relay = self._relays.get(address)
        if relay is not None and relay.is_up:
            asyncio.get_running_loop().call_later(LATENCY_S, self._arrive, relay, list(datagrams), self.address)

    def _arrive(self, relay: VirtualRelay, datagrams: list[bytes], source: SocketAddress) -> None:
        if relay.is_up:
            relay.service.on_packets(datagrams, source)


async def _answer(serving: Coroutine[Any, Any, m.Response]) -> m.Response:
    """Return an answer, or what the asker of a real endpoint would see."""
    try:
        return await serving
    except Overloaded as error:
        raise RemoteRefused(str(error), remote_code=m.ErrorCode.BUSY, retry_after_s=error.retry_after_s) from error
    except Leaving as error:
        raise RemoteRefused(str(error), remote_code=m.ErrorCode.SHUTTING_DOWN) from error
    except LookupError as error:
        raise RemoteRefused(str(error), remote_code=m.ErrorCode.NOT_FOUND) from error
    except Refused as error:
        raise RemoteRefused(str(error), remote_code=m.ErrorCode.INTERNAL) from error
