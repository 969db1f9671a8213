"""Keeps the placement true: watches the registry, shakes hands with a peer before it counts, drops those that fail.

What is known of a peer comes from four places, and each can take back only its own word:
- the registry lists it, at a seq; left out, it stays for its ttl while its connection lives, because a registry may have
  restarted with an empty table, or withhold;
- a connection to it is open: without one it does not count, with a new one it counts again;
- an audit caught it (`is_barred`): then nothing else counts.
- a request failed. Lost connections count little: the first costs nothing, more in a row cost time. A refusal or a missed
  deadline: quarantined, then tried again (`quarantine`). Breaking the protocol, or leaving: down until a higher seq as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swarm.dispatch.peer_states import PeerLog, PeerState, PeerView
from swarm.dispatch.placement import Placement
from swarm.dispatch.quarantine import Quarantine, State
from swarm.errors import ExpertUnavailable, NetworkError, RemoteProtocolError, RemoteRefused, SwarmError
from swarm.ids import ModelId, NodeId
from swarm.net.addresses import SocketAddress, parse_address
from swarm.net.connection import Connection
from swarm.net.pool import Pool
from swarm.registry.client import Registry
from swarm.registry.records import ExpertAnnouncement
from swarm.wire import messages as m
from swarm.wire.versions import WIRE_VERSIONS, choose_version, own_disagreement

logger = logging.getLogger(__name__)

REFRESH_S = 2.0  # between two looks at the registry; guessed: one small datagram each way
MIN_REFRESH_S = 0.1  # however often somebody asks for news
RETRY_S = 10.0  # until a peer that did not answer is tried again, unless it announces itself anew
MAX_HOLDERS = 256  # peers a backbone connects to; guessed
# A peer that loses its connection again and again is left alone for at most this; guessed: each loss costs a hedge where there
# is a replica, and where there is none, it is worth more than nothing.
LONGEST_AFTER_LOSS_S = 8.0
REDIAL_TIMEOUT_S = 2.0  # in the middle of a request


class OwnExperts(Protocol):
    """Experts that this process computes itself: always those that it keeps, and perhaps others as the last resort."""

    @property
    def is_last_resort(self) -> bool:
        """Whether experts that are not kept can be computed too."""
        ...

    def kept(self, layer: int) -> npt.NDArray[np.bool_] | None:
        """Return which experts of a layer are never asked of a peer, bool [E]; None: none."""
        ...

    def holds(self, layer: int, experts: Collection[int]) -> bool:
        """Return whether all of these can be computed here."""
        ...

    async def compute(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        row_counts: npt.NDArray[np.uint8],
        expert_ids: npt.NDArray[np.integer],
        weights: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.float32]:
        """Return raw rows [P, D] or, with weights, partial sums [N, D], as `swarm.experts.executor.ExpertExecutor.run`.

        Must not block the loop. Raises SwarmError.
        """
        ...


class Holders:
    """The live holders of one model's experts, as this backbone sees them."""

    def __init__(
        self,
        registry: Registry,
        pool: Pool,
        placement: Placement,
        model: ModelId,
        *,
        own: OwnExperts | None = None,
        allowed: Collection[NodeId] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own`: what this process can compute itself if it must; `allowed`: the only peers to use, None: anybody."""
        self.placement = placement
        self.own = own
        self.is_barred: Callable[[NodeId, int], bool] | None = None
        """Whether a peer that announces this seq is not to be used, nor dialled; None: all may be."""
        self._registry = registry
        self._pool = pool
        self._model = model
        self._allowed = None if allowed is None else frozenset(allowed)
        self._now = now
        self._announced: dict[NodeId, ExpertAnnouncement] = {}
        self._missed_since: dict[NodeId, float] = {}  # of those: when the registry first left it out
        self._greeting: set[NodeId] = set()
        self._failed: dict[NodeId, tuple[int, float]] = {}  # node -> (seq, when to try again)
        self._quarantine = Quarantine()
        self._leaving: dict[NodeId, int] = {}  # node -> the seq it had when it said so
        self._other_versions: set[NodeId] = set()  # of those announced: with whom no wire version is common
        self._log = PeerLog()
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
                    async with asyncio.timeout(self._until_look()):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()

    def look_soon(self) -> None:
        """Ask the registry now: it has told of something new."""
        self._wake.set()

    def _until_look(self) -> float:
        """Return the seconds until the registry and the quarantine are to be looked at again."""
        now = self._now()
        opening = self._quarantine.next_opening(now)
        most_s = REFRESH_S - MIN_REFRESH_S
        return most_s if opening is None else min(most_s, opening - now)

    def missing(self) -> dict[int, tuple[int, ...]]:
        """Return layer -> experts that no live peer and not this process holds; empty when the model can be served."""
        missing = self.placement.all_missing()
        if missing and self.own is not None:
            own = self.own
            missing = {
                layer: absent
                for layer, experts in missing.items()
                if (absent := tuple(expert for expert in experts if not own.holds(layer, (expert,))))
            }
        return missing

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
        """Use a peer no more for now because a request ended with `error`, and look for news at once.

        When it counts again: see the module.
        """
        now = self._now()
        is_known = node in self.placement.destinations
        if isinstance(error, NetworkError) and self._pool.connection(node) is None:
            shut_s = self._quarantine.fail(node, now, n_free=1, longest_s=LONGEST_AFTER_LOSS_S)
        elif isinstance(error, RemoteRefused) and error.remote_code == m.ErrorCode.SHUTTING_DOWN:
            if self.placement.mark_down(node):
                logger.info("peer %s is leaving", node.short)
                if (record := self._announced.get(node)) is not None:
                    self._leaving[node] = record.seq
                self._note_states()
            return
        else:
            shut_s = self._quarantine.fail(node, now)
            if isinstance(error, RemoteProtocolError):
                self.placement.mark_down(node)
            if is_known:
                logger.warning("peer %s is not used for %.0f s: %s", node.short, shut_s, error)
        self._apply()
        self._wake.set()

    def succeeded(self, node: NodeId) -> None:
        """A peer has answered well."""
        if self._quarantine:
            self._quarantine.succeed(node, self._now())

    def on_trial(self, now: float) -> Sequence[NodeId]:
        """Return the peers that failed and are tried again: one batch at a time, where others hold the experts too."""
        return self._quarantine.on_trial(now) if self._quarantine else ()

    def recheck(self) -> None:
        """What `is_barred` says has changed. What a peer that is barred now still owes is lost with its connection."""
        for node, record in self._announced.items():
            if self._bars(record) and (connection := self._pool.connection(node)) is not None:
                connection.close()
        self._apply()
        self._wake.set()

    def announcement(self, node: NodeId) -> ExpertAnnouncement | None:
        """Return what a peer announced last, in use or not; None when it is gone."""
        return self._announced.get(node)

    def _bars(self, record: ExpertAnnouncement) -> bool:
        return self.is_barred is not None and self.is_barred(record.node, record.seq)

    def open_connection(self, node: NodeId) -> Connection | None:
        """Return the open connection to a holder, if there is one now."""
        return self._pool.connection(node)

    async def connection(self, node: NodeId) -> Connection:
        """Return an open connection to a holder; raises NetworkError or RemoteProtocolError."""
        connection = self._pool.connection(node)
        if connection is not None:
            return connection
        record = self._announced.get(node)
        if record is None:
            raise NetworkError(f"peer {node.short} is no longer announced")
        return await self._pool.reach(record, timeout_s=REDIAL_TIMEOUT_S)

    def _learn(self, listed: Sequence[ExpertAnnouncement]) -> None:
        """Take in what the registry lists now."""
        now = self._now()
        listed = [record for record in listed if not record.is_loading]  # these answer nothing yet
        if self._allowed is not None:
            listed = [record for record in listed if record.node in self._allowed]
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
        self._note_versions()

    def _note_versions(self) -> None:
        """Find out whom it is no use to dial, and tell a person once."""
        others = {
            node
            for node, record in self._announced.items()
            if choose_version(WIRE_VERSIONS, record.wire_versions) is None
        }
        for node in others - self._other_versions:
            why = own_disagreement(WIRE_VERSIONS, self._announced[node].wire_versions)
            logger.warning("peer %s cannot be used: %s", node.short, why)
        self._other_versions = others

    def _strangers(self) -> list[ExpertAnnouncement]:
        """Return the announcements of peers that must be dialled now; with those being greeted at most MAX_HOLDERS."""
        strangers: list[ExpertAnnouncement] = []
        now = self._now()
        for node, record in self._announced.items():
            connection = self._pool.connection(node)
            self._pool.know(record)
            is_stray = connection is not None and connection.address not in (None, *_addresses(record))
            if (
                connection is not None and is_stray and record.is_public
            ):  # behind NAT, addresses change under a connection
                connection.close()  # the peer has restarted or moved, and says so
                connection = None
            seq, retry_at = self._failed.get(node, (-1, 0.0))
            if len(self._greeting) + len(strangers) >= MAX_HOLDERS:
                break  # those that were announced and are gone still hold their places; the rest waits for the next look
            is_due = (record.seq > seq or now >= retry_at) and node not in self._other_versions
            if connection is None and node not in self._greeting and is_due and not self._bars(record):
                strangers.append(record)
        for node in self._failed.keys() - self._announced.keys():
            del self._failed[node]
        return strangers

    async def _greet(self, record: ExpertAnnouncement) -> None:
        try:
            await self._pool.reach(record)
            self._failed.pop(record.node, None)
        except (NetworkError, RemoteProtocolError) as error:
            if record.node not in self._failed:
                logger.warning("peer %s is announced but cannot be used: %s", record.node.short, error)
            self._failed[record.node] = (record.seq, self._now() + RETRY_S)
        finally:
            self._greeting.discard(record.node)
        self._apply()

    def _apply(self) -> None:
        """Let the placement know the announcements of the peers that are connected now and not shut out."""
        now = self._now()
        usable = [
            record
            for node, record in self._announced.items()
            if self._pool.connection(node) is not None
            and self._quarantine.state(node, now) is not State.SHUT
            and not self._bars(record)
        ]
        if self.placement.update(usable):
            logger.info("%d peers are in use; %d layers lack experts", len(usable), len(self.missing()))
            self._changed.set()
        self._note_states()

    def now(self) -> float:
        """Return the time by the clock of `peers`."""
        return self._now()

    def peers(self) -> list[PeerView]:
        """Return what became of every peer that was announced, by node id; lost connections are noticed first."""
        self._apply()
        return self._log.views

    def named_connections(self) -> dict[NodeId, Connection]:
        """Return the peers that show a name in public and are connected now."""
        named = (node for node, record in self._announced.items() if record.name)
        return {node: connection for node in named if (connection := self._pool.connection(node)) is not None}

    def rtt_s(self, node: NodeId) -> float | None:
        """Return the smoothed round trip to a peer, None without a connection."""
        connection = self._pool.connection(node)
        return None if connection is None else connection.rtt_s

    def _note_states(self) -> None:
        for node in self._leaving.keys() - self._announced.keys():
            del self._leaving[node]
        in_use = frozenset(self.placement.destinations)
        states = {node: (record, self._state(record, in_use)) for node, record in self._announced.items()}
        self._log.update(self._now(), states)

    def _state(self, record: ExpertAnnouncement, in_use: frozenset[NodeId]) -> PeerState:
        node = record.node
        trust = self._quarantine.state(node, self._now())
        if node in in_use:
            return PeerState.ON_TRIAL if trust is State.HALF_OPEN else PeerState.IN_USE
        if self._bars(record):
            return PeerState.CAUGHT
        if record.seq <= self._leaving.get(node, -1):
            return PeerState.LEAVING
        if trust is State.SHUT:
            return PeerState.QUARANTINED
        if node in self._other_versions:
            return PeerState.SET_ASIDE
        return PeerState.UNREACHABLE if self._pool.connection(node) is None else PeerState.SET_ASIDE


def _addresses(record: ExpertAnnouncement) -> list[SocketAddress]:
    return [parse_address(text) for text in record.addresses]  # a record's addresses are checked when it is made
