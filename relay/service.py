"""Serves those who call and who can be called: requests of nodes on one side, their packets on the other. Plumbing.

The rules are in `reservations` (who may have what) and `switchboard` (which packet goes where).
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from relay.quotas import Limits
from relay.reservations import ChannelEntry, Reservations
from relay.switchboard import Flight, Switchboard
from swarm.errors import Leaving, NetworkError, Overloaded, Refused, RemoteProtocolError, RemoteRefused, SwarmError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net import relay_packets as p
from swarm.net.addresses import SocketAddress, format_address, is_loopback
from swarm.net.admission import host_of
from swarm.token_bucket import TokenBucket
from swarm.wire import messages as m
from swarm.wire.vouchers import read_voucher, sign_voucher

logger = logging.getLogger(__name__)

SERVES: tuple[type[m.Request], ...] = (m.Reserve, m.Connect, m.Release)
INCOMING_TIMEOUT_S = 3.0  # for the called node to take a call; as long as it takes to find out that a link is dead
NOTICE_TIMEOUT_S = 1.0
# CONNECTs on one connection: a voucher's signature costs 0.1 ms, and each makes the called node work. Guessed: a backbone that
# calls 30 peers at once.
CONNECT_PER_S, CONNECT_BURST = 2.0, 40.0
MIN_TIMER_S = 0.0005  # between two looks at the queue, so that a backlog leaves in runs


class Client(Protocol):
    """What is needed of a connection to a node."""

    @property
    def remote(self) -> NodeId: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def source(self) -> Any: ...
    def start(self, message: m.Request, *, timeout_s: float) -> asyncio.Future[m.Response]: ...


class RelayService:
    """The relaying part of a relay; `attach` gives it a socket, `sweep` is to be called every second or so."""

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        *,
        generation: int,
        secret: bytes,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`generation` and `secret` are the switchboard's."""
        # Whom to count for what comes from a source: a WebSocket's end on this machine is another host's.
        self.real_host: Callable[[SocketAddress], str] = lambda source: str(source[0])
        self._identity = identity
        self._limits = limits
        self._now = now
        self._clock_offset_s = wall() - now()  # so that vouchers do not follow the wall clock's jumps
        self.switchboard = Switchboard(limits, generation=generation, secret=secret, now=now())
        self.reservations: Reservations[Client] = Reservations(self.switchboard, limits)
        self._send: Callable[[Sequence[bytes], Any], object] = lambda datagrams, address: None
        self._addresses: tuple[str, ...] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: weakref.WeakKeyDictionary[Client, TokenBucket] = weakref.WeakKeyDictionary()
        self._callers: weakref.WeakSet[Client] = weakref.WeakSet()
        self._notices: set[asyncio.Future[m.Response]] = set()
        self.is_draining = False

    def attach(self, send: Callable[[Sequence[bytes], Any], object], addresses: tuple[str, ...]) -> None:
        """Begin: `send` sends datagrams to one address; `addresses` are where callers reach this relay."""
        self._send, self._addresses = send, addresses

    # Packets

    def on_packets(self, datagrams: Sequence[bytes], address: Any) -> None:
        """Take what came in together from one address and is not QUIC."""
        self._send_all(self.switchboard.receive(datagrams, address, self._now()))

    def _send_all(self, flights: Sequence[Flight]) -> None:
        for datagrams, address in flights:
            self._send(datagrams, address)
        if self._timer is None:
            at = self.switchboard.next_deadline()
            if at is not None:
                wait_s = max(at - self._now(), MIN_TIMER_S)
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._send_all(self.switchboard.poll(self._now()))

    # Requests

    async def serve(self, connection: Client, request: m.Request) -> m.Response:
        """Return the answer to one of SERVES.

        Raises:
            Leaving, Refused, Overloaded, LookupError: it is not granted.
        """
        if isinstance(request, m.Release):
            self.reservations.release(connection.remote, request.channel)
            return m.Done()
        if self.is_draining:
            raise Leaving("this relay restarts")
        if isinstance(request, m.Reserve):
            return self._reserve(connection, request)
        assert isinstance(request, m.Connect)
        return await self._connect(connection, request)

    def sweep(self) -> None:
        """Forget what is over."""
        self.reservations.expire(self._now())

    def stop(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def drain(self, drain_s: float) -> None:
        """Take nothing new, tell everybody, and pass packets on for as long as asked while there are channels."""
        self.is_draining = True
        for connection in self.reservations.connections() | set(self._callers):
            self._tell(connection, m.NoticeKind.DRAINING, drain_s, "this relay restarts")
        until = self._now() + drain_s
        while self._notices and self._now() < until:
            await asyncio.wait(self._notices, timeout=min(NOTICE_TIMEOUT_S, until - self._now()))
        while self.reservations.n_channels and self._now() < until:
            await asyncio.sleep(min(0.1, max(0.0, until - self._now())))
            self.sweep()

    def _reserve(self, connection: Client, request: m.Reserve) -> m.Reserved:
        now = self._now()
        host = self.real_host(connection.source)
        held, loser = self.reservations.reserve(
            connection.remote,
            connection,
            network="" if is_loopback(host) else host_of(host),
            lifetime_s=request.lifetime_ms / 1e3,
            is_open=lambda other: other.is_open,
            now=now,
        )
        if loser is not None:
            logger.warning("two processes use the key of node %s: the newer one is served", held.node.short)
            self._tell(loser, m.NoticeKind.REPLACED, 0.0, "another process with this key has the reservation now")
        return m.Reserved(
            ttl_ms=round((held.ends_at - now) * 1e3),
            n_channels=self._limits.n_channels_per_node,
            leg=self._leg(connection, held.channel, p.CALLED, held.key),
            observed_address=format_address(connection.source),
            voucher=sign_voucher(
                self._identity,
                node=held.node,
                ends_at_ms=round((held.ends_at + self._clock_offset_s) * 1e3),
                addresses=self._addresses,
            ),
        )

    async def _connect(self, connection: Client, request: m.Connect) -> m.Channel:
        now = self._now()
        bucket = self._connecting.get(connection)
        if bucket is None:
            bucket = TokenBucket(rate_per_s=CONNECT_PER_S, burst=CONNECT_BURST, now=now)
            self._connecting[connection] = bucket
        wait_s = bucket.take(now)
        if wait_s:
            raise Overloaded("too many calls: expected at most 2 a second", retry_after_s=wait_s)
        self._check_voucher(request, now)
        held = self.reservations.find(request.node_id)
        if held is not None and not held.connection.is_open:
            raise Overloaded(f"node {held.node.short} is away, and may come back", retry_after_s=2.0)
        entry = self.reservations.connect(connection.remote, request.node_id, now)
        assert held is not None  # else `connect` has raised
        try:
            await self._announce(held.connection, entry)
        except BaseException:  # the caller may have gone too
            self.reservations.release(entry.caller, entry.channel)
            raise
        self._callers.add(connection)
        return m.Channel(leg=self._leg(connection, entry.channel, p.CALLER, entry.keys[p.CALLER]))

    async def _announce(self, called: Client, entry: ChannelEntry) -> None:
        leg = self._leg(called, entry.channel, p.CALLED, entry.keys[p.CALLED])
        try:
            await called.start(m.Incoming(caller=entry.caller, leg=leg), timeout_s=INCOMING_TIMEOUT_S)
        except RemoteRefused as error:
            raise Refused(f"node {entry.called.short} does not take the call: {error}") from error
        except (NetworkError, RemoteProtocolError) as error:
            raise Overloaded(f"node {entry.called.short} does not answer this relay", retry_after_s=2.0) from error

    def _check_voucher(self, request: m.Connect, now: float) -> None:
        try:
            voucher = read_voucher(request.voucher)
        except RemoteProtocolError as error:
            raise Refused(f"bad voucher: {error}") from error
        if voucher.relay != self._identity.node_id or voucher.node != request.node_id:
            raise Refused("the voucher is another relay's or another node's")
        if voucher.ends_at_ms < (now + self._clock_offset_s) * 1e3:
            raise LookupError("the voucher has run out")

    def _leg(self, connection: Client, channel: bytes, side: int, key: bytes) -> m.Leg:
        return m.Leg(
            channel=channel,
            generation=self.switchboard.generation,
            side=side,
            key=key,
            cookie=self.switchboard.cookie(channel, connection.source, self._now()),
            idle_ms=round(self._limits.idle_s * 1e3),
            rate_kbit_s=self._limits.channel_bit_s // 1000,
        )

    def _tell(self, connection: Client, kind: m.NoticeKind, in_s: float, detail: str) -> None:
        notice = m.Notice(kind=kind, in_ms=round(in_s * 1e3), detail=detail)
        try:
            told = connection.start(notice, timeout_s=NOTICE_TIMEOUT_S)
        except SwarmError as error:
            logger.debug("node is gone before it was told: %s", error)
            return
        self._notices.add(told)
        told.add_done_callback(self._notices.discard)
