"""Combine, judged by plain scalar float32 arithmetic; bits do not depend on arrival."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from swarm.dispatch.combine import combine_exact, combine_partial
from swarm.dispatch.plan import Batch, plan_dispatch
from swarm.errors import LocalProtocolError
from swarm.ids import NodeId

T, K, D, E, N_NODES = 7, 4, 24, 16, 5
NODES = [NodeId(bytes([n]) * 32) for n in (9, 3, 200, 41, 77)]  # not in order
Parts = list[tuple[Batch, np.ndarray]]


def layer(seed: int = 1) -> tuple[list[Batch], np.ndarray, np.ndarray]:
    """Return (batches, raw rows [T, K, D], weights [T, K])."""
    rng = np.random.default_rng(seed)
    topk_ids = np.array([rng.permutation(E)[:K] for _ in range(T)], dtype=np.int32)
    weights = rng.random((T, K), dtype=np.float32)
    raw = (rng.standard_normal((T, K, D)) * 10.0 ** rng.integers(-4, 4, (T, K, 1))).astype(np.float32)
    batches = plan_dispatch(topk_ids, weights, rng.integers(0, N_NODES, E), NODES)
    assert isinstance(batches, list)
    return batches, raw, weights


def exact_parts(batches: list[Batch], raw: np.ndarray) -> Parts:
    return [(batch, raw[batch.pair_rows, batch.slots]) for batch in batches]


def partial_parts(batches: list[Batch], raw: np.ndarray) -> Parts:
    parts: Parts = []
    for batch in batches:
        sums = np.zeros((batch.n_rows, D), np.float32)
        for pair, row in enumerate(batch.pair_rows):
            sums[np.searchsorted(batch.rows, row)] += raw[row, batch.slots[pair]] * batch.weights[pair]
        parts.append((batch, sums))
    return parts


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype == np.float32 and bool((left.view(np.uint32) == right.view(np.uint32)).all())


def test_exact_is_the_chain_of_rounded_products_in_the_routers_order() -> None:
    batches, raw, weights = layer()
    expected = np.empty((T, D), np.float32)
    for token, column in itertools.product(range(T), range(D)):
        total = np.float32(raw[token, 0, column] * weights[token, 0])
        for slot in range(1, K):
            total = np.float32(total + np.float32(raw[token, slot, column] * weights[token, slot]))
        expected[token, column] = total
    assert same_bits(combine_exact(T, K, D, exact_parts(batches, raw), weights), expected)
    backwards = raw[:, ::-1] * weights[:, ::-1, None]
    other = backwards[:, 0] + backwards[:, 1] + backwards[:, 2] + backwards[:, 3]
    assert not same_bits(other, expected)  # the order matters for these numbers, so the test above can fail


def test_exact_keeps_the_sign_of_zero() -> None:
    batches = plan_dispatch(np.array([[0]], np.int32), np.ones((1, 1), np.float32), np.zeros(1, int), NODES)
    assert isinstance(batches, list)
    out = combine_exact(1, 1, 1, [(batches[0], np.array([[-0.0]], np.float32))], np.ones((1, 1), np.float32))
    assert np.signbit(out[0, 0])


def test_partial_sums_are_added_in_ascending_node_id() -> None:
    batches, raw, _ = layer()
    parts = partial_parts(batches, raw)
    expected = np.zeros((T, D), np.float32)
    for node in sorted(NODES):
        for batch, sums in parts:
            if batch.destination == node:
                for row, token in enumerate(batch.rows):
                    expected[token] = expected[token] + sums[row]
    assert same_bits(combine_partial(T, K, D, parts), expected)


def test_partial_agrees_with_exact_within_rounding() -> None:
    batches, raw, weights = layer()
    exact = combine_exact(T, K, D, exact_parts(batches, raw), weights)
    partial = combine_partial(T, K, D, partial_parts(batches, raw))
    scale = np.abs(raw * weights[:, :, None]).sum(axis=1)
    assert (np.abs(exact - partial) <= 1e-6 * scale).all()


@pytest.mark.parametrize("seed", range(3))
def test_arrival_order_does_not_change_a_bit(seed: int) -> None:
    batches, raw, weights = layer(seed)
    exact, partial = exact_parts(batches, raw), partial_parts(batches, raw)
    assert len(batches) >= 4
    for order in itertools.permutations(range(len(batches))):
        assert same_bits(
            combine_exact(T, K, D, [exact[at] for at in order], weights), combine_exact(T, K, D, exact, weights)
        )
        assert same_bits(combine_partial(T, K, D, [partial[at] for at in order]), combine_partial(T, K, D, partial))


def test_two_batches_of_one_node_are_added_in_a_fixed_order_too() -> None:
    parts: Parts = []
    for slot, value in enumerate([1e8, 1.0, -1e8]):
        batch = Batch(
            destination=NODES[0],
            rows=np.array([0]),
            row_counts=np.array([1], np.uint8),
            expert_ids=np.array([slot], np.uint16),
            slots=np.array([slot], np.uint8),
            weights=np.ones(1, np.float32),
        )
        parts.append((batch, np.array([[value]], np.float32)))
    found = {float(combine_partial(1, 3, 1, list(order))[0, 0]) for order in itertools.permutations(parts)}
    assert found == {0.0}


def test_a_missing_part_is_our_mistake() -> None:
    batches, raw, weights = layer()
    exact, partial = exact_parts(batches, raw), partial_parts(batches, raw)
    for at in range(len(batches)):
        with pytest.raises(LocalProtocolError, match="missing"):
            combine_exact(T, K, D, exact[:at] + exact[at + 1 :], weights)
        with pytest.raises(LocalProtocolError, match="missing"):
            combine_partial(T, K, D, partial[:at] + partial[at + 1 :])
    with pytest.raises(LocalProtocolError):
        combine_partial(T, K, D, [])


def test_a_part_that_counts_twice_is_our_mistake() -> None:
    batches, raw, weights = layer()
    exact, partial = exact_parts(batches, raw), partial_parts(batches, raw)
    with pytest.raises(LocalProtocolError, match="twice"):
        combine_exact(T, K, D, [*exact, exact[0]], weights)
    with pytest.raises(LocalProtocolError, match="twice"):
        combine_partial(T, K, D, [*partial, partial[0]])


def test_a_batch_of_another_layers_shape_is_our_mistake() -> None:
    batches, raw, weights = layer()
    exact, partial = exact_parts(batches, raw), partial_parts(batches, raw)
    with pytest.raises(LocalProtocolError):
        combine_exact(T - 1, K, D, exact, weights[:-1])
    with pytest.raises(LocalProtocolError):
        combine_partial(T, K - 1, D, partial)


def one_token(*batches: tuple[list[int], list[int]]) -> Parts:
    """Return parts of token 0, each (slots, rows)."""
    return [
        (
            Batch(
                destination=NODES[number],
                rows=np.array(rows),
                row_counts=np.array([len(slots) - len(rows) + 1, *[1] * (len(rows) - 1)], np.uint8),
                expert_ids=np.array(slots, np.uint16),
                slots=np.array(slots, np.uint8),
                weights=np.ones(len(slots), np.float32),
            ),
            np.full((len(rows), D), number + 1, np.float32),
        )
        for number, (slots, rows) in enumerate(batches)
    ]


def test_a_single_token_is_covered_by_every_slot_once() -> None:
    assert (combine_partial(1, K, D, one_token(([0, 2], [0]), ([1, 3], [0]))) == 3).all()
    for wrong, match in (
        ([([0, 2], [0]), ([1], [0])], "missing"),
        ([([0, 2], [0]), ([1, 2, 3], [0])], "twice"),
        ([([0, 2], [0]), ([1, 3], [1])], "outside"),
        ([([0, 2], [0]), ([1, 4], [0])], "outside"),
        ([([0, 2], [0, 1]), ([1, 3], [0])], "outside"),
        ([([0, 2], [0]), ([1, 3], [0]), ([0], [1])], "outside"),
        ([([0, 1, 2, 3], [0]), ([1, 3], [0, 1])], "outside"),
    ):
        with pytest.raises(LocalProtocolError, match=match):
            combine_partial(1, K, D, one_token(*wrong))


def test_rows_of_a_wrong_shape_or_type_are_our_mistake() -> None:
    batches, raw, weights = layer()
    exact, partial = exact_parts(batches, raw), partial_parts(batches, raw)
    for change in (lambda rows: rows[:-1], lambda rows: rows[:, :-1], lambda rows: rows.astype(np.float64)):
        with pytest.raises(LocalProtocolError):
            combine_exact(T, K, D, [(exact[0][0], change(exact[0][1])), *exact[1:]], weights)
        with pytest.raises(LocalProtocolError):
            combine_partial(T, K, D, [(partial[0][0], change(partial[0][1])), *partial[1:]])
    with pytest.raises(LocalProtocolError):
        combine_exact(T, K, D, exact, weights.T)


def test_no_tokens_need_no_parts() -> None:
    assert combine_exact(0, K, D, [], np.empty((0, K), np.float32)).shape == (0, D)
    assert combine_partial(0, K, D, []).shape == (0, D)


def test_the_inputs_stay_as_they_were() -> None:
    batches, raw, weights = layer()
    for parts, combine in (
        (exact_parts(batches, raw), lambda parts: combine_exact(T, K, D, parts, weights)),
        (partial_parts(batches, raw), lambda parts: combine_partial(T, K, D, parts)),
    ):
        before = [rows.copy() for _, rows in parts]
        out = combine(parts)
        assert all(same_bits(rows, old) for (_, rows), old in zip(parts, before, strict=True))
        assert not any(np.shares_memory(out, rows) for _, rows in parts)
