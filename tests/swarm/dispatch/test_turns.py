"""The order among a backbone's own dispatches to a busy peer: by hand, and in random schedules against a peer with a bucket."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.dispatch import turns as turns_module
from swarm.dispatch.turns import TAKEN_S, Turns
from swarm.ids import NodeId

A, B = (NodeId(bytes([n]) * 32) for n in (10, 20))
NOW = 1000.0


class Case:
    """Turns, and who was woken; each key is a flow of its own unless said otherwise."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.woken: list[Hashable] = []

    def ask(self, key: str, now: float = NOW, *, node: NodeId = A, size: int = 10, flow: str | None = None) -> bool:
        return self.turns.may_ask(key, node, now, flow=flow or key, size=size, since=NOW)

    def wait(
        self,
        key: str,
        now: float = NOW,
        *,
        hint_s: float = 0.0,
        node: NodeId = A,
        size: int = 10,
        flow: str | None = None,
        since: float = NOW,
    ) -> None:
        self.turns.wait(
            key,
            node,
            now + hint_s,
            now,
            flow=flow or key,
            size=size,
            since=since,
            wake=lambda now: self.woken.append(key),
        )

    def next(self) -> list[Hashable]:
        """Return who was woken since the last call."""
        woken, self.woken = self.woken, []
        return list(dict.fromkeys(woken))


def test_where_nobody_waits_everybody_asks_and_nothing_is_kept() -> None:
    case = Case()
    assert case.ask("a")
    assert case.ask("b")
    assert not case.turns.taken("a", NOW)
    assert not case.turns.lines


def test_equals_go_first_come_first_served_and_each_wakes_the_next() -> None:
    case = Case()
    case.wait("a", hint_s=0.2)
    assert not case.ask("b"), "a waits: b is not to take what a waits for"
    case.wait("b")
    case.wait("c")
    assert not case.ask("a", NOW + 0.1), "the peer said when"
    assert not case.ask("b", NOW + 0.1)
    assert case.ask("a", NOW + 0.2)
    assert not case.ask("b", NOW + 0.2), "not before a is taken"
    case.next()
    assert case.turns.taken("a", NOW + 0.3)
    assert case.next()[0] == "b"
    assert case.ask("b", NOW + 0.3)
    assert case.turns.taken("b", NOW + 0.4)
    assert case.next() == ["c"]
    assert case.ask("c", NOW + 0.4)
    assert case.turns.taken("c", NOW + 0.5)
    assert not case.turns.lines, "nothing is left"


def test_of_those_that_come_at_one_time_the_oldest_goes_first() -> None:
    case = Case()
    case.wait("young", since=NOW)
    case.wait("old", since=NOW - 1)
    assert not case.ask("young")
    assert case.ask("old")


def test_the_line_of_one_peer_is_not_anothers() -> None:
    case = Case()
    case.wait("a", hint_s=5.0)
    assert case.ask("b", node=B)
    case.wait("c", node=B)
    assert case.ask("c", node=B)
    assert not case.ask("d")


def test_a_small_one_goes_before_a_huge_one_that_waits() -> None:
    case = Case()
    case.wait("huge", hint_s=2.0, size=1000)
    assert case.ask("small", size=5)
    assert case.turns.taken("small", NOW + 0.1)


def test_what_passes_a_huge_one_is_no_more_than_its_size_however_many_come() -> None:
    case = Case()
    case.wait("huge", hint_s=2.0, size=100)
    n_passed = 0
    while case.ask(f"small{n_passed}", size=5):
        assert case.turns.taken(f"small{n_passed}", NOW)
        n_passed += 1
    assert n_passed == 19, "of equals the first goes first"
    assert case.ask("huge", NOW + 2.0)
    case.wait("huge", NOW + 2.1, hint_s=1.0)
    assert not case.ask("small", NOW + 2.2, size=5)
    assert case.ask("huge", NOW + 3.1)


def test_chunks_of_two_flows_alternate() -> None:
    case = Case()
    for chunk in range(3):
        case.wait(f"a{chunk}", flow="a")
    for chunk in range(3):
        case.wait(f"b{chunk}", flow="b")
    assert case.ask("a0")
    case.turns.taken("a0", NOW)
    assert [key for key in ("a1", "a2", "b0", "b1", "b2") if case.ask(key)] == ["a1", "b0"]
    case.turns.taken("b0", NOW)
    assert [key for key in ("a2", "b1", "b2") if case.ask(key)] == ["a2", "b1"]


def test_a_newcomer_waits_for_one_chunk_of_those_before_it_not_for_all() -> None:
    case = Case()
    for chunk in range(8):
        case.wait(f"a{chunk}", flow="a", size=100)
    assert case.ask("a0")
    case.turns.taken("a0", NOW)
    assert case.ask("a1")
    case.wait("new", size=5)
    case.turns.taken("a1", NOW)
    assert case.ask("new")


def test_one_more_asks_with_each_that_was_taken() -> None:
    case = Case()
    for number in range(8):
        case.wait(str(number))
    assert [case.ask(str(number)) for number in range(2)] == [True, False]
    case.turns.taken("0", NOW)
    assert [case.ask(str(number)) for number in range(1, 4)] == [True, True, False]
    case.turns.taken("1", NOW)
    case.turns.taken("2", NOW)
    assert [case.ask(str(number)) for number in range(3, 8)] == [True, True, True, True, False]


def test_who_is_refused_at_its_turn_closes_the_line_until_it_is_taken() -> None:
    case = Case()
    for number in range(7):
        case.wait(str(number))
    case.ask("0")
    case.turns.taken("0", NOW)
    assert case.ask("1")
    assert case.ask("2")
    case.wait("1", hint_s=0.5)  # refused
    case.turns.taken("2", NOW)
    case.next()
    assert not case.ask("3", NOW + 0.4), "it would take what 1 waits for"
    assert case.ask("1", NOW + 0.5)
    assert not case.ask("3", NOW + 0.5)
    case.turns.taken("1", NOW + 0.6)
    assert "3" in case.next()
    assert [case.ask(key, NOW + 0.6) for key in "3456"] == [True, True, True, False], "it had begun anew"


def test_refused_beside_the_first_it_is_still_before_those_behind() -> None:
    case = Case()
    for number in range(4):
        case.wait(str(number))
    case.ask("0")
    case.turns.taken("0", NOW)
    assert case.ask("1")
    assert case.ask("2")
    case.wait("2", hint_s=0.1)
    case.turns.taken("1", NOW)
    assert not case.ask("3", NOW + 0.2)
    assert case.ask("2", NOW + 0.2)


def test_when_the_first_leaves_the_next_is_woken_whether_it_waited_or_asked() -> None:
    case = Case()
    for key in "abc":
        case.wait(key, hint_s=1.0 if key == "a" else 0.0)
    case.turns.leave("a", NOW)
    assert case.next() == ["b"]
    assert case.ask("b")
    case.next()
    case.turns.leave_all("b", NOW)
    assert case.next() == ["c"]
    assert case.ask("c")
    case.turns.leave("c", NOW)
    case.turns.leave("c", NOW)
    assert not case.turns.lines


def test_a_question_that_stays_silent_is_not_waited_for() -> None:
    case = Case()
    case.wait("a")
    case.wait("b")
    assert case.ask("a")
    assert "b" in case.next(), "it is to look again when"
    assert case.turns.look_at("b", NOW) == NOW + TAKEN_S
    assert not case.ask("b", NOW + TAKEN_S - 0.001)
    assert case.ask("b", NOW + TAKEN_S)
    case.wait("c", NOW + TAKEN_S)
    case.wait("a", NOW + TAKEN_S, hint_s=0.1)  # refused after all
    case.turns.taken("b", NOW + TAKEN_S)
    assert not case.ask("c", NOW + TAKEN_S)
    assert case.ask("a", NOW + TAKEN_S + 0.1)


def test_when_to_look_is_the_hint_for_the_first_and_unknown_behind() -> None:
    case = Case()
    case.wait("a", hint_s=0.3)
    case.wait("b", hint_s=0.1)
    assert case.turns.look_at("a", NOW) == NOW + 0.3
    assert case.turns.look_at("b", NOW) == float("inf")
    assert case.turns.look_at("nobody", NOW) == float("inf")


def test_a_newcomers_turn_is_guessed_by_what_was_said() -> None:
    case = Case()
    assert case.turns.free_at(A, NOW) == NOW
    case.wait("a", hint_s=0.3)
    case.wait("b")
    assert case.turns.free_at(A, NOW) == pytest.approx(NOW + 0.6)
    assert case.turns.free_at(B, NOW) == NOW


def test_a_line_that_is_dissolved_lets_everybody_ask_and_wakes_who_does_not() -> None:
    case = Case()
    for key in "abc":
        case.wait(key)
    assert case.ask("a")
    case.next()
    case.turns.dissolve(A, NOW)
    assert case.next() == ["b", "c"]
    assert not case.turns.lines
    assert all(case.ask(key) for key in "abc")
    case.turns.dissolve(A, NOW)


def test_places_are_bounded_and_who_finds_none_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "MAX_PLACES", 3)
    case = Case()
    for key in "abcd":
        case.wait(key)
    assert [case.turns.has(key) for key in "abcd"] == [True, True, True, False]
    assert not case.ask("small", size=1)
    case.turns.leave("a", NOW)
    case.wait("d")
    assert case.turns.has("d")


# Random schedules


@dataclass(eq=False)
class Agent:
    """Something that wants to be taken by a peer; it asks when it comes, and when it is told to."""

    number: int
    flow: int
    size: int
    leaves_at: float
    state: str = "new"  # then "asking", "waiting", and at last "taken" or "gone"
    n_allowed: int = 0  # what may pass it
    n_passed: int = 0
    beside: set[Agent] = field(default_factory=set)  # who asked at the same time as it


class Schedule:
    """One peer with a bucket, and agents that come at random, in a clock of their own."""

    def __init__(self, seed: int, n_flows: int) -> None:
        self.rng = random.Random(seed)
        self.turns = Turns()
        self.now = NOW
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.rate = 100.0
        self.level = 0.0
        self.filled_at = NOW
        self.n_flows = n_flows
        self.in_line: list[Agent] = []
        self.agents: list[Agent] = []

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), event))

    def run(self) -> None:
        for flow in range(self.n_flows):
            self.next_of(flow)
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()

    def next_of(self, flow: int) -> None:
        """A flow's next layer: some chunks at once, as soon as the last one's are over."""
        if sum(agent.flow == flow for agent in self.agents) >= 12:
            return
        for _ in range(self.rng.choice((1, 1, 1, 4))):
            size = self.rng.choice((1, 2, 5, 40))
            leaves_at = self.now + self.rng.uniform(0.0, 2.0) if self.rng.random() < 0.2 else float("inf")
            agent = Agent(len(self.agents), flow, size, leaves_at)
            self.agents.append(agent)
            if leaves_at < float("inf"):
                self.at(leaves_at, lambda agent=agent: self.leave(agent))  # type: ignore[misc]
            self.try_asking(agent)

    def try_asking(self, agent: Agent) -> None:
        if agent.state not in ("new", "waiting"):
            return
        is_new = agent.state == "new"
        if self.turns.may_ask(agent, A, self.now, flow=agent.flow, size=agent.size, since=NOW):
            if is_new and self.turns.has(agent):
                self.joined(agent)
            agent.state = "asking"
            asking = {each for each in self.agents if each.state == "asking"}
            for each in asking:
                each.beside |= asking
            self.at(self.now + self.rng.uniform(0.01, 0.1), lambda: self.answer(agent))
        elif is_new:
            self.wait(agent, self.now)
        elif (again_at := self.turns.look_at(agent, self.now)) < float("inf"):
            assert again_at > self.now
            self.at(again_at, lambda: self.try_asking(agent))

    def wait(self, agent: Agent, until: float) -> None:
        is_new = not self.turns.has(agent)

        def wake(now: float) -> None:
            self.at(now, lambda: self.try_asking(agent))

        self.turns.wait(agent, A, until, self.now, flow=agent.flow, size=agent.size, since=NOW, wake=wake)
        agent.state = "waiting"
        if is_new:
            self.joined(agent)
        again_at = self.turns.look_at(agent, self.now)
        if again_at < float("inf"):
            self.at(max(again_at, self.now), lambda: self.try_asking(agent))

    def joined(self, agent: Agent) -> None:
        of_flow = sum(each.size for each in self.in_line if each.flow == agent.flow)
        agent.n_allowed = (of_flow + agent.size) * self.n_flows
        self.in_line.append(agent)

    def answer(self, agent: Agent) -> None:
        if agent.state != "asking":
            return
        self.level = min(50.0, self.level + (self.now - self.filled_at) * self.rate)
        self.filled_at = self.now
        missing = min(agent.size, 50.0) - self.level
        if missing > 1e-9:
            self.wait(agent, self.now + missing / self.rate)
            return
        self.level -= agent.size
        if self.turns.taken(agent, self.now):
            for earlier in self.in_line[: self.in_line.index(agent)]:
                if agent not in earlier.beside:
                    earlier.n_passed += agent.size
        self.over(agent, "taken")

    def leave(self, agent: Agent) -> None:
        if agent.state in ("asking", "waiting"):
            self.turns.leave(agent, self.now)
            self.over(agent, "gone")

    def over(self, agent: Agent, state: str) -> None:
        agent.state = state
        if agent in self.in_line:
            self.in_line.remove(agent)
        if all(each.state in ("taken", "gone") for each in self.agents if each.flow == agent.flow):
            self.at(self.now + self.rng.choice((0.0, 0.02)), lambda: self.next_of(agent.flow))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), n_flows=st.integers(1, 6))
def test_in_any_schedule_all_get_their_turn_and_nobody_is_passed_by_more_than_its_share(
    seed: int, n_flows: int
) -> None:
    schedule = Schedule(seed, n_flows)
    schedule.run()
    assert all(agent.state in ("taken", "gone") for agent in schedule.agents), "a wake-up was lost"
    assert not schedule.turns.lines
    for agent in schedule.agents:
        assert agent.n_passed <= agent.n_allowed, f"{agent.number} of flow {agent.flow}, size {agent.size}"
