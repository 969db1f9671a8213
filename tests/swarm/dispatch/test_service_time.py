"""Service times: what estimates, hedges and deadlines become under given answers, in the test's own clock."""

from __future__ import annotations

import random

import pytest

from swarm.dispatch.service_time import (
    BATCH_TIMEOUT_S,
    DEADLINE_FLOOR_S,
    FADE_S,
    HEDGE_FLOOR_S,
    LONGEST_BACKOFF_S,
    OVERDUE_FLOOR_S,
    UNSEEN_S,
    ServiceTime,
    ServiceTimes,
)
from swarm.ids import NodeId

A, B = (NodeId(bytes([n]) * 32) for n in (10, 20))


def answer(times: ServiceTime, elapsed_s: float, now: float, *, n_pairs: int = 4, n: int = 1) -> float:
    """Let `n` batches be answered, one after another; return the time after the last."""
    for key in range(n):
        times.sent(key, now)
        now += elapsed_s
        times.answered(key, n_pairs, now)
    return now


def test_a_peer_that_was_never_asked_is_believed_by_its_ping() -> None:
    times = ServiceTime()
    assert times.estimate_s(4, 1000.0) == 0.0
    times.rtt_s = 0.03
    assert times.estimate_s(4, 1000.0) == 0.03
    assert times.waits_s(4) == (UNSEEN_S + 0.09, UNSEEN_S + 0.09, BATCH_TIMEOUT_S)
    assert times.pair_s(4) is None


def test_the_estimate_follows_the_answers() -> None:
    times = ServiceTime()
    now = answer(times, 0.008, 1000.0)
    assert times.estimate_s(4, now) == pytest.approx(0.008)
    now = answer(times, 0.088, now)
    assert times.estimate_s(4, now) == pytest.approx(0.018), "an eighth of what is new"
    now = answer(times, 0.088, now, n=40)
    assert times.estimate_s(4, now) == pytest.approx(0.088, rel=0.01)


def test_sizes_of_work_are_measured_apart_and_others_are_scaled_beyond_the_path() -> None:
    times = ServiceTime()
    times.rtt_s = 0.010
    now = answer(times, 0.014, 1000.0, n_pairs=4)
    assert times.estimate_s(64, now) == pytest.approx(0.010 + 16 * 0.004)
    now = answer(times, 0.030, now, n_pairs=64)
    assert times.estimate_s(64, now) == pytest.approx(0.030)
    assert times.estimate_s(4, now) == pytest.approx(0.014)
    assert times.pair_s(64) == pytest.approx(0.020 / 64)


def test_hedge_is_the_slow_tail_and_no_earlier_than_its_floor() -> None:
    rng = random.Random(4)
    times, now = ServiceTime(), 1000.0
    for _ in range(300):
        now = answer(times, rng.gauss(0.1, 0.01), now)
    hedge_s, overdue_s, deadline_s = times.waits_s(4)
    assert 0.1 + 2 * 0.01 < hedge_s < 0.1 + 6 * 0.01
    assert overdue_s == max(OVERDUE_FLOOR_S, 2 * hedge_s)
    assert deadline_s == DEADLINE_FLOOR_S
    fast = ServiceTime()
    answer(fast, 0.0005, 1000.0, n=30)
    assert fast.waits_s(4)[:2] == (HEDGE_FLOOR_S, OVERDUE_FLOOR_S)
    slow = ServiceTime()
    answer(slow, 2.0, 1000.0, n=30)
    assert slow.waits_s(4)[2] == pytest.approx(40.0, rel=0.05)


def test_a_hang_shows_before_any_answer() -> None:
    times = ServiceTime()
    now = answer(times, 0.002, 1000.0, n=20)
    times.sent("first", now)
    times.sent("second", now + 0.4)
    assert times.estimate_s(4, now + 0.5) == pytest.approx(0.5), "as old as the oldest"
    times.dropped("first")
    assert times.estimate_s(4, now + 0.5) == pytest.approx(0.1)
    times.answered("second", 4, now + 0.5)
    assert times.n_outstanding == 0
    assert times.estimate_s(4, now + 0.5) < 0.02


def test_a_slow_peers_estimate_fades_to_its_round_trip_while_it_is_left_alone() -> None:
    times = ServiceTime()
    times.rtt_s = 0.002
    now = answer(times, 0.052, 1000.0)
    assert times.estimate_s(4, now + FADE_S) == pytest.approx(0.027)
    assert times.estimate_s(4, now + 20 * FADE_S) == pytest.approx(0.002, rel=0.01)
    times.rtt_s = 0.080  # the path itself is slow now: no need to try
    assert times.estimate_s(4, now + 20 * FADE_S) == pytest.approx(0.052)


def test_a_busy_peer_costs_what_it_says_and_no_longer() -> None:
    times = ServiceTime()
    now = answer(times, 0.002, 1000.0)
    times.sent("more", now)
    times.refused("more", 0.2, now)
    assert times.n_outstanding == 0
    assert times.estimate_s(4, now) == pytest.approx(0.202)
    assert times.estimate_s(4, now + 0.2) == pytest.approx(0.002, rel=0.05)


def refuse(times: ServiceTime, now: float, retry_after_s: float = 0.01) -> float:
    """Let the peer refuse a batch; return for how long it is taken to be busy."""
    times.sent("refused", now)
    times.refused("refused", retry_after_s, now)
    busy_s = 0.0
    while times.estimate_s(4, now + busy_s) > (times.rtt_s or 0.0) + 1e-9:
        busy_s += times.estimate_s(4, now + busy_s) - (times.rtt_s or 0.0)
    return busy_s


def test_a_peer_that_only_ever_refuses_is_asked_more_and_more_rarely() -> None:
    times, now, waits = ServiceTime(), 1000.0, []
    times.rtt_s = 0.001
    for _ in range(12):
        waits.append(refuse(times, now))
        now += waits[-1]
    assert waits[:3] == pytest.approx([0.02, 0.04, 0.08], rel=0.01)
    assert waits[-1] == pytest.approx(LONGEST_BACKOFF_S, rel=0.01)
    now = answer(times, 0.002, now)
    times.sent("refused", now)
    times.refused("refused", 0.01, now)
    assert times.estimate_s(4, now) == pytest.approx(0.022), "an answer ends that"


def test_what_is_refused_at_once_counts_once() -> None:
    times = ServiceTime()
    for key in range(8):
        times.sent(key, 1000.0)
    for key in range(8):
        times.refused(key, 0.02, 1000.0 + key / 1e4)
    assert times.estimate_s(4, 1000.001) == pytest.approx(0.02, rel=0.05)


def test_an_answer_that_nobody_waits_for_is_no_measurement() -> None:
    times = ServiceTime()
    times.answered("unknown", 4, 1000.0)
    assert times.pair_s(4) is None


def test_who_is_gone_is_forgotten() -> None:
    times = ServiceTimes()
    answer(times.of(A), 0.5, 1000.0)
    answer(times.of(B), 0.5, 1000.0)
    times.keep_only(frozenset({B}))
    assert times.of(A).pair_s(4) is None
    assert times.of(B).pair_s(4) is not None
    times.forget(B)
    assert times.of(B).pair_s(4) is None
