"""The records that one registry node keeps: leases with an explicit `now`, bounded in every direction.

Pure: `now` is monotonic seconds from the caller, never smaller than in an earlier call. Knows no sockets and asks nobody;
a `prefix` is whatever the caller says stands for one owner of addresses, None for nobody who needs a limit.

A slot is one (node, kind, model); the places that its record is asked for at are `ring`'s. Its life:

    absent -> live       put of a verified record from its own node's connection
    live   -> live       put with a higher seq: replaces and renews
    live   -> remembered ttl over (counted from receipt), or a `Withdrawal` with a higher seq
    remembered -> live   put with a higher seq than any seen before
    remembered -> absent 24 h later: until then an old record that is sent again finds its seq too low

A withdrawal itself is kept for the longest lease, as proof for the replicas that have missed it.

Rules that are easy to get wrong:
- The same record again changes nothing and does NOT renew. Otherwise whoever kept a copy could hold a dead node alive; an
  announcer renews with a higher seq. Another record with an equal seq is stale: the first one stands.
- A full table refuses what is new with Overloaded. It never evicts a live record, so a flood of new nodes cannot push out
  the ones that serve. Only remembered slots (they protect against replay, nobody looks them up) give way, oldest first.
- What another replica passes on lives as long as it had left there, never longer.
- Keys cost nothing, addresses do: a prefix fills at most its share of the table, live and remembered slots together, so that
  one host can neither fill the table nor push the others' remembered slots out. A slot counts for the prefix that its
  last record came from.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from swarm.errors import IdentityMismatch, Overloaded
from swarm.ids import ModelId, NodeId
from swarm.registry.records import MAX_TTL_S, Record, RecordKind, SignedRecord, Withdrawal, verify
from swarm.registry.ring import Place, places_of

REMEMBER_S = 24 * 3600.0  # DESIGN section 4: the highest seq outlives its record by 24 h
FULL_RETRY_S = 30.0  # guessed: leases last minutes, so room rarely appears sooner

TAG_BYTES = 8  # of a slot, in what replicas tell each other; a collision only delays a repair

Key = tuple[NodeId, RecordKind, ModelId]
_SEQ = re.compile(rb'"seq":[0-9]+')


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLimits:
    """Bounds of a table. All guessed: a small relay's memory (about 50 MB when full), far above the first swarms."""

    max_records: int = 10_000
    max_records_per_node: int = 8  # live and remembered together
    max_bytes: int = 32 << 20  # of live signed records
    max_remembered: int = 20_000
    # A tenth of the table. Live and remembered together, so 20 prefixes are needed to fill what is remembered.
    max_records_per_prefix: int = 1_000
    max_bytes_per_prefix: int = (32 << 20) // 10


class PutResult(StrEnum):
    """What a put did. STALE: a record with that seq or a higher one was seen before; see `highest_seq`."""

    STORED = "stored"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"
    STALE = "stale"
    WITHDRAWN = "withdrawn"


@dataclass(slots=True)
class _Slot:
    seq: int
    until: float  # live: when the lease ends; remembered: when the seq is forgotten
    signed: SignedRecord | None  # None: remembered
    prefix: str | None  # that its last record came from
    places: tuple[Place, ...]
    content: int  # hash of the record without its seq, to tell a renewal from news
    tag: bytes
    proof: SignedRecord | None = None  # remembered: the withdrawal that ended it


@dataclass(slots=True)
class _Share:
    """What one prefix holds of the table: its slots, and the size of the live records in them."""

    keys: set[Key] = field(default_factory=set)
    n_bytes: int = 0


class RegistryTable:
    """The one owner of a registry node's records."""

    def __init__(
        self, limits: TableLimits | None = None, *, on_change: Callable[[Key, SignedRecord | None], None] | None = None
    ) -> None:
        """`on_change` is told of what is new (not of a mere renewal): the slot, and its record or withdrawal, None: expired."""
        self._limits = limits or TableLimits()
        self.on_change = on_change
        self._slots: dict[Key, _Slot] = {}
        self._keys_of_node: dict[NodeId, set[Key]] = {}
        self._share_of_prefix: dict[str, _Share] = {}
        self._live_of_model: dict[ModelId, set[Key]] = {}
        self._keys_at: dict[Place, set[Key]] = {}  # live, or withdrawn with the proof at hand
        self._remembered: dict[Key, None] = {}  # ordered by `until`: each enters at the latest time so far
        self._leases: list[tuple[float, Key]] = []  # a heap; entries whose slot has moved on are skipped
        self._n_live = 0
        self._n_bytes = 0

    def __len__(self) -> int:
        return self._n_live

    @property
    def n_bytes(self) -> int:
        """Size of the live signed records, bytes."""
        return self._n_bytes

    @property
    def n_remembered(self) -> int:
        """Slots of which only the highest seq is kept."""
        return len(self._remembered)

    def put(self, signed: SignedRecord, *, owner: NodeId, now: float, prefix: str | None = None) -> PutResult:
        """Take an untrusted record that came over the connection of the authenticated node `owner`; return what it did.

        Args:
            prefix: where that connection comes from; None: no limit applies to it.

        Raises:
            RemoteProtocolError: bad form or signature.
            IdentityMismatch: the record speaks for another node than `owner`.
            Overloaded: no room, and the record is new or larger than the one it replaces; nothing changed.
        """
        return self.put_verified(verify(signed), signed, owner=owner, now=now, prefix=prefix)

    def put_verified(
        self,
        record: Record,
        signed: SignedRecord,
        *,
        owner: NodeId | None,
        now: float,
        prefix: str | None = None,
        left_s: float | None = None,
    ) -> PutResult:
        """Do what `put` does, for a caller that has `record = verify(signed)` already: verifying is the dear part.

        Args:
            owner: None: another replica passed it on, and the caller has judged that it may.
            left_s: what it had left there.
        """
        self.expire(now)
        if owner is not None and record.node != owner:
            raise IdentityMismatch(
                f"record from a foreign connection: got node {record.node.short}, expected {owner.short}"
            )
        if isinstance(record, Withdrawal):
            return self._withdraw((record.node, record.withdraws, record.model), record.seq, signed, now)
        key = (record.node, record.kind, record.model)
        slot = self._slots.get(key)
        if slot is not None and record.seq <= slot.seq:
            return PutResult.UNCHANGED if slot.signed == signed else PutResult.STALE
        self._make_room(key, slot, signed, prefix)
        until = now + (record.ttl_s if left_s is None else min(left_s, record.ttl_s))
        content = hash(_SEQ.sub(b"", signed.payload, count=1))
        if slot is not None and slot.signed is not None and slot.content == content and slot.prefix == prefix:
            return self._renew(key, slot, record.seq, until, signed)  # the common case, kept short
        was_live = slot is not None and slot.signed is not None
        if slot is not None:
            self._take_out(key, slot)
            self._leave(slot.prefix, key)
        places = places_of(record)
        self._slots[key] = _Slot(record.seq, until, signed, prefix, places, content, _tag_of(key))
        for place in places:
            self._keys_at.setdefault(place, set()).add(key)
        if prefix is not None:
            share = self._share_of_prefix.setdefault(prefix, _Share())
            share.keys.add(key)
            share.n_bytes += signed.size_bytes
        self._keys_of_node.setdefault(record.node, set()).add(key)
        self._live_of_model.setdefault(record.model, set()).add(key)
        self._n_live += 1
        self._n_bytes += signed.size_bytes
        self._push_lease(until, key)
        if self.on_change is not None and not (was_live and slot is not None and slot.content == content):
            self.on_change(key, signed)
        return PutResult.REPLACED if was_live else PutResult.STORED

    def _renew(self, key: Key, slot: _Slot, seq: int, until: float, signed: SignedRecord) -> PutResult:
        assert slot.signed is not None
        n_more = signed.size_bytes - slot.signed.size_bytes
        self._n_bytes += n_more
        if slot.prefix is not None:
            self._share_of_prefix[slot.prefix].n_bytes += n_more
        slot.seq, slot.until, slot.signed = seq, until, signed
        self._push_lease(until, key)
        return PutResult.REPLACED

    def lookup(self, model: ModelId, now: float) -> list[tuple[SignedRecord, float]]:
        """Return the model's live records with the seconds that each still has (above 0), ordered by node and kind."""
        found: list[tuple[SignedRecord, float]] = []
        for key in sorted(self._live_of_model.get(model, ())):
            slot = self._slots[key]
            if slot.signed is not None and slot.until > now:
                found.append((slot.signed, slot.until - now))
        return found

    def find(self, places: Iterable[Place], now: float) -> list[tuple[SignedRecord, float]]:
        """Return what is known at `places`, each once, by node: live records, and withdrawals while they are proof."""
        keys = {key for place in places for key in self._keys_at.get(place, ())}
        found: list[tuple[SignedRecord, float]] = []
        for key in sorted(keys):
            signed, left_s = self._told(key, now)
            if signed is not None:
                found.append((signed, left_s))
        return found

    def places(self) -> list[Place]:
        """Return the places of which something is known, in no order."""
        return list(self._keys_at)

    def entries(self, place: Place, now: float) -> dict[bytes, int]:
        """Return tag -> seq of all that `find` returns for `place`."""
        known = {}
        for key in list(self._keys_at.get(place, ())):
            if self._told(key, now)[0] is not None:
                slot = self._slots[key]
                known[slot.tag] = slot.seq
        return known

    def take(self, place: Place, tags: Iterable[bytes], now: float) -> list[tuple[SignedRecord, float]]:
        """Return what `find` returns for `place`, of these tags."""
        wanted = set(tags)
        keys = [key for key in self._keys_at.get(place, ()) if self._slots[key].tag in wanted]
        return [(signed, left_s) for signed, left_s in (self._told(key, now) for key in keys) if signed is not None]

    def told(self, key: Key, now: float) -> tuple[SignedRecord, float] | None:
        """Return one slot's live record, or the withdrawal that ended it, with the seconds that has left; None: neither."""
        if key not in self._slots:
            return None
        signed, left_s = self._told(key, now)
        return None if signed is None else (signed, left_s)

    def _told(self, key: Key, now: float) -> tuple[SignedRecord | None, float]:
        """Return what others are told of a slot, with the time that has left; a proof that is over is let go of here."""
        slot = self._slots[key]
        if slot.signed is not None:
            return (slot.signed, slot.until - now) if slot.until > now else (None, 0.0)
        left_s = slot.until - REMEMBER_S + MAX_TTL_S - now
        if slot.proof is not None and left_s > 0:
            return slot.proof, left_s
        self._let_go(key, slot)
        return None, 0.0

    def models(self, now: float) -> list[ModelId]:
        """Return the models with at least one live record, ascending."""
        return sorted(
            model for model, keys in self._live_of_model.items() if any(self._slots[key].until > now for key in keys)
        )

    def knows(self, record: Record) -> bool:
        """Return whether that record, its withdrawal, or a later one of the same slot was seen."""
        kind = record.withdraws if isinstance(record, Withdrawal) else record.kind
        slot = self._slots.get((record.node, kind, record.model))
        return slot is not None and slot.seq >= record.seq

    def places_at(self, node: NodeId, kind: RecordKind, model: ModelId) -> tuple[Place, ...]:
        """Return the places of a slot that is known; nothing for another."""
        slot = self._slots.get((node, kind, model))
        return () if slot is None else slot.places

    def highest_seq(self, node: NodeId, kind: RecordKind, model: ModelId) -> int | None:
        """Return the highest seq seen for that slot; an announcer whose record was STALE goes on above it."""
        slot = self._slots.get((node, kind, model))
        return None if slot is None else slot.seq

    def expire(self, now: float) -> int:
        """Drop what has ended by `now`; return how many live records that were."""
        n_expired = 0
        while self._leases and self._leases[0][0] <= now:
            until, key = heapq.heappop(self._leases)
            slot = self._slots.get(key)
            if slot is not None and slot.signed is not None and slot.until == until:
                self._remember(key, slot, slot.seq, until + REMEMBER_S, None)
                n_expired += 1
                if self.on_change is not None:
                    self.on_change(key, None)
        while self._remembered:
            key = next(iter(self._remembered))
            if self._slots[key].until > now:
                break
            self._forget(key)
        return n_expired

    def next_expiry(self) -> float | None:
        """Return when `expire` next has something to do, None for never."""
        while self._leases and not self._is_current(self._leases[0]):
            heapq.heappop(self._leases)
        times = [self._leases[0][0]] if self._leases else []
        if self._remembered:
            times.append(self._slots[next(iter(self._remembered))].until)
        return min(times, default=None)

    def _withdraw(self, key: Key, seq: int, signed: SignedRecord, now: float) -> PutResult:
        slot = self._slots.get(key)
        if slot is None:  # remembering seqs of what was never here would let one node fill the table
            return PutResult.UNCHANGED
        if seq < slot.seq or (seq == slot.seq and slot.signed is not None):
            return PutResult.STALE
        was_live = slot.signed is not None
        if seq == slot.seq:
            return PutResult.UNCHANGED
        self._remember(key, slot, seq, now + REMEMBER_S, signed)
        if was_live and self.on_change is not None:
            self.on_change(key, signed)
        return PutResult.WITHDRAWN if was_live else PutResult.UNCHANGED

    def _make_room(self, key: Key, slot: _Slot | None, signed: SignedRecord, prefix: str | None) -> None:
        """Raise Overloaded if `signed` does not fit; the last step may forget the node's or prefix's oldest remembered slot."""
        limits = self._limits
        old = slot.signed if slot is not None else None
        n_bytes = self._n_bytes + signed.size_bytes - (old.size_bytes if old is not None else 0)
        if n_bytes > limits.max_bytes and (old is None or signed.size_bytes > old.size_bytes):
            raise Overloaded(
                f"registry is full: got {n_bytes} bytes, expected at most {limits.max_bytes}",
                retry_after_s=FULL_RETRY_S,
            )
        if old is None and self._n_live >= limits.max_records:
            raise Overloaded(f"registry is full: {self._n_live} live records", retry_after_s=FULL_RETRY_S)
        given_up: set[Key] = set()
        if slot is None:
            keys = self._keys_of_node.get(key[0], set())
            self._give_up(given_up, keys, limits.max_records_per_node, f"node {key[0].short}")
        if prefix is not None:
            share = self._share_of_prefix.get(prefix, _Share())
            is_inside = key in share.keys
            old = old if is_inside else None
            n_bytes = share.n_bytes + signed.size_bytes - (old.size_bytes if old is not None else 0)
            if n_bytes > limits.max_bytes_per_prefix and (old is None or signed.size_bytes > old.size_bytes):
                raise Overloaded(
                    f"too many bytes from {prefix}: got {n_bytes}, expected at most {limits.max_bytes_per_prefix}",
                    retry_after_s=FULL_RETRY_S,
                )
            if not is_inside:
                self._give_up(given_up, share.keys, limits.max_records_per_prefix, prefix)
        for other in given_up:
            self._forget(other)

    def _give_up(self, given_up: set[Key], keys: set[Key], limit: int, whose: str) -> None:
        """Add to `given_up` the oldest remembered one of `keys` if they are at their limit; Overloaded if all are live."""
        if len(keys) < limit or len(keys - given_up) < limit:
            return
        dead = [other for other in keys if other in self._remembered]
        if not dead:
            raise Overloaded(
                f"too many records from {whose}: expected at most {limit}",
                retry_after_s=FULL_RETRY_S,
            )
        given_up.add(min(dead, key=lambda other: (self._slots[other].until, other)))

    def _take_out(self, key: Key, slot: _Slot) -> None:
        """Undo a slot's place in the counts and indexes of its state; it stays in `_slots`."""
        self._let_go(key, slot)
        if slot.signed is None:
            del self._remembered[key]
            return
        self._n_live -= 1
        self._n_bytes -= slot.signed.size_bytes
        if slot.prefix is not None:
            self._share_of_prefix[slot.prefix].n_bytes -= slot.signed.size_bytes
        keys = self._live_of_model[key[2]]
        keys.discard(key)
        if not keys:
            del self._live_of_model[key[2]]

    def _let_go(self, key: Key, slot: _Slot) -> None:
        """Take a slot out of its places."""
        slot.proof = None
        for place in slot.places:
            keys = self._keys_at.get(place)
            if keys is not None:
                keys.discard(key)
                if not keys:
                    del self._keys_at[place]

    def _remember(self, key: Key, slot: _Slot, seq: int, until: float, proof: SignedRecord | None) -> None:
        self._take_out(key, slot)
        self._slots[key] = _Slot(seq, until, None, slot.prefix, slot.places, slot.content, slot.tag, proof)
        if proof is not None:
            for place in slot.places:
                self._keys_at.setdefault(place, set()).add(key)
        self._remembered[key] = None
        if len(self._remembered) > self._limits.max_remembered:
            self._forget(next(iter(self._remembered)))

    def _forget(self, key: Key) -> None:
        self._let_go(key, self._slots[key])
        self._leave(self._slots[key].prefix, key)
        del self._remembered[key], self._slots[key]
        keys = self._keys_of_node[key[0]]
        keys.discard(key)
        if not keys:
            del self._keys_of_node[key[0]]

    def _leave(self, prefix: str | None, key: Key) -> None:
        """Take a slot, whose bytes are off the count already, out of its prefix's share."""
        if prefix is None:
            return
        share = self._share_of_prefix[prefix]
        share.keys.discard(key)
        if not share.keys:
            del self._share_of_prefix[prefix]

    def _is_current(self, lease: tuple[float, Key]) -> bool:
        slot = self._slots.get(lease[1])
        return slot is not None and slot.signed is not None and slot.until == lease[0]

    def _push_lease(self, until: float, key: Key) -> None:
        heapq.heappush(self._leases, (until, key))
        if len(self._leases) > 2 * self._n_live + 64:  # a node that renews in a tight loop must not grow the heap
            self._leases = [lease for lease in self._leases if self._is_current(lease)]
            heapq.heapify(self._leases)


def _tag_of(key: Key) -> bytes:
    return blake2b(key[0].raw + key[2].raw + key[1].value.encode(), digest_size=TAG_BYTES).digest()
