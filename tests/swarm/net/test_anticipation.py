"""When it pays to be awake for what arrives: after a few waits of one length, and not where waits are short or of any length."""

from __future__ import annotations

import random

import pytest

from swarm.net import anticipation as a
from swarm.net.anticipation import Anticipation

WAIT_S = 0.030


def taught(waits_s: list[float], now: float = 100.0) -> tuple[Anticipation, float]:
    """Return what has seen these waits, and the time."""
    waits = Anticipation()
    for wait_s in waits_s:
        waits.began(now)
        now += wait_s
        waits.ended(now)
        now += 0.001
    return waits, now


def test_it_wakes_before_what_it_expects_and_stays_awake_a_little_longer() -> None:
    waits, now = taught([WAIT_S] * 30)
    at = waits.began(now)
    assert at is not None
    assert now + WAIT_S - 2 * a.LEAD_S < at < now + WAIT_S - 0.001
    until = waits.window(at)
    assert until is not None
    assert now + WAIT_S < until <= now + WAIT_S + a.MAX_PATIENCE_S
    assert waits.window(until + 1e-6) is None, "what does not come is not waited for"


def test_the_first_waits_only_teach() -> None:
    waits, now = taught([WAIT_S] * (a.N_LEARN - 1))
    assert waits.began(now) is None
    assert taught([WAIT_S] * a.N_LEARN)[0].began(now) is not None


def test_short_waits_are_left_alone() -> None:
    waits, now = taught([a.MIN_WAIT_S / 2] * 30)
    assert waits.began(now) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_path_with_jitter_is_left_alone(seed: int) -> None:
    rng = random.Random(seed)
    waits, now = taught([WAIT_S + rng.uniform(-0.005, 0.005) for _ in range(60)])
    assert waits.began(now) is None


def test_one_pause_between_two_requests_is_soon_forgotten() -> None:
    waits, now = taught([WAIT_S] * 30 + [60.0] + [WAIT_S] * 40)
    at = waits.began(now)
    assert at is not None
    assert at < now + WAIT_S - 0.001


def test_a_wait_that_was_cancelled_teaches_nothing() -> None:
    waits, now = taught([WAIT_S] * 30)
    waits.began(now)
    waits.cancelled()
    waits.ended(now + 10.0)
    assert waits.window(now + 0.02) is None
    at = waits.began(now)
    assert at == pytest.approx(now + WAIT_S - a.LEAD_S, abs=1e-4)


def test_an_end_without_a_beginning_is_nothing() -> None:
    waits = Anticipation()
    waits.ended(5.0)
    assert waits.window(5.0) is None
    assert waits.began(6.0) is None
