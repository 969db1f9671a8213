"""What the federation's figures are made of: a step's tokens by the time in which it ran, shares, and what each kept."""

from __future__ import annotations

import pytest

from swarm.bench.federation import federation_figures, tokens_between
from swarm.bench.federation_member import Step


def test_a_step_counts_for_as_much_of_it_as_lies_within_the_time() -> None:
    steps = [
        Step(n_tokens=100, began=0.0, ended=2.0),  # half
        Step(n_tokens=10, began=2.0, ended=3.0),
        Step(n_tokens=100, began=3.0, ended=7.0),  # a quarter
        Step(n_tokens=100, began=8.0, ended=9.0),
    ]
    assert tokens_between(steps, 1.0, 4.0) == pytest.approx(50 + 10 + 25)
    assert tokens_between(steps, 7.5, 7.9) == 0.0
    assert tokens_between([], 0.0, 1.0) == 0.0


def test_a_step_longer_than_the_time_counts_for_its_rate() -> None:
    assert tokens_between([Step(n_tokens=100, began=0.0, ended=50.0)], 10.0, 15.0) == pytest.approx(10.0)


def test_shares_are_of_what_both_got_together_and_kept_of_what_each_got_alone() -> None:
    figures = federation_figures(
        alone=[[10.0, 10.0, 10.0], [40.0, 40.0, 40.0]], together=[[5.0, 6.0, 4.0], [15.0, 14.0, 16.0]]
    )
    assert figures["pool_tokens_per_s"] == 20.0
    assert figures["shares"] == pytest.approx([0.25, 0.75])
    assert figures["least_share"] == pytest.approx(0.25)
    assert figures["kept"] == pytest.approx([0.5, 0.375])
    assert figures["pool_over_alone"] == pytest.approx(0.5)


def test_a_backbone_that_got_nothing_has_no_share() -> None:
    figures = federation_figures(alone=[[10.0], [0.0]], together=[[10.0], [0.0]])
    assert figures["shares"] == [1.0, 0.0]
    assert figures["kept"] == [1.0, 0.0]
    assert federation_figures(alone=[[1.0], [1.0]], together=[[0.0], [0.0]])["least_share"] == 0.0
