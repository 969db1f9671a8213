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
            doors.end(gone)
            doors.end(gone)  # open first, and gone later
        assert len(doors) == len(inside)
    for key in inside:
        doors.end(key)
    assert len(doors) == 0
    assert fill(doors, HOST, is_proved=True) == 3
    assert not Admission()._proved
