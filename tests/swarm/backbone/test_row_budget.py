"""How many rows of prompts several lanes take together, over hand-made steps."""

from __future__ import annotations

import random

import pytest

from swarm.backbone.row_budget import LEAST_ROWS, RowBudget, most_rows
from swarm.wire.rows import parse_wire

N_BATCH = 512
N_ROWS = 704


def begin(budget: RowBudget, lane: int, n_pending: int) -> int:
    """Begin a lane's step as the lane does, and return its rows."""
    room = budget.room(lane)
    n_rows = min(n_pending, N_BATCH if room is None else min(N_BATCH, room))
    budget.began(lane, n_rows, wants_more=n_pending > n_rows)
    return n_rows


def test_a_lane_that_is_alone_takes_whole_batches() -> None:
    budget = RowBudget(N_ROWS)
    for _ in range(3):
        assert begin(budget, 0, 5000) == N_BATCH
        budget.ended(0)


def test_who_comes_second_takes_what_is_left_and_then_both_take_the_same() -> None:
    budget = RowBudget(N_ROWS)
    assert begin(budget, 0, 5000) == N_BATCH
    assert begin(budget, 1, 5000) == N_ROWS - N_BATCH
    budget.ended(0)
    assert begin(budget, 0, 5000) == N_ROWS // 2
    budget.ended(1)
    assert begin(budget, 1, 5000) == N_ROWS // 2
    budget.ended(0)
    budget.ended(1)
    assert begin(budget, 1, 5000) == N_BATCH, "the other one reads no prompt any more"


def test_what_a_short_prompt_leaves_of_its_share_is_the_others() -> None:
    budget = RowBudget(N_ROWS)
    begin(budget, 0, 300)
    assert begin(budget, 1, 5000) == N_ROWS - 300
    budget.ended(0)
    assert begin(budget, 0, 40) == 40


def test_nobody_waits_however_much_is_under_way() -> None:
    budget = RowBudget(N_ROWS)
    assert [begin(budget, lane, 5000) for lane in range(4)] == [N_BATCH, N_ROWS - N_BATCH, LEAST_ROWS, LEAST_ROWS]


def test_steps_of_requests_that_stream_take_nothing() -> None:
    budget = RowBudget(N_ROWS)
    budget.began(0, 0, wants_more=False)
    assert budget.room(1) == N_ROWS


def test_lanes_never_have_more_under_way_than_the_budget_and_the_least_of_each() -> None:
    """Whoever begins and ends in whatever order; and whoever always has more to read gets a fair part of all rows."""
    rng = random.Random(3)
    budget, n_lanes = RowBudget(N_ROWS), 4
    under_way: dict[int, int] = {}
    taken = [0] * n_lanes
    for _ in range(4000):
        lane = rng.randrange(n_lanes)
        if lane in under_way:
            budget.ended(lane)
            del under_way[lane]
        else:
            n_rows = under_way[lane] = begin(budget, lane, 5000)
            taken[lane] += n_rows
            assert n_rows >= LEAST_ROWS
        assert sum(under_way.values()) <= N_ROWS + (n_lanes - 1) * LEAST_ROWS
    assert max(taken) < 1.2 * min(taken)


def test_without_a_bound_all_take_what_they_like() -> None:
    budget = RowBudget()
    assert [begin(budget, lane, 5000) for lane in range(3)] == [N_BATCH] * 3


@pytest.mark.parametrize(
    ("wire", "expected"),
    [("f32", 704), ("f32/f16", 704), ("f16", 1024), ("bf16", 1024), ("q8/f16", 1024), ("fp8", 1024), ("exact", 512)],
)
def test_the_more_bytes_a_row_takes_the_fewer_are_under_way(wire: str, expected: int) -> None:
    assert most_rows(parse_wire(wire), N_BATCH) == expected
