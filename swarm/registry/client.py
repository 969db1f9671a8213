"""Asking and telling the registry. `Registry` is what the rest of swarm knows; `RegistryClient` finds the ring behind it.

The nodes that a person names are asked who stores records. With at most N_REPLICAS of them everything is everywhere: each is told
and asked everything. With more, a record goes to the replicas of its places, and a look-up asks theirs (`ring`, `lookup`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarm.errors import NetworkError, Overloaded, RemoteProtocolError, RemoteRefused, SwarmError, UserError
from swarm.ids import ModelId, NodeId
from swarm.net.addresses import SocketAddress, format_address, parse_address
from swarm.registry.answers import AnswerReader
from swarm.registry.cache import SAVE_S, RegistryCache
from swarm.registry.contacts import Contact, Dialler
from swarm.registry.lookup import Reading, newest, writers
from swarm.registry.records import (
    ExpertAnnouncement,
    Lease,
    ModelOffer,
    Record,
    RecordKind,
    RegistryNodeRecord,
    RoutingHistogram,
    SignedRecord,
    Withdrawal,
    verify,
)
from swarm.registry.ring import (
    HISTOGRAMS,
    N_EXPERT_BUCKETS,
    N_REPLICAS,
    OFFERS,
    THE_DIRECTORY,
    Place,
    expert_buckets,
    places_of,
)
from swarm.registry.view import MEMBERS_S, REQUEST_TIMEOUT_S, RingView
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

WATCH_TIMEOUT_S = 30.0  # above the registry node's own WATCH_S
WATCH_RETRY_S = 5.0  # and the longest that a registry node may tell us to wait
# After each answer: what comes in a burst comes together, and a node that always answers at once costs little.
WATCH_REST_S = 0.25
# In a large ring, as long as a watch of the model stands and tells nothing: a look-up of 250 peers brings 5 x 100 KB. Guessed.
FRESH_S = 10.0
N_WATCHED = 2  # replicas of each place: what one has missed or withholds, the other tells
DEFAULT_REGISTRY = "127.0.0.1:7440"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryAddress:
    """Where a registry node listens, and which node it must be; None: whoever is there."""

    address: SocketAddress
    node: NodeId | None

    def __str__(self) -> str:
        where = format_address(self.address)
        return where if self.node is None else f"swarm://{self.node}@{where}"


def parse_registry(text: str) -> tuple[RegistryAddress, ...]:
    """Return the registry nodes of a comma list of `swarm://NODEID@host:port` or `host:port`. Raises UserError."""
    nodes = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"swarm://(?:([a-z2-7]+)@)?([^@/]+)/?", part)
        if match is None and ("/" in part or "@" in part):
            raise UserError(f"not a registry: got {part!r}, expected swarm://NODEID@host:port or host:port")
        node_text, where = match.groups() if match else (None, part)
        nodes.append(RegistryAddress(address=parse_address(where), node=NodeId.parse(node_text) if node_text else None))
    if not nodes:
        raise UserError(f"no registry given: got {text!r}, expected swarm://NODEID@host:port or host:port")
    return tuple(nodes)


class Registry(Protocol):
    """What peers and backbones need of a registry."""

    async def publish(self, signed: SignedRecord) -> int:
        """Hand over a record; return the highest seq known of it. Raises NetworkError when no registry node took it."""
        ...

    async def holders(self, model: ModelId) -> list[ExpertAnnouncement]:
        """Return the live announcements of a model, the highest seq of each node, ordered by node id."""
        ...

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        """Return the live offers of one model, or of all."""
        ...

    async def observed_address(self) -> str:
        """Return `host:port` of our endpoint as the registry sees it."""
        ...


@dataclass(eq=False, slots=True)
class _Watching:
    """One watch of a model: at several replicas of each place, of which one is enough."""

    model: ModelId
    on_change: Callable[[Sequence[Record]], None]
    wanted: list[tuple[NodeId, ...]] = field(default_factory=list)  # by place
    standing: set[NodeId] = field(default_factory=set)  # those whose last answer was no failure
    cursors: dict[NodeId, int] = field(default_factory=dict)

    @property
    def stands(self) -> bool:
        """Whether news of every place would be told."""
        return bool(self.wanted) and all(not self.standing.isdisjoint(nodes) for nodes in self.wanted)


class RegistryClient:
    """A `Registry` over an endpoint and a few known registry nodes."""

    def __init__(
        self, endpoint: Dialler, nodes: Sequence[RegistryAddress], *, cache: RegistryCache | None = None
    ) -> None:
        """`cache`: what to go on with as long as no registry node answers, and where to keep it."""
        self._view = RingView(endpoint, [(each.address, each.node) for each in nodes])
        self._reader = AnswerReader()
        self.n_rounds = 0  # round trips of requests that the last look-up took, dials apart
        self._n_expert: dict[ModelId, int] = {}
        self._watches: dict[ModelId, list[_Watching]] = {}
        self._fresh: dict[ModelId, tuple[float, list[ExpertAnnouncement]]] = {}  # until when, what a look-up has found
        self._published: dict[tuple[RecordKind, ModelId], tuple[Place, ...]] = {}
        self._cache = cache
        self._kept: dict[ModelId | None, list[tuple[Lease, SignedRecord]]] = {}  # what was found last
        self._has_answered = False
        self._save_at = float("-inf")
        if cache is not None:
            self._load(cache)

    async def close(self) -> None:
        """End every connection; the endpoint's end does as much."""
        await self._view.close()

    # Telling

    async def publish(self, signed: SignedRecord) -> int:
        """Hand the record to every replica of its places; return the highest seq that one of them knows.

        Raises:
            NetworkError: none answered.
            RemoteRefused: those that answered refused it.
        """
        record = verify(signed)
        for is_last in (False, True):
            ring = await self._view.ring()
            places = self._places_to_tell(record)
            avoid = () if len(ring) <= N_REPLICAS else self._view.avoided()
            try:
                answers = await self._ask_all(writers(ring, places, avoid), m.Announce(record=signed.to_bytes()))
                break
            except RemoteRefused as error:
                if is_last or error.remote_code != m.ErrorCode.NOT_FOUND:
                    raise
                self._view.forget()  # it is stored elsewhere now
        if places and not isinstance(record, Withdrawal):
            self._published[record.kind, record.model] = places
        return max(answer.highest_seq for answer in answers if isinstance(answer, m.Accepted))

    # Asking

    async def holders(self, model: ModelId, n_expert: int | None = None) -> list[ExpertAnnouncement]:
        """Return the live announcements of a model, the highest seq of each node, ordered by node id.

        `n_expert`, where the caller knows it, saves asking for the model's offers in a large ring.
        """
        now = asyncio.get_running_loop().time()
        until, known = self._fresh.get(model, (now, []))
        if now < until:
            return list(known)
        places: list[Place] = [(model, OFFERS)]
        try:
            if is_large := len(await self._view.ring()) > N_REPLICAS:
                n_expert = n_expert or await self._count_experts(model)
                places = [(model, bucket) for bucket in expert_buckets(n_expert)]
        except NetworkError as error:
            return [record for record in self._go_on(model, error) if isinstance(record, ExpertAnnouncement)]
        records = await self._look_up(places, model)
        holders = [record for record in records if isinstance(record, ExpertAnnouncement)]
        if is_large and any(watching.stands for watching in self._watches.get(model, ())):
            self._fresh[model] = now + FRESH_S, holders
        return list(holders)

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        """Return the live offers of one model, or of all, ordered by node id."""
        records = await self._look_up([THE_DIRECTORY if model is None else (model, OFFERS)], model)
        return [record for record in records if isinstance(record, ModelOffer)]

    async def histograms(self, model: ModelId) -> list[RoutingHistogram]:
        """Return how the model's backbones use its experts, by backbone."""
        records = await self._look_up([(model, HISTOGRAMS)], model)
        return [record for record in records if isinstance(record, RoutingHistogram)]

    async def records(self) -> list[Lease]:
        """Return every live record, ordered by node id; in a large ring only those of models that somebody offers."""
        ring = await self._view.ring()
        found: list[Lease] = await self._look_up([THE_DIRECTORY], None)
        if len(ring) > N_REPLICAS:
            for model in sorted({record.model for record in found}):
                found += await self.holders(model)
        return sorted(found, key=lambda record: (record.node, record.kind, record.model))

    async def observed_address(self) -> str:
        """Return `host:port` of our endpoint as the first registry node that answers sees it."""
        return await self._view.observed_address()

    async def watch(self, model: ModelId, on_change: Callable[[Sequence[Record]], None]) -> None:
        """Call `on_change` for ever with what is new of a model, soon after it happens: records and withdrawals.

        Renewals are no news, and the end of a lease is not told: whoever keeps records lets them expire. What was there at
        the start is not told either. Each registry node tells what is new to itself: the same record may come twice, and one
        that is older than another told before; the higher seq counts.
        """
        watching = _Watching(model, on_change)
        self._watches.setdefault(model, []).append(watching)
        try:
            await self._watch_all(watching)
        finally:
            self._watches[model].remove(watching)
            if not self._watches[model]:
                del self._watches[model]
            self._fresh.pop(model, None)

    async def _watch_all(self, watching: _Watching) -> None:
        while True:
            try:
                watching.wanted = await self._watched(watching.model)
                contacts = [self._view.contact(key) for key in set().union(*watching.wanted)]
            except (NetworkError, RemoteRefused) as error:
                logger.debug("cannot watch the registry: %s", error)
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            try:
                async with asyncio.timeout(MEMBERS_S), asyncio.TaskGroup() as tasks:
                    for contact in contacts:
                        tasks.create_task(self._watch_one(contact, watching))
            except TimeoutError:
                continue  # others may store it now

    # Who stores what

    async def members(self) -> Mapping[NodeId, str | None]:
        """Return the registry nodes that store records, each with the network that it is counted under."""
        return (await self._view.ring()).members

    def members_known(self) -> list[RegistryNodeRecord]:
        """Return what the registry nodes say of themselves, as far as it is known now; asks nobody."""
        return self._view.members_known()

    def forget_view(self) -> None:
        """Ask who stores records before the next request, however lately that was asked."""
        self._view.forget()

    def _places_to_tell(self, record: Record) -> tuple[Place, ...]:
        if not isinstance(record, Withdrawal):
            return places_of(record)
        known = self._published.get((record.withdraws, record.model))
        if known is not None:
            return known
        buckets = {RecordKind.MODEL: [OFFERS], RecordKind.HISTOGRAM: [HISTOGRAMS]}.get(
            record.withdraws, list(range(N_EXPERT_BUCKETS))
        )
        return tuple((record.model, bucket) for bucket in buckets)

    async def _count_experts(self, model: ModelId) -> int:
        if model not in self._n_expert:
            offers = await self.offers(model)
            if not offers:
                return N_EXPERT_BUCKETS  # four buckets: most models that nobody offers now
            self._n_expert[model] = max(offer.n_expert for offer in offers)
        return self._n_expert[model]

    async def _watched(self, model: ModelId) -> list[tuple[NodeId, ...]]:
        """Return whom to ask for news, place by place."""
        ring = await self._view.ring()
        if len(ring) <= N_REPLICAS:
            return [tuple(ring.members)]
        places = [(model, bucket) for bucket in expert_buckets(await self._count_experts(model))]
        return [ring.closest(place, N_WATCHED) for place in places]

    async def _watch_one(self, contact: Contact, watching: _Watching) -> None:
        key, model = contact.key, watching.model
        try:
            while True:
                try:
                    cursor = watching.cursors.get(key)
                    request = m.Watch(model_id=model, cursor=cursor or 0)
                    answer = await contact.request(request, timeout_s=WATCH_TIMEOUT_S)
                    assert isinstance(answer, m.Changes)  # the session checks an answer's type
                    watching.cursors[key] = answer.cursor
                    watching.standing.add(key)
                    records = await self._reader.read(answer.records)
                    news = [record for record, _ in records if record.model == model]
                    if cursor is not None and news:
                        self._fresh.pop(model, None)
                        watching.on_change(news)
                    wait_s = WATCH_REST_S
                except (NetworkError, RemoteProtocolError, RemoteRefused, Overloaded) as error:
                    logger.debug("cannot watch registry node %s: %s", key.short, error)
                    self._watch_fell(watching, key)
                    wait_s = _retry_s(error)
                await asyncio.sleep(wait_s)
        finally:
            self._watch_fell(watching, key)

    def _watch_fell(self, watching: _Watching, key: NodeId) -> None:
        watching.standing.discard(key)
        if not watching.stands:
            self._fresh.pop(watching.model, None)

    # Asking several at once

    async def _look_up(self, places: Collection[Place], model: ModelId | None) -> list[Lease]:
        """Return the newest live records at some places, all of one model (None: any)."""
        try:
            answers = await self._read_places(places, model)
        except NetworkError as error:
            return self._go_on(model, error)
        self._has_answered = True
        found = [
            (record, signed)
            for key, answer in answers
            for record, signed in await self._reader.read(answer.records)
            if not self._view.is_misplaced(key, record)
        ]
        records = [(record, signed) for record, signed in found if model is None or record.model == model]
        chosen = newest(record for record, _ in records)
        if self._cache is not None:
            signed_of = {id(record): signed for record, signed in records}
            self._keep(model, [(record, signed_of[id(record)]) for record in chosen])
            await self._save()
        return chosen

    async def _read_places(self, places: Collection[Place], model: ModelId | None) -> list[tuple[NodeId, m.Records]]:
        ring = await self._view.ring()
        has_all = len(ring) <= N_REPLICAS
        reading = Reading(
            ring,
            places,
            now=asyncio.get_running_loop().time(),
            rtt_s=self._view.rtt_s,
            avoid=self._view.avoided(),
        )
        tasks: dict[asyncio.Task[m.Response], NodeId] = {}
        answers: list[tuple[NodeId, m.Records]] = []
        errors: list[SwarmError] = []

        def ask(asks: Mapping[NodeId, tuple[Place, ...]]) -> None:
            for key, those in asks.items():
                request = m.Lookup(model_id=model) if has_all else m.Find(places=those)
                tasks[asyncio.create_task(self._ask(key, request))] = key

        ask(reading.first)
        try:
            while tasks and not reading.is_done(now := asyncio.get_running_loop().time()):
                wait_s = reading.next_deadline(now) - now + 1e-4  # floats: not a moment too early
                done, _ = await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    key = tasks.pop(task)
                    failure = task.exception()
                    if failure is None:
                        answer = task.result()
                        assert isinstance(answer, m.Records)  # the session checks an answer's type
                        answers.append((key, answer))
                        reading.answered(key)
                    elif isinstance(failure, SwarmError):
                        errors.append(failure)
                        ask(reading.failed(key))
                    else:
                        raise failure
            if reading.has_waited(asyncio.get_running_loop().time()):
                for key in tasks.values():
                    self._view.missed(key)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.n_rounds = reading.n_rounds
        if answers:
            return answers
        raise self._worst(errors)

    async def _ask_all(self, keys: Collection[NodeId], request: m.Request) -> list[m.Response]:
        """Return the answers of those that answered; raises NetworkError when none did."""
        outcomes = await asyncio.gather(*(self._ask(key, request) for key in keys), return_exceptions=True)
        answers: list[m.Response] = []
        errors: list[SwarmError] = []
        for outcome in outcomes:
            if isinstance(outcome, SwarmError):
                errors.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answers.append(outcome)
        if answers:
            return answers
        raise self._worst(errors)

    async def _ask(self, key: NodeId, request: m.Request) -> m.Response:
        return await self._view.contact(key).request(request, timeout_s=REQUEST_TIMEOUT_S)

    def _worst(self, errors: Sequence[SwarmError]) -> SwarmError:
        """Return what to raise when nobody answered: a refusal says more than a dead node's silence."""
        for error in errors:
            if isinstance(error, RemoteRefused):
                return error
        return self._view.unreachable(errors[-1] if errors else None)

    # What is kept on disk

    def _go_on(self, model: ModelId | None, error: NetworkError) -> list[Lease]:
        """Return what the registry said last time, if none has answered this time yet; else raise `error`."""
        kept = self._kept.get(model, ())
        if self._has_answered or not kept:
            raise error
        logger.warning("no registry answers, going on with %d records of last time: %s", len(kept), error)
        return [record for record, _ in kept]

    def _load(self, cache: RegistryCache) -> None:
        members, records = cache.load()
        self._view.learn(members)
        for signed in records:
            try:
                record = verify(signed)
            except RemoteProtocolError:
                continue
            if not isinstance(record, Withdrawal):
                self._kept.setdefault(record.model, []).append((record, signed))
                self._kept.setdefault(None, []).append((record, signed))

    def _keep(self, model: ModelId | None, found: Sequence[tuple[Lease, SignedRecord]]) -> None:
        """Keep what was found, beside what other kinds of look-ups of the model have found."""
        kinds = {record.kind for record, _ in found}
        others = [(record, signed) for record, signed in self._kept.get(model, ()) if record.kind not in kinds]
        self._kept[model] = [*others, *found]

    async def _save(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._cache is None or now < self._save_at:
            return
        self._save_at = now + SAVE_S
        records = {signed.signature: signed for kept in self._kept.values() for _, signed in kept}
        await asyncio.to_thread(self._cache.save, self._view.member_records(), records.values())


def _retry_s(error: SwarmError) -> float:
    """Return how long to wait before a watch is tried again: what the registry node asks for, within bounds."""
    asked_s = error.retry_after_s if isinstance(error, RemoteRefused | Overloaded) else None
    return WATCH_RETRY_S if asked_s is None else min(max(asked_s, WATCH_REST_S), WATCH_RETRY_S)
