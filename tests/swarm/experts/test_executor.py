"""Answering dispatches: what is refused, how rows are combined, what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError
from swarm.experts.executor import ExpertExecutor, _sum_rows
from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet

EXPERTS = ExpertSet({1: frozenset(range(8, 16)), 4: frozenset({0, 9, 31})})


@pytest.fixture(scope="module")
def ffn(open_reference: Any) -> Iterator[ExpertFfn]:
    with open_reference("Q8_0").ffn(EXPERTS) as ffn:
        yield ffn


@pytest.fixture
def executor(ffn: ExpertFfn, open_reference: Any) -> ExpertExecutor:
    return ExpertExecutor(ffn, open_reference("Q8_0").spec)


def dispatch(**changes: Any) -> dict[str, Any]:
    """Three rows with 2, 1 and 4 pairs, with some fields changed."""
    rng = np.random.default_rng(6)
    return {
        "layer": 1,
        "x": rng.standard_normal((3, 256)).astype(np.float32),
        "row_counts": np.array([2, 1, 4], np.uint8),
        "expert_ids": np.array([8, 15, 9, 10, 11, 12, 8], np.uint16),
        "weights": rng.random(7).astype(np.float32),
        **changes,
    }


def test_without_weights_the_raw_rows_come_back_in_pair_order(executor: ExpertExecutor, ffn: ExpertFfn) -> None:
    sent = dispatch(weights=None)
    rows = np.array([0, 0, 1, 2, 2, 2, 2])
    np.testing.assert_array_equal(executor.run(**sent), ffn.compute(1, sent["x"], rows, sent["expert_ids"]))


def test_with_weights_each_row_is_its_weighted_sum_in_pair_order(executor: ExpertExecutor) -> None:
    sent = dispatch()
    raw = executor.run(**{**sent, "weights": None})
    weighted = raw * sent["weights"][:, None]
    expected = np.zeros((3, 256), np.float32)
    for row, pairs in enumerate(([0, 1], [2], [3, 4, 5, 6])):
        expected[row] = weighted[pairs[0]]
        for pair in pairs[1:]:
            expected[row] += weighted[pair]
    partial = executor.run(**sent)
    assert partial.dtype == np.float32
    np.testing.assert_array_equal(partial, expected)


def long_dispatch(n_rows: int, *, repeats: bool = False) -> dict[str, Any]:
    """Some of eight experts for each row, in no order; with `repeats` a row has one of them twice."""
    rng = np.random.default_rng(n_rows)
    ids = [rng.permutation(np.arange(8, 16, dtype=np.uint16))[: 1 + row % 4] for row in range(n_rows)]
    if repeats:
        ids[5][-1] = ids[5][0]
    return {
        "layer": 1,
        "x": rng.standard_normal((n_rows, 256)).astype(np.float32),
        "row_counts": np.array([len(each) for each in ids], np.uint8),
        "expert_ids": np.concatenate(ids),
        "weights": rng.random(sum(map(len, ids))).astype(np.float32),
    }


@pytest.mark.parametrize("n_rows", [9, 40])
@pytest.mark.parametrize("repeats", [False, True])
def test_sums_of_more_pairs_than_a_graph_takes_are_those_of_all_at_once(
    executor: ExpertExecutor, ffn: ExpertFfn, monkeypatch: pytest.MonkeyPatch, n_rows: int, repeats: bool
) -> None:
    sent = long_dispatch(n_rows, repeats=repeats)
    whole = executor.run(**sent)
    monkeypatch.setattr(ffn, "max_pairs", 7)
    cut = executor.run(**sent)
    assert cut.dtype == np.float32
    np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-5 * np.abs(whole).max())


def test_with_exact_kernels_the_order_of_sums_does_not_depend_on_how_many_there_are(
    executor: ExpertExecutor, ffn: ExpertFfn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.experts.executor.has_exact_kernels", lambda: True)
    monkeypatch.setattr(ffn, "max_pairs", 7)
    sent = long_dispatch(12)
    raw = executor.run(**{**sent, "weights": None})
    starts = np.cumsum(sent["row_counts"], dtype=int) - sent["row_counts"]
    in_order = _sum_rows(raw * sent["weights"][:, None], starts, sent["row_counts"].astype(int))
    np.testing.assert_array_equal(executor.run(**sent), in_order)


@pytest.mark.parametrize("with_weights", [False, True])
def test_rows_with_equally_many_pairs_give_what_each_row_alone_gives(
    executor: ExpertExecutor, with_weights: bool
) -> None:
    rng = np.random.default_rng(13)
    sent = dispatch(row_counts=np.full(3, 2, np.uint8), expert_ids=rng.integers(8, 16, 6).astype(np.uint16))
    sent["weights"] = rng.random(6).astype(np.float32) if with_weights else None
    whole = executor.run(**sent)
    assert whole.shape == ((3, 256) if with_weights else (6, 256))
    for row in range(3):
        alone = executor.run(
            layer=1,
            x=np.concatenate([sent["x"][row : row + 1], sent["x"][:1]]),  # uneven: the other way through
            row_counts=np.array([2, 1], np.uint8),
            expert_ids=np.append(sent["expert_ids"][2 * row : 2 * row + 2], np.uint16(8)),
            weights=None
            if sent["weights"] is None
            else np.append(sent["weights"][2 * row : 2 * row + 2], np.float32(1)),
        )
        n = 1 if with_weights else 2
        np.testing.assert_allclose(whole[row * n : (row + 1) * n], alone[:n], rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_sums_are_numpys_whatever_the_counts(counts: list[int], seed: int) -> None:
    y = np.random.default_rng(seed).standard_normal((sum(counts), 5)).astype(np.float32)
    sizes = np.array(counts)
    total = _sum_rows(y, np.cumsum(sizes) - sizes, sizes)
    expected = np.stack([part.sum(axis=0) for part in np.split(y.astype(np.float64), np.cumsum(counts)[:-1])])
    np.testing.assert_allclose(total, expected, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": 0},  # a layer of the model, not of the slice
        {"layer": 6},
        {"layer": -1},
        {"layer": 4},  # of the slice, but with other experts
        {"x": np.zeros((3, 255), np.float32)},
        {"x": np.zeros((3, 256), np.float16)},
        {"x": np.zeros(256, np.float32)},
        {"x": np.zeros((2, 256), np.float32)},
        {"row_counts": np.array([2, 1, 3], np.uint8)},
        {"row_counts": np.array([2, 0, 4], np.uint8), "expert_ids": np.full(6, 8), "weights": np.ones(6, np.float32)},
        {"row_counts": np.array([1, 1, 5], np.uint8)},  # five experts of four
        {"row_counts": np.array([2, 1, 4], np.int64)},
        {"row_counts": np.array([[2, 1, 4]], np.uint8)},
        {"expert_ids": np.array([8, 15, 9, 10, 11, 12], np.uint16)},
        {"expert_ids": np.array([8, 15, 9, 10, 11, 12, 7], np.uint16)},
        {"expert_ids": np.array([8, 15, 9, 10, 11, 12, 32], np.uint16)},
        {"expert_ids": np.array([8, 15, 9, 10, 11, 12, 65535], np.uint16)},
        {"expert_ids": np.array([8, 15, 9, 10, 11, 12, -1], np.int32)},
        {"expert_ids": np.full(7, 8.0)},
        {"weights": np.ones(6, np.float32)},
        {"weights": np.ones(7, np.float64)},
        {"weights": np.array([1, 1, 1, np.nan, 1, 1, 1], np.float32)},
        {"weights": np.array([1, 1, 1, 1, 1, 1, np.inf], np.float32)},
        {"weights": np.array([np.inf, 1, 1, 1, 1, 1, -np.inf], np.float32)},
        {
            "x": np.zeros((0, 256), np.float32),
            "row_counts": np.empty(0, np.uint8),
            "expert_ids": np.empty(0, np.uint16),
            "weights": np.empty(0, np.float32),
        },
    ],
)
def test_a_dispatch_that_does_not_fit_is_the_senders_fault_and_is_not_counted(
    executor: ExpertExecutor, changes: dict[str, Any]
) -> None:
    with pytest.raises(RemoteProtocolError):
        executor.run(**dispatch(**changes))
    assert executor.assignments().total == 0


def test_every_pair_is_counted_once_by_layer_and_expert(executor: ExpertExecutor) -> None:
    executor.run(**dispatch())
    executor.run(**dispatch(weights=None))
    executor.run(4, np.zeros((1, 256), np.float32), np.array([2], np.uint8), np.array([31, 0]), np.ones(2, np.float32))
    seen = executor.assignments()
    expected = np.zeros((6, 32), np.int64)
    expected[1, [8, 9, 10, 11, 12, 15]] = [4, 2, 2, 2, 2, 2]
    expected[4, [0, 31]] = 1
    assert seen.layers == (0, 1, 2, 3, 4, 5)
    assert seen.counts.dtype == np.int64
    np.testing.assert_array_equal(seen.counts, expected)
    assert seen.total == 16
    executor.run(**dispatch())
    assert seen.total == 16
    assert seen.counts.sum() == 16


def test_counts_of_many_threads_add_up(executor: ExpertExecutor) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(executor.run, **dispatch()) for _ in range(80)]:
            done.result()
    assert executor.assignments().total == 80 * 7
