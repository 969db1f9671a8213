"""Finds ways to nodes that cannot simply be dialled: through their relays, and from there, by hole punching, direct ones.

    caller                        relay                         called
      CONNECT voucher          ->   INCOMING                 ->
      QUIC handshake through the channel                     <->
      OFFER_PATHS addresses    ->                                 probes them
      probes them                                            <-   PATHS addresses
      the connection moves to a direct path once both sides' probes are answered there (`paths`)

The relay's channel stays beside a direct path, so that it is there when that fails. One finder to an endpoint; it knows nothing
of registries: whoever reads them tells it the vouchers.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import random
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from swarm.errors import ConnectionLost, NetworkError, Overloaded, RemoteProtocolError, RemoteRefused, SwarmError
from swarm.ids import NodeId
from swarm.ip import plain_ip
from swarm.net.addresses import SocketAddress, format_address, host_towards, is_loopback, own_hosts
from swarm.net.connection import Connection, clock
from swarm.net.endpoint import DIAL_TIMEOUT_S, Endpoint
from swarm.net.paths import Path
from swarm.net.punch import Sighting, candidates, is_hopeless, mapping_of, usable, why_relayed
from swarm.net.reachability import Reach, ReachChecker, Verdict, classify
from swarm.net.relay_client import SERVES as RELAY_SERVES
from swarm.net.relay_client import RelayAddress, RelayClient, RelayLeg
from swarm.token_bucket import TokenBucket
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

OFFER_TIMEOUT_S = 4.0
PUNCH_S = 5.0  # probes that have no answer by then have failed; guessed: ten round trips across the world
# Between two tries on one connection: NATs are restarted, laptops move. Doubles up to the longest. Guessed.
AGAIN_S, LONGEST_AGAIN_S = 30.0, 600.0
# Offers that this node answers, all connections together: an offer has us probe its addresses some 60 times a second for a few
# seconds, and a stranger may have many connections and name somebody else's address. Guessed: a backbone makes one for each peer.
OFFERS_PER_S, OFFER_BURST = 2.0, 12.0
OFFER_REST_S = 5.0  # between two offers that one connection's other side may make: each has us probe eight addresses
MAX_VOUCHERS = 4  # that a record may carry
LOOK_S = 2.0  # between two looks whether others see us at a new address
# Between two checks whether others reach us; the second while nobody could try; guessed.
CHECK_S, CHECK_RETRY_S = 600.0, 60.0
# Between two looks whether a channel by which we were called carries a connection: a relay lets a node have few of them, and a
# stranger could hold them all. Guessed: three times what a dial takes at most.
UNUSED_S = 3 * DIAL_TIMEOUT_S
SPARE_REST_S = 0.1  # from the loss of a relay's channel to opening another
SPARE_RETRY_S = 2.0  # until it is tried again if that fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """What a node announces of how it is reached; the fields of its records."""

    addresses: tuple[str, ...]
    is_public: bool
    vouchers: tuple[str, ...]


class PathFinder:
    """Use as `async with PathFinder(endpoint, takes_calls=...) as finder`, inside the endpoint's own block."""

    def __init__(self, endpoint: Endpoint, *, takes_calls: bool, is_relays_only: bool = False) -> None:
        """Prepare.

        Args:
            takes_calls: whether others may call this node through its relays.
            is_relays_only: offer no direct paths, and use relays on this machine too: for benchmarks of relays.
        """
        self.relays = RelayClient(endpoint, on_leg=self._take_leg if takes_calls else None)
        self.reach = ReachChecker(endpoint)
        self._endpoint = endpoint
        self._is_relays_only = is_relays_only
        self._vouchers: dict[NodeId, tuple[bytes, ...]] = {}
        self._offers = TokenBucket(rate_per_s=OFFERS_PER_S, burst=OFFER_BURST, now=clock())
        self._offered: weakref.WeakKeyDictionary[Connection, float] = weakref.WeakKeyDictionary()
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        endpoint.on_other = self.relays.receive
        endpoint.add_handler(RELAY_SERVES, self.relays.serve)
        endpoint.add_handler((m.OfferPaths,), self._answer_offer)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        await self._tasks.__aexit__(None, None, None)
        self.relays.close()

    async def dial(
        self, address: SocketAddress, *, expected: NodeId | None, timeout_s: float = DIAL_TIMEOUT_S
    ) -> Connection:
        """Return an open connection to a relay or registry node, by a WebSocket where UDP does not get there.

        Raises:
            NetworkError, RemoteProtocolError: there is no way.
        """
        if is_loopback(address[0]):
            return await self._endpoint.dial(address, expected=expected, timeout_s=timeout_s)
        return await self.relays.dial(address, expected)

    # What others see of us

    def sightings(self) -> list[Sighting]:
        """Return where the nodes that we are connected to see us."""
        found = []
        for by, at in self._endpoint.sightings():
            host = host_towards(by)
            found.append(Sighting(by=by, at=at, own=None if host is None else (host, self._endpoint.port)))
        return found

    def mapping(self, version: int = 4) -> m.Mapping:
        """Return what is between us and the others, as far as is known."""
        return m.Mapping.BLOCKED if self._is_blocked() else mapping_of(self.sightings(), version)

    def _is_blocked(self) -> bool:
        """Return whether no UDP gets out: a relay is reached by WebSocket, and nobody out there without.

        One relay alone may be anybody's, named by a voucher, and its UDP alone may be off.
        """
        return self.relays.has_bridge and not any(plain_ip(each.by[0]).is_global for each in self.sightings())

    def own_addresses(self) -> list[SocketAddress]:
        """Return the addresses of this machine's interfaces to the world, with our port."""
        return [(host, self._endpoint.port) for host in own_hosts(self._endpoint.families)]

    def face(self, address: str, *, is_advertised: bool = False) -> Face:
        """Return what to announce; `address`: where a registry sees us, or what a person says (`is_advertised`)."""
        sightings = self.sightings()
        addresses = [address]
        if self._is_blocked() and not is_advertised:
            addresses = [format_address(each) for each in self.own_addresses()] or addresses
        elif not is_advertised:
            addresses += [format_address(each.at) for each in sightings]
            # An address of our own first: without NAT it is the surest, and of two kinds of IP only one may be behind NAT.
            owned = [format_address(each.at) for each in sightings if each.own == each.at]
            addresses = owned + addresses
        vouchers = tuple(base64.urlsafe_b64encode(each).decode().rstrip("=") for each in self.relays.vouchers())
        return Face(
            addresses=tuple(dict.fromkeys(addresses))[: m.MAX_CANDIDATES],
            is_public=is_advertised or self.is_public(),
            vouchers=vouchers[:MAX_VOUCHERS],
        )

    def is_public(self) -> bool:
        """Return whether others reach us unasked by one kind of IP at least.

        They have, or they see us at an address of our own and nobody has tried in vain.
        """
        if self._is_blocked():
            return False
        verdicts = [self.reach.verdicts[version] for version in self._endpoint.families]
        if Verdict.PUBLIC in verdicts:
            return True
        for version in self._endpoint.families:
            if self.mapping(version) is m.Mapping.NONE and self.reach.verdicts[version] is not Verdict.CLOSED:
                return True
        return all(plain_ip(each.by[0]).is_loopback for each in self.sightings())

    def how_reached(self) -> Reach:
        """Return how others reach this node, as far as is known."""
        return classify({version: self.mapping(version) for version in self._endpoint.families}, self.reach.verdicts)

    async def keep_reachable(
        self,
        relays: Sequence[RelayAddress],
        on_change: Callable[[], None],
        *,
        others: Callable[[], Sequence[RelayAddress]] = tuple,
    ) -> None:
        """Keep reservations at two of these relays, and know whether others reach us, until cancelled.

        Relays on this machine are passed over: who reaches them reaches us.

        Args:
            on_change: there is something new to announce.
            others: returns further relays that are known at the moment.
        """

        def far() -> list[RelayAddress]:
            known = (*relays, *others())
            return [relay for relay in known if self._is_relays_only or not is_loopback(relay.address[0])]

        if far():
            self.relays.on_change = on_change
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.relays.run(far))
                tasks.create_task(self._keep_checking(on_change, far))

    async def _keep_checking(self, on_change: Callable[[], None], relays: Callable[[], list[RelayAddress]]) -> None:
        """Check now and then whether others reach us, and whenever we are seen at another address; these relays are asked."""

        def may_ask(connection: Connection) -> bool:
            return any(connection.remote == each.node or connection.address == each.address for each in relays())

        seen: set[SocketAddress] = set()
        next_at, told = clock(), self.how_reached()
        while True:
            await asyncio.sleep(LOOK_S)
            found = {each.at for each in self.sightings()}
            if clock() < next_at and not found - seen:
                continue
            seen |= found
            await self.reach.check(may_ask)
            is_known = any(verdict is not Verdict.UNKNOWN for verdict in self.reach.verdicts.values())
            next_at = clock() + (CHECK_S if is_known else CHECK_RETRY_S) * random.uniform(0.8, 1.2)
            if self.how_reached() is not told:
                told = self.how_reached()
                logger.info("others reach this node: %s", told.value)
                on_change()

    # Ways to others

    def know(self, node: NodeId, vouchers: Sequence[str]) -> None:
        """Learn the vouchers that a node announces now, base64url; damaged ones are passed over."""
        found = []
        for text in vouchers:
            try:
                found.append(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
            except (binascii.Error, ValueError):
                logger.debug("a voucher of node %s is damaged", node.short)
        if found:
            self._vouchers[node] = tuple(found)
        else:
            self._vouchers.pop(node, None)

    def has_relays(self, node: NodeId) -> bool:
        """Return whether a node names relays."""
        return bool(self._vouchers.get(node))

    async def dial_relayed(self, node: NodeId, *, timeout_s: float = DIAL_TIMEOUT_S) -> Connection:
        """Return an open connection to a node through one of its relays; a direct path is looked for from then on.

        Raises:
            NetworkError, RemoteProtocolError: none of its relays reaches it; the last one's error.
        """
        error: SwarmError = ConnectionLost(f"node {node.short} names no relay")
        for voucher in self._vouchers.get(node, ()):
            try:
                leg, path = await self._open_leg(node, voucher)
            except (NetworkError, RemoteProtocolError, RemoteRefused, Overloaded) as failure:
                logger.debug("no channel to node %s: %s", node.short, failure)
                error = failure
                continue
            try:
                connection = await self._endpoint.dial(path, expected=node, timeout_s=timeout_s)
            except BaseException as failure:
                leg.close()
                self._endpoint.remove_channel(leg.channel)
                if not isinstance(failure, (NetworkError, RemoteProtocolError)):
                    raise
                error = failure
                continue
            self._start(self._keep_spare(connection, node, leg), f"relay to {node.short}")
            self._start(self._punch(connection), f"punch to {node.short}")
            return connection
        if isinstance(error, (RemoteRefused, Overloaded)):
            raise ConnectionLost(f"no relay reaches node {node.short}: {error}") from error
        raise error

    def add_spare(self, connection: Connection, node: NodeId) -> None:
        """Keep a relay's channel beside a direct connection to a node behind NAT, for when its direct path fails."""
        if self._vouchers.get(node):
            self._start(self._keep_spare(connection, node, None), f"relay to {node.short}")

    def _take_leg(self, leg: RelayLeg) -> None:
        """A node calls us through a relay: what comes by that channel is ours."""
        self._endpoint.add_channel(leg.channel, leg.address)
        leg.on_lost = lambda: self._endpoint.remove_channel(leg.channel)
        self._start(self._end_unused(leg), "called through a relay")

    async def _end_unused(self, leg: RelayLeg) -> None:
        """End a channel by which somebody called once no connection uses it."""
        while not leg.is_lost:
            await asyncio.sleep(UNUSED_S)
            if not self._endpoint.uses_channel(leg.channel):
                leg.close()
                self._endpoint.remove_channel(leg.channel)
                return

    async def _open_leg(self, node: NodeId, voucher: bytes) -> tuple[RelayLeg, Path]:
        leg = await self.relays.connect(node, voucher)
        path = self._endpoint.add_channel(leg.channel, leg.address)
        leg.on_lost = lambda: self._endpoint.remove_channel(leg.channel)
        return leg, path

    async def _keep_spare(self, connection: Connection, node: NodeId, leg: RelayLeg | None, *, n_lost: int = 0) -> None:
        """Keep a channel to a node as long as a connection to it lives; a lost one is opened anew, by any of its relays.

        `n_lost`: which of the relays comes first.
        """
        former: Path | None = None
        gone = asyncio.ensure_future(connection.wait_gone())
        try:
            while not gone.done():
                if leg is None:
                    leg = await self._open_spare(connection, node, n_lost, former)
                    if leg is None:
                        n_lost += 1
                        await asyncio.wait((gone,), timeout=SPARE_RETRY_S)
                        continue
                former = connection.path if connection.path.channel == leg.channel else None
                await self._while_bound(leg, gone)
                self._endpoint.remove_channel(leg.channel)
                if not gone.done():
                    leg, n_lost = None, n_lost + 1
                    await asyncio.wait((gone,), timeout=SPARE_REST_S)
        finally:
            gone.cancel()
            if leg is not None:
                self._endpoint.remove_channel(leg.channel)
                leg.close()

    async def _open_spare(
        self, connection: Connection, node: NodeId, n_lost: int, former: Path | None
    ) -> RelayLeg | None:
        """Return a new channel that a connection may use, in place of `former`; None: the relay whose turn it is gives none."""
        vouchers = self._vouchers.get(node, ())
        if not vouchers:
            return None
        try:
            leg, path = await self._open_leg(node, vouchers[n_lost % len(vouchers)])
        except (NetworkError, RemoteProtocolError, RemoteRefused, Overloaded) as error:
            logger.debug("no spare channel to node %s: %s", node.short, error)
            return None
        self._endpoint.add_path(connection, path)
        if former is not None and connection.path == former and connection.monitor is not None:
            connection.monitor.remove(
                former, reason="the relay ended the channel"
            )  # it was the only path: nothing was moved
        return leg

    async def _while_bound(self, leg: RelayLeg, gone: asyncio.Future[None]) -> None:
        """Return when a relay has lost a channel, or the connection is gone."""
        lost = asyncio.Event()
        leg.on_lost = lost.set
        if not leg.is_lost:
            waiting = asyncio.ensure_future(lost.wait())
            try:
                await asyncio.wait((gone, waiting), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()

    # Punching

    async def _punch(self, connection: Connection) -> None:
        """Look for a direct path under a relayed connection, again and again while it has none."""
        again_s, has_second = AGAIN_S, False
        gone = asyncio.ensure_future(connection.wait_gone())
        try:
            while not gone.done():
                if connection.path.is_relayed:
                    await self._offer(connection)
                if not connection.path.is_relayed:
                    again_s = AGAIN_S
                elif not has_second and connection.is_open and len(self._vouchers.get(connection.remote, ())) > 1:
                    has_second = True  # through another relay, for when the first one dies
                    node = connection.remote
                    self._start(self._keep_spare(connection, node, None, n_lost=1), f"second relay to {node.short}")
                await asyncio.wait((gone,), timeout=again_s)
                again_s = min(2 * again_s, LONGEST_AGAIN_S)
        finally:
            gone.cancel()

    async def _offer(self, connection: Connection) -> None:
        ours = self.mapping()
        offer = m.OfferPaths(addresses=candidates(self.sightings(), self.own_addresses()), mapping=ours)
        try:
            answer = await connection.request(offer, timeout_s=OFFER_TIMEOUT_S)
        except SwarmError as error:
            logger.debug("no offer of paths: %s", error)
            return
        assert isinstance(answer, m.Paths)  # by the session
        if not is_hopeless(ours, answer.mapping):
            self._probe(connection, answer.addresses)
        until = clock() + (0.0 if is_hopeless(ours, answer.mapping) else PUNCH_S)
        while connection.is_open and connection.path.is_relayed and clock() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if connection.is_open and connection.path.is_relayed:
            connection.why_relayed = why_relayed(ours, answer.mapping)
            if connection.monitor is not None:
                connection.monitor.forget_unanswered()
            logger.info("node %s stays relayed: %s", connection.remote.short, connection.why_relayed)

    async def _answer_offer(self, connection: Connection, request: m.Request) -> m.Paths:
        assert isinstance(request, m.OfferPaths)
        if self._is_relays_only:
            return m.Paths(addresses=(), mapping=m.Mapping.BLOCKED)
        now = clock()
        if now < self._offered.get(connection, float("-inf")) + OFFER_REST_S:
            raise Overloaded("paths were offered a moment ago", retry_after_s=OFFER_REST_S)
        if self._offers.take(now):
            raise Overloaded("too many paths are offered", retry_after_s=OFFER_REST_S)
        self._offered[connection] = now
        ours = self.mapping()
        if not is_hopeless(ours, request.mapping):
            self._probe(connection, request.addresses)
        else:
            logger.info("node %s stays relayed: %s", connection.remote.short, why_relayed(ours, request.mapping))
        return m.Paths(addresses=candidates(self.sightings(), self.own_addresses()), mapping=ours)

    def _probe(self, connection: Connection, offered: Sequence[str]) -> None:
        may_be_here = plain_ip(connection.path.address[0]).is_loopback
        for address in usable(offered, may_be_here=may_be_here):
            if plain_ip(address[0]).version in self._endpoint.families:
                self._endpoint.add_path(connection, address)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._tasks.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
