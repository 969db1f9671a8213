"""Histograms."""

from __future__ import annotations

from swarm.backbone.serving_stats import Histogram, ServingStats


def test_a_value_at_a_bound_counts_below_it() -> None:
    values = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        values.observe(value)
    assert values.counts == [2, 2, 1]
    assert (values.n, values.total) == (5, 12.0)


def test_two_backbones_share_no_counts() -> None:
    first, second = ServingStats(), ServingStats()
    first.ttft.observe(1.0)
    first.drafts.count(3, 2)
    assert second.ttft.n == second.drafts.n_steps == 0
