"""Packing by destination, judged by a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.dispatch.plan import Batch, MissingExperts, part_of, plan_dispatch
from swarm.errors import LocalProtocolError
from swarm.ids import NodeId

NODES = [NodeId(bytes([n]) * 32) for n in range(40)]


def loop_plan(
    topk_ids: np.ndarray, topk_weights: np.ndarray, owner_of: np.ndarray, destinations: list[NodeId]
) -> list[tuple[NodeId, list[tuple[int, list[tuple[int, int, float]]]]]]:
    """Return [(destination, [(row, [(slot, expert, weight)])])], by a loop over everything."""
    plan = []
    for index, destination in enumerate(destinations):
        rows = []
        for row in range(len(topk_ids)):
            pairs = [
                (slot, int(expert), float(topk_weights[row, slot]))
                for slot, expert in enumerate(topk_ids[row])
                if owner_of[expert] == index
            ]
            if pairs:
                rows.append((row, pairs))
        if rows:
            plan.append((destination, rows))
    return plan


def unpack(batch: Batch) -> tuple[NodeId, list[tuple[int, list[tuple[int, int, float]]]]]:
    rows, pair = [], 0
    for row, count in zip(batch.rows.tolist(), batch.row_counts.tolist(), strict=True):
        pairs = [
            (int(batch.slots[at]), int(batch.expert_ids[at]), float(batch.weights[at]))
            for at in range(pair, pair + count)
        ]
        rows.append((row, pairs))
        pair += count
    assert pair == batch.n_pairs
    return batch.destination, rows


@st.composite
def choices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[NodeId]]:
    n_expert = draw(st.integers(1, 24))
    n_used = draw(st.integers(1, min(n_expert, 8)))
    n_tokens = draw(st.just(1) | st.integers(0, 12))
    n_nodes = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    topk_ids = np.array([rng.permutation(n_expert)[:n_used] for _ in range(n_tokens)], dtype=np.int32)
    topk_ids = topk_ids.reshape(n_tokens, n_used)
    weights = rng.random((n_tokens, n_used), dtype=np.float32)
    owner_of = rng.integers(-1 if draw(st.booleans()) else 0, n_nodes, n_expert).astype(np.int32)
    return topk_ids, weights, owner_of, NODES[:n_nodes]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(choices())
def test_the_plan_is_what_a_plain_loop_finds(choice: Any) -> None:
    topk_ids, weights, owner_of, destinations = choice
    plan = plan_dispatch(topk_ids, weights, owner_of, destinations)
    absent = sorted({int(expert) for expert in topk_ids.ravel() if owner_of[expert] < 0})
    if absent:
        assert plan == MissingExperts(tuple(absent))
        return
    assert isinstance(plan, list)
    assert [unpack(batch) for batch in plan] == loop_plan(topk_ids, weights, owner_of, destinations)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(choices())
def test_every_token_and_slot_is_in_exactly_one_batch(choice: Any) -> None:
    topk_ids, weights, owner_of, destinations = choice
    plan = plan_dispatch(topk_ids, weights, np.maximum(owner_of, 0), destinations)
    assert isinstance(plan, list)
    times = np.zeros(topk_ids.shape, dtype=int)
    for batch in plan:
        np.add.at(times, (batch.pair_rows, batch.slots), 1)
        assert len(set(batch.rows.tolist())) == batch.n_rows
    assert (times == 1).all()
    assert len({batch.destination for batch in plan}) == len(plan)


def test_types_are_those_of_the_wire() -> None:
    plan = plan_dispatch(np.array([[3, 1]], np.int32), np.array([[0.75, 0.25]], np.float32), np.zeros(4, int), NODES)
    assert isinstance(plan, list)
    (batch,) = plan
    assert batch.destination == NODES[0]
    found = (batch.rows, batch.row_counts, batch.expert_ids, batch.slots, batch.weights)
    assert [array.dtype.name for array in found] == ["int64", "uint8", "uint16", "uint8", "float32"]
    assert [array.tolist() for array in found] == [[0], [2], [3, 1], [0, 1], [0.75, 0.25]]


def test_a_strided_view_of_the_choice_is_read_by_value() -> None:
    wide = np.arange(24, dtype=np.int32).reshape(3, 8) % 5
    weights = np.ones((3, 4), np.float32)
    owner_of = np.array([0, 1, 0, 1, 0])
    first = plan_dispatch(wide[:, :4], weights, owner_of, NODES)
    second = plan_dispatch(wide[:, :4].copy(), weights, owner_of, NODES)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert [unpack(batch) for batch in first] == [unpack(batch) for batch in second]


def test_the_plan_shares_no_memory_with_the_router() -> None:
    topk_ids, weights = np.array([[0, 1]], np.int32), np.array([[0.5, 0.5]], np.float32)
    plan = plan_dispatch(topk_ids, weights, np.zeros(2, int), NODES)
    assert isinstance(plan, list)
    topk_ids[:], weights[:] = 9, 9
    assert plan[0].expert_ids.tolist() == [0, 1]
    assert plan[0].weights.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("topk_ids", "weights", "owner_of"),
    [
        ([[0, 4]], [[1, 1]], [0, 0, 0, 0]),
        ([[0, -1]], [[1, 1]], [0, 0, 0, 0]),
        ([[0, 1]], [[1]], [0, 0]),
        ([0, 1], [1, 1], [0, 0]),
        ([[0, 1]], [[1, 1]], [0, 99]),
        ([[]], [[]], [0]),
    ],
)
def test_a_choice_that_makes_no_sense_is_our_mistake(topk_ids: Any, weights: Any, owner_of: Any) -> None:
    with pytest.raises(LocalProtocolError):
        plan_dispatch(np.array(topk_ids, np.int32), np.array(weights, np.float32), np.array(owner_of), NODES)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [0, 0]},
        {"rows": [1, 0]},
        {"row_counts": [1, 1]},
        {"row_counts": [3, 0]},
        {"slots": [0, 1]},
        {"weights": [1.0]},
    ],
    ids=str,
)
def test_a_batch_must_agree_with_itself(change: dict[str, list[float]]) -> None:
    fields = {
        "rows": np.array([0, 1]),
        "row_counts": np.array([2, 1], np.uint8),
        "expert_ids": np.array([5, 6, 5], np.uint16),
        "slots": np.array([0, 1, 0], np.uint8),
        "weights": np.ones(3, np.float32),
    }
    Batch(destination=NODES[0], **fields)
    (name, values) = next(iter(change.items()))
    with pytest.raises(LocalProtocolError):
        Batch(destination=NODES[0], **(fields | {name: np.array(values, fields[name].dtype)}))


def test_pairs_may_have_owners_of_their_own() -> None:
    """Rows of one expert at several replicas: as if each row had been planned with its own owners."""
    rng = np.random.default_rng(6)
    topk_ids = np.stack([rng.permutation(9)[:3] for _ in range(20)]).astype(np.int32)
    weights = rng.random((20, 3)).astype(np.float32)
    owners = rng.integers(0, 4, (20, 3)).astype(np.int32)
    plan = plan_dispatch(topk_ids, weights, owners, NODES[:4])
    assert isinstance(plan, list)
    found = {
        (row, slot): (destination, expert, weight)
        for batch in plan
        for destination, rows in [unpack(batch)]
        for row, pairs in rows
        for slot, expert, weight in pairs
    }
    assert found == {
        (t, k): (NODES[owners[t, k]], int(topk_ids[t, k]), float(weights[t, k])) for t in range(20) for k in range(3)
    }


def test_a_pair_without_an_owner_names_its_expert() -> None:
    owners = np.array([[0, -1], [0, 0]], np.int32)
    plan = plan_dispatch(np.array([[4, 7], [7, 2]], np.int32), np.ones((2, 2), np.float32), owners, NODES)
    assert plan == MissingExperts((7,))


def test_owners_of_pairs_have_the_choices_shape() -> None:
    with pytest.raises(LocalProtocolError, match="owners of pairs"):
        plan_dispatch(np.zeros((2, 2), np.int32), np.ones((2, 2), np.float32), np.zeros((1, 2), np.int32), NODES)


def test_a_part_of_a_batch_keeps_order_rows_and_destination() -> None:
    topk_ids = np.array([[0, 1, 2], [3, 4, 5], [0, 4, 1]], np.int32)
    weights = np.arange(9, dtype=np.float32).reshape(3, 3)
    plan = plan_dispatch(topk_ids, weights, np.zeros(6, int), NODES)
    assert isinstance(plan, list)
    part = part_of(plan[0], np.isin(plan[0].expert_ids, [4, 1]))
    assert unpack(part) == (NODES[0], [(0, [(1, 1, 1.0)]), (1, [(1, 4, 4.0)]), (2, [(1, 4, 7.0), (2, 1, 8.0)])])
