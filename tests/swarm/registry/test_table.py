"""The registry's table: order by seq, leases, replay, bounds. Time is whatever the test says."""

from __future__ import annotations

import random

import pytest

from swarm.errors import IdentityMismatch, Overloaded, RemoteProtocolError
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId
from swarm.registry.records import (
    MAX_TTL_S,
    ExpertAnnouncement,
    RecordKind,
    SignedRecord,
    Withdrawal,
    sign,
    verify,
)
from swarm.registry.ring import OFFERS, THE_DIRECTORY, places_of
from swarm.registry.table import REMEMBER_S, PutResult, RegistryTable, TableLimits
from tests.sample_records import sample_offer

A, B, C = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
MODEL, OTHER_MODEL = ModelId(b"m" * 32), ModelId(b"n" * 32)


def announcement(
    identity: Identity, seq: int, *, ttl_s: int = 60, model: ModelId = MODEL, experts: range = range(4)
) -> SignedRecord:
    record = ExpertAnnouncement(
        node=identity.node_id,
        seq=seq,
        ttl_s=ttl_s,
        model=model,
        model_name="tiny",
        experts=ExpertSet.of([0], experts),
        addresses=("127.0.0.1:1",),
        exact_kernels=True,
        wire_versions=(1,),
    )
    return sign(record, identity)


def offer(identity: Identity, seq: int, *, ttl_s: int = 60) -> SignedRecord:
    record = sample_offer(identity.node_id, seq=seq, ttl_s=ttl_s, model=MODEL, addresses=("127.0.0.1:2",))
    return sign(record, identity)


def withdrawal(identity: Identity, seq: int, *, kind: RecordKind = RecordKind.EXPERTS) -> SignedRecord:
    return sign(Withdrawal(node=identity.node_id, seq=seq, model=MODEL, withdraws=kind), identity)


def put(table: RegistryTable, signed: SignedRecord, now: float, prefix: str | None = None) -> PutResult:
    return table.put(signed, owner=verify(signed).node, now=now, prefix=prefix)


def test_a_record_is_found_with_the_time_it_has_left() -> None:
    table = RegistryTable()
    record = announcement(A, 1)
    assert put(table, record, 100.0) is PutResult.STORED
    assert table.lookup(MODEL, 110.0) == [(record, 50.0)]
    assert table.models(110.0) == [MODEL]
    assert table.lookup(OTHER_MODEL, 110.0) == []


def test_a_lease_counts_from_receipt_and_ends_to_the_second() -> None:
    table = RegistryTable()
    put(table, announcement(A, 1), 100.0)
    assert len(table.lookup(MODEL, 159.9)) == 1
    assert table.lookup(MODEL, 160.0) == []  # even before anybody called expire
    assert table.models(160.0) == []
    assert table.next_expiry() == 160.0
    assert table.expire(159.9) == 0
    assert table.expire(160.0) == 1
    assert len(table) == 0
    assert table.n_bytes == 0


def test_a_higher_seq_replaces_and_renews() -> None:
    table = RegistryTable()
    put(table, announcement(A, 1), 0.0)
    newer = announcement(A, 2, experts=range(2))
    assert put(table, newer, 50.0) is PutResult.REPLACED
    assert table.lookup(MODEL, 61.0) == [(newer, 49.0)]
    assert len(table) == 1
    assert table.n_bytes == newer.size_bytes


def test_the_same_record_again_does_not_renew() -> None:
    table = RegistryTable()
    record = announcement(A, 1)
    put(table, record, 0.0)
    assert put(table, record, 50.0) is PutResult.UNCHANGED
    assert table.lookup(MODEL, 55.0) == [(record, 5.0)]


def test_another_record_with_the_same_seq_or_a_lower_one_is_stale() -> None:
    table = RegistryTable()
    record = announcement(A, 5)
    put(table, record, 0.0)
    assert put(table, announcement(A, 5, experts=range(2)), 1.0) is PutResult.STALE
    assert put(table, announcement(A, 4), 1.0) is PutResult.STALE
    assert table.lookup(MODEL, 1.0) == [(record, 59.0)]
    assert table.highest_seq(A.node_id, RecordKind.EXPERTS, MODEL) == 5


def test_a_restart_within_two_seconds_leaves_one_entry() -> None:
    table = RegistryTable()
    put(table, announcement(A, 1_000), 0.0)
    restarted = announcement(A, 3_000)
    put(table, restarted, 2.0)
    assert table.lookup(MODEL, 2.0) == [(restarted, 60.0)]
    assert table.expire(60.5) == 0  # the first lease's end does not touch the second
    assert table.lookup(MODEL, 61.0) == [(restarted, 1.0)]


def test_an_old_record_is_refused_for_a_day_after_the_lease_ended() -> None:
    table = RegistryTable()
    record = announcement(A, 5)
    put(table, record, 0.0)
    table.expire(60.0)
    assert put(table, record, 61.0) is PutResult.STALE
    assert put(table, record, 59.0 + REMEMBER_S) is PutResult.STALE
    assert table.n_remembered == 1
    assert table.next_expiry() == 60.0 + REMEMBER_S
    assert put(table, record, 60.0 + REMEMBER_S) is PutResult.STORED


def test_a_higher_seq_comes_back_after_the_lease_ended() -> None:
    table = RegistryTable()
    put(table, announcement(A, 5), 0.0)
    table.expire(60.0)
    assert put(table, announcement(A, 6), 61.0) is PutResult.STORED
    assert table.n_remembered == 0
    assert len(table) == 1


def test_a_withdrawal_needs_a_higher_seq_and_stays_in_force() -> None:
    table = RegistryTable()
    put(table, announcement(A, 5), 0.0)
    put(table, offer(A, 5), 0.0)
    assert put(table, withdrawal(A, 5), 1.0) is PutResult.STALE
    assert put(table, withdrawal(A, 6), 1.0) is PutResult.WITHDRAWN
    assert [verify(signed).kind for signed, _ in table.lookup(MODEL, 1.0)] == [RecordKind.MODEL]
    assert put(table, withdrawal(A, 6), 2.0) is PutResult.UNCHANGED
    assert put(table, announcement(A, 6), 2.0) is PutResult.STALE
    assert put(table, announcement(A, 7), 2.0) is PutResult.STORED


def test_a_withdrawal_of_what_was_never_here_takes_no_memory() -> None:
    table = RegistryTable()
    assert put(table, withdrawal(A, 6), 1.0) is PutResult.UNCHANGED
    assert table.n_remembered == 0
    assert table.next_expiry() is None


def test_a_record_counts_only_from_its_own_nodes_connection() -> None:
    table = RegistryTable()
    for signed in (announcement(A, 1), withdrawal(A, 2)):
        with pytest.raises(IdentityMismatch):
            table.put(signed, owner=B.node_id, now=0.0)
    assert table.lookup(MODEL, 0.0) == []


def test_a_bad_signature_changes_nothing() -> None:
    table = RegistryTable()
    good = announcement(A, 1)
    put(table, good, 0.0)
    forged = SignedRecord(payload=announcement(A, 9).payload, signature=good.signature)
    with pytest.raises(RemoteProtocolError):
        table.put(forged, owner=A.node_id, now=1.0)
    assert table.lookup(MODEL, 1.0) == [(good, 59.0)]


def test_lookup_is_ordered_by_node_whatever_the_order_of_arrival() -> None:
    found = []
    for order in ([A, B, C], [C, A, B]):
        table = RegistryTable()
        for identity in order:
            put(table, announcement(identity, 1), 0.0)
        found.append([verify(signed).node for signed, _ in table.lookup(MODEL, 0.0)])
    assert found[0] == found[1] == sorted(identity.node_id for identity in (A, B, C))


def test_a_full_table_refuses_new_nodes_and_keeps_and_renews_the_live_ones() -> None:
    table = RegistryTable(TableLimits(max_records=2))
    put(table, announcement(A, 1), 0.0)
    put(table, announcement(B, 1), 0.0)
    with pytest.raises(Overloaded) as caught:
        put(table, announcement(C, 1), 1.0)
    assert caught.value.retry_after_s > 0
    assert put(table, announcement(A, 2), 2.0) is PutResult.REPLACED
    assert {verify(signed).node for signed, _ in table.lookup(MODEL, 2.0)} == {A.node_id, B.node_id}
    assert put(table, announcement(C, 1), 60.0) is PutResult.STORED  # B's lease has ended: there is room again


def test_bytes_are_bounded_and_a_refused_put_changes_nothing() -> None:
    small, large = announcement(A, 1), announcement(A, 2, experts=range(0, 64, 2))
    table = RegistryTable(TableLimits(max_bytes=small.size_bytes + 10))
    put(table, small, 0.0)
    with pytest.raises(Overloaded):
        put(table, large, 1.0)
    with pytest.raises(Overloaded):
        put(table, announcement(B, 1), 1.0)
    assert table.lookup(MODEL, 1.0) == [(small, 59.0)]
    assert table.n_bytes == small.size_bytes


def test_records_of_one_node_are_bounded_and_its_oldest_remembered_one_gives_way() -> None:
    models = [ModelId(bytes([n]) * 32) for n in range(4)]
    table = RegistryTable(TableLimits(max_records_per_node=2))
    put(table, announcement(A, 1, model=models[0], ttl_s=10), 0.0)
    put(table, announcement(A, 1, model=models[1], ttl_s=20), 0.0)
    with pytest.raises(Overloaded):
        put(table, announcement(A, 1, model=models[2]), 1.0)
    put(table, announcement(B, 1, model=models[2]), 1.0)  # another node has its own share
    table.expire(20.0)
    put(table, announcement(A, 1, model=models[2]), 21.0)
    assert table.highest_seq(A.node_id, RecordKind.EXPERTS, models[0]) is None
    assert table.highest_seq(A.node_id, RecordKind.EXPERTS, models[1]) == 1


def test_remembered_slots_are_bounded_and_the_oldest_gives_way() -> None:
    table = RegistryTable(TableLimits(max_remembered=2))
    for second, identity in enumerate((A, B, C)):
        put(table, announcement(identity, 1, ttl_s=10), float(second))
    table.expire(100.0)
    assert table.n_remembered == 2
    assert table.highest_seq(A.node_id, RecordKind.EXPERTS, MODEL) is None
    assert table.highest_seq(C.node_id, RecordKind.EXPERTS, MODEL) == 1


def test_renewing_in_a_tight_loop_takes_no_memory() -> None:
    table = RegistryTable()
    for seq in range(500):
        put(table, announcement(A, seq), seq / 1000)
    assert len(table._leases) <= 2 * len(table) + 64
    assert len(table) == 1
    assert table.next_expiry() == pytest.approx(60.499)


def nodes(n: int) -> list[Identity]:
    return [Identity.from_seed(bytes([100 + i]) * 32) for i in range(n)]


def test_a_prefix_fills_its_share_of_the_table_and_no_more_however_many_keys_it_makes() -> None:
    table = RegistryTable(TableLimits(max_records=10, max_records_per_prefix=3))
    keys = nodes(12)
    for identity in keys[:3]:
        put(table, announcement(identity, 1), 0.0, "192.0.2.0/24")
    for identity in keys[3:10]:
        with pytest.raises(Overloaded, match=r"192\.0\.2\.0/24: expected at most 3") as refusal:
            put(table, announcement(identity, 1), 1.0, "192.0.2.0/24")
        assert refusal.value.retry_after_s is not None
    assert len(table) == 3
    put(table, announcement(keys[10], 1), 1.0, "198.51.100.0/24")
    assert put(table, announcement(keys[0], 2), 1.0, "192.0.2.0/24") is PutResult.REPLACED, "who is in may renew"
    table.expire(61.5)  # the leases of all but the one that renewed at 1.0 are over
    assert len(table) == 0
    put(table, announcement(keys[4], 1), 62.0, "192.0.2.0/24")


def test_no_prefix_has_no_share() -> None:
    table = RegistryTable(TableLimits(max_records=10, max_records_per_prefix=1, max_bytes_per_prefix=1))
    for identity in nodes(10):
        put(table, announcement(identity, 1), 0.0)
    assert len(table) == 10


def test_a_prefix_has_a_share_of_the_bytes() -> None:
    small, large = announcement(A, 2), announcement(B, 1, experts=range(0, 400, 2))
    table = RegistryTable(TableLimits(max_bytes_per_prefix=large.size_bytes + small.size_bytes - 1))
    put(table, large, 0.0, "p")
    with pytest.raises(Overloaded, match="too many bytes from p"):
        put(table, small, 0.0, "p")
    put(table, small, 0.0, "q")
    with pytest.raises(Overloaded):  # nor by moving
        put(table, announcement(A, 3), 0.0, "p")
    assert put(table, announcement(B, 2), 0.0, "p") is PutResult.REPLACED
    put(table, announcement(A, 3), 0.0, "p")


def test_remembered_slots_count_for_their_prefix_and_give_way_to_its_own_new_ones() -> None:
    """Else one host could push out what protects all others against replay."""
    table = RegistryTable(TableLimits(max_records_per_prefix=2))
    first, second, third, fourth = nodes(4)
    put(table, announcement(A, 5), 0.0, "q")
    put(table, withdrawal(A, 6), 0.0, "q")
    for identity in (first, second):
        put(table, announcement(identity, 1), 1.0, "p")
        put(table, withdrawal(identity, 2), 1.0, "p")
    assert table.n_remembered == 3
    put(table, announcement(third, 1), 2.0, "p")
    assert table.highest_seq(first.node_id, RecordKind.EXPERTS, MODEL) is None, "the prefix's oldest is forgotten"
    assert table.highest_seq(second.node_id, RecordKind.EXPERTS, MODEL) == 2
    put(table, announcement(fourth, 1), 2.0, "p")
    with pytest.raises(Overloaded):
        put(table, announcement(first, 3), 2.0, "p")
    assert table.highest_seq(A.node_id, RecordKind.EXPERTS, MODEL) == 6


def test_a_node_that_moves_counts_where_it_is() -> None:
    table = RegistryTable(TableLimits(max_records_per_prefix=1))
    put(table, announcement(A, 1), 0.0, "p")
    assert put(table, announcement(A, 2), 0.0, "q") is PutResult.REPLACED
    put(table, announcement(B, 1), 0.0, "p")
    with pytest.raises(Overloaded):
        put(table, announcement(A, 3), 0.0, "p")
    assert table.highest_seq(A.node_id, RecordKind.EXPERTS, MODEL) == 2, "refused, it stays where it was"
    with pytest.raises(Overloaded):
        put(table, announcement(C, 1), 0.0, "q")


def test_nothing_is_given_up_for_a_record_that_is_refused() -> None:
    table = RegistryTable(TableLimits(max_records_per_node=1, max_records_per_prefix=1))
    put(table, announcement(A, 1, model=OTHER_MODEL), 0.0, "q")
    table.expire(61.0)
    put(table, announcement(B, 1), 61.0, "p")
    with pytest.raises(Overloaded):
        put(table, announcement(A, 1), 61.0, "p")
    assert table.highest_seq(A.node_id, RecordKind.EXPERTS, OTHER_MODEL) == 1


def test_shares_agree_with_a_count_under_random_use() -> None:
    rng = random.Random(11)
    limits = TableLimits(max_records=12, max_records_per_node=2, max_remembered=9, max_records_per_prefix=4)
    table = RegistryTable(limits)
    identities, prefixes = nodes(14), ["p", "q", "r", None]
    now, n_refused = 0.0, 0
    for _ in range(1500):
        now += rng.choice([0.0, 0.5, 3.0, 2000.0 if rng.random() < 0.05 else 0.0])
        identity, seq, prefix = rng.choice(identities), rng.randrange(1000), rng.choice(prefixes)
        signed = rng.choice(
            [announcement(identity, seq, ttl_s=rng.choice([1, 20])), offer(identity, seq), withdrawal(identity, seq)]
        )
        try:
            put(table, signed, now, prefix)
        except Overloaded:
            n_refused += 1
        held: dict[str, list[int]] = {}
        for slot in table._slots.values():
            if slot.prefix is not None:
                held.setdefault(slot.prefix, []).append(slot.signed.size_bytes if slot.signed is not None else 0)
        counted = {prefix: (len(share.keys), share.n_bytes) for prefix, share in table._share_of_prefix.items()}
        assert counted == {prefix: (len(sizes), sum(sizes)) for prefix, sizes in held.items()}
        assert all(n_slots <= 4 for n_slots, _ in counted.values())
    assert n_refused > 50


def test_counts_and_answers_agree_with_a_plain_model_under_random_use() -> None:
    rng = random.Random(7)
    table = RegistryTable(TableLimits(max_records=6, max_records_per_node=3))
    identities = [Identity.from_seed(bytes([n]) * 32) for n in range(10, 18)]
    live: dict[tuple[bytes, str], tuple[SignedRecord, float]] = {}
    seqs: dict[tuple[bytes, str], int] = {}
    now = 0.0
    for _ in range(600):
        now += rng.choice([0.0, 0.5, 3.0])
        live = {key: entry for key, entry in live.items() if entry[1] > now}
        identity, seq, ttl_s = rng.choice(identities), rng.randrange(100), rng.choice([1, 5, 20])
        signed = rng.choice(
            [announcement(identity, seq, ttl_s=ttl_s), offer(identity, seq, ttl_s=ttl_s), withdrawal(identity, seq)]
        )
        record = verify(signed)
        kind = record.withdraws if isinstance(record, Withdrawal) else record.kind
        key = (identity.node_id.raw, kind.value)
        try:
            put(table, signed, now)
        except Overloaded:
            assert len(live) == 6
            assert key not in live
        else:
            if isinstance(record, Withdrawal):
                if key in seqs and record.seq > seqs[key]:
                    seqs[key] = record.seq
                    live.pop(key, None)
            elif record.seq > seqs.get(key, -1):
                seqs[key] = record.seq
                live[key] = (signed, now + record.ttl_s)
        expected = [(live[key][0], live[key][1] - now) for key in sorted(live)]
        assert table.lookup(MODEL, now) == expected
        assert len(table) == len(live)
        assert table.n_bytes == sum(entry[0].size_bytes for entry in live.values())
        assert table.next_expiry() is None or table.next_expiry() > now


# Places, and what other replicas pass on


def pass_on(table: RegistryTable, signed: SignedRecord, now: float, left_s: float) -> PutResult:
    return table.put_verified(verify(signed), signed, owner=None, now=now, left_s=left_s)


def test_a_record_is_found_at_its_places_once_however_many_are_asked_for() -> None:
    table = RegistryTable()
    wide, small = announcement(A, 1, experts=range(40)), announcement(B, 1)
    for signed in (wide, small, offer(C, 1)):
        put(table, signed, 0.0)
    assert {found for found, _ in table.find([(MODEL, 0)], 1.0)} == {wide, small}
    assert table.find([(MODEL, 2)], 1.0) == [(wide, 59.0)]
    assert len(table.find([(MODEL, bucket) for bucket in range(5)], 1.0)) == 2
    assert table.find([THE_DIRECTORY], 1.0) == table.find([(MODEL, OFFERS)], 1.0) == [(offer(C, 1), 59.0)]
    assert set(table.places()) == {*places_of(verify(wide)), (MODEL, OFFERS), THE_DIRECTORY}
    assert table.find([(MODEL, 0)], 60.0) == []
    table.expire(60.0)
    assert table.places() == []


def test_a_record_that_moves_leaves_its_old_places() -> None:
    table = RegistryTable()
    put(table, announcement(A, 1, experts=range(16)), 0.0)
    put(table, announcement(A, 2, experts=range(16, 32)), 0.0)
    assert table.places() == [(MODEL, 1)]
    assert len(table.find([(MODEL, 1)], 1.0)) == 1


def test_what_was_passed_on_ends_when_it_would_have_ended_there() -> None:
    table = RegistryTable()
    signed = announcement(A, 1)
    assert pass_on(table, signed, 0.0, 10.0) is PutResult.STORED
    assert pass_on(table, signed, 5.0, 60.0) is PutResult.UNCHANGED
    assert table.lookup(MODEL, 9.0) == [(signed, 1.0)]
    assert table.lookup(MODEL, 10.0) == []
    assert pass_on(table, signed, 20.0, 60.0) is not PutResult.STORED
    assert table.lookup(MODEL, 20.0) == []
    assert table.knows(verify(signed))
    assert not table.knows(verify(announcement(A, 2)))


def test_a_withdrawal_is_shown_as_proof_until_no_lease_can_be_left() -> None:
    table = RegistryTable()
    put(table, announcement(A, 1), 0.0)
    put(table, withdrawal(A, 2), 10.0)
    assert table.find([(MODEL, 0)], 10.0) == [(withdrawal(A, 2), MAX_TTL_S)]
    assert table.lookup(MODEL, 10.0) == []
    assert table.find([(MODEL, 0)], 10.0 + MAX_TTL_S) == []
    assert table.places() == []
    assert table.highest_seq(A.node_id, RecordKind.EXPERTS, MODEL) == 2


def test_entries_name_what_is_there_and_take_gives_it() -> None:
    table = RegistryTable()
    put(table, announcement(A, 1), 0.0)
    put(table, announcement(B, 7), 0.0)
    put(table, withdrawal(B, 8), 0.0)
    entries = table.entries((MODEL, 0), 1.0)
    assert sorted(entries.values()) == [1, 8]
    (tag,) = (tag for tag, seq in entries.items() if seq == 8)
    assert [signed for signed, _ in table.take((MODEL, 0), [tag, b"x" * 8], 1.0)] == [withdrawal(B, 8)]
    other = RegistryTable()
    put(other, announcement(A, 1), 50.0)
    assert other.entries((MODEL, 0), 51.0).items() <= entries.items(), "tags are the same everywhere"


def test_changes_are_told_and_renewals_are_not() -> None:
    told: list[tuple[bytes, SignedRecord | None]] = []
    table = RegistryTable(on_change=lambda key, signed: told.append((key[0].raw, signed)))
    steps = [
        (announcement(A, 1), True),
        (announcement(A, 2), False),
        (announcement(A, 2), False),
        (announcement(A, 1), False),
        (announcement(A, 3, experts=range(5)), True),
        (withdrawal(A, 4), True),
        (withdrawal(A, 5), False),
        (announcement(A, 6), True),
    ]
    for signed, is_news in steps:
        n_before = len(told)
        put(table, signed, 0.0)
        assert told[n_before:] == ([(A.node_id.raw, signed)] if is_news else [])
    table.expire(60.0)
    assert told[-1] == (A.node_id.raw, None)
