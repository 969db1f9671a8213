"""When a look-up's answers may stand, whom it asks instead, and which records count."""

from __future__ import annotations

import random

import pytest

from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.registry.lookup import MIN_PATIENCE_S, N_ENOUGH, TIMEOUT_S, UNKNOWN_RTT_S, Reading, newest, writers
from swarm.registry.records import ExpertAnnouncement, RecordKind, Withdrawal
from swarm.registry.ring import N_REPLICAS, N_TOLERATED, Ring

MODEL = ModelId(b"m" * 32)
PLACE = (MODEL, 0)
NODES = [NodeId(random.Random(n).randbytes(32)) for n in range(40)]
RING = Ring(dict.fromkeys(NODES))
NOW = 100.0


def reading(ring: Ring = RING, avoid: tuple[NodeId, ...] = (), rtt_s: float = 0.1) -> Reading:
    return Reading(ring, [PLACE], now=NOW, rtt_s=lambda node: rtt_s, avoid=avoid)


def test_all_five_are_asked_at_once_and_four_replies_stand() -> None:
    look = reading()
    assert look.first == dict.fromkeys(RING.closest(PLACE), (PLACE,))
    for n, node in enumerate(look.first, 1):
        look.answered(node)
        assert look.is_done(NOW) is (n >= N_ENOUGH)
    assert look.n_rounds == 1


def test_after_two_round_trips_two_replies_stand_and_one_does_not() -> None:
    look = reading()
    nodes = list(look.first)
    look.answered(nodes[0])
    assert look.next_deadline(NOW) == NOW + 0.2
    assert not look.is_done(NOW + 0.21), "a single one may withhold"
    look.answered(nodes[1])
    assert not look.is_done(NOW + 0.19)
    assert look.is_done(NOW + 0.2)
    assert [look.has_waited(NOW + passed_s) for passed_s in (0.0, 0.19, 0.2)] == [False, False, True]


def test_in_the_end_it_is_done_with_whatever_there_is() -> None:
    look = reading()
    assert look.next_deadline(NOW + 1) == NOW + TIMEOUT_S
    assert look.is_done(NOW + TIMEOUT_S)


def test_a_failed_one_is_replaced_by_the_next_closest_and_that_is_a_second_round() -> None:
    look = reading()
    near = RING.closest(PLACE, N_TOLERATED)
    assert look.failed(near[0]) == {near[5]: (PLACE,)}
    assert look.failed(near[1]) == {near[6]: (PLACE,)}
    assert look.n_rounds == 2
    for node in near[2:6]:
        assert not look.is_done(NOW)
        look.answered(node)
    assert look.is_done(NOW)


def test_those_asked_instead_do_not_stand_for_the_replicas_that_can_still_reply() -> None:
    near = RING.closest(PLACE, N_TOLERATED)
    look = reading()
    look.failed(near[0])
    look.failed(near[1])
    look.answered(near[5])
    look.answered(near[6])
    assert not look.is_done(NOW + 0.2), "both may be new to the place"
    look.answered(near[2])
    assert not look.is_done(NOW + 0.2)
    look.answered(near[3])
    assert look.is_done(NOW)
    look = reading(avoid=near[:4])
    assert set(look.first) == set(near[4:9])
    for node in near[5:9]:
        look.answered(node)
    assert not look.is_done(NOW + 0.2)
    look.answered(near[4])
    assert look.is_done(NOW)


def test_once_four_have_replied_nobody_is_asked_instead() -> None:
    look = reading()
    *four, last = look.first
    for node in four:
        look.answered(node)
    assert look.failed(last) == {}


def test_with_fewer_members_all_of_them_are_enough_and_the_dead_are_not_waited_for() -> None:
    ring = Ring(dict.fromkeys(NODES[:3]))
    look = reading(ring)
    a, b, c = look.first
    look.answered(a)
    look.answered(b)
    assert not look.is_done(NOW)
    assert look.failed(c) == {}
    assert look.is_done(NOW)


def test_when_all_fail_it_is_done_at_once() -> None:
    ring = Ring(dict.fromkeys(NODES[:2]))
    look = reading(ring)
    for node in list(look.first):
        look.failed(node)
    assert look.is_done(NOW)


def test_those_that_failed_lately_are_asked_last_and_do_not_make_it_patient() -> None:
    near = RING.closest(PLACE, N_TOLERATED)
    look = reading(avoid=near[:2])
    assert set(look.first) == set(near[2:7])
    small = Ring(dict.fromkeys(NODES[:2]))
    look = Reading(small, [PLACE], now=NOW, rtt_s=lambda node: 9.0 if node == NODES[0] else 0.1, avoid=[NODES[0]])
    assert set(look.first) == set(NODES[:2]), "there is nobody else"
    assert look.next_deadline(NOW) == NOW + 0.2


@pytest.mark.parametrize(("rtt_s", "patience_s"), [(None, 2 * UNKNOWN_RTT_S), (0.001, MIN_PATIENCE_S), (0.3, 0.6)])
def test_patience(rtt_s: float | None, patience_s: float) -> None:
    look = Reading(RING, [PLACE], now=NOW, rtt_s=lambda node: rtt_s)
    assert look.next_deadline(NOW) == NOW + patience_s


def test_several_places_are_one_request_to_each_node_and_all_must_be_settled() -> None:
    places = [(MODEL, n) for n in range(30)]
    look = Reading(RING, places, now=NOW)
    assert sum(map(len, look.first.values())) == N_REPLICAS * len(places)
    assert len(look.first) <= len(NODES)
    for node in list(look.first)[:-1]:
        look.answered(node)
    assert look.is_done(NOW) is all(
        sum(node in list(look.first)[:-1] for node in RING.closest(place)) >= N_ENOUGH for place in places
    )


def test_a_writer_tells_all_replicas_and_others_in_place_of_those_it_avoids() -> None:
    near = RING.closest(PLACE, N_TOLERATED)
    assert writers(RING, [PLACE]) == set(near[:5])
    assert writers(RING, [PLACE], [near[1], near[4]]) == {near[0], near[2], near[3], near[5], near[6]}
    assert writers(RING, [PLACE, (MODEL, 1)]) == set(near[:5]) | set(RING.closest((MODEL, 1)))


def announcement(node: NodeId, seq: int) -> ExpertAnnouncement:
    return ExpertAnnouncement(
        node=node,
        seq=seq,
        ttl_s=60,
        model=MODEL,
        model_name="tiny",
        experts=ExpertSet.of([0], [1]),
        addresses=("192.0.2.1:1",),
        exact_kernels=False,
        wire_versions=(1,),
    )


def test_the_highest_seq_counts_and_a_withdrawal_takes_away_what_is_below_it() -> None:
    a, b, c = sorted(NODES[:3])
    gone = Withdrawal(node=b, seq=7, model=MODEL, withdraws=RecordKind.EXPERTS)
    late = Withdrawal(node=c, seq=7, model=MODEL, withdraws=RecordKind.EXPERTS)
    other = Withdrawal(node=a, seq=9, model=MODEL, withdraws=RecordKind.MODEL)
    said = [announcement(c, 8), announcement(b, 6), announcement(a, 2), gone, other, announcement(a, 1), late]
    for _ in range(5):
        random.Random(1).shuffle(said)
        assert [(each.node, each.seq) for each in newest(said)] == [(a, 2), (c, 8)]
