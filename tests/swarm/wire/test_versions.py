"""Neighbouring wire versions work together; those further apart are told who is too old and what to do."""

from __future__ import annotations

import itertools

import pytest

from swarm.wire import messages as m
from swarm.wire.versions import SINCE, UPGRADE, WIRE_VERSIONS, choose_version, disagreement, own_disagreement, speaks


def test_this_program_speaks_its_version_and_at_most_the_one_before() -> None:
    assert 1 <= len(WIRE_VERSIONS) <= 2
    assert all(b - a == 1 for a, b in itertools.pairwise(WIRE_VERSIONS))
    assert all(WIRE_VERSIONS[0] < since <= WIRE_VERSIONS[-1] for since in SINCE.values()), "a line that says nothing"


def released(version: int) -> tuple[int, ...]:
    """Return what the release that brings this version speaks."""
    return (version - 1, version) if version > 1 else (1,)


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(range(1, 6), repeat=2)))
def test_releases_agree_exactly_when_they_are_at_most_one_version_apart(ours: int, theirs: int) -> None:
    agreed = choose_version(released(ours), released(theirs))
    assert agreed == (min(ours, theirs) if abs(ours - theirs) <= 1 else None)


def test_the_older_side_is_named_to_both() -> None:
    old, new = (1, 2), (3, 4)
    assert disagreement(old, new).startswith(
        "wire versions: got [1, 2], expected one of [3, 4]; the node that connects is"
    )
    assert "the node that was called is too old" in disagreement(new, old)
    assert own_disagreement(old, new).startswith(
        "this program is too old: it speaks wire version 1, 2, the other side 3, 4"
    )
    assert own_disagreement(new, old).startswith("the other side's program is too old: it speaks wire version 1, 2")
    for text in (
        disagreement(old, new),
        disagreement(new, old),
        own_disagreement(old, new),
        own_disagreement(new, old),
    ):
        assert text.endswith(UPGRADE)


def test_a_request_is_known_from_its_version_on_and_an_unlisted_one_always() -> None:
    since = {m.GetStatus: 3}
    known = [speaks(version, m.GetStatus, since) for version in (None, 2, 3, 4)]
    assert known == [False, False, True, True]
    assert all(speaks(version, m.Lookup, since) for version in (None, 1, 9))
