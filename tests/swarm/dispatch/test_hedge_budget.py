"""Second copies are a share of what is sent, saved up to a burst."""

from __future__ import annotations

from swarm.dispatch.hedge_budget import HEDGE_BURST, HedgeBudget


def test_the_budget_is_a_share_of_what_is_sent() -> None:
    budget = HedgeBudget()
    assert sum(budget.spend() for _ in range(100)) == HEDGE_BURST
    budget.earn(100)
    assert sum(budget.spend() for _ in range(100)) == 5


def test_no_more_is_saved_than_a_burst_and_what_was_not_needed_is_given_back() -> None:
    budget = HedgeBudget()
    budget.earn(10_000)
    budget.give_back()
    assert sum(budget.spend() for _ in range(100)) == HEDGE_BURST
    budget.give_back()
    assert [budget.spend(), budget.spend()] == [True, False]
