"""A registry node among others: what it takes from whom, how replicas repair each other, what watchers see. Real signatures."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from swarm.errors import IdentityMismatch, Refused, RemoteProtocolError
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.registry import replica as replica_module
from swarm.registry.digests import member_tag
from swarm.registry.membership import MEMBER_TTL_S
from swarm.registry.records import (
    MAX_TTL_S,
    NO_MODEL,
    ExpertAnnouncement,
    Record,
    RecordKind,
    RegistryNodeRecord,
    SignedRecord,
    Withdrawal,
    sign,
    verify,
)
from swarm.registry.replica import HANDOVER_S, MAX_PUSHED, MAX_PUSHED_BY_STRANGERS, Call, Replica
from swarm.registry.ring import N_REPLICAS, N_TOLERATED, THE_DIRECTORY, Place, Ring
from swarm.registry.table import RegistryTable, TableLimits
from swarm.wire import messages as m
from swarm.wire.frames import decode_frame, encode
from tests.sample_records import sample_announcement, sample_offer

PEER, OTHER, BACKBONE, STRANGER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3, 4))
MODEL, OTHER_MODEL = ModelId(b"m" * 32), ModelId(b"n" * 32)
PLACE = (MODEL, 0)
NOW = 1000.0


def announcement(
    identity: Identity, seq: int, *, model: ModelId = MODEL, address: str = "192.0.2.1:1", ttl_s: int = 60
) -> SignedRecord:
    record = sample_announcement(identity.node_id, seq=seq, ttl_s=ttl_s, model=model, addresses=(address,))
    return sign(record, identity)


def offer(identity: Identity, seq: int = 1, address: str = "192.0.2.1:2") -> SignedRecord:
    record = sample_offer(identity.node_id, seq=seq, model=MODEL, addresses=(address,))
    return sign(record, identity)


def withdrawal(identity: Identity, seq: int) -> SignedRecord:
    return sign(Withdrawal(node=identity.node_id, seq=seq, model=MODEL, withdraws=RecordKind.EXPERTS), identity)


def node_record(identity: Identity, seq: int, address: str) -> tuple[RegistryNodeRecord, SignedRecord]:
    record = RegistryNodeRecord(node=identity.node_id, seq=seq, ttl_s=MEMBER_TTL_S, addresses=(address,))
    return record, sign(record, identity)


class Ringful:
    """Registry nodes that know each other; every message goes through its bytes, at once, between nodes that are up."""

    def __init__(self, n_nodes: int, *, stores_all: bool = False) -> None:
        self.now = NOW
        self.rng = random.Random(5)
        self.identities = [Identity.from_seed(bytes([100 + n]) * 32) for n in range(n_nodes)]
        self.addresses = {each.node_id: f"198.51.{n}.1:7440" for n, each in enumerate(self.identities)}
        self.replicas: dict[NodeId, Replica] = {}
        self.down: set[NodeId] = set()
        for identity in self.identities:
            self.start(identity)
        for replica in self.replicas.values():
            for other in self.identities:
                record, signed = node_record(other, 1, self.addresses[other.node_id])
                replica.membership.learn(record, signed, self.now, is_proved=True)

    def start(self, identity: Identity, table: RegistryTable | None = None) -> Replica:
        replica = Replica(identity.node_id, pick=self.rng.randrange, table=table)
        replica.membership.set_own(*node_record(identity, 1, self.addresses[identity.node_id]), self.now)
        self.replicas[identity.node_id] = replica
        return replica

    def at(self, place: Place = PLACE) -> list[Replica]:
        """Return the replicas of a place, closest first."""
        ring = next(iter(self.replicas.values())).membership.ring
        return [self.replicas[node] for node in ring.closest(place)]

    def far_from(self, place: Place = PLACE) -> Replica:
        near = next(iter(self.replicas.values())).membership.ring.closest(place, N_TOLERATED)
        return next(replica for node, replica in self.replicas.items() if node not in near)

    def send(self, sender: NodeId, call: Call) -> m.Response | None:
        """Return the answer, None where there is none."""
        if call.node in self.down:
            return None
        request = decode_frame(encode(call.request))
        assert isinstance(request, m.Request)
        host = self.addresses[sender].rpartition(":")[0]
        answer = decode_frame(encode(self.replicas[call.node].answer(sender, request, now=self.now, host=host)))
        assert isinstance(answer, m.Response)
        return answer

    def perform(self, sender: NodeId, calls: list[Call]) -> None:
        calls = list(calls)
        while calls:
            call = calls.pop(0)
            try:
                answer = self.send(sender, call)
            except LookupError:
                self.replicas[sender].refused(call)
                continue
            if answer is None:
                self.replicas[sender].failed(call)
            else:
                calls += self.replicas[sender].answered(call, answer, self.now)

    def run(self, seconds: float, keep: Callable[[Call], bool] = lambda call: True) -> None:
        """Let the nodes that are up do what is due, in steps of half a second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for node, replica in self.replicas.items():
                if node not in self.down and self.now >= replica.next_deadline():
                    self.perform(node, [call for call in replica.poll(self.now) if keep(call)])

    def renew(self, seq: int) -> None:
        """Renew everybody's membership, as time goes on."""
        for identity in self.identities:
            if identity.node_id not in self.down:
                record, signed = node_record(identity, seq, self.addresses[identity.node_id])
                for node, replica in self.replicas.items():
                    if node != identity.node_id:
                        replica.membership.learn(record, signed, self.now)
                    else:
                        replica.membership.set_own(record, signed, self.now)


def announce(replica: Replica, signed: SignedRecord, owner: Identity, now: float = NOW) -> m.Accepted:
    answer = replica.answer(owner.node_id, m.Announce(record=signed.to_bytes()), now=now, host="192.0.2.1")
    assert isinstance(answer, m.Accepted)
    return answer


def find(replica: Replica, *places: Place, now: float = NOW) -> list[tuple[int, Record]]:
    answer = replica.answer(STRANGER.node_id, m.Find(places=places or (PLACE,)), now=now, host="203.0.113.1")
    assert isinstance(answer, m.Records)
    return [(left_ms, verify(SignedRecord.from_bytes(data))) for left_ms, data in answer.records]


def push(replica: Replica, sender: NodeId, *told: tuple[float, SignedRecord], now: float = NOW) -> None:
    records = tuple((int(left_s * 1000), signed.to_bytes()) for left_s, signed in told)
    replica.answer(sender, m.Push(records=records, wanted=()), now=now, host="198.51.0.1")


# From owners


def test_a_record_is_taken_only_where_the_ring_puts_it() -> None:
    them = Ringful(20)
    signed = announcement(PEER, 1)
    for replica in them.at():
        assert announce(replica, signed, PEER).is_new
        assert find(replica) == [(60_000, verify(signed))]
    with pytest.raises(LookupError, match="other registry nodes"):
        announce(them.far_from(), signed, PEER)


def test_a_view_that_is_a_little_off_is_tolerated() -> None:
    them = Ringful(20)
    ring = them.at()[0].membership.ring
    sixth = them.replicas[ring.closest(PLACE, N_TOLERATED)[N_REPLICAS]]
    assert announce(sixth, announcement(PEER, 1), PEER).is_new


def test_forged_and_foreign_records_are_refused() -> None:
    them = Ringful(3)
    replica = them.at()[0]
    good = announcement(PEER, 1)
    forged = SignedRecord(payload=good.payload.replace(b'"seq":1', b'"seq":9'), signature=good.signature)
    with pytest.raises(RemoteProtocolError):
        announce(replica, forged, PEER)
    with pytest.raises(IdentityMismatch):
        announce(replica, good, OTHER)
    push(replica, them.identities[1].node_id, (60, forged))
    assert find(replica) == []


def test_an_allow_list_keeps_other_publishers_models_out_however_they_come() -> None:
    them = Ringful(3)
    sender = them.identities[1].node_id
    replica = Replica(them.identities[0].node_id, pick=them.rng.randrange, publishers=[BACKBONE.node_id])
    replica.membership.learn(*node_record(them.identities[1], 1, "198.51.1.1:1"), NOW, is_proved=True)
    with pytest.raises(Refused, match=str(OTHER.node_id)):
        announce(replica, offer(OTHER), OTHER)
    push(replica, sender, (60, offer(OTHER)))
    assert find(replica, THE_DIRECTORY) == []
    assert announce(replica, offer(BACKBONE), BACKBONE).is_new
    assert announce(replica, announcement(PEER, 1), PEER).is_new, "announcements of experts are everybody's"


def test_a_node_that_does_not_store_refuses_and_still_tells_who_does() -> None:
    them = Ringful(3)
    replica = Replica(STRANGER.node_id, pick=them.rng.randrange, stores=False)
    for identity in them.identities:
        replica.membership.learn(*node_record(identity, 1, "198.51.1.1:1"), NOW, is_proved=True)
    with pytest.raises(LookupError, match="stores no records"):
        announce(replica, announcement(PEER, 1), PEER)
    answer = replica.answer(PEER.node_id, m.GetMembers(known=()), now=NOW)
    assert isinstance(answer, m.Members)
    assert len(answer.records) == 3


# From other replicas


def test_a_replica_is_believed_where_it_stores_by_the_ring_and_nobody_else_is() -> None:
    them = Ringful(30)
    first, second = them.at()[:2]
    signed = announcement(PEER, 1)
    push(first, STRANGER.node_id, (60, signed))
    push(first, them.far_from().own, (60, signed))
    assert find(first) == []
    push(first, second.own, (60, signed))
    assert find(first) == [(60_000, verify(signed))]


def test_what_is_passed_on_keeps_what_it_had_left_and_passing_it_again_does_not_renew_it() -> None:
    them = Ringful(3)
    first, second = them.at()[:2]
    signed = announcement(PEER, 1)
    push(first, second.own, (10, signed))
    push(first, second.own, (60, signed), now=NOW + 5)
    assert find(first, now=NOW + 9) == [(1_000, verify(signed))]
    assert find(first, now=NOW + 10) == []
    push(first, second.own, (60, signed), now=NOW + 11)
    assert find(first, now=NOW + 11) == [], "its seq is remembered"
    push(first, second.own, (9_999, announcement(OTHER, 1)), now=NOW + 11)
    assert find(first, now=NOW + 11)[0][0] == 60_000, "at most what it says itself"


def test_records_pushed_by_one_member_are_counted_under_it_until_their_owners_come() -> None:
    them = Ringful(3)
    first, second, third = them.at()
    small = RegistryTable(TableLimits(max_records_per_prefix=2))
    replica = them.start(next(each for each in them.identities if each.node_id == first.own), small)
    for other in (second, third):
        identity = next(each for each in them.identities if each.node_id == other.own)
        replica.membership.learn(*node_record(identity, 1, "198.51.9.1:1"), NOW, is_proved=True)
    keys = [Identity.from_seed(bytes([40 + n]) * 32) for n in range(6)]
    push(replica, second.own, *((60, announcement(identity, 1)) for identity in keys))
    assert len(replica.table) == 2
    push(replica, third.own, *((60, announcement(identity, 1)) for identity in keys[2:]))
    assert len(replica.table) == 4
    announce(replica, announcement(keys[0], 2), keys[0])
    push(replica, second.own, (60, announcement(keys[5], 1)))
    assert len(replica.table) == 5


def test_messages_are_bounded_before_a_signature_is_checked() -> None:
    n_checked = 0

    def count(signed: SignedRecord) -> Record:
        nonlocal n_checked
        n_checked += 1
        raise RemoteProtocolError("bad")

    them = Ringful(3)
    replica = Replica(them.identities[0].node_id, pick=them.rng.randrange, verify_record=count)
    replica.membership.learn(*node_record(them.identities[1], 1, "198.51.1.1:1"), NOW, is_proved=True)
    flood = [(60.0, announcement(PEER, 1))] * 1000
    names = [(60.0, node_record(STRANGER, 1, "203.0.113.1:1")[1])] * 1000
    push(replica, STRANGER.node_id, *flood)
    assert n_checked == 0, "a stranger may tell of registry nodes"
    push(replica, STRANGER.node_id, *names)
    assert n_checked == MAX_PUSHED_BY_STRANGERS
    push(replica, them.identities[1].node_id, *flood)
    assert n_checked == MAX_PUSHED_BY_STRANGERS + MAX_PUSHED
    told = tuple((60_000, signed.to_bytes()) for _, signed in (*flood[:300], *names[:300]))
    gossip = Call(them.identities[1].node_id, m.Gossip(summary=()))
    before = n_checked
    replica.answered(gossip, m.News(wanted=(), records=told[:100] + told[300:400]), NOW)
    assert n_checked - before == 100, "news is of registry nodes"


def test_the_largest_records_fit_into_every_message() -> None:
    them = Ringful(2)
    first, second = (them.replicas[each.node_id] for each in them.identities)
    scattered = ExpertSet({layer: frozenset(range(layer, 512, 2 + layer % 5)) for layer in range(20)})
    for n in range(100):
        identity = Identity.from_seed(bytes([150 + n]) * 32)
        base = verify(announcement(identity, 1, ttl_s=MAX_TTL_S))
        assert isinstance(base, ExpertAnnouncement)
        signed = sign(dataclasses.replace(base, experts=scattered), identity)
        answer = first.answer(identity.node_id, m.Announce(record=signed.to_bytes()), now=NOW)
        assert isinstance(answer, m.Accepted)
    assert first.table.n_bytes > replica_module.MAX_PASSED_BYTES
    changes = first.changes(m.Watch(model_id=MODEL, cursor=0), NOW)
    assert changes is not None
    encode(changes)
    them.run(120)  # every message goes through its bytes
    assert len(second.table) == 100, "what does not fit at once comes with the next comparison"


@pytest.mark.parametrize(("host", "is_taken"), [("198.51.1.1", False), ("127.0.0.1", True)])
def test_a_loopback_address_is_not_taken_from_another_machines_replica_asked_or_not(host: str, is_taken: bool) -> None:
    member = Identity.from_seed(bytes([101]) * 32)
    replica = Replica(STRANGER.node_id, pick=random.Random(1).randrange)
    replica.membership.learn(*node_record(member, 1, f"{host}:7440"), NOW, is_proved=True)
    told = ((60_000, offer(BACKBONE, address="127.0.0.1:2").to_bytes()),)
    replica.answered(Call(member.node_id, m.Push(records=(), wanted=())), m.Records(records=told), NOW)
    assert len(replica.table) == int(is_taken)
    replica.answer(member.node_id, m.Push(records=told, wanted=()), now=NOW, host=host)
    assert len(replica.table) == int(is_taken)


def test_a_stranger_passes_nothing_on_in_a_small_ring_either() -> None:
    first = Ringful(3).at()[0]
    push(first, STRANGER.node_id, (60, announcement(PEER, 1)))
    assert find(first) == []


def test_one_host_is_not_many_networks_however_many_addresses_it_names() -> None:
    us = Ringful(1).at()[0]
    for n in range(60):
        identity = Identity.from_seed(bytes([150 + n]) * 32)
        addresses = (f"203.{n}.113.1:7440", "198.51.100.66:7440")
        record = RegistryNodeRecord(node=identity.node_id, seq=1, ttl_s=MEMBER_TTL_S, addresses=addresses)
        request = m.Announce(record=sign(record, identity).to_bytes())
        us.answer(identity.node_id, request, now=NOW, host="198.51.100.66")
        us.answer(identity.node_id, m.Gossip(summary=()), now=NOW, host="198.51.100.66")
    assert set(us.membership.ring.members) == {us.own}


# Repair


class CountingTable(RegistryTable):
    """Counts what is looked up for comparisons."""

    n_entries = 0

    def entries(self, place: Place, now: float) -> dict[bytes, int]:
        found = super().entries(place, now)
        self.n_entries += len(found)
        return found


def crowded(n_peers: int, n_experts: int) -> tuple[Ringful, Replica, CountingTable]:
    """Return a node of two whose table has records with many places each."""
    them, table = Ringful(2), CountingTable()
    replica = them.start(them.identities[0], table)
    replica.membership.learn(*node_record(them.identities[1], 1, "198.51.1.1:1"), NOW, is_proved=True)
    for n in range(n_peers):
        identity = Identity.from_seed(bytes([150 + n]) * 32)
        base = verify(announcement(identity, 1))
        assert isinstance(base, ExpertAnnouncement)
        record = dataclasses.replace(base, experts=ExpertSet.of([0], range(0, n_experts, 16)))
        table.put_verified(record, sign(record, identity), owner=None, now=NOW)
    return them, replica, table


def test_a_place_that_one_sync_names_often_is_compared_once() -> None:
    them, replica, table = crowded(10, 16)
    sync = m.Sync(digests=((PLACE, bytes(8)),) * 512)
    answer = replica.answer(them.identities[1].node_id, sync, now=NOW, host="198.51.1.1")
    assert isinstance(answer, m.Differences)
    assert [index for index, _ in answer.places] == [0]
    assert table.n_entries == 10
    table.n_entries = 0
    differences = m.Differences(places=((0, ()),) * 512)
    replica.answered(Call(them.identities[1].node_id, sync), differences, NOW)
    assert table.n_entries == 10


def test_what_one_sync_hashes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "MAX_ENTRIES", 35)
    them, replica, table = crowded(10, 16 * 64)
    sync = m.Sync(digests=tuple(((MODEL, bucket), bytes(8)) for bucket in range(64)))
    replica.answer(them.identities[1].node_id, sync, now=NOW, host="198.51.1.1")
    assert table.n_entries <= 40
    table.n_entries = 0
    (call,) = replica._sync_with_somebody(NOW)
    assert isinstance(call.request, m.Sync)
    assert len(call.request.digests) == 3
    assert table.n_entries <= 40


def test_however_many_places_records_name_few_are_looked_at_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "MAX_LOOKED_AT", 5)
    _, replica, _ = crowded(1, 16 * 64)
    looked_at: list[Place] = []
    closest = Ring.closest

    def count(ring: Ring, place: Place, n: int = N_REPLICAS) -> tuple[NodeId, ...]:
        looked_at.append(place)
        return closest(ring, place, n)

    monkeypatch.setattr(Ring, "closest", count)
    seen: set[Place] = set()
    for _ in range(40):
        looked_at.clear()
        (call,) = replica._sync_with_somebody(NOW)
        assert isinstance(call.request, m.Sync)
        assert len(call.request.digests) == 5
        assert len(looked_at) <= 6
        seen.update(place for place, _ in call.request.digests)
    assert len(seen) > 50, "it begins elsewhere each time"
    replica.membership.learn(*node_record(STRANGER, 1, "203.0.113.1:1"), NOW, is_proved=True)
    looked_at.clear()
    replica._plan_handovers(NOW)
    assert len(looked_at) == 10


def test_a_watcher_costs_what_it_has_missed() -> None:
    replica = Ringful(1).at()[0]
    for n in range(50):
        identity = Identity.from_seed(bytes([40 + n]) * 32)
        announce(replica, announcement(identity, 1), identity)
    looked_at: list[int] = []

    class Spy(tuple[int, object]):
        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            if index == 0:
                looked_at.append(super().__getitem__(0))  # type: ignore[arg-type]
            return super().__getitem__(index)  # type: ignore[index]

        def __iter__(self):  # type: ignore[no-untyped-def]
            looked_at.append(super().__getitem__(0))
            return super().__iter__()

    replica._changes = type(replica._changes)((Spy(each) for each in replica._changes), maxlen=replica._changes.maxlen)  # type: ignore[arg-type]
    changes = watch(replica, replica._version - 2)
    assert changes is not None
    assert len(changes.records) == 2
    assert len(set(looked_at)) == 3


def test_two_replicas_that_compare_end_up_with_the_same() -> None:
    them = Ringful(5)
    first, second = them.at()[:2]
    announce(first, announcement(PEER, 2), PEER)
    announce(second, announcement(PEER, 1), PEER)
    announce(second, announcement(OTHER, 7), OTHER)
    them.run(40)
    for replica in them.replicas.values():
        assert [(record.node, record.seq) for _, record in find(replica, now=them.now)] == sorted(
            [(PEER.node_id, 2), (OTHER.node_id, 7)]
        )
    lefts = {left_ms for replica in them.replicas.values() for left_ms, _ in find(replica, now=them.now)}
    assert max(lefts) <= 60_000 - 1000 * (them.now - NOW)


def test_a_withdrawal_that_a_replica_has_missed_reaches_it_and_is_not_undone() -> None:
    them = Ringful(5)
    for replica in them.at():
        announce(replica, announcement(PEER, 1, ttl_s=MAX_TTL_S), PEER)
    announce(them.at()[0], withdrawal(PEER, 2), PEER)
    them.run(60)
    for replica in them.replicas.values():
        assert [record.kind for _, record in find(replica, now=them.now)] == [RecordKind.WITHDRAWAL]
        assert replica.table.lookup(MODEL, them.now) == []


def test_a_withdrawal_is_proof_for_the_longest_lease_and_its_seq_for_a_day() -> None:
    them = Ringful(2)
    replica = them.at()[0]
    announce(replica, announcement(PEER, 1), PEER)
    announce(replica, withdrawal(PEER, 2), PEER)
    assert [left_ms for left_ms, _ in find(replica)] == [1000 * MAX_TTL_S]
    assert find(replica, now=NOW + MAX_TTL_S) == []
    assert announce(replica, announcement(PEER, 1), PEER, NOW + 3600).highest_seq == 2


def test_a_new_replica_is_brought_what_it_lacks_by_one_that_stays() -> None:
    them = Ringful(12)
    signed = announcement(PEER, 1, ttl_s=MAX_TTL_S)
    holders = them.at()
    for replica in holders:
        announce(replica, signed, PEER)
    gone = holders[1].own
    them.down.add(gone)
    sixth = them.replicas[holders[0].membership.ring.closest(PLACE, N_TOLERATED)[N_REPLICAS]]
    assert find(sixth) == []
    record, gone_signed = (
        Withdrawal(node=gone, seq=2, model=NO_MODEL, withdraws=RecordKind.REGISTRY),
        sign(
            Withdrawal(node=gone, seq=2, model=NO_MODEL, withdraws=RecordKind.REGISTRY),
            next(each for each in them.identities if each.node_id == gone),
        ),
    )
    for node, replica in them.replicas.items():
        if node != gone:
            replica.membership.learn(record, gone_signed, them.now)
    them.run(3 * HANDOVER_S, keep=lambda call: not isinstance(call.request, m.Gossip))
    assert [each.node for _, each in find(sixth, now=them.now)] == [PEER.node_id]


def test_a_place_index_that_was_not_asked_for_is_a_protocol_error() -> None:
    them = Ringful(2)
    first, second = (them.replicas[each.node_id] for each in them.identities)
    call = Call(second.own, m.Sync(digests=((PLACE, b"\0" * 8),)))
    with pytest.raises(RemoteProtocolError, match="place 1"):
        first.answered(call, m.Differences(places=((1, ()),)), NOW)


# Members


def test_nodes_that_know_one_seed_find_each_other_and_leave() -> None:
    them = Ringful(0)
    them.identities = [Identity.from_seed(bytes([100 + n]) * 32) for n in range(8)]
    them.addresses = {each.node_id: f"198.51.{n}.1:7440" for n, each in enumerate(them.identities)}
    for identity in them.identities:
        them.start(identity).trust_seeds([them.identities[0].node_id])
    them.run(40)
    everybody = {identity.node_id for identity in them.identities}
    assert all(set(replica.membership.ring.members) == everybody for replica in them.replicas.values())
    last = them.identities[-1]
    record = Withdrawal(node=last.node_id, seq=2, model=NO_MODEL, withdraws=RecordKind.REGISTRY)
    them.perform(last.node_id, them.replicas[last.node_id].leave(record, sign(record, last), them.now))
    them.down.add(last.node_id)
    them.run(15)
    for node in everybody - {last.node_id}:
        assert set(them.replicas[node].membership.ring.members) == everybody - {last.node_id}


def test_a_caller_proves_itself_only_from_its_announced_host() -> None:
    them = Ringful(2)
    us = them.replicas[them.identities[0].node_id]
    record, signed = node_record(STRANGER, 1, "203.0.113.1:7440")
    told = m.Push(records=((100_000, signed.to_bytes()),), wanted=())
    us.answer(STRANGER.node_id, told, now=NOW, host="198.51.100.66")
    assert us.membership.addresses(STRANGER.node_id) == record.addresses
    us.answer(STRANGER.node_id, m.Gossip(summary=()), now=NOW, host="198.51.100.66")
    assert STRANGER.node_id not in us.membership.ring
    us.answer(STRANGER.node_id, m.Gossip(summary=()), now=NOW, host="203.0.113.1")
    assert STRANGER.node_id in us.membership.ring


def test_a_client_is_told_what_its_view_lacks_and_what_is_gone() -> None:
    them = Ringful(4)
    replica = them.at()[0]
    everything = replica.answer(PEER.node_id, m.GetMembers(known=()), now=NOW)
    assert isinstance(everything, m.Members)
    assert len(everything.records) == 4
    tags = tuple(
        member_tag(record.node, record.addresses)
        for record in (verify(SignedRecord.from_bytes(data)) for _, data in everything.records)
        if isinstance(record, RegistryNodeRecord)
    )
    nothing = replica.answer(PEER.node_id, m.GetMembers(known=(*tags, b"x" * 8)), now=NOW)
    assert nothing == m.Members(gone=(b"x" * 8,), records=())


# Watching


def watch(replica: Replica, cursor: int, now: float = NOW) -> m.Changes | None:
    return replica.changes(m.Watch(model_id=MODEL, cursor=cursor), now)


def test_a_watcher_sees_what_is_new_and_no_mere_renewals() -> None:
    replica = Ringful(2).at()[0]
    first = watch(replica, 0)
    assert first is not None, "a strange cursor has missed everything"
    assert first.records == ()
    assert watch(replica, first.cursor) is None
    announce(replica, announcement(PEER, 1), PEER)
    announce(replica, announcement(PEER, 1, model=OTHER_MODEL), PEER)
    second = watch(replica, first.cursor)
    assert second is not None
    assert [data for _, data in second.records] == [announcement(PEER, 1).to_bytes()]
    announce(replica, announcement(PEER, 2), PEER)
    assert watch(replica, second.cursor) is None
    announce(replica, announcement(PEER, 3, address="192.0.2.1:9"), PEER)
    third = watch(replica, second.cursor)
    assert third is not None
    assert len(third.records) == 1
    announce(replica, withdrawal(PEER, 4), PEER)
    fourth = watch(replica, third.cursor)
    assert fourth is not None
    assert [data for _, data in fourth.records] == [withdrawal(PEER, 4).to_bytes()]


def test_a_watcher_that_has_missed_too_much_is_told_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "MAX_CHANGES", 3)
    replica = Ringful(1).at()[0]
    first = watch(replica, 0)
    assert first is not None
    keys = [Identity.from_seed(bytes([40 + n]) * 32) for n in range(5)]
    for identity in keys[:3]:
        announce(replica, announcement(identity, 1), identity)
    caught_up = watch(replica, first.cursor)
    assert caught_up is not None
    assert len(caught_up.records) == 3
    for identity in keys[3:]:
        announce(replica, announcement(identity, 1), identity)
    told_all = watch(replica, first.cursor)
    assert told_all is not None
    assert len(told_all.records) == 5
    assert len((watch(replica, caught_up.cursor) or told_all).records) == 2


def test_news_of_a_model_wakes_who_waits_for_it() -> None:
    replica = Ringful(1).at()[0]
    woken: list[ModelId] = []
    replica.on_news = woken.append
    announce(replica, announcement(PEER, 1), PEER)
    announce(replica, announcement(PEER, 2), PEER)
    assert woken == [MODEL]
    replica.table.expire(NOW + 61)
    assert woken == [MODEL, MODEL], "the end of a lease is a change of the table"
