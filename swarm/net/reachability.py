"""Whether others reach this node unasked: they are let dial back, and only what really came in counts.

    node                               relay                              helpers, connected to it from other hosts
      CHECK_REACH port, nonce      ->    DIAL_BACK node, nonce, address ->
                                                                            dial the node, pinned to its key
      REACHED nonce                                                     <-  on that connection
      CHECKED how many             <-                                   <-  DONE

A NAT lets in hosts that the node has sent to, or even everything from their addresses. So who dials must be a host that this
node has not sent to lately; a relay never is (go-libp2p's issue 3467). Two such hosts make it *public*, or one where the relay
knows no more. IPv4 and IPv6 apart.

A relay sends at most two helpers, to the host that it sees the asker at and nowhere else, a few times a minute: a request brings
about as many packets as it has cost, and only to who sent it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from swarm.errors import Overloaded, Refused, RemoteProtocolError, RemoteRefused, SwarmError, UserError
from swarm.ip import plain_ip
from swarm.net.addresses import format_address, literal_address
from swarm.net.admission import host_of
from swarm.net.connection import Connection, clock
from swarm.net.endpoint import Endpoint
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

N_HELPERS = 2  # DESIGN section 4
DIAL_BACK_S = 3.0  # a helper's dial
HELPER_TIMEOUT_S = 5.0  # a relay waits so long for a helper
CHECK_TIMEOUT_S = 7.0  # a node for the relay
CHECK_REST_S = 10.0  # between two checks of one host at a relay, and two dials that one relay asks of a helper; guessed
MAX_HOSTS = 4096  # askers that a relay remembers the last check of
# A host that we sent to may pass a NAT for so long: the longest timeouts of NATs are some minutes (RFC 4787 section 4.3).
CONTACT_S = 600.0


class Verdict(Enum):
    """What is known of one kind of IP."""

    UNKNOWN = "nobody could try"
    PUBLIC = "others reach it"
    CLOSED = "others do not reach it"


class Reach(Enum):
    """How others reach a node."""

    PUBLIC = "public"
    PUNCHABLE = "hole-punchable"
    RELAYED = "relayed"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Check:
    """One that is under way.

    Attributes:
        hosts: of whom a REACHED came.
    """

    version: int
    hosts: set[str] = field(default_factory=set)


class ReachChecker:
    """Finds out whether others reach this node's endpoint; answers REACHED and DIAL_BACK."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._checks: dict[bytes, _Check] = {}  # by nonce
        self._dialled: dict[Connection, float] = {}  # relays that asked us to dial: when
        self.verdicts = dict.fromkeys((4, 6), Verdict.UNKNOWN)
        endpoint.add_handler((m.Reached,), self._take_reached)
        endpoint.add_handler((m.DialBack,), self._dial_back)

    async def check(self, may_ask: Callable[[Connection], bool] = lambda _: True) -> dict[int, Verdict]:
        """Ask every relay that we are connected to, each kind of IP by one that sees it, and return the verdicts.

        What nobody could try stays as it was.

        Args:
            may_ask: whether a connection is to a relay of whom that may be asked: what others say makes this node look closed,
                so it should not be just anybody whom it has dialled.
        """
        asked: set[int] = set()
        for connection in self._endpoint.open_connections():
            if not connection.is_client or connection.path.is_relayed or connection.address is None:
                continue
            if not may_ask(connection):
                continue
            version = plain_ip(connection.address[0]).version
            if version in asked or plain_ip(connection.address[0]).is_loopback:
                continue
            verdict = await self._ask(connection, version)
            if verdict is not Verdict.UNKNOWN:
                asked.add(version)
                self.verdicts[version] = verdict
        return dict(self.verdicts)

    async def _ask(self, connection: Connection, version: int) -> Verdict:
        nonce = os.urandom(m.NONCE_BYTES)
        check = self._checks[nonce] = _Check(version)
        try:
            request = m.CheckReach(port=self._endpoint.port, nonce=nonce)
            answer = await connection.request(request, timeout_s=CHECK_TIMEOUT_S)
        except (SwarmError, RemoteProtocolError) as error:
            logger.debug("no check of reachability: %s", error)
            return Verdict.UNKNOWN
        finally:
            del self._checks[nonce]
        assert isinstance(answer, m.Checked)  # by the session
        return judge(n_asked=answer.n_asked, n_hosts=len(check.hosts))

    async def _take_reached(self, connection: Connection, request: m.Request) -> m.Done:
        assert isinstance(request, m.Reached)
        check = self._checks.get(request.nonce)
        host = connection.remote_address
        if check is None or connection.is_client or connection.path.is_relayed or host is None:
            raise Refused("that is not what was asked for")
        if self._endpoint.has_contacted(host, within_s=CONTACT_S):
            logger.debug("dialled back by %s, which a NAT would let in anyway", host)
        elif plain_ip(host).version == check.version:
            check.hosts.add(host_of(host))
        return m.Done()

    async def _dial_back(self, connection: Connection, request: m.Request) -> m.Done:
        """Dial another node for a relay of ours."""
        assert isinstance(request, m.DialBack)
        now = clock()
        if not connection.is_client:
            raise Refused("only a relay that this node has dialled may ask that")
        if now < self._dialled.get(connection, float("-inf")) + CHECK_REST_S / N_HELPERS:
            raise Overloaded("this node has dialled for you a moment ago", retry_after_s=CHECK_REST_S)
        self._dialled = {each: at for each, at in self._dialled.items() if each.is_open} | {connection: now}
        try:
            address = literal_address(request.address)
        except UserError as error:
            raise RemoteProtocolError("DIAL_BACK without a node's IP address") from error
        if plain_ip(address[0]).is_loopback:
            raise RemoteProtocolError("DIAL_BACK to an address that is nobody's")
        try:
            dialled = await self._endpoint.dial(address, expected=request.node_id, timeout_s=DIAL_BACK_S)
            try:
                await dialled.request(m.Reached(nonce=request.nonce), timeout_s=DIAL_BACK_S)
            finally:
                dialled.close()
        except SwarmError as error:
            logger.debug("dialled %s for a relay: %s", request.address, error)
            raise LookupError("it did not answer there") from error  # which tells the relay that we have tried
        return m.Done()


def judge(*, n_asked: int, n_hosts: int) -> Verdict:
    """Return what a check says: so many helpers were asked, and so many hosts that count came in."""
    if n_hosts >= min(N_HELPERS, max(1, n_asked)):
        return Verdict.PUBLIC
    return Verdict.CLOSED if n_asked else Verdict.UNKNOWN


def classify(mappings: Mapping[int, m.Mapping], verdicts: Mapping[int, Verdict]) -> Reach:
    """Return how others reach a node, by what is known of each kind of IP: the best of them."""
    if m.Mapping.BLOCKED in mappings.values():
        return Reach.RELAYED
    if any(verdicts.get(version) is Verdict.PUBLIC for version in mappings):
        return Reach.PUBLIC
    kinds = set(mappings.values()) - {m.Mapping.UNKNOWN}
    if any(mapping is m.Mapping.NONE and verdicts.get(v) is not Verdict.CLOSED for v, mapping in mappings.items()):
        return Reach.UNKNOWN  # it looks public, and nobody could try
    if kinds & {m.Mapping.NONE, m.Mapping.SAME}:
        return Reach.PUNCHABLE
    return Reach.RELAYED if kinds else Reach.UNKNOWN


class ReachBroker:
    """At a relay: lets nodes that are connected to it dial those who ask."""

    def __init__(
        self, endpoint: Endpoint, *, now: Callable[[], float] = clock, rng: random.Random | None = None
    ) -> None:
        self._endpoint = endpoint
        self._now = now
        self._rng = rng or random.Random()  # a fair choice
        self._checked: dict[str, float] = {}  # host -> when it asked last; oldest first
        endpoint.add_handler((m.CheckReach,), self.serve)

    async def serve(self, connection: Connection, request: m.Request) -> m.Checked:
        """Answer CHECK_REACH.

        Raises:
            Overloaded: the host has asked a moment ago.
            Refused: there is no telling where it is.
        """
        assert isinstance(request, m.CheckReach)
        host = connection.remote_address
        if host is None or connection.is_client or connection.path.is_relayed or not request.port:
            raise Refused("where you are cannot be told from here")
        if plain_ip(host).is_loopback:  # by WebSocket, perhaps; helpers leave a relay that sends them there
            raise Refused("where you are cannot be told from here")
        self._take_turn(host_of(host))
        helpers = self._helpers(host)
        address = format_address((host, request.port))
        order = m.DialBack(node_id=connection.remote, nonce=request.nonce, address=address)
        outcomes = await asyncio.gather(
            *(helper.request(order, timeout_s=HELPER_TIMEOUT_S) for helper in helpers), return_exceptions=True
        )
        n_reached = n_failed = 0
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, SwarmError):
                raise outcome
            n_reached += isinstance(outcome, m.Done)
            # Who is busy, gone or has never heard of it has not tried.
            n_failed += isinstance(outcome, RemoteRefused) and outcome.remote_code == m.ErrorCode.NOT_FOUND
        return m.Checked(n_asked=n_reached + n_failed, n_reached=n_reached)

    def _take_turn(self, key: str) -> None:
        now = self._now()
        last = self._checked.pop(key, float("-inf"))
        if now < last + CHECK_REST_S:
            self._checked[key] = last
            raise Overloaded("this host has asked a moment ago", retry_after_s=last + CHECK_REST_S - now)
        while len(self._checked) >= MAX_HOSTS:
            del self._checked[next(iter(self._checked))]
        self._checked[key] = now

    def _helpers(self, host: str) -> list[Connection]:
        """Return at most two connections of nodes at two other hosts with the same kind of IP."""
        version, hosts = plain_ip(host).version, {host_of(host)}
        chosen: list[Connection] = []
        connections = [each for each in self._endpoint.open_connections() if not each.is_client]
        self._rng.shuffle(connections)
        for connection in connections:
            other = connection.remote_address
            if other is None or connection.path.is_relayed or plain_ip(other).is_loopback:
                continue
            if plain_ip(other).version != version or host_of(other) in hosts:
                continue
            hosts.add(host_of(other))
            chosen.append(connection)
            if len(chosen) == N_HELPERS:
                break
        return chosen
