"""Who is a member, as one node sees it: proved before it counts, silent by our own finding alone, lost and found again."""

from __future__ import annotations

import itertools
import random

import pytest

from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.registry import membership as membership_module
from swarm.registry.membership import (
    GOSSIP_S,
    LOST_EVERY,
    MAX_PER_PREFIX,
    MEMBER_TTL_S,
    N_FAILURES,
    NEWS_S,
    PROBE_S,
    REMEMBER_S,
    Membership,
)
from swarm.registry.records import NO_MODEL, RecordKind, RegistryNodeRecord, SignedRecord, Withdrawal, sign

US, A, B, C = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3, 4))
NOW = 1000.0


def record(identity: Identity, seq: int, address: str = "198.51.100.1:7440") -> tuple[RegistryNodeRecord, SignedRecord]:
    node = RegistryNodeRecord(node=identity.node_id, seq=seq, ttl_s=MEMBER_TTL_S, addresses=(address,))
    return node, sign(node, identity)


def withdrawal(identity: Identity, seq: int) -> tuple[Withdrawal, SignedRecord]:
    gone = Withdrawal(node=identity.node_id, seq=seq, model=NO_MODEL, withdraws=RecordKind.REGISTRY)
    return gone, sign(gone, identity)


def membership(own: Identity = US, address: str = "198.51.200.1:7440") -> Membership:
    us = Membership(own.node_id, pick=random.Random(1).randrange)
    us.set_own(*record(own, 1, address), NOW)
    return us


def others(us: Membership) -> set[NodeId]:
    return set(us.ring.members) - {us.own}


def test_who_was_only_heard_of_is_asked_and_counts_once_it_has_answered() -> None:
    us = membership()
    assert us.learn(*record(A, 5), NOW, left_s=100)
    assert others(us) == set()
    assert A.node_id in us.targets(NOW + GOSSIP_S)
    us.heard_from(A.node_id)
    assert others(us) == {A.node_id}


def test_who_does_not_answer_is_tried_again_ever_more_rarely() -> None:
    us = membership()
    us.learn(*record(A, 5), NOW)
    tries, now = [], NOW
    while now < NOW + MEMBER_TTL_S - 1:
        now += 0.5
        if A.node_id in us.targets(now):
            tries.append(now)
            us.failed(A.node_id)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps[0] >= PROBE_S
    assert gaps == sorted(gaps)
    assert len(tries) >= 4


def test_a_member_is_silent_after_failures_in_a_row_and_back_with_its_first_answer() -> None:
    us = membership()
    us.learn(*record(A, 5), NOW, is_proved=True)
    for n in range(1, N_FAILURES + 1):
        us.failed(A.node_id)
        assert (A.node_id in us.ring) is (n < N_FAILURES)
    us.heard_from(A.node_id)
    us.failed(A.node_id)
    assert others(us) == {A.node_id}, "the count starts anew"


def test_a_lease_counts_from_receipt_and_what_was_passed_on_keeps_what_it_had_left() -> None:
    us = membership()
    us.learn(*record(A, 5), NOW, is_proved=True)
    us.learn(*record(B, 5, "203.0.113.1:1"), NOW, left_s=20, is_proved=True)
    us.learn(*record(C, 5, "203.0.114.1:1"), NOW, left_s=9_999, is_proved=True)
    us.expire(NOW + 20)
    assert others(us) == {A.node_id, C.node_id}
    us.expire(NOW + MEMBER_TTL_S)
    assert others(us) == set()


def test_an_old_record_played_back_revives_nobody() -> None:
    """Scenario 13."""
    us = membership()
    old = record(A, 5)
    us.learn(*old, NOW, is_proved=True)
    us.learn(*record(A, 6), NOW + 10, is_proved=True)
    us.expire(NOW + MEMBER_TTL_S + 10)
    assert not us.learn(*old, NOW + 300, is_proved=True)
    assert not us.learn(*record(A, 6), NOW + 300, is_proved=True)
    assert others(us) == set()
    assert us.learn(*record(A, 7), NOW + 300, is_proved=True)
    us.expire(NOW + 300 + MEMBER_TTL_S)
    us.expire(NOW + 300 + MEMBER_TTL_S + REMEMBER_S)
    assert us.learn(*record(A, 7), NOW + 2 * REMEMBER_S), "after a day nobody knows any more"


def test_a_withdrawal_ends_a_member_and_is_passed_on() -> None:
    us = membership()
    us.learn(*record(A, 5), NOW, is_proved=True)
    gone = withdrawal(A, 6)
    assert us.learn(*gone, NOW)
    assert others(us) == set()
    assert not us.learn(*record(A, 5), NOW, is_proved=True)
    told, wanted = us.compare([(US.node_id.raw[:8], 1), (A.node_id.raw[:8], 5)], NOW)
    assert [signed for signed, _ in told] == [gone[1]]
    assert wanted == []
    assert us.learn(*record(A, 7), NOW, is_proved=True)
    assert others(us) == {A.node_id}


def test_the_withdrawal_of_somebody_unknown_is_not_kept() -> None:
    us = membership()
    assert not us.learn(*withdrawal(A, 6), NOW)
    assert len(us.summary()) == 1


def test_gossip_brings_both_sides_to_the_newest_of_each() -> None:
    us, them = membership(), membership(A, "198.51.201.1:1")
    us.learn(*record(B, 5, "203.0.113.1:1"), NOW, is_proved=True)
    us.learn(*record(C, 9, "203.0.114.1:1"), NOW, is_proved=True)
    them.learn(*record(C, 8, "203.0.114.1:1"), NOW, is_proved=True)
    told, wanted = them.compare(us.summary(), NOW)
    assert [signed for signed, _ in told] == [record(A, 1, "198.51.201.1:1")[1]]
    assert set(wanted) == {identity.node_id.raw[:8] for identity in (US, B, C)}
    assert len(us.take(wanted, NOW)) == 3
    for (node, signed), left_s in zip(
        (record(US, 1, "198.51.200.1:7440"), record(B, 5, "203.0.113.1:1"), record(C, 9, "203.0.114.1:1")),
        (left for _, left in us.take(wanted, NOW)),
        strict=True,
    ):
        them.learn(node, signed, NOW, left_s=left_s)
    us.learn(*record(A, 1, "198.51.201.1:1"), NOW)
    us.heard_from(A.node_id)
    for identity in (US, B, C):
        them.heard_from(identity.node_id)
    assert them.compare(us.summary(), NOW) == ([], [])
    assert sorted(us.summary()) == sorted(them.summary())


def test_a_renewal_keeps_a_member_proved_and_another_address_does_not() -> None:
    us = membership()
    us.learn(*record(A, 5), NOW, is_proved=True)
    us.learn(*record(A, 6), NOW, left_s=100)
    assert others(us) == {A.node_id}
    us.learn(*record(A, 7, "203.0.113.1:1"), NOW, left_s=100)
    assert others(us) == set()
    assert us.addresses(A.node_id) == ("203.0.113.1:1",)


def test_one_network_gets_no_more_than_its_share() -> None:
    us = membership()
    for n in range(MAX_PER_PREFIX + 5):
        us.learn(*record(Identity.from_seed(bytes([50 + n]) * 32), 1, f"203.0.113.{n}:1"), NOW, is_proved=True)
    assert len(others(us)) == MAX_PER_PREFIX
    us.learn(*record(A, 1), NOW, is_proved=True)
    assert A.node_id in us.ring
    us.expire(NOW + MEMBER_TTL_S)
    us.learn(*record(B, 1, "203.0.113.200:1"), NOW + MEMBER_TTL_S, is_proved=True)
    assert others(us) == {B.node_id}, "their places are free again"


@pytest.mark.parametrize(
    ("own", "address", "is_taken"),
    [
        ("198.51.200.1:1", "10.0.0.1:1", False),
        ("198.51.200.1:1", "127.0.0.1:1", False),
        ("10.0.0.2:1", "10.0.0.1:1", True),
        ("10.0.0.2:1", "127.0.0.1:1", False),
        ("10.0.0.2:1", "198.51.200.1:1", True),
        ("127.0.0.1:2", "127.0.0.1:1", True),
    ],
)
def test_an_address_that_reaches_less_far_than_ours_is_refused(own: str, address: str, is_taken: bool) -> None:
    us = membership(address=own)
    assert us.learn(*record(A, 1, address), NOW) is is_taken


def test_names_that_were_tried_in_vain_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    us = membership()
    fakes = [Identity.from_seed(bytes([50 + n]) * 32) for n in range(MAX_PER_PREFIX)]
    for n, identity in enumerate(fakes):
        us.learn(*record(identity, 1, f"203.0.113.{n}:1"), NOW)
    honest = record(A, 1, "203.0.113.200:1")
    assert not us.learn(*honest, NOW), "nobody knows yet that they are not there"
    us.failed(fakes[3].node_id)
    assert us.learn(*honest, NOW, is_proved=True)
    assert others(us) == {A.node_id}
    monkeypatch.setattr(membership_module, "MAX_MEMBERS", MAX_PER_PREFIX)
    assert not us.learn(*record(B, 1, "198.51.99.1:1"), NOW)
    us.failed(A.node_id)
    assert not us.learn(*record(B, 1, "198.51.99.1:1"), NOW), "a proved one does not give way"
    us.failed(fakes[0].node_id)
    assert us.learn(*record(B, 1, "198.51.99.1:1"), NOW)


def test_the_number_of_members_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "MAX_MEMBERS", 2)
    us = membership()
    for n, identity in enumerate((A, B, C)):
        us.learn(*record(identity, 1, f"203.0.{n}.1:1"), NOW, is_proved=True)
    assert others(us) == {A.node_id, B.node_id}


def test_lost_members_and_seeds_are_tried_now_and_then() -> None:
    us = membership()
    us.learn(*record(A, 5), NOW, left_s=10, is_proved=True)
    us.learn(*record(B, 5, "203.0.113.1:1"), NOW, is_proved=True)
    us.expire(NOW + 10)
    now, called = NOW + 10, []
    for _ in range(6 * LOST_EVERY):
        now = max(us.next_gossip(), now + 1e-3)
        us.learn(*record(B, round(now * 1000), "203.0.113.1:1"), now, is_proved=True)
        called += us.targets(now, [C.node_id])
    assert called.count(B.node_id) >= 4 * LOST_EVERY
    assert 1 <= called.count(A.node_id) + called.count(C.node_id) <= 8
    assert us.addresses(A.node_id) == ("198.51.100.1:7440",)


def test_alone_it_calls_its_seeds_every_time() -> None:
    us = membership()
    assert us.targets(NOW + 2 * GOSSIP_S, [A.node_id]) == [A.node_id]
    assert us.targets(NOW + 2 * GOSSIP_S, [A.node_id]) == []


def test_news_makes_it_gossip_faster_for_a_while() -> None:
    us = membership()
    us.learn(*record(A, 1), NOW, is_proved=True)
    now = NOW
    for _ in range(20):
        now = max(us.next_gossip(), now)
        us.targets(now)
    assert us.next_gossip() - now >= 0.7 * GOSSIP_S
    us.learn(*record(B, 1, "203.0.113.1:1"), now, is_proved=True)
    assert us.next_gossip() - now <= NEWS_S
    now = max(us.next_gossip(), now)
    us.targets(now)
    assert us.next_gossip() - now <= 1.25 * NEWS_S


def test_a_node_that_stores_nothing_sees_the_ring_and_is_not_in_it() -> None:
    us = Membership(US.node_id, pick=random.Random(1).randrange)
    us.learn(*record(A, 5), NOW, is_proved=True)
    assert set(us.ring.members) == {A.node_id} == set(us.view())
    assert not us.is_storing
    assert us.compare([], NOW)[0] == us.told([A.node_id], NOW)


def test_a_name_that_was_only_heard_of_is_neither_passed_on_nor_wanted_again() -> None:
    us = membership()
    us.learn(*record(A, 5), NOW)
    tag = A.node_id.raw[:8]
    assert us.summary() == membership().summary()
    assert us.compare([(US.node_id.raw[:8], 1)], NOW) == ([], [])
    assert us.compare([(US.node_id.raw[:8], 1), (tag, 5)], NOW) == ([], [])
    assert us.compare([(US.node_id.raw[:8], 1), (tag, 6)], NOW) == ([], [tag])
    assert us.take([tag], NOW) == []
    us.heard_from(A.node_id)
    assert us.take([tag], NOW) == us.compare([(US.node_id.raw[:8], 1)], NOW)[0] != []


def test_a_name_that_never_proved_itself_is_not_remembered_as_lost() -> None:
    us = membership()
    us.learn(*record(A, 5), NOW, left_s=10)
    us.learn(*record(B, 5, "203.0.113.1:1"), NOW, left_s=10, is_proved=True)
    us.expire(NOW + 10)
    assert us.addresses(A.node_id) == ()
    assert us.addresses(B.node_id) == ("203.0.113.1:1",)


def test_the_withdrawal_of_a_mere_name_is_not_passed_on() -> None:
    us = membership()
    us.learn(*record(A, 5), NOW)
    assert not us.learn(*withdrawal(A, 6), NOW)
    assert us.summary() == membership().summary()
    assert us.addresses(A.node_id) == ()


def test_a_proved_newcomer_takes_the_place_of_an_unproved_one() -> None:
    us = membership()
    names = [Identity.from_seed(bytes([50 + n]) * 32) for n in range(MAX_PER_PREFIX)]
    for n, identity in enumerate(names):
        us.learn(*record(identity, 1, f"203.0.113.{n}:1"), NOW)
    us.failed(names[3].node_id)
    assert us.learn(*record(A, 1, "203.0.113.200:1"), NOW, is_proved=True)
    assert us.addresses(names[3].node_id) == (), "one that was tried in vain goes first"
    assert us.learn(*record(B, 1, "203.0.113.201:1"), NOW, is_proved=True)
    assert others(us) == {A.node_id, B.node_id}
    assert not us.learn(*record(C, 1, "203.0.113.202:1"), NOW), "an unproved one does not"


@pytest.mark.parametrize(
    ("addresses", "is_taken"),
    [
        (("203.0.113.1:1", "203.0.113.2:1"), True),
        (("203.0.113.1:1", "198.51.100.1:1"), False),
        (("203.0.113.1:1", "[2001:db8::1]:1"), False),
    ],
)
def test_a_member_is_in_one_network(addresses: tuple[str, ...], is_taken: bool) -> None:
    us = membership()
    node = RegistryNodeRecord(node=A.node_id, seq=1, ttl_s=MEMBER_TTL_S, addresses=addresses)
    assert us.learn(node, sign(node, A), NOW, is_proved=True) is is_taken
