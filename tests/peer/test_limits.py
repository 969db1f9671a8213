"""Rates, hours and a busy machine, with clocks of the test's own."""

from __future__ import annotations

import datetime
import random
from types import SimpleNamespace

import numpy as np
import pytest

from peer import traffic as traffic_module
from peer.limits import BUSY_FOR_S, IDLE_FOR_S, BusyMeter, RateCap, Schedule, parse_schedule
from peer.pauses import Pauses, outside_hours, while_busy
from peer.traffic import Traffic
from swarm.errors import Overloaded, UserError
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec


def test_a_rate_holds_over_a_minute_whatever_comes() -> None:
    """2 MB/s offered six times as much, in answers of 49 KB that cost 4 % more than was promised."""
    chance = random.Random(5)
    now, sent, owed = 0.0, 0, []
    cap = RateCap(2e6, now=now, n_bytes=0)
    while now < 60:
        now += chance.expovariate(240)
        for due in [each for each in owed if each <= now]:
            owed.remove(due)
            sent += round(49_000 * 1.09)
            cap.settle(51_450)
        if cap.wait_s(now, sent, 51_450) == 0:
            cap.promise(51_450)
            owed.append(now + 0.02)
    assert 0.95 * 2e6 * 60 <= sent <= 1.05 * 2e6 * 60


def test_who_must_wait_is_told_how_long() -> None:
    cap = RateCap(1e6, now=0, n_bytes=0)
    assert cap.wait_s(0, 0, 400_000) == 0
    cap.promise(400_000)
    assert cap.wait_s(0, 0, 400_000) == pytest.approx(0.3)
    cap.settle(400_000)
    assert cap.wait_s(0, 400_000, 400_000) == pytest.approx(0.3)
    assert cap.wait_s(0.3, 400_000, 400_000) == pytest.approx(0)


def test_an_answer_larger_than_the_burst_goes_when_the_burst_is_full() -> None:
    cap = RateCap(1e6, now=0, n_bytes=0)
    assert cap.wait_s(0, 0, 10_000_000) == 0
    assert cap.wait_s(0, 10_000_000, 1) == pytest.approx(9.5, abs=0.01)


def test_hours_of_little_traffic_do_not_count_against_the_next_second() -> None:
    cap = RateCap(50_000, now=0, n_bytes=0)
    assert cap.wait_s(36_000, 36_000 * 60, 20_000) == 0


def test_a_rate_too_low_for_anything_is_refused() -> None:
    with pytest.raises(UserError, match="too low"):
        RateCap(1000, now=0, n_bytes=0)


def at(text: str) -> datetime.time:
    return datetime.time.fromisoformat(text)


@pytest.mark.parametrize(
    ("text", "open_at", "closed_at"),
    [
        ("22:00-07:00", ["22:00", "23:59", "00:00", "06:59"], ["07:00", "12:00", "21:59"]),
        ("09:30-10:00", ["09:30", "09:59"], ["10:00", "09:29", "00:00"]),
        ("22:00-07:00, 12:00-13:00", ["12:30", "23:00"], ["13:00", "08:00"]),
    ],
)
def test_hours(text: str, open_at: list[str], closed_at: list[str]) -> None:
    schedule = parse_schedule(text)
    assert all(schedule.is_open(at(each)) for each in open_at)
    assert not any(schedule.is_open(at(each)) for each in closed_at)


@pytest.mark.parametrize(
    "text", ["", "22-7", "22:00", "25:00-07:00", "22:00-22:00", "22:00-07:00,", "a-b", "1:00-2:00-3:00"]
)
def test_bad_hours_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_schedule(text)


def test_a_machine_is_busy_only_if_it_stays_so_and_free_only_after_a_while() -> None:
    meter = BusyMeter()
    assert not meter.update(0, 0.9)
    assert not meter.update(BUSY_FOR_S - 1, 0.9)
    assert not meter.update(BUSY_FOR_S, 0.1), "a pause in between begins the count anew"
    assert not meter.update(BUSY_FOR_S + 1, 0.9)
    assert meter.update(2 * BUSY_FOR_S + 1, 0.9)
    assert meter.update(2 * BUSY_FOR_S + 2, 0.1)
    assert meter.update(2 * BUSY_FOR_S + 1 + IDLE_FOR_S, 0.1)
    assert not meter.update(2 * BUSY_FOR_S + 2 + IDLE_FOR_S, 0.1)


async def test_pauses_tell_of_each_beginning_and_end_once() -> None:
    hour = datetime.datetime(2026, 1, 1, 23)
    share = 0.0
    clock = 0.0
    pauses = Pauses(
        [
            outside_hours(Schedule(((at("22:00"), at("07:00")),)), now=lambda: hour),
            while_busy(lambda: share, now=lambda: clock),
        ]
    )
    pauses.look()
    assert not pauses.why
    hour = hour.replace(hour=12)
    pauses.look()
    await pauses.changed()
    assert "hours" in pauses.why
    hour = hour.replace(hour=23)
    pauses.look()
    await pauses.changed()
    assert not pauses.why
    share = 1.0
    pauses.look()
    clock = BUSY_FOR_S
    pauses.look()
    await pauses.changed()
    assert "others" in pauses.why


def dispatch(n_rows: int, codec: RowCodec = RowCodec.F16) -> m.Dispatch:
    return SimpleNamespace(  # type: ignore[return-value]
        result_codec=codec,
        row_counts=np.full(n_rows, 2, np.uint8),
        expert_ids=np.zeros(2 * n_rows, np.uint16),
        rows=np.zeros((n_rows, 1024), np.float32),
    )


async def test_a_load_before_its_hours_does_not_send_a_peer_to_rest_as_they_begin() -> None:
    is_outside, share, clock = False, 0.9, 0.0
    pauses = Pauses([lambda: "outside" if is_outside else "", while_busy(lambda: share, now=lambda: clock)])
    pauses.look()
    is_outside, share = True, 0.0
    while clock < 1000.0:
        clock += 2.0
        pauses.look()
    assert pauses.why == "outside"
    is_outside, share = False, 0.9
    clock += 2.0
    pauses.look()
    assert pauses.why == "", "busy for one look"


def test_an_answer_that_does_not_fit_the_upload_is_refused_with_a_time() -> None:
    now = 0.0
    counters = SimpleNamespace(bytes_sent=0, repair_bytes=0, bytes_received=0)
    traffic = Traffic(counters, max_upload_bytes_s=1e6, max_download_bytes_s=None, now=lambda: now)
    n_bytes = traffic.admit(dispatch(100))
    assert n_bytes == pytest.approx(100 * 2048 * 1.05, rel=0.01)
    traffic.promise(n_bytes)
    traffic.promise(traffic.admit(dispatch(100)))
    with pytest.raises(Overloaded) as refused:
        traffic.admit(dispatch(100))
    assert 0 < refused.value.retry_after_s <= 0.2
    traffic.settle(2 * n_bytes)
    counters.bytes_sent += 2 * n_bytes
    assert traffic.admit(dispatch(1)) > 0
    now = 0.2
    assert traffic.admit(dispatch(10, RowCodec.EXACT)) == pytest.approx(20 * 4096 * 1.05, rel=0.01)
    counters.repair_bytes += 800_000  # copies count, too
    now = 0.25
    with pytest.raises(Overloaded):
        traffic.admit(dispatch(1))


def test_what_came_in_above_the_download_makes_the_next_ones_wait() -> None:
    now = 0.0
    counters = SimpleNamespace(bytes_sent=0, repair_bytes=0, bytes_received=0)
    traffic = Traffic(counters, max_upload_bytes_s=None, max_download_bytes_s=1e6, now=lambda: now)
    assert traffic.admit(dispatch(1)) == 0
    counters.bytes_received = 800_000
    with pytest.raises(Overloaded) as refused:
        traffic.admit(dispatch(1))
    assert refused.value.retry_after_s == pytest.approx(0.3)
    now = 0.31
    traffic.admit(dispatch(1))


def test_what_comes_from_the_web_counts_too() -> None:
    now = 0.0
    counters = SimpleNamespace(bytes_sent=0, repair_bytes=0, bytes_received=0)
    traffic = Traffic(counters, max_upload_bytes_s=None, max_download_bytes_s=1e6, now=lambda: now)
    assert traffic.max_download_bytes_s == 1e6
    traffic.received(800_000)
    with pytest.raises(Overloaded) as refused:
        traffic.admit(dispatch(1))
    assert refused.value.retry_after_s == pytest.approx(0.3)


async def test_a_fetch_keeps_to_the_download_and_leaves_no_debt_to_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    counters = SimpleNamespace(bytes_sent=0, repair_bytes=0, bytes_received=0)

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(traffic_module.asyncio, "sleep", sleep)
    traffic = Traffic(counters, max_upload_bytes_s=None, max_download_bytes_s=1e6, now=lambda: now)
    for _ in range(20):
        await traffic.made_good()
        counters.bytes_received += 3_000_000
    assert counters.bytes_received <= 1.05 * 1e6 * (now + 3)
    await traffic.made_good()
    assert traffic.admit(dispatch(1)) == 0
    unbounded = Traffic(counters, max_upload_bytes_s=1e6, max_download_bytes_s=None, now=lambda: now)
    counters.bytes_received += 3_000_000
    before = now
    await unbounded.made_good()
    assert now == before
