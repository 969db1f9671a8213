"""The peer's line as a pure value: order, what is merged, and what never is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from peer import batching
from peer.batching import Line, merge
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec
from tests.peer.conftest import dispatch


@dataclass(eq=False)
class Waiting:
    dispatch: m.Dispatch


def line_of(*dispatches: m.Dispatch) -> tuple[Line[Waiting], list[Waiting]]:
    line: Line[Waiting] = Line()
    entries = [Waiting(each) for each in dispatches]
    for entry in entries:
        line.add(entry)
    return line, entries


def taken(line: Line[Waiting], entries: list[Waiting]) -> list[list[int]]:
    groups = []
    while line:
        groups.append([entries.index(entry) for entry in line.take()])
    return groups


def exact(layer: int = 0) -> m.Dispatch:
    return dispatch(layer, result_codec=RowCodec.EXACT, weights=None)


def test_dispatches_of_one_layer_that_wait_are_one_group_and_others_keep_their_order() -> None:
    assert taken(*line_of(*(dispatch(layer) for layer in (0, 1, 0, 2, 1, 0)))) == [[0, 2, 5], [1, 4], [3]]


def test_the_oldest_is_always_of_the_next_group_so_no_layer_starves() -> None:
    line, entries = line_of(dispatch(0), dispatch(1))
    for _ in range(20):  # layer 0 is asked for again and again
        group = line.take()
        assert group[0] is entries[0]
        entries = entries[1:] if len(group) == 1 else [each for each in entries if each not in group]
        entries.append(Waiting(dispatch(0)))
        line.add(entries[-1])
    assert all(entry.dispatch.layer == 0 for entry in entries), "layer 1 was taken long ago"


def test_raw_rows_are_never_merged() -> None:
    assert taken(*line_of(exact(), exact(), dispatch(), exact(), dispatch())) == [[0], [1], [2, 4], [3]]


def test_a_group_is_bounded_and_what_is_too_much_waits_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MAX_MERGED_PAIRS", 7)
    three, two = dispatch(experts=(1, 2, 3)), dispatch(experts=(1, 2))
    assert taken(*line_of(three, three, three, two)) == [[0, 1], [2, 3]]
    assert taken(*line_of(three, two, three, two)) == [[0, 1, 3], [2]]
    long = dispatch(experts=(1, 2, 3, 1, 2, 3, 1, 2))
    assert taken(*line_of(long, two, long, two)) == [[0], [1, 3], [2]], "a long one is computed, by itself"


@pytest.mark.parametrize(
    "fields",
    [
        {"row_counts": np.array([1, 1], np.uint8)},
        {"row_counts": np.array([3], np.uint8)},
        {"weights": np.full(2, 0.5, np.float32)},
        {"rows": np.zeros((2, 63), np.float32)},
        {"rows": np.zeros((3, 64), np.float32)},
    ],
    ids=["counts too few", "counts short", "weights short", "narrow", "a row too many"],
)
def test_a_dispatch_that_is_not_whole_is_never_merged(fields: dict[str, Any]) -> None:
    bad = dispatch(**fields)
    assert taken(*line_of(dispatch(), bad, dispatch())) == [[0, 2], [1]]
    assert taken(*line_of(bad, dispatch(), dispatch())) == [[0], [1, 2]]


def test_who_leaves_is_not_taken_and_leaving_twice_does_nothing() -> None:
    line, entries = line_of(dispatch(0), dispatch(0), dispatch(1))
    line.discard(entries[0])
    line.discard(entries[0])
    assert len(line) == 2
    assert taken(line, entries) == [[1], [2]]


def test_merged_rows_and_pairs_follow_each_other_and_split_again() -> None:
    first, second = dispatch(0, experts=(1, 2, 3)), dispatch(7, experts=(3, 1))
    merged = merge([first, second])
    assert merged.rows.tobytes() == first.rows.tobytes() + second.rows.tobytes()
    assert merged.row_counts.tolist() == [2, 1, 1, 1]
    assert merged.expert_ids.tolist() == [1, 2, 3, 3, 1]
    assert merged.weights.dtype == np.float32
    parts = merged.split(merged.rows)
    assert [part.tobytes() for part in parts] == [first.rows.tobytes(), second.rows.tobytes()]


def test_askers_take_turns_and_each_keeps_its_order() -> None:
    line: Line[Waiting] = Line()
    flood, calm = [Waiting(exact()) for _ in range(6)], [Waiting(exact()) for _ in range(2)]
    for entry in flood:
        line.add(entry, "flood")
    assert line.take() == [flood[0]]
    for entry in calm:
        line.add(entry, "calm")
    order = [line.take()[0] for _ in range(len(line))]
    assert order == [calm[0], flood[1], calm[1], *flood[2:]]
    assert not line


def test_an_asker_that_comes_back_is_not_kept_waiting_by_a_flood() -> None:
    line: Line[Waiting] = Line()
    for _ in range(10):
        line.add(Waiting(exact()), "flood")
    line.take()
    for _ in range(4):
        token = Waiting(exact())
        line.add(token, "calm")
        assert line.take() == [token]
        assert line.take() != [token]


def test_what_is_merged_may_come_from_several_askers() -> None:
    line: Line[Waiting] = Line()
    entries = [Waiting(dispatch(layer)) for layer in (0, 1, 0, 1)]
    for entry, asker in zip(entries, "aabb", strict=True):
        line.add(entry, asker)
    assert taken(line, entries) == [[0, 2], [1, 3]]


def test_who_leaves_the_line_is_out_of_it_and_loses_no_other_its_turn() -> None:
    line: Line[Waiting] = Line()
    entries = [Waiting(exact()) for _ in range(4)]
    for entry, asker in zip(entries, "aabb", strict=True):
        line.add(entry, asker)
    line.discard(entries[0])
    line.discard(entries[0])
    assert len(line) == 3
    assert [line.take()[0] for _ in range(3)] == [entries[1], entries[2], entries[3]]


def test_one_that_sent_many_gets_its_turn_among_several_that_come_back_with_one_each() -> None:
    line: Line[Waiting] = Line()
    asker_of: dict[int, str] = {}

    def add(asker: str) -> None:
        entry = Waiting(exact())
        asker_of[id(entry)] = asker
        entries.append(entry)
        line.add(entry, asker)

    entries: list[Waiting] = []
    for asker in "AAAAAAAABC":
        add(asker)
    turns = ""
    for _ in range(12):
        [entry] = line.take()
        asker = asker_of[id(entry)]
        turns += asker
        if asker in "BC":
            add(asker)
    assert turns == "ABCABCABCABC"


def test_who_had_the_last_turn_and_comes_back_does_not_pass_who_waits() -> None:
    line: Line[Waiting] = Line()
    first, other, again = (Waiting(exact()) for _ in range(3))
    line.add(first, "a")
    line.add(other, "b")
    assert line.take() == [first]
    line.add(again, "a")
    assert line.take() == [other]
    assert line.take() == [again]


# Shares


class Pool:
    """A peer by a clock of its own: computing takes a second a pair, and askers send as soon as they may."""

    def __init__(self) -> None:
        self.line: Line[Waiting] = Line()
        self.asker_of: dict[int, str] = {}
        self.keep: list[Waiting] = []
        self.done: dict[str, int] = {}
        self.longest_wait: dict[str, int] = {}
        self._since: dict[int, int] = {}
        self.now = 0

    def send(self, asker: str, n_pairs: int, layer: int = 0) -> None:
        entry = Waiting(dispatch(layer, experts=tuple(range(n_pairs))))
        self.keep.append(entry)
        self.asker_of[id(entry)], self._since[id(entry)] = asker, self.now
        self.line.add(entry, asker)

    def serve(self) -> list[str]:
        """Compute one group; return whose dispatches it was."""
        group = self.line.take()
        for entry in group:
            asker = self.asker_of[id(entry)]
            self.longest_wait[asker] = max(self.longest_wait.get(asker, 0), self.now - self._since[id(entry)])
        for entry in group:
            n_pairs = len(entry.dispatch.expert_ids)
            self.now += n_pairs
            asker = self.asker_of[id(entry)]
            self.done[asker] = self.done.get(asker, 0) + n_pairs
        return [self.asker_of[id(entry)] for entry in group]


def test_one_with_long_batches_and_one_with_short_ones_get_as_many_pairs() -> None:
    pool = Pool()
    for _ in range(8):
        pool.send("prompts", 200, layer=1)
        pool.send("tokens", 4)
    for _ in range(2000):
        for asker in pool.serve():
            pool.send(asker, 200 if asker == "prompts" else 4, layer=asker == "prompts")
    share = pool.done["tokens"] / sum(pool.done.values())
    assert 0.4 < share < 0.6


def test_a_light_asker_waits_for_one_group_of_a_greedy_one_at_most() -> None:
    pool = Pool()
    for layer in range(100):
        pool.send("greedy", 100, layer=layer)
    for step in range(50):
        pool.serve()
        pool.send("light", 4, layer=1000 + step)
        pool.send("greedy", 100, layer=2000 + step)
        assert pool.serve() == ["light"]
    assert pool.longest_wait["light"] == 0


def test_a_greedy_asker_leaves_each_of_three_others_its_quarter() -> None:
    pool = Pool()
    for layer in range(64):
        pool.send("greedy", 50, layer=layer)
    for each in "abc":
        for layer in range(4):
            pool.send(each, 50, layer=100 + layer)
    layer = 1000
    for _ in range(800):
        for asker in pool.serve():
            layer += 1
            pool.send(asker, 50, layer=layer)
    assert all(abs(pool.done[each] / sum(pool.done.values()) - 0.25) < 0.01 for each in ("greedy", *"abc"))


def test_who_was_away_gets_no_credit_for_it() -> None:
    pool = Pool()
    for layer in range(40):
        pool.send("steady", 10, layer=layer)
    for _ in range(30):
        pool.serve()
    for layer in range(10):
        pool.send("back", 10, layer=100 + layer)
    turns = [pool.serve()[0] for _ in range(20)]
    assert turns == ["back", "steady"] * 10


def test_however_many_newcomers_come_nobody_starves() -> None:
    pool = Pool()
    pool.send("old", 10)
    pool.send("old", 10, layer=1)
    assert pool.serve() == ["old"]
    for n in range(3 * batching.MAX_PASSED_OVER):
        pool.send(f"new {n}", 10, layer=2 + n)
        if pool.serve() == ["old"]:
            break
    assert n <= batching.MAX_PASSED_OVER


def test_the_line_is_shared_while_several_ask_and_for_a_while_after() -> None:
    pool = Pool()
    assert not pool.line.is_shared
    pool.send("a", 10)
    assert not pool.line.is_shared
    pool.send("b", 10, layer=1)
    assert pool.line.is_shared
    for _ in range(2):
        pool.serve()
    for layer in range(batching.N_SHARED):
        assert pool.line.is_shared
        pool.send("b", 10, layer=layer)
        pool.serve()
    assert not pool.line.is_shared


def test_a_group_keeps_to_what_it_is_allowed() -> None:
    line, _ = line_of(*(dispatch(experts=(1, 2, 3)) for _ in range(6)))
    assert [len(line.take(max_pairs)) for max_pairs in (6, 1, 7)] == [2, 1, 2]


def test_askers_that_left_are_forgotten() -> None:
    pool = Pool()
    for n in range(10 * batching.MAX_REMEMBERED):
        pool.send(f"asker {n}", 10)
        pool.serve()
    assert len(pool.line._askers) <= batching.MAX_REMEMBERED + 1
