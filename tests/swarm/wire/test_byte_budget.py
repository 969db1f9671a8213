"""Bytes are taken while they fit, and given back."""

from __future__ import annotations

import pytest

from swarm.wire.byte_budget import ByteBudget


def test_what_does_not_fit_is_not_taken() -> None:
    budget = ByteBudget(10)
    assert budget.take(7)
    assert budget.has_room(3)
    assert not budget.has_room(4)
    assert not budget.take(4)
    assert budget.n_bytes == 7
    budget.give_back(7)
    assert budget.take(10)


def test_more_than_was_taken_cannot_be_given_back() -> None:
    budget = ByteBudget(10)
    budget.take(3)
    with pytest.raises(AssertionError):
        budget.give_back(4)
