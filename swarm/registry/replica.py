"""One registry node without I/O: what it answers, and what it calls others for. Explicit `now`; chance comes from `pick`.

    who                 says                            and gets
    owner of a record   ANNOUNCE, to all replicas       the highest seq known here
    reader              FIND (LOOKUP: all of a model)   the records, with the time they have left
    client              GET_MEMBERS, WATCH              who stores; what changed
    registry node       GOSSIP -> NEWS, then PUSH       who else is there              (membership)
    another replica     SYNC -> DIFFERENCES, then PUSH  what one of the two has missed (anti-entropy)

The driver calls `poll` at `next_deadline`, performs the `Call`s that come back, and reports each by `answered` or `failed`.

What keeps strangers from doing harm:
- a record is stored only where the ring puts it (within N_TOLERATED, since views differ for a while);
- a record of another node than the caller's is taken only from a member that stores it by the ring; what came so is counted
  under that member until its owner renews it;
- it lives no longer than it had left there, and a seq that was seen does not come back for 24 h (`table`);
- every message is bounded in records before a signature is checked, and where only members' records belong (NEWS, a stranger's
  PUSH), nothing else is read;
- what is done for a SYNC, or before one, is bounded in places and entries, however many places a record names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from swarm.errors import LocalProtocolError, Refused, RemoteProtocolError, SwarmError
from swarm.ids import ModelId, NodeId
from swarm.registry.digests import digest_of, member_tag
from swarm.registry.membership import MEMBER_RENEW_S, Membership, Told
from swarm.registry.networks import Scope, host_of, prefix_of, scope_of
from swarm.registry.records import (
    ModelOffer,
    Record,
    RecordKind,
    RegistryNodeRecord,
    RoutingHistogram,
    SignedRecord,
    Withdrawal,
    speaks_of_a_member,
    verify,
)
from swarm.registry.ring import N_TOLERATED, Place, Ring, is_place, places_of
from swarm.registry.table import Key, PutResult, RegistryTable
from swarm.wire import messages as m

SYNC_S = 15.0  # between two comparisons with a random replica; guessed: a place is compared with each other about once a minute
HANDOVER_S = 2.0  # after a change of the ring: the new replica must have heard of us
MAX_ANSWER_BYTES = 8 << 20  # half of a RECORDS frame's limit: thousands of holders; the rest is left out
# Records in one NEWS or PUSH: some 30 to 60 ms of signatures (0.25 ms each with parsing, guessed); the rest comes with the next.
MAX_NEWS = 256
MAX_PUSHED = 128
MAX_PASSED_BYTES = 900_000  # of records in one NEWS or PUSH, below the frames' limit of 1 MB
MAX_CHANGES_BYTES = 3 << 20  # of records in one CHANGES, below the frame's limit of 4 MB
MAX_PUSHED_BY_STRANGERS = 4  # a node that joins tells its own record, and whom it heard of
MAX_SYNCED = 512  # places in one SYNC
MAX_ENTRIES = 32_768  # in one DIFFERENCES, and hashed for one SYNC or its answer: some 40 ms (guessed)
# Places looked at in one go, for a SYNC or after a change of the ring: a record is in up to 64, each costs some 50 us (guessed).
MAX_LOOKED_AT = 2_048
MAX_FOUND = 256  # places in one FIND
MAX_CHANGES = 4_096  # that a watcher may have missed and still catch up with, all models together


@dataclass(frozen=True, slots=True)
class Call:
    """A request to another registry node, to be sent by the driver."""

    node: NodeId
    request: m.Gossip | m.Sync | m.Push


class Replica:
    """The one owner of a registry node's table and membership."""

    def __init__(
        self,
        own: NodeId,
        *,
        pick: Callable[[int], int],
        table: RegistryTable | None = None,
        stores: bool = True,
        publishers: Collection[NodeId] | None = None,
        verify_record: Callable[[SignedRecord], Record] = verify,
    ) -> None:
        """Start alone.

        Args:
            stores: False: it knows the members, and refuses records.
            publishers: whose models may be offered here; None: anybody's.
        """
        self.own = own
        self.table = RegistryTable() if table is None else table  # an empty table is falsy
        self.table.on_change = self._on_change
        self.membership = Membership(own, pick=pick)
        self.on_news: Callable[[ModelId], None] = lambda model: None  # for whoever holds WATCHes
        self._pick = pick
        self._stores = stores
        self._renew_own: Callable[[], tuple[RegistryNodeRecord, SignedRecord]] | None = None
        self._seeds: dict[NodeId, None] = {}
        self._trusted_seeds: set[NodeId] = set()
        self._publishers = None if publishers is None else frozenset(publishers)
        self._verify = verify_record
        self._ring = self._view_of = self.membership.ring
        self._view: dict[bytes, NodeId] = {}  # what clients are told of `_view_of`, by tag
        self._renew_at = self._sync_at = float("-inf")
        self._handovers: dict[NodeId, tuple[float, set[Place]]] = {}
        self._version = pick(1 << 20) << 40 | 1  # of another life than the last one's, so old cursors do not fit
        self._changes: deque[tuple[int, Key]] = deque(maxlen=MAX_CHANGES)
        self._first_version = self._version + 1  # of what `_changes` still has

    def store_as(self, renew_own: Callable[[], tuple[RegistryNodeRecord, SignedRecord]]) -> None:
        """Take part in the ring: `renew_own` makes this node's own record anew, with a higher seq each time."""
        self._renew_own = renew_own if self._stores else None

    def stop_storing(self) -> None:
        """Refuse records from here on: others could not find them here."""
        self._stores = False

    def trust_seeds(self, seeds: Iterable[NodeId]) -> None:
        """Call these nodes when nobody else is known; each is trusted to name the members, once."""
        for node in seeds:
            if node not in self._seeds:
                self._seeds[node] = None
                self._trusted_seeds.add(node)

    # Answers

    def answer(self, asker: NodeId, request: m.Request, *, now: float, host: str | None = None) -> m.Response:
        """Return the answer to a request of the authenticated node `asker`; WATCH at once, with what there is.

        Args:
            host: the IP address that the asker's connection comes from; None for an asker in this process.

        Raises:
            RemoteProtocolError: a record that is malformed, forged or another node's.
            Refused: another machine announces a loopback address, or a publisher that is not allowed here.
            LookupError: the record belongs elsewhere, or this node does not store.
            Overloaded: the table, or the asker's share of it, is full.
        """
        if isinstance(request, m.Announce):
            signed = SignedRecord.from_bytes(request.record)
            return self.announce(asker, self._verify(signed), signed, now=now, host=host)
        if isinstance(request, m.Lookup):
            models = self.table.models(now) if request.model_id is None else [request.model_id]
            return m.Records(records=_packed(told for model in models for told in self.table.lookup(model, now)))
        if isinstance(request, m.Find):
            places = [place for place in request.places[:MAX_FOUND] if is_place(*place)]
            return m.Records(records=_packed(self.table.find(places, now)))
        if isinstance(request, m.GetMembers):
            return self._members(request, now)
        if isinstance(request, m.Watch):
            return self.changes(request, now) or m.Changes(cursor=self._version, records=())
        if isinstance(request, m.Gossip):
            self._called_by(asker, host)
            records, wanted = self.membership.compare(request.summary, now)
            told = _packed(records[:MAX_NEWS], MAX_PASSED_BYTES)
            return m.News(wanted=tuple(wanted[:MAX_NEWS]), records=told)
        if isinstance(request, m.Sync):
            self._require_member(asker)
            return self._differences(request, now)
        if isinstance(request, m.Push):
            is_member = self.is_member(asker)
            self._take(request.records, asker, now, host=host)
            asked_for = self._wanted(request.wanted, now) if is_member else []
            return m.Records(records=_packed(asked_for[:MAX_PUSHED]))
        raise LocalProtocolError(f"a registry does not serve {type(request).__name__}")

    def announce(
        self, asker: NodeId, record: Record, signed: SignedRecord, *, now: float, host: str | None
    ) -> m.Accepted:
        """Take a verified record that came over its owner's connection; raises what `answer` does."""
        is_from_afar = host is not None and scope_of(host) is not Scope.MACHINE
        if is_from_afar:
            _refuse_loopback(record, host)
        kind = record.withdraws if isinstance(record, Withdrawal) else record.kind
        if kind is RecordKind.REGISTRY:
            if record.node == asker and isinstance(record, RegistryNodeRecord | Withdrawal):
                self._learn(record, signed, now, None, host)
            return m.Accepted(is_new=False, highest_seq=record.seq)
        if not self._stores:
            raise LookupError("this registry node stores no records: ask it for those that do")
        if isinstance(record, ModelOffer | RoutingHistogram) and not self._is_allowed(record.node):
            raise Refused(f"this registry does not take models of publisher {record.node}: its operator allows them")
        places = places_of(record)
        if places and not any(self._is_near(self.own, place) for place in places):
            raise LookupError("these records are stored at other registry nodes: ask for the members again")
        prefix = prefix_of(host) if host is not None and is_from_afar else None
        result = self.table.put_verified(record, signed, owner=asker, now=now, prefix=prefix)
        highest = self.table.highest_seq(record.node, kind, record.model)
        is_new = result not in (PutResult.UNCHANGED, PutResult.STALE)
        return m.Accepted(is_new=is_new, highest_seq=record.seq if highest is None else highest)

    def changes(self, watch: m.Watch, now: float) -> m.Changes | None:
        """Return what a watcher has missed, None if that is nothing; a strange cursor has missed everything."""
        if not self._first_version - 1 <= watch.cursor <= self._version:
            everything = _packed(self.table.lookup(watch.model_id, now), MAX_CHANGES_BYTES)
            return m.Changes(cursor=self._version, records=everything)
        missed = takewhile(lambda change: change[0] > watch.cursor, reversed(self._changes))  # ascending
        changed = {key for _, key in missed if key[2] == watch.model_id}
        told = [told for told in (self.table.told(key, now) for key in sorted(changed)) if told is not None]
        return m.Changes(cursor=self._version, records=_packed(told, MAX_CHANGES_BYTES)) if told else None

    # Calls

    def next_deadline(self) -> float:
        """Return when `poll` next has something to do."""
        times = [self.membership.next_gossip(), self._sync_at, *(due for due, _ in self._handovers.values())]
        return min(times if self._renew_own is None else [*times, self._renew_at])

    def poll(self, now: float) -> list[Call]:
        """Return whom to call now."""
        self.table.expire(now)
        self.membership.expire(now)
        if self._renew_own is not None and now >= self._renew_at:
            self.membership.set_own(*self._renew_own(), now)
            self._renew_at = now + MEMBER_RENEW_S
        calls: list[Call] = []
        if targets := self.membership.targets(now, self._seeds):
            gossip = m.Gossip(summary=self.membership.summary())
            calls += [Call(node, gossip) for node in targets]
        self._plan_handovers(now)
        for node in [node for node, (due, _) in self._handovers.items() if now >= due]:
            calls += self._sync(node, self._handovers.pop(node)[1], now)
        if now >= self._sync_at:
            self._sync_at = now + SYNC_S * (0.75 + self._pick(1000) / 2000)
            calls += self._sync_with_somebody(now)
        return calls

    def answered(self, call: Call, response: m.Response, now: float) -> list[Call]:
        """Take an untrusted answer in; return what to call for next."""
        self.membership.heard_from(call.node)
        if isinstance(call.request, m.Gossip) and isinstance(response, m.News):
            is_trusted = call.node in self._trusted_seeds
            self._trusted_seeds.discard(call.node)
            self._take_news(response.records, now, is_proved=is_trusted)
            told = self.membership.take(response.wanted[:MAX_NEWS], now)
            return [
                Call(call.node, m.Push(records=_packed(told[first : first + MAX_PUSHED], MAX_PASSED_BYTES), wanted=()))
                for first in range(0, len(told), MAX_PUSHED)
            ]
        if isinstance(call.request, m.Sync) and isinstance(response, m.Differences):
            return self._repair(call.node, call.request, response, now)
        if isinstance(call.request, m.Push) and isinstance(response, m.Records):
            self._take(response.records, call.node, now, host=self._host_of(call.node))
        return []

    def refused(self, call: Call) -> None:
        """A call was answered with a refusal: whoever refuses is there."""
        self.membership.heard_from(call.node)

    def failed(self, call: Call) -> None:
        """A call got no answer."""
        self.membership.failed(call.node)

    def leave(self, withdrawal: Withdrawal, signed: SignedRecord, now: float) -> list[Call]:
        """Return whom to tell that this node is a member no more."""
        if not self.membership.is_storing:
            return []
        self.membership.leave(withdrawal, signed, now)
        others = [node for node in self.membership.ring.members if node != self.own]
        start = self._pick(len(others)) if others else 0
        push = m.Push(records=_packed([(signed, float(MEMBER_RENEW_S))]), wanted=())
        return [Call(node, push) for node in (others[start:] + others[:start])[:4]]

    def is_member(self, node: NodeId) -> bool:
        """Return whether `node` is believed as a member."""
        return node in self.membership.ring

    # Inside

    def _host_of(self, node: NodeId) -> str | None:
        """Return the host that a member is reached at; None if it is not known."""
        addresses = self.membership.addresses(node)
        return host_of(addresses[0]) if addresses else None

    def _is_near(self, node: NodeId, place: Place) -> bool:
        ring = self.membership.ring
        return len(ring) <= N_TOLERATED or node in ring.closest(place, N_TOLERATED)

    def _is_allowed(self, publisher: NodeId) -> bool:
        return self._publishers is None or publisher in self._publishers

    def _require_member(self, asker: NodeId) -> None:
        if not self.is_member(asker):
            raise LookupError("this registry node does not know you as one yet")

    def _called_by(self, asker: NodeId, host: str | None) -> None:
        """A call proves a member only from its announced host: else one host could be many networks."""
        if host is None or any(host == host_of(address) for address in self.membership.addresses(asker)):
            self.membership.heard_from(asker)

    def _members(self, request: m.GetMembers, now: float) -> m.Members:
        ring = self.membership.ring
        if self._view_of is not ring:
            self._view_of = ring
            self._view = {member_tag(node, addresses): node for node, addresses in self.membership.view().items()}
        known = set(request.known)
        lacking = [self._view[tag] for tag in self._view.keys() - known]
        records = _packed(self.membership.told(lacking, now), max_bytes=MAX_ANSWER_BYTES // 4)
        return m.Members(gone=tuple(known - self._view.keys()), records=records)

    def _differences(self, request: m.Sync, now: float) -> m.Differences:
        found: list[tuple[int, tuple[tuple[bytes, int], ...]]] = []
        n_left = n_to_hash = MAX_ENTRIES
        seen: set[Place] = set()
        for index, (place, digest) in enumerate(request.digests[:MAX_SYNCED]):
            if not is_place(*place) or place in seen:
                continue
            seen.add(place)
            entries = self.table.entries(place, now)
            n_to_hash -= len(entries)
            if n_to_hash < 0 and len(seen) > 1:
                break  # the rest comes with another SYNC: its places start elsewhere
            if digest_of(entries) != digest:
                chosen = tuple(entries.items())[:n_left]
                n_left -= len(chosen)
                found.append((index, chosen))
        return m.Differences(places=tuple(found))

    def _repair(self, node: NodeId, sync: m.Sync, differences: m.Differences, now: float) -> list[Call]:
        """Return the PUSH that brings both sides to the higher seq of each entry, as far as one message goes."""
        told: dict[bytes, Told] = {}
        wanted: list[tuple[Place, bytes]] = []
        seen: set[int] = set()
        for index, entries in differences.places[:MAX_SYNCED]:
            if index >= len(sync.digests):
                raise RemoteProtocolError(f"DIFFERENCES names place {index}, asked were {len(sync.digests)}")
            if index in seen:
                continue
            seen.add(index)
            place = sync.digests[index][0]
            ours, theirs = self.table.entries(place, now), dict(entries)
            wanted += [(place, tag) for tag, seq in theirs.items() if ours.get(tag, -1) < seq]
            newer = [tag for tag, seq in ours.items() if theirs.get(tag, -1) < seq]
            for signed, left_s in self.table.take(place, newer, now):
                told.setdefault(signed.signature, (signed, left_s))
        if not told and not wanted:
            return []
        records = _packed(list(told.values())[:MAX_PUSHED], MAX_PASSED_BYTES)
        return [Call(node, m.Push(records=records, wanted=tuple(wanted[:MAX_PUSHED])))]

    def _wanted(self, wanted: Sequence[tuple[Place, bytes]], now: float) -> list[Told]:
        tags_at: dict[Place, list[bytes]] = {}
        for place, tag in wanted[:MAX_PUSHED]:
            tags_at.setdefault(place, []).append(tag)
        return [told for place, tags in tags_at.items() for told in self.table.take(place, tags, now)]

    def _take(self, records: Sequence[m.Told], sender: NodeId, now: float, *, host: str | None) -> None:
        """Take untrusted records in that `sender`, at `host`, passed on; what is bad or not for here is left out."""
        is_from_afar = host is not None and scope_of(host) is not Scope.MACHINE
        is_member = self.is_member(sender)
        for left_ms, data in records[: MAX_PUSHED if is_member else MAX_PUSHED_BY_STRANGERS]:
            if not is_member and not speaks_of_a_member(data):
                continue
            try:
                signed = SignedRecord.from_bytes(data)
                record = self._verify(signed)
                kind = record.withdraws if isinstance(record, Withdrawal) else record.kind
                if kind is RecordKind.REGISTRY:
                    if isinstance(record, RegistryNodeRecord | Withdrawal):
                        self._learn(record, signed, now, left_ms / 1000, host if record.node == sender else None)
                    continue
                if is_from_afar:
                    _refuse_loopback(record, host)
                self._take_from_replica(record, signed, sender, now, left_ms / 1000)
            except (
                SwarmError
            ):  # one bad record does not spoil the others; who sent it is known as a member, not as a friend
                continue

    def _take_from_replica(
        self, record: Record, signed: SignedRecord, sender: NodeId, now: float, left_s: float
    ) -> None:
        if not self._stores or left_s <= 0 or self.table.knows(record):
            return
        if isinstance(record, ModelOffer | RoutingHistogram) and not self._is_allowed(record.node):
            return
        places = places_of(record)
        if isinstance(record, Withdrawal):
            places = self.table.places_at(record.node, record.withdraws, record.model)
        if any(self._is_near(self.own, place) and self._is_near(sender, place) for place in places):
            by = f"what node {sender.short} passes on"
            self.table.put_verified(record, signed, owner=None, now=now, prefix=by, left_s=left_s)

    def _learn(
        self,
        record: RegistryNodeRecord | Withdrawal,
        signed: SignedRecord,
        now: float,
        left_s: float | None,
        host: str | None,
    ) -> None:
        addresses = record.addresses if isinstance(record, RegistryNodeRecord) else ()
        is_proved = host is not None and any(host == host_of(address) for address in addresses)
        self.membership.learn(record, signed, now, left_s=left_s, is_proved=is_proved)

    def _take_news(self, records: Sequence[m.Told], now: float, *, is_proved: bool) -> None:
        for left_ms, data in records[:MAX_NEWS]:
            if not speaks_of_a_member(data):
                continue
            try:
                signed = SignedRecord.from_bytes(data)
                record = self._verify(signed)
            except SwarmError:
                continue
            if isinstance(record, RegistryNodeRecord | Withdrawal):
                self.membership.learn(record, signed, now, left_s=left_ms / 1000, is_proved=is_proved)

    def _plan_handovers(self, now: float) -> None:
        """Where the ring has changed, let one of the replicas that stay bring each new one what it lacks."""
        old, new = self._ring, self.membership.ring
        if old is new:
            return
        self._ring = new
        places, start = self._turned_places()
        for place in islice(chain(places[start:], places[:start]), MAX_LOOKED_AT):  # SYNCs bring the rest
            before, after = old.closest(place), new.closest(place)
            if before == after:
                continue
            added = [node for node in after if node not in before and node != self.own]
            stayed = [node for node in after if node in before] or list(before)
            if added and (stayed or [self.own])[0] == self.own:
                for node in added:
                    due = now + HANDOVER_S * (1 + self._pick(1000) / 1000)
                    self._handovers.setdefault(node, (due, set()))[1].add(place)

    def _sync_with_somebody(self, now: float) -> list[Call]:
        places, start = self._turned_places()
        ring: Ring = self.membership.ring
        if not places or len(ring) <= 1:
            return []
        others = [node for node in ring.closest(places[start]) if node != self.own]
        if not others:
            return []
        partner = others[self._pick(len(others))]
        looked_at = islice(chain(places[start:], places[:start]), MAX_LOOKED_AT)
        shared = islice((place for place in looked_at if partner in ring.closest(place)), MAX_SYNCED)
        return self._sync(partner, list(shared), now)

    def _turned_places(self) -> tuple[list[Place], int]:
        """Return the places of which something is known, and where to begin this time."""
        places = self.table.places()
        return places, self._pick(len(places)) if places else 0

    def _sync(self, node: NodeId, places: Collection[Place], now: float) -> list[Call]:
        chosen = list(places)
        if len(chosen) > MAX_SYNCED:
            start = self._pick(len(chosen))
            chosen = (chosen[start:] + chosen[:start])[:MAX_SYNCED]
        if not chosen or not self.is_member(node):
            return []
        digests: list[tuple[Place, bytes]] = []
        n_to_hash = MAX_ENTRIES
        for place in chosen:
            entries = self.table.entries(place, now)
            n_to_hash -= len(entries)
            if n_to_hash < 0 and digests:
                break
            digests.append((place, digest_of(entries)))
        return [Call(node, m.Sync(digests=tuple(digests)))]

    def _on_change(self, key: Key, signed: SignedRecord | None) -> None:
        self._version += 1
        if len(self._changes) == MAX_CHANGES:
            self._first_version = self._changes[0][0] + 1
        self._changes.append((self._version, key))
        self.on_news(key[2])


def _packed(told: Iterable[Told], max_bytes: int | None = None) -> tuple[m.Told, ...]:
    """Return records as they travel, up to a size."""
    packed: list[m.Told] = []
    n_bytes = 0
    max_bytes = MAX_ANSWER_BYTES if max_bytes is None else max_bytes
    for signed, left_s in told:
        n_bytes += signed.size_bytes
        if n_bytes > max_bytes or len(packed) >= 0xFFFF:
            break
        packed.append((int(left_s * 1000), signed.to_bytes()))
    return tuple(packed)


def _refuse_loopback(record: Record, host: str | None) -> None:
    if isinstance(record, Withdrawal | RoutingHistogram):
        return
    for text in record.addresses:
        if scope_of(host_of(text)) is Scope.MACHINE:
            raise Refused(
                f"nobody else reaches the announced address {text}: got it from {host}; give --advertise HOST:PORT"
            )
