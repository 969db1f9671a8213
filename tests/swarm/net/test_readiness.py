"""Who is told of waits goes through the exchange and watches the socket shortly before each one's end, and at no other time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from swarm.net import anticipation as a
from swarm.net.readiness import Readiness, is_worthwhile
from swarm.net.rehearsal import Rehearsal
from swarm.wire import messages as m
from tests.virtual_time import now, run

REQUEST, ANSWER = m.GetStatus(), m.Status(data=b"{}")
WAIT_S = 0.030


class FakeRehearsal:
    def __init__(self, log: list[tuple[str, float]]) -> None:
        self._log = log
        self.is_closed = False

    def run(self, request: m.Request, answer: m.Response) -> bool:
        assert (request, answer) == (REQUEST, ANSWER)
        self._log.append(("rehearsed", now()))
        return True

    def close(self) -> None:
        self.is_closed = True


class FakeEndpoint:
    def __init__(self) -> None:
        self.log: list[tuple[str, float]] = []
        self.rehearsals: list[FakeRehearsal] = []

    def watch(self, until: float) -> bool:
        self.log.append(("watched", until))
        return True

    def rehearsal(self) -> Rehearsal:
        self.rehearsals.append(FakeRehearsal(self.log))
        return cast(Rehearsal, self.rehearsals[-1])


async def wait(readiness: Readiness, n: int, wait_s: float = WAIT_S) -> float:
    """Have so many waits; return when the last began."""
    began = now()
    for _ in range(n):
        began = now()
        readiness.began()
        await asyncio.sleep(wait_s)
        readiness.ended((REQUEST, ANSWER))
    return began


def test_before_the_end_of_a_wait_it_rehearses_and_then_watches() -> None:
    async def main() -> None:
        endpoint, others = FakeEndpoint(), list[Any]()
        readiness = Readiness(endpoint, also=others.append, now=now)
        await wait(readiness, a.N_LEARN + 1)
        assert endpoint.log == [], "it has learned, and has made its rehearsal"
        for n in range(20):
            endpoint.log.clear()
            began = await wait(readiness, 1)
            if n > 10:  # the mean has settled
                (what, at), (then, until) = endpoint.log
                assert (what, then) == ("rehearsed", "watched")
                assert began + WAIT_S - 2 * a.LEAD_S < at < began + WAIT_S < until < began + WAIT_S + 0.003
        assert others == [REQUEST] * 20
        assert readiness.n_rehearsed == readiness.n_met == 20
        readiness.close()
        assert endpoint.rehearsals[0].is_closed

    run(main())


def test_nothing_is_done_while_two_wait_or_nobody_does() -> None:
    async def main() -> None:
        endpoint = FakeEndpoint()
        readiness = Readiness(endpoint, now=now)
        await wait(readiness, 20)
        endpoint.log.clear()
        readiness.began()
        readiness.began()
        await asyncio.sleep(2 * WAIT_S)
        readiness.ended((REQUEST, ANSWER))
        readiness.ended((REQUEST, ANSWER))
        await asyncio.sleep(10 * WAIT_S)
        assert endpoint.log == []
        readiness.close()

    run(main())


def test_a_wait_that_never_ends_is_watched_once() -> None:
    async def main() -> None:
        endpoint = FakeEndpoint()
        readiness = Readiness(endpoint, now=now)
        await wait(readiness, 20)
        endpoint.log.clear()
        readiness.began()
        await asyncio.sleep(60.0)
        assert [what for what, _ in endpoint.log] == ["rehearsed", "watched"]
        readiness.close()

    run(main())


def test_a_failed_wait_teaches_nothing() -> None:
    async def main() -> None:
        endpoint = FakeEndpoint()
        readiness = Readiness(endpoint, now=now)
        await wait(readiness, 20)
        readiness.began()
        await asyncio.sleep(5.0)
        readiness.ended(is_measured=False)
        endpoint.log.clear()
        await wait(readiness, 1)
        assert [what for what, _ in endpoint.log] == ["rehearsed", "watched"]
        readiness.close()

    run(main())


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.net.readiness.n_cores", lambda: 2)
    assert is_worthwhile()
    monkeypatch.setenv("SWARM_READINESS", "off")
    assert not is_worthwhile()
    monkeypatch.delenv("SWARM_READINESS")
    monkeypatch.setattr("swarm.net.readiness.n_cores", lambda: 1)
    assert not is_worthwhile(), "it would take the core from what it waits for"
