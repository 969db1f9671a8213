"""A node's dealings with relays: reservations that are kept, calls that come in, channels that it opens. Over one endpoint.

A reservation is renewed at a third of its time. Its own leg is bound and kept alive by datagrams, so that a relay that has died,
started again or forgotten this node is noticed within RESERVATION_KEEPALIVE_S and three repetitions; then the node reserves anew,
on a new connection if the old one does not answer. What a relay has once promised stays in `vouchers` until it runs out, whatever
happens to a renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swarm.errors import (
    ConnectionLost,
    NetworkError,
    Overloaded,
    Refused,
    RemoteProtocolError,
    RemoteRefused,
    SwarmError,
)
from swarm.ids import NodeId
from swarm.net import relay_packets as p
from swarm.net.addresses import SocketAddress, format_address, parse_address
from swarm.net.connection import Connection, clock
from swarm.net.relay_channel import RelayLeg as RelayLeg
from swarm.wire import messages as m
from swarm.wire.vouchers import MAX_RELAY_ADDRESSES, Voucher, read_voucher

logger = logging.getLogger(__name__)

SERVES: tuple[type[m.Request], ...] = (m.Incoming, m.Notice)
N_RESERVATIONS = 2  # DESIGN section 4: one relay may be down
LIFETIME_S = 120.0
REQUEST_TIMEOUT_S = 4.0
CHECK_TIMEOUT_S = (
    1.0  # to reserve anew after the leg was lost: a relay that started again does not know this connection
)
LEAVE_TIMEOUT_S = 0.5
CONNECT_TIMEOUT_S = 6.0  # the relay asks the called node meanwhile, for up to 3 s
# While a relay is away. A dial sends its first packet again after 0.3 s or so, and a relay that came back answers that.
DIAL_TIMEOUT_S = 2.0
RETRY_S, LONGEST_RETRY_S = 0.5, 2.0  # grows; peers are to be back within 5 s of a relay's restart, and not all at once
N_TRIES = 4  # of one relay, before another one that is known is tried in its place
LOOK_S = 5.0  # for a relay that no other slot has; guessed
REPLACED_REST_S = 300.0  # another process with our key was told that it may; fighting would help nobody
# Of a reservation's own leg. DESIGN says 15 s, but a relay's restart is to be healed within 5 s (scenario 20).
RESERVATION_KEEPALIVE_S = 1.5
CHANNEL_KEEPALIVE_S = 15.0  # DESIGN section 4; below NATs' shortest timeouts of 30 s
MIN_KEEPALIVE_S = 0.25  # whatever a relay says: at 0 s each answer would bring the next; guessed
MAX_CALLED_THROUGH = 64  # relays without a reservation and without a channel, to which a connection is kept; guessed
MAX_LEGS = 1024  # that relays may make us keep a timer for; guessed: sixteen times what one lets a node have


KnownRelays = Callable[[], "Sequence[RelayAddress]"]


class RelayEndpoint(Protocol):
    """What is needed of an endpoint."""

    async def dial(self, address: SocketAddress, *, expected: NodeId | None, timeout_s: float = ...) -> Connection: ...
    def send_raw(self, datagrams: Sequence[bytes], address: Any) -> None: ...
    @property
    def port(self) -> int: ...


class Bridge(Protocol):
    """Another way to a relay than UDP: see swarm.net.relay_websocket."""

    @property
    def address(self) -> SocketAddress: ...
    @property
    def is_open(self) -> bool: ...
    def close(self) -> None: ...


BridgeOpener = Callable[[SocketAddress, int], Awaitable[Bridge]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayAddress:
    """Where a relay listens, and which node it must be; None: whoever is there."""

    address: SocketAddress
    node: NodeId | None


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """A reservation at one relay.

    Attributes:
        ends_at: when the relay forgets it, by our clock, counted from when we heard of it.
        observed_address: where the relay sees us.
        connection: the live one to the relay; None: there is none now, and calls do not reach us.
    """

    relay: NodeId
    voucher: bytes
    ends_at: float
    observed_address: str
    connection: Connection | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Visit:
    """What has come of one connection to a relay: the leg of a reservation, if it stood, and what the relay has told."""

    channel: bytes = b""
    is_draining: bool = False
    replaced_by: str = ""
    rest_s: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class RelayClient:
    """Reservations and channels of one node."""

    def __init__(
        self,
        endpoint: RelayEndpoint,
        *,
        on_leg: Callable[[RelayLeg], None] | None = None,
        rng: random.Random | None = None,
        open_bridge: BridgeOpener | None = None,
    ) -> None:
        """Prepare.

        Args:
            on_leg: takes a channel that another node has opened to us; it may raise Refused. None: we take no calls.
            open_bridge: finds another way to a relay that UDP does not get to; None: by WebSocket.
        """
        self.on_change: Callable[[], None] = lambda: None
        self._endpoint = endpoint
        self._on_leg = on_leg
        self._rng = rng or random.Random()  # jitter
        self._called_through: dict[NodeId, Connection] = {}  # relays at which we have no reservation
        self._dialling: dict[NodeId, asyncio.Lock] = {}  # of those being reached now,
        self._n_reaching: Counter[NodeId] = Counter()  # and how many calls do so
        self._legs: dict[bytes, RelayLeg] = {}
        self._held: dict[NodeId, Held] = {}
        self._taken: list[RelayAddress] = []  # those that a slot works at
        self._visits: dict[Connection, _Visit] = {}
        self._open_bridge = open_bridge or _open_web_socket
        self._bridges: dict[SocketAddress, Bridge] = {}  # by the relay's own address
        self._releases: set[asyncio.Future[Any]] = set()

    # Reservations

    @property
    def reservations(self) -> list[Held]:
        """Those that have not run out, those that calls reach us by first."""
        now = clock()
        live = [each for each in self._held.values() if each.ends_at > now]
        return sorted(live, key=lambda each: (each.connection is None, -each.ends_at))

    def vouchers(self) -> tuple[bytes, ...]:
        """Return what to announce."""
        return tuple(each.voucher for each in self.reservations)

    async def run(self, relays: Sequence[RelayAddress] | KnownRelays, *, n: int = N_RESERVATIONS) -> None:
        """Keep reservations at `n` of these relays until cancelled; in order of preference.

        `relays` may be a function that returns those that are known at the moment.
        """
        known: KnownRelays = relays if callable(relays) else lambda: relays
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(n):
                    tasks.create_task(self._keep_one(known))
        finally:
            self._held.clear()

    async def _keep_one(self, known: KnownRelays) -> None:
        """Keep one reservation at whichever relay works that no other slot has."""
        at = 0
        while True:
            free = self._free(known)
            if not free:
                await asyncio.sleep(LOOK_S)
                continue
            relay = free[at % len(free)]
            self._taken.append(relay)
            try:
                await self._keep_at(relay, has_choice=lambda: bool(self._free(known)))
            finally:
                self._taken.remove(relay)
            at += 1

    def _free(self, known: KnownRelays) -> list[RelayAddress]:
        """Return the relays that no slot works at."""
        addresses = {relay.address for relay in self._taken}
        nodes = {relay.node for relay in self._taken if relay.node is not None}
        return [relay for relay in known() if relay.address not in addresses and relay.node not in nodes]

    async def _keep_at(self, relay: RelayAddress, *, has_choice: Callable[[], bool]) -> None:
        """Keep a reservation at one relay; returns when another one should be tried, if there is a choice."""
        n_failures = 0
        while n_failures < N_TRIES or not has_choice():
            visit = await self._visit(relay, has_choice=has_choice)
            if visit.is_draining and has_choice():
                return
            n_failures = 0 if visit.channel else n_failures + 1
            wait_s = max(visit.rest_s, min(RETRY_S * 2 ** min(n_failures, 8), LONGEST_RETRY_S))
            await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.0))

    async def _visit(self, relay: RelayAddress, *, has_choice: Callable[[], bool]) -> _Visit:
        """Reserve and renew on one connection until that ends, or the relay drains and there is another."""
        visit = _Visit()
        connection: Connection | None = None
        try:
            connection = await self.dial(relay.address, relay.node)
            self._visits[connection] = visit
            if any(other is not connection and other.remote == connection.remote for other in self._visits):
                visit.rest_s = REPLACED_REST_S
                raise ConnectionLost("another slot is there already: this relay has two addresses")
            await self._hold(connection, visit, has_choice=has_choice)
        except RemoteRefused as error:
            logger.warning("no reservation at relay %s: %s", format_address(relay.address), error)
            visit.rest_s = error.retry_after_s or LONGEST_RETRY_S
        except (NetworkError, RemoteProtocolError, Overloaded) as error:
            logger.debug("relay %s: %s", format_address(relay.address), error)
        except asyncio.CancelledError:
            if connection is not None and visit.channel:
                with contextlib.suppress(SwarmError):
                    await connection.request(m.Release(channel=visit.channel), timeout_s=LEAVE_TIMEOUT_S)
            raise
        finally:
            if connection is not None:
                del self._visits[connection]
                self._let_go(connection)
                connection.close()
        if visit.replaced_by:
            logger.warning("relay %s: %s", format_address(relay.address), visit.replaced_by)
            visit.rest_s = REPLACED_REST_S
        return visit

    async def _hold(self, connection: Connection, visit: _Visit, *, has_choice: Callable[[], bool]) -> None:
        leg: RelayLeg | None = None
        timeout_s = REQUEST_TIMEOUT_S
        try:
            while not visit.replaced_by and not (visit.is_draining and has_choice()):
                request = m.Reserve(lifetime_ms=round(LIFETIME_S * 1e3))
                answer = await connection.request(request, timeout_s=timeout_s)
                assert isinstance(answer, m.Reserved)  # by the session
                self._note(connection, answer)
                visit.channel = answer.leg.channel
                if leg is None or leg.is_lost or leg.channel != answer.leg.channel:
                    if leg is not None:
                        leg.close()
                    leg = self._make_leg(answer.leg, connection, None, RESERVATION_KEEPALIVE_S)
                    leg.on_lost = visit.wake.set
                visit.wake.clear()
                await self._wait(connection, visit.wake, answer.ttl_ms / 3e3 * self._rng.uniform(0.8, 1.0))
                timeout_s = CHECK_TIMEOUT_S if leg.is_lost else REQUEST_TIMEOUT_S
        finally:
            if leg is not None:
                leg.close()

    async def _wait(self, connection: Connection, wake: asyncio.Event, renew_s: float) -> None:
        """Return when it is time to renew, something has happened, or the connection is gone."""
        waits = [asyncio.ensure_future(connection.wait_gone()), asyncio.ensure_future(wake.wait())]
        try:
            await asyncio.wait(waits, timeout=renew_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    def _note(self, connection: Connection, answer: m.Reserved) -> None:
        held = self._held.get(connection.remote)
        before = None if held is None else (held.voucher, held.connection)
        self._held[connection.remote] = Held(
            relay=connection.remote,
            voucher=answer.voucher,
            ends_at=clock() + answer.ttl_ms / 1e3,
            observed_address=answer.observed_address,
            connection=connection,
        )
        if before != (answer.voucher, connection):
            self.on_change()

    def _let_go(self, connection: Connection) -> None:
        """Note that a connection is over: what the relay has promised on it holds until it runs out."""
        for relay, held in list(self._held.items()):
            if held.ends_at <= clock():
                del self._held[relay]
            elif held.connection is connection:
                held.connection = None
                self.on_change()

    def close(self) -> None:
        """Give up all channels and close the connections to relays; `run`, if it runs, is to be cancelled before."""
        for leg in list(self._legs.values()):
            leg.close()
        for connection in self._connections():
            connection.close()
        self._held.clear()
        self._called_through.clear()
        for bridge in self._bridges.values():
            bridge.close()
        self._bridges.clear()

    # Channels

    async def connect(self, node: NodeId, voucher: bytes) -> RelayLeg:
        """Return this node's leg of a new channel to `node`, through the relay that signed the voucher.

        Raises:
            RemoteProtocolError: the voucher is damaged, or is not that node's.
            RemoteRefused: the relay or the node does not want it; `remote_code` and `retry_after_s` say how.
            NetworkError: the relay cannot be reached.
        """
        said = read_voucher(voucher)
        if said.node != node:
            raise RemoteProtocolError(f"the voucher is of node {said.node.short}, expected {node.short}")
        connection = await self._reach(said)
        answer = await connection.request(m.Connect(node_id=node, voucher=voucher), timeout_s=CONNECT_TIMEOUT_S)
        assert isinstance(answer, m.Channel)  # by the session
        if answer.leg.side != p.CALLER:
            raise RemoteProtocolError("the relay gave the wrong leg: got the called side's")
        return self._make_leg(answer.leg, connection, node, CHANNEL_KEEPALIVE_S)

    async def _reach(self, voucher: Voucher) -> Connection:
        """Return a connection to a voucher's relay: that of a reservation there, or one of its own."""
        relay = voucher.relay
        self._n_reaching[relay] += 1
        try:
            async with self._dialling.setdefault(relay, asyncio.Lock()):
                held = self._held.get(relay)
                connection = self._called_through.get(relay) if held is None else held.connection
                if connection is None or not connection.is_open:
                    connection = await self._dial_any(voucher)
                    self._called_through.pop(relay, None)
                    self._called_through[relay] = connection
                    self._forget_callers_relays()
        finally:
            self._n_reaching[relay] -= 1
            if not self._n_reaching[relay]:
                del self._n_reaching[relay], self._dialling[relay]
        return connection

    def _forget_callers_relays(self) -> None:
        """Close the connections that were dialled longest ago to relays that carry nothing now, as far as there are too many."""
        in_use = {leg.address for leg in self._legs.values()}
        for relay, connection in list(self._called_through.items())[:-1]:  # the last one is about to be used
            is_over = not connection.is_open
            is_idle = connection.address not in in_use and relay not in self._n_reaching
            if is_over or (is_idle and len(self._called_through) > MAX_CALLED_THROUGH):
                del self._called_through[relay]
                connection.close()

    async def _dial_any(self, voucher: Voucher) -> Connection:
        error: SwarmError | None = None
        for text in voucher.addresses[:MAX_RELAY_ADDRESSES]:
            try:
                return await self.dial(parse_address(text), voucher.relay)
            except (NetworkError, RemoteProtocolError) as failure:
                logger.debug("relay %s at %s: %s", voucher.relay.short, text, failure)
                error = failure
        assert error is not None  # a voucher names at least one address
        raise error

    @property
    def has_bridge(self) -> bool:
        """Whether a relay is reached otherwise than by UDP: then no address at which it sees us is worth anything."""
        return any(bridge.is_open for bridge in self._bridges.values())

    async def dial(self, relay: SocketAddress, node: NodeId | None) -> Connection:
        """Return a connection to a relay, by UDP, or by another way where UDP does not get there."""
        bridge = self._bridges.get(relay)
        if bridge is None or not bridge.is_open:
            try:
                return await self._endpoint.dial(relay, expected=node, timeout_s=DIAL_TIMEOUT_S)
            except NetworkError:
                opened = await self._open_bridge(relay, self._endpoint.port)
                bridge = self._bridges.get(relay)
                if bridge is not None and bridge.is_open:  # another dial was faster
                    opened.close()
                else:
                    bridge = self._bridges[relay] = opened
        try:
            return await self._endpoint.dial(bridge.address, expected=node, timeout_s=DIAL_TIMEOUT_S)
        except BaseException:
            if self._bridges.get(relay) is bridge:  # not if another dial over it has failed before
                del self._bridges[relay]
            bridge.close()
            raise

    # What comes in

    async def serve(self, connection: Connection, request: m.Request) -> m.Done:
        """Answer one of SERVES, which a relay asks on a connection that we opened to it.

        Raises:
            Refused: it is not from a relay of ours, or the call is not wanted.
        """
        is_relay = any(held.connection is connection for held in self._held.values())
        if isinstance(request, m.Notice):
            self._take_notice(connection, request)
            return m.Done()
        if not isinstance(request, m.Incoming) or not is_relay or self._on_leg is None:
            raise Refused("this node takes no calls by way of you")
        if request.leg.side != p.CALLED or request.leg.channel in self._legs or len(self._legs) >= MAX_LEGS:
            raise Refused("that is not a leg for this node")
        leg = self._make_leg(request.leg, connection, request.caller, CHANNEL_KEEPALIVE_S)
        try:
            self._on_leg(leg)
        except Refused:
            leg.close()
            raise
        return m.Done()

    def _take_notice(self, connection: Connection, notice: m.Notice) -> None:
        if not connection.is_client:
            raise Refused("that is not for you to say")
        if notice.kind == m.NoticeKind.DRAINING:
            logger.info("a relay restarts in %.1f s: %s", notice.in_ms / 1e3, notice.detail)
        visit = self._visits.get(connection)
        if visit is None:
            return  # we only call through it
        visit.is_draining |= notice.kind == m.NoticeKind.DRAINING
        if notice.kind == m.NoticeKind.REPLACED:
            visit.replaced_by = notice.detail or "another process has this node's key"
        visit.wake.set()

    def receive(self, datagrams: Sequence[bytes], address: Any) -> None:
        """Take packets of relays that are neither QUIC nor RELAY; what is not for a leg of ours is dropped."""
        for data in datagrams:
            if not data or data[0] not in p.CONTROL_TYPES:
                continue
            try:
                packet = p.decode(data)
            except RemoteProtocolError:
                continue
            leg = self._legs.get(packet.channel)
            if leg is not None:
                leg.receive(packet, data)

    # Inside

    def _make_leg(self, leg: m.Leg, connection: Connection, remote: NodeId | None, keepalive_s: float) -> RelayLeg:
        assert connection.address is not None  # we dialled it
        made = RelayLeg(
            leg,
            connection.address,
            remote,
            keepalive_s=min(keepalive_s, max(leg.idle_ms / 3e3, MIN_KEEPALIVE_S)),
            rng=self._rng,
            send=self._endpoint.send_raw,
            on_moved=self._on_moved,
            on_end=self._on_leg_end,
        )
        self._legs[made.channel] = made
        return made

    def _on_moved(self, moved: RelayLeg) -> None:
        """The relay saw us at another address: let it learn the same of the other legs there, which may only listen."""
        for leg in self._legs.values():
            if leg is not moved and leg.address == moved.address:
                leg.check()

    def _on_leg_end(self, leg: RelayLeg, is_lost: bool) -> None:
        self._legs.pop(leg.channel, None)
        if is_lost or leg.remote is None:
            return
        for connection in self._connections():
            if connection.address == leg.address and connection.is_open:
                with contextlib.suppress(SwarmError):
                    released = connection.start(m.Release(channel=leg.channel), timeout_s=REQUEST_TIMEOUT_S)
                    self._releases.add(released)
                    released.add_done_callback(self._releases.discard)
                return

    def _connections(self) -> list[Connection]:
        held = [each.connection for each in self._held.values() if each.connection is not None]
        return held + list(self._called_through.values())


async def _open_web_socket(relay: SocketAddress, port: int) -> Bridge:
    from swarm.net.relay_websocket import WebSocketBridge  # an HTTP client, which few nodes need

    return await WebSocketBridge.open(relay, port)
