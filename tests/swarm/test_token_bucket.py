"""A token bucket lets a burst go, then its rate, and says how long to wait. Time is whatever the test says."""

from __future__ import annotations

import pytest

from swarm.token_bucket import TokenBucket


def test_a_burst_goes_at_once_and_then_the_rate() -> None:
    bucket = TokenBucket(rate_per_s=2.0, burst=3.0, now=10.0)
    assert [bucket.take(10.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bucket.take(10.0) == pytest.approx(0.5)
    assert bucket.take(10.25) == pytest.approx(0.25), "a refusal takes nothing"
    assert bucket.take(10.5) == 0.0
    assert bucket.take(10.5) > 0


def test_rest_saves_up_a_burst_and_no_more() -> None:
    bucket = TokenBucket(rate_per_s=1.0, burst=2.0, now=0.0)
    taken = [bucket.take(1_000.0) for _ in range(4)]
    assert [wait == 0.0 for wait in taken] == [True, True, False, False]


def test_in_the_long_run_it_lets_its_rate_through() -> None:
    bucket = TokenBucket(rate_per_s=1.0, burst=16.0, now=0.0)
    n_taken = sum(bucket.take(0.01 * tick) == 0.0 for tick in range(10_000))
    assert 114 <= n_taken <= 116  # 16 at once, then one a second for 100 s
