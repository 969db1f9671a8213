"""What is held for whom, when nothing more may be made, and who is found too slow."""

from __future__ import annotations

import random

from swarm.net.answer_budget import DRAIN_S, PACE_S, SMALL_BYTES, AnswerBudget

MB = 1 << 20


def test_what_is_held_adds_up_and_is_gone_with_its_connection() -> None:
    budget: AnswerBudget[int] = AnswerBudget(100 * MB)
    rng = random.Random(9)
    held: dict[int, int] = {}
    for _ in range(1000):
        key = rng.randrange(10)
        if rng.random() < 0.2:
            budget.forget(key)
            held.pop(key, None)
        else:
            held[key] = rng.randrange(MB)
            budget.update(key, n_given=10 * MB, n_held=held[key])
        assert budget.n_bytes == sum(held.values())


def test_it_is_full_for_all_at_its_limit_and_for_one_at_half() -> None:
    budget: AnswerBudget[str] = AnswerBudget(8 * MB)
    budget.update("a", n_given=4 * MB, n_held=4 * MB)
    assert not budget.is_full
    assert not budget.has_room("a")
    assert budget.has_room("b")
    budget.update("b", n_given=4 * MB, n_held=4 * MB)
    assert budget.is_full
    assert not budget.has_room("c")
    budget.update("a", n_given=4 * MB, n_held=0)
    assert budget.has_room("a")
    assert budget.has_room("c")


def test_who_takes_nothing_is_slow_and_who_keeps_pace_is_not() -> None:
    budget: AnswerBudget[str] = AnswerBudget(100 * MB)
    n = 60 * MB
    needed = n / DRAIN_S  # bytes per second
    paces = {"dead": 0.0, "trickling": 0.5 * needed, "in time": 1.5 * needed}
    for key in paces:
        budget.update(key, n_given=n, n_held=n)
    budget.update("small", n_given=n, n_held=SMALL_BYTES - 1)
    assert budget.slow(0.0) == []  # nobody's pace is known
    for now in (1.0, PACE_S - 0.1, PACE_S):
        for key, pace in paces.items():
            budget.update(key, n_given=n, n_held=n - int(pace * now))
        found = budget.slow(now)
        assert found == (["dead", "trickling"] if now == PACE_S else [])


def test_who_is_given_more_all_the_time_is_judged_by_what_it_takes() -> None:
    """What it holds does not fall, although it takes all that its line can."""
    budget: AnswerBudget[str] = AnswerBudget(100 * MB)
    for second in range(20):
        budget.update("busy", n_given=(8 + second) * MB, n_held=8 * MB)
        assert budget.slow(float(second)) == []


def test_who_stops_later_is_found_too() -> None:
    budget: AnswerBudget[str] = AnswerBudget(100 * MB)
    budget.slow(0.0)
    budget.update("a", n_given=50 * MB, n_held=20 * MB)
    budget.slow(10.0)
    budget.update("a", n_given=50 * MB, n_held=10 * MB)
    assert budget.slow(10.0 + PACE_S) == []
    assert budget.slow(10.0 + 2 * PACE_S) == ["a"]
