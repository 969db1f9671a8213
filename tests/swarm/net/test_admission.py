"""Who is let in, told to prove its address, or turned away, and that every place is given back."""

from __future__ import annotations

import itertools
import random

import pytest

from swarm.net import admission
from swarm.net.admission import Admission, Verdict, host_of

HOST, OTHER = "192.0.2.1", "192.0.2.2"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RETRY_FROM", 4)
    monkeypatch.setattr(admission, "MAX_HALF_OPEN", 10)
    monkeypatch.setattr(admission, "MAX_HALF_OPEN_PER_HOST", 3)
    monkeypatch.setattr(admission, "MAX_PER_HOST", 8)


def fill(doors: Admission, host: str, *, is_proved: bool, key: str = "") -> int:
    """Return how many are admitted from `host` before another verdict."""
    for n in itertools.count():
        if doors.judge(host, is_proved=is_proved) is not Verdict.ADMIT:
            return n
        doors.begin((host, is_proved, key, n), host, is_proved=is_proved)
    raise AssertionError("unreachable")


def test_the_first_ones_need_no_proof_and_the_next_are_asked_for_it() -> None:
    doors = Admission()
    assert fill(doors, HOST, is_proved=False) == 4
    assert doors.judge(OTHER, is_proved=False) is Verdict.RETRY


def test_unproved_ones_leave_the_places_of_the_proved() -> None:
    doors = Admission()
    fill(doors, HOST, is_proved=False)
    hosts = [f"192.0.2.{n}" for n in range(10, 20)]
    assert sum(fill(doors, host, is_proved=True) for host in hosts) == 10
    assert doors.judge(OTHER, is_proved=True) is Verdict.REFUSE


def test_a_host_has_its_share_and_a_forged_source_takes_nothing_of_it() -> None:
    doors = Admission()
    fill(doors, HOST, is_proved=False)
    assert fill(doors, HOST, is_proved=True) == 3
    assert doors.judge(HOST, is_proved=True) is Verdict.REFUSE
    assert doors.judge(OTHER, is_proved=True) is Verdict.ADMIT


def open_all(doors: Admission, host: str, *, is_proved: bool) -> int:
    """Return how many connections of a host get open, one after the other, until none is admitted."""
    for n in itertools.count():
        if doors.judge(host, is_proved=is_proved) is not Verdict.ADMIT or n > 50:
            return n
        doors.begin((host, n), host, is_proved=is_proved)
        doors.open((host, n))
    raise AssertionError("unreachable")


@pytest.mark.parametrize("is_proved", [True, False])
def test_a_host_keeps_a_bounded_number_open_and_gets_a_place_back_for_each_that_ends(is_proved: bool) -> None:
    doors = Admission()
    assert open_all(doors, HOST, is_proved=is_proved) == 8
    assert [doors.judge(HOST, is_proved=proved) for proved in (True, False)] == [Verdict.REFUSE] * 2
    assert doors.judge(OTHER, is_proved=is_proved) is Verdict.ADMIT
    assert len(doors) == 0
    doors.end((HOST, 3))
    doors.end((HOST, 3))
    assert doors.judge(HOST, is_proved=is_proved) is Verdict.ADMIT
    doors.begin("another", HOST, is_proved=True)
    assert doors.judge(HOST, is_proved=is_proved) is Verdict.REFUSE  # half-open ones count as soon as they are proved


def test_a_line_of_ipv6_keeps_a_bounded_number_open_and_this_machine_any() -> None:
    doors = Admission()
    for n in range(8):
        doors.begin(n, f"2001:db8::{n}", is_proved=True)
        doors.open(n)
    assert doors.judge("2001:db8::ffff", is_proved=True) is Verdict.REFUSE
    assert open_all(doors, "127.0.0.1", is_proved=True) > 50


def test_forged_sources_take_nothing_of_what_a_host_may_keep_open() -> None:
    doors = Admission()
    fill(doors, HOST, is_proved=False)
    assert open_all(doors, HOST, is_proved=True) == 8


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_this_machine_is_bounded_as_a_whole_only(host: str) -> None:
    assert fill(Admission(), host, is_proved=True) == 10


def test_an_ipv6_line_is_one_host() -> None:
    doors = Admission()
    assert fill(doors, "2001:db8::1", is_proved=True) == 3
    assert doors.judge("2001:db8::2", is_proved=True) is Verdict.REFUSE
    assert doors.judge("2001:db8:0:1::2", is_proved=True) is Verdict.ADMIT
    assert host_of("::ffff:192.0.2.1") == host_of(HOST)


def test_every_place_is_given_back_once() -> None:
    doors = Admission()
    rng = random.Random(8)
    inside: list[int] = []
    for key in range(500):
        host, is_proved = f"192.0.2.{rng.randrange(5)}", rng.random() < 0.7
        if doors.judge(host, is_proved=is_proved) is Verdict.ADMIT:
            doors.begin(key, host, is_proved=is_proved)
            inside.append(key)
        if inside and rng.random() < 0.4:
            gone = inside.pop(rng.randrange(len(inside)))
            if rng.random() < 0.5:
                doors.open(gone)
            doors.end(gone)
            doors.end(gone)
            doors.open(gone)  # too late
        assert len(doors) == len(inside)
    for key in inside:
        doors.end(key)
    assert len(doors) == 0
    assert fill(doors, HOST, is_proved=True) == 3
    assert open_all(doors, OTHER, is_proved=True) == 8
