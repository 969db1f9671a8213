"""What is tainted when a peer is caught: all that it had a part in since the last answer that passed, and nothing else."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.dispatch import audit_trail
from swarm.dispatch.audit_trail import Trail
from swarm.ids import NodeId

A, B = NodeId(b"a" * 32), NodeId(b"b" * 32)


def test_a_peer_never_audited_taints_from_its_first_position() -> None:
    trail = Trail()
    for position in (5, 6, 7):
        trail.touch(A, {1: position})
    trail.touch(A, {2: 0})
    trail.touch(B, {1: 3})
    assert trail.taint(A) == {1: 5, 2: 0}
    assert trail.taint(A) == {}
    assert trail.taint(B) == {1: 3}


def test_what_came_before_an_answer_that_passed_counts_as_right() -> None:
    trail = Trail()
    numbers = [trail.touch(A, {1: position}) for position in range(10)]
    trail.begin(A, numbers[6])
    trail.end(A, numbers[6], has_passed=True)
    assert trail.taint(A) == {1: 7}


def test_the_position_of_the_audited_layer_stays_for_its_later_layers() -> None:
    trail = Trail()
    for position in (0, 1):
        for layer in range(4):
            number = trail.touch(A, {1: position})
            if (position, layer) == (1, 1):
                trail.begin(A, number)
                trail.end(A, number, has_passed=True)
    assert trail.taint(A) == {1: 1}, "layers 2 and 3 of position 1 were not audited"


def test_an_answer_that_passed_says_nothing_of_an_earlier_one_under_audit() -> None:
    trail = Trail()
    numbers = [trail.touch(A, {1: position}) for position in range(10)]
    trail.begin(A, numbers[2])
    trail.begin(A, numbers[8])
    trail.end(A, numbers[8], has_passed=True)
    assert trail.taint(A) == {1: 2}


def test_an_audit_that_came_to_nothing_stands_in_the_way_no_more() -> None:
    trail = Trail()
    numbers = [trail.touch(A, {1: position}) for position in range(10)]
    trail.begin(A, numbers[2])
    trail.begin(A, numbers[8])
    trail.end(A, numbers[8], has_passed=True)
    trail.end(A, numbers[2], has_passed=False)
    assert trail.taint(A) == {1: 9}


def test_of_a_suspect_nothing_falls_away_until_it_is_cleared() -> None:
    for is_cleared in (False, True):
        trail = Trail()
        numbers = [trail.touch(A, {1: position}) for position in range(10)]
        trail.hold(A)
        trail.begin(A, numbers[8])
        trail.end(A, numbers[8], has_passed=True)
        if is_cleared:
            trail.hold(A, is_held=False)
        assert trail.taint(A) == ({1: 9} if is_cleared else {1: 0})


def test_who_is_suspected_before_its_first_answer_is_held_too() -> None:
    trail = Trail()
    trail.hold(A)
    numbers = [trail.touch(A, {1: position}) for position in range(3)]
    trail.begin(A, numbers[1])
    trail.end(A, numbers[1], has_passed=True)
    assert trail.taint(A) == {1: 0}


def test_a_sequence_that_begins_with_another_shares_what_it_took() -> None:
    trail = Trail()
    for position in range(10):
        trail.touch(A, {1: position})
    trail.touch(B, {1: 8})
    trail.adopt(2, 1, 8)
    trail.release(1)
    trail.touch(A, {2: 8})
    assert trail.has_touched(A, 2)
    assert not trail.has_touched(B, 2), "it began after the tokens that were taken"
    assert trail.taint(A) == {2: 0}


def test_a_sequence_that_is_over_is_forgotten() -> None:
    trail = Trail()
    trail.touch(A, {1: 0, 2: 5})
    trail.release(1)
    assert not trail.has_touched(A, 1)
    assert trail.taint(A) == {2: 5}


def test_marks_are_bounded_and_taint_more_rather_than_less(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(audit_trail, "MAX_MARKS", 4)
    monkeypatch.setattr(audit_trail, "MAX_SEQUENCES", 3)
    trail = Trail()
    numbers = [trail.touch(A, {1: position}) for position in range(20)]
    trail.begin(A, numbers[5])
    trail.end(A, numbers[5], has_passed=True)
    assert trail.taint(A) == {1: 0}
    for sequence in range(5):
        trail.touch(A, {sequence: 0})
    assert trail.taint(A) == {2: 0, 3: 0, 4: 0}


_touches = st.lists(
    st.tuples(st.dictionaries(st.integers(1, 3), st.integers(0, 6), min_size=1, max_size=2), st.booleans()), max_size=40
)


@given(_touches)
def test_against_a_plain_list_of_all_answers(touches: list[tuple[dict[int, int], bool]]) -> None:
    trail, since = Trail(), defaultdict[int, list[int]](list)  # sequence -> positions since the last that passed
    for firsts, has_passed in touches:
        number = trail.touch(A, firsts)
        for sequence, position in firsts.items():
            since[sequence].append(position)
        if has_passed:
            trail.begin(A, number)
            trail.end(A, number, has_passed=True)
            since.clear()
    assert trail.taint(A) == {sequence: min(positions) for sequence, positions in since.items()}


def test_peers_without_anything_that_depends_on_them_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_trail, "MAX_PEERS", 4)
    trail = Trail()
    trail.touch(A, {1: 3})  # the oldest, and something depends on it
    for number in range(50):
        node = NodeId(bytes([100 + number]) * 32)
        trail.end(node, trail.touch(node, {}), has_passed=True)
    assert len(trail._peers) == 4
    assert trail.taint(A) == {1: 3}
    for number in range(50):
        trail.touch(NodeId(bytes([100 + number]) * 32), {1: number})
    assert len(trail._peers) == 4, "even where something depends on all of them"


def test_an_audit_of_a_forgotten_peer_says_nothing_of_its_later_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_trail, "MAX_PEERS", 1)
    trail = Trail()
    numbers = [trail.touch(A, {1: 0}) for _ in range(5)]
    trail.begin(A, numbers[-1])
    trail.touch(B, {})  # in the place of A
    trail.begin(A, numbers[-1])  # as if it were still there
    trail.touch(A, {2: 7})
    trail.end(A, numbers[-1], has_passed=True)
    assert trail.taint(A) == {2: 7}
    trail.touch(A, {3: 1})
    trail.end(A, numbers[-1], has_passed=True)
    assert trail.taint(A) == {3: 1}, "nor after it was caught"
