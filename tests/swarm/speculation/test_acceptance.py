"""Shares of accepted tokens: found from what was drafted, quickly forgotten, and the same for drafts that were only watched."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.speculation.acceptance import Acceptance, Watched


def test_nothing_is_expected_before_anything_was_right() -> None:
    acceptance = Acceptance()
    assert acceptance.expected_lengths(4) == [0, 0, 0, 0]
    for _ in range(5):
        acceptance.count(0, False)
    assert acceptance.expected_lengths(4) == [0, 0, 0, 0]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_share_is_found_within_its_scatter(share: float) -> None:
    rng = np.random.default_rng(0)
    acceptance = Acceptance()
    found = []
    for _ in range(4000):
        acceptance.count(0, bool(rng.random() < share))
        found.append(acceptance.probability(0))
    assert np.mean(found) == pytest.approx(share, abs=0.1)
    assert acceptance.expected_lengths(3)[2] == pytest.approx(
        sum(np.prod([acceptance.probability(i) for i in range(n + 1)]) for n in range(3))
    )


def test_a_change_shows_within_a_few_looks() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.count(0, True)
    for _ in range(8):
        acceptance.count(0, False)
    assert acceptance.probability(0) < 0.5
    for _ in range(8):
        acceptance.count(0, True)
    assert acceptance.probability(0) > 0.6


def test_positions_differ_where_there_were_enough_looks() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.count(0, True)
        acceptance.count(1, False)
    assert acceptance.probability(0) > 0.75
    assert acceptance.probability(1) < 0.3


def test_what_is_known_from_elsewhere_counts_a_little() -> None:
    prior = Acceptance()
    for _ in range(50):
        prior.count(0, True)
    acceptance = Acceptance(prior=prior, prior_looks=2.0)
    assert 0.5 < acceptance.probability(0) < 0.8
    for _ in range(6):
        acceptance.count(0, False)
    assert acceptance.probability(0) < 0.25
    assert Acceptance(prior=Acceptance(), prior_looks=2.0).probability(0) == 0


def test_a_watched_proposal_is_judged_as_its_text_grows() -> None:
    acceptance = Acceptance()
    watched = Watched(3, [7, 8, 9], acceptance)
    assert watched.judge([1, 2, 3]) == []
    assert watched.judge([1, 2, 3, 7]) == [True]
    assert watched.judge([1, 2, 3, 7]) == []
    assert not watched.is_over
    assert watched.judge([1, 2, 3, 7, 8, 5, 6]) == [True, False]
    assert watched.is_over
    assert watched.judge([1, 2, 3, 7, 8, 5, 6, 7]) == []


def test_a_proposal_that_was_right_to_its_end_is_over() -> None:
    watched = Watched(0, [1, 2], Acceptance())
    assert watched.judge([1, 2, 3]) == [True, True]
    assert watched.is_over
