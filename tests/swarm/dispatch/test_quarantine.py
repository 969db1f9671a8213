"""Quarantine: every transition of its table, in the test's own clock."""

from __future__ import annotations

from swarm.dispatch.quarantine import FIRST_S, FORGET_S, LONGEST_S, MAX_NODES, SAME_MOMENT_S, Quarantine, State
from swarm.ids import NodeId

A, B = (NodeId(bytes([n]) * 32) for n in (10, 20))


def test_a_peer_that_never_failed_is_trusted() -> None:
    quarantine = Quarantine()
    quarantine.succeed(A, 0.0)
    assert quarantine.state(A, 0.0) is State.TRUSTED
    assert quarantine.next_opening(0.0) is None
    assert len(quarantine) == 0


def test_a_failure_shuts_a_peer_out_and_then_it_is_tried_again() -> None:
    quarantine = Quarantine()
    assert quarantine.fail(A, 100.0) == FIRST_S
    assert quarantine.state(A, 100.0) is State.SHUT
    assert quarantine.state(B, 100.0) is State.TRUSTED
    assert quarantine.next_opening(100.0) == 100.0 + FIRST_S
    assert quarantine.state(A, 100.0 + FIRST_S) is State.HALF_OPEN
    quarantine.succeed(A, 100.0 + FIRST_S)
    assert quarantine.state(A, 100.0 + FIRST_S) is State.TRUSTED


def test_each_failure_of_the_trial_doubles_the_time_up_to_a_bound() -> None:
    quarantine, now, times = Quarantine(), 100.0, []
    for _ in range(12):
        times.append(quarantine.fail(A, now))
        now += times[-1]
    assert times[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert times[-1] == LONGEST_S


def test_failures_of_one_moment_are_one() -> None:
    quarantine = Quarantine()
    quarantine.fail(A, 100.0)
    assert quarantine.fail(A, 100.25) == FIRST_S - 0.25
    assert quarantine.fail(A, 100.0 + FIRST_S) == 2 * FIRST_S


def test_an_answer_to_an_earlier_question_opens_nothing() -> None:
    quarantine = Quarantine()
    quarantine.fail(A, 100.0)
    quarantine.succeed(A, 100.5)
    assert quarantine.state(A, 100.5) is State.SHUT


def test_what_may_happen_to_an_honest_peer_is_free_at_first() -> None:
    quarantine = Quarantine()
    assert quarantine.fail(A, 100.0, n_free=1) == 0.0
    assert quarantine.state(A, 100.0) is State.HALF_OPEN
    assert quarantine.fail(A, 101.0, n_free=1) == FIRST_S


def test_what_is_free_at_first_may_be_cheap_afterwards() -> None:
    quarantine, now = Quarantine(), 100.0
    for _ in range(10):
        shut_s = quarantine.fail(A, now, n_free=1, longest_s=3.0)
        now += max(shut_s, SAME_MOMENT_S)
    assert shut_s == 3.0


def test_everything_that_a_lost_connection_fails_at_once_is_free_together() -> None:
    quarantine = Quarantine()
    assert [quarantine.fail(A, 100.0 + n / 100, n_free=1) for n in range(4)] == [0.0] * 4
    assert quarantine.state(A, 100.03) is State.HALF_OPEN
    assert quarantine.fail(A, 100.0 + SAME_MOMENT_S, n_free=1) == FIRST_S, "the next time is another"


def test_what_is_never_free_costs_at_the_moment_of_a_free_failure_too() -> None:
    quarantine = Quarantine()
    quarantine.fail(A, 100.0, n_free=1)
    assert quarantine.fail(A, 100.0) > 0


def test_failures_are_remembered_beyond_a_short_recovery_but_not_for_ever() -> None:
    quarantine = Quarantine()
    quarantine.fail(A, 100.0)
    quarantine.succeed(A, 102.0)
    assert quarantine.fail(A, 103.0) == 2 * FIRST_S
    quarantine.succeed(A, 110.0)
    assert quarantine.fail(A, 110.0 + FORGET_S) == FIRST_S
    quarantine.succeed(A, 200.0)
    quarantine.succeed(A, 200.0 + FORGET_S)
    assert len(quarantine) == 0


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    quarantine = Quarantine()
    for index in range(MAX_NODES + 5):
        quarantine.fail(NodeId(index.to_bytes(32, "big")), 100.0)
    assert len(quarantine) == MAX_NODES
    assert quarantine.state(NodeId((0).to_bytes(32, "big")), 100.0) is State.TRUSTED
    assert quarantine.state(NodeId((MAX_NODES + 4).to_bytes(32, "big")), 100.0) is State.SHUT
