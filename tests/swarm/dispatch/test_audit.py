"""Which answers are audited: everybody's share, nobody foresees which, no long gaps."""

from __future__ import annotations

import itertools
import random

import pytest

from swarm.dispatch.audit import OWED_WITHIN, AuditChooser, parse_share
from swarm.errors import UserError
from swarm.ids import NodeId

A, B = NodeId(b"a" * 32), NodeId(b"b" * 32)


def chosen(chooser: AuditChooser, node: NodeId, n: int, share: float) -> list[int]:
    """Return which of the next n answers are audited."""
    return [index for index in range(n) if chooser.choose(node, share)]


@pytest.mark.parametrize("seed", range(5))
def test_one_in_each_fifty_is_chosen_and_every_run_of_a_hundred_has_one(seed: int) -> None:
    found = chosen(AuditChooser(random.Random(seed)), A, 5000, 0.02)
    assert [index // 50 for index in found] == list(range(100))
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert max(gaps) < 100


def test_each_peer_has_its_own_share_however_often_the_others_answer() -> None:
    chooser = AuditChooser(random.Random(1))
    n_a = n_b = 0
    for index in range(10_000):
        n_a += chooser.choose(A, 0.02)
        if index % 100 == 0:
            n_b += chooser.choose(B, 0.02)
    assert n_a == 200
    assert n_b == 2


def test_places_are_drawn_anew_and_differ_between_processes() -> None:
    first = chosen(AuditChooser(random.Random(1)), A, 5000, 0.02)
    second = chosen(AuditChooser(random.Random(2)), A, 5000, 0.02)
    assert first != second
    places = [index % 50 for index in first]
    assert len(set(places)) > 30, "spread over the whole run"
    assert abs(sum(places) / len(places) - 24.5) < 6


def test_no_share_means_no_audit_and_the_whole_means_every_answer() -> None:
    chooser = AuditChooser(random.Random(1))
    assert chosen(chooser, A, 500, 0.0) == []
    assert chosen(chooser, A, 20, 1.0) == list(range(20))


def test_another_share_takes_effect_at_once() -> None:
    chooser = AuditChooser(random.Random(1))
    chosen(chooser, A, 60, 0.02)
    assert len(chosen(chooser, A, 100, 0.5)) == 50
    assert len(chosen(chooser, A, 1000, 0.02)) == 20


@pytest.mark.parametrize("seed", range(20))
def test_an_audit_that_came_to_nothing_is_made_up_for_soon(seed: int) -> None:
    chooser = AuditChooser(random.Random(seed))
    while not chooser.choose(A, 0.02):
        pass
    chooser.put_back(A)
    assert any(chooser.choose(A, 0.02) for _ in range(OWED_WITHIN))
    assert len(chosen(chooser, A, 1000, 0.02)) in (19, 20, 21), "once"


def test_a_peer_that_never_answered_is_owed_nothing() -> None:
    chooser = AuditChooser(random.Random(1))
    chooser.put_back(A)
    chooser.forget(A)
    assert len(chosen(chooser, A, 50, 0.02)) == 1


@pytest.mark.parametrize(
    ("text", "share"), [("2%", 0.02), ("0.5%", 0.005), ("0", 0.0), ("0%", 0.0), ("100%", 1.0), (" 1 %", 0.01)]
)
def test_shares_are_percentages(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "2", "0.02", "-1%", "101%", "nan%", "x%", "%"])
def test_anything_else_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError, match="expected a percentage"):
        parse_share(text)
