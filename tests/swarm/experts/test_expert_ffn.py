"""The slice's computation, judged by plain numpy on dequantised weights and by stock llama.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import swarm
from swarm.errors import EngineError, IntegrityError, UserError
from swarm.experts import expert_ffn
from swarm.experts.expert_ffn import ExpertFfn, ExpertNotLoaded
from swarm.ids import ExpertSet
from swarm.model.spec import SUPPORTED, ExpertTensor, ModelSpec, Support

ROOT = Path(swarm.__file__).parents[1]
GGML_TYPE_F32 = 0


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def f32_spec(kinds: tuple[str, ...]) -> ModelSpec:
    """A model of one layer, D=16, F=8, E=5, with weights that ggml does not round."""
    shapes = {"gate": (16, 8, 5), "up": (16, 8, 5), "down": (8, 16, 5), "gate_up": (16, 16, 5)}
    tensors = tuple(
        ExpertTensor(name=f"blk.2.ffn_{kind}_exps.weight", kind=kind, ggml_type=GGML_TYPE_F32, shape=shapes[kind])
        for kind in sorted(kinds)
    )
    return ModelSpec(
        architecture="qwen3moe",
        n_layers=3,
        moe_layers=(2,),
        n_expert=5,
        n_expert_used=2,
        n_embd=16,
        n_ff_exp=8,
        activation="swiglu",
        n_expert_shared=0,
        n_ff_shared=0,
        tensors_by_layer=(tensors,),
    )


def test_experts_are_numpys_swiglu_for_slices_that_differ_by_layer(reference: Any) -> None:
    experts = ExpertSet({0: frozenset({3, 30}), 2: frozenset(range(12, 20)), 5: frozenset({0, 31})})
    rng = np.random.default_rng(3)
    x = rng.standard_normal((6, reference.spec.n_embd)).astype(np.float32)
    with reference.ffn(experts) as ffn:
        for layer, chosen in experts.by_layer.items():
            rows = rng.integers(0, 6, 20)
            ids = rng.choice(sorted(chosen), 20)
            y = ffn.compute(layer, x, rows, ids)
            expected = np.stack([reference.expert(layer, e, x[r]) for r, e in zip(rows, ids, strict=True)])
            assert y.shape == (20, reference.spec.n_embd)
            assert y.dtype == np.float32
            for got, wanted in zip(y, expected, strict=True):
                assert cosine(got, wanted) > 0.9995


@pytest.mark.parametrize("kinds", [("gate", "up", "down"), ("gate_up", "down")])
def test_separate_and_joined_gates_are_numpys_swiglu_to_rounding(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    monkeypatch.setitem(SUPPORTED, "qwen3moe", Support(kinds=frozenset(kinds)))
    rng = np.random.default_rng(5)
    spec = f32_spec(kinds)
    gate, up = (rng.standard_normal((5, 8, 16)).astype(np.float32) for _ in range(2))
    planes = {"gate": gate, "up": up, "down": rng.standard_normal((5, 16, 8)).astype(np.float32)}
    planes["gate_up"] = np.concatenate([gate, up], axis=1)
    x = rng.standard_normal((3, 16)).astype(np.float32)
    rows, ids = np.array([2, 0, 0, 1]), np.array([4, 1, 4, 3])
    with ExpertFfn(spec, ExpertSet.of([2], [4, 1, 3])) as ffn:
        for expert in (1, 3, 4):
            ffn.load(2, expert, b"".join(planes[t.kind][expert].tobytes() for t in spec.expert_tensors(2)))
        y = ffn.compute(2, x, rows, ids)
    a, b = (np.einsum("pfd,pd->pf", weights[ids], x[rows]) for weights in (gate, up))
    expected = np.einsum("pdf,pf->pd", planes["down"][ids], a / (1 + np.exp(-a)) * b)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def exact_result() -> dict[str, Any]:
    files = [str(ROOT / "examples" / "tiny_moe" / f"model-{name}.gguf") for name in ("Q8_0", "Q4_K_M")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("GGML_CPU_TILED_MM", None)
    program = str(Path(__file__).with_name("exact_check.py"))
    done = subprocess.run(
        [sys.executable, program, *files], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", ["model-Q8_0.gguf", "model-Q4_K_M.gguf"])
def test_slices_in_any_cuts_are_bit_identical_to_stock_llama_cpp(exact_result: dict[str, Any], name: str) -> None:
    result = exact_result[name]
    assert result["layers"] == 3 * 6
    assert result["pairs"] == (1 + 37 + 300) * 6 * 4
    assert result["as_stock"]
    assert result["in_small_graphs"]
    assert result["same_rows_same_bits"]


@pytest.mark.parametrize("name", ["model-Q8_0.gguf", "model-Q4_K_M.gguf"])
def test_the_comparison_finds_one_flipped_byte(exact_result: dict[str, Any], name: str) -> None:
    assert exact_result[name]["as_stock_after_a_flipped_byte"] is False


def test_a_flipped_byte_changes_its_own_expert_only_and_flips_back(reference: Any) -> None:
    x = np.random.default_rng(1).standard_normal((16, reference.spec.n_embd)).astype(np.float32)
    size = reference.spec.block_size_bytes(3)
    with reference.ffn(ExpertSet.of([3], [7, 8])) as ffn:
        rows, ids = np.tile(np.arange(16), 2), np.repeat([7, 8], 16)
        before = ffn.compute(3, x, rows, ids)
        for offset in (5, size // 2, size - 1):
            ffn.flip_byte(3, 8, offset)
            after = ffn.compute(3, x, rows, ids)
            np.testing.assert_array_equal(after[:16], before[:16])
            assert not np.array_equal(after[16:], before[16:])
            ffn.flip_byte(3, 8, offset)
        np.testing.assert_array_equal(ffn.compute(3, x, rows, ids), before)
        for offset in (-1, size):
            with pytest.raises(ValueError, match="no such byte"):
                ffn.flip_byte(3, 8, offset)
        with pytest.raises(ExpertNotLoaded):
            ffn.flip_byte(3, 9, 0)


def test_only_loaded_experts_of_the_slice_are_computed(reference: Any) -> None:
    x = np.zeros((1, reference.spec.n_embd), np.float32)
    with ExpertFfn(reference.spec, ExpertSet.of([1, 2], [4, 5])) as ffn:
        ffn.load(1, 4, memoryview(reference.block(1, 4)))
        assert ffn.loaded == ExpertSet.of([1], [4])
        ffn.compute(1, x, np.array([0]), np.array([4]))
        for layer, expert in ((1, 5), (1, 6), (1, -1), (1, 32), (2, 4), (3, 4), (99, 4)):
            with pytest.raises(ExpertNotLoaded) as caught:
                ffn.compute(layer, x, np.array([0, 0]), np.array([4, expert]))
            assert caught.value.layer == layer
            assert expert in caught.value.experts


def test_a_block_of_a_wrong_size_or_place_is_refused(reference: Any) -> None:
    block = reference.block(1, 4)
    with ExpertFfn(reference.spec, ExpertSet.of([1], [4])) as ffn:
        for wrong in (block[:-1], block + b"\0", b""):
            with pytest.raises(IntegrityError, match=f"got {len(wrong)} bytes, expected {len(block)}"):
                ffn.load(1, 4, wrong)
        for layer, expert in ((1, 5), (0, 4)):
            with pytest.raises(ExpertNotLoaded):
                ffn.load(layer, expert, block)
        assert len(ffn.loaded) == 0


@pytest.mark.parametrize(
    ("x", "rows", "experts"),
    [
        (np.zeros((2, 255), np.float32), [0], [0]),
        (np.zeros((2, 256), np.float64), [0], [0]),
        (np.zeros(256, np.float32), [0], [0]),
        (np.zeros((2, 256), np.float32), [2], [0]),
        (np.zeros((2, 256), np.float32), [-1], [0]),
        (np.zeros((2, 256), np.float32), [0, 1], [0]),
        (np.zeros((0, 256), np.float32), [0], [0]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    open_reference: Any, x: np.ndarray, rows: list[int], experts: list[int]
) -> None:
    with open_reference("Q8_0").ffn(ExpertSet.of([0], [0])) as ffn, pytest.raises(ValueError):
        ffn.compute(0, x, np.array(rows), np.array(experts))


def test_no_pairs_give_no_rows(open_reference: Any) -> None:
    with open_reference("Q8_0").ffn(ExpertSet.of([0], [0])) as ffn:
        empty = np.empty(0, np.int64)
        assert ffn.compute(0, np.empty((0, 256), np.float32), empty, empty).shape == (0, 256)


def test_values_that_are_not_finite_do_not_harm_the_process_or_other_pairs(reference: Any) -> None:
    x = np.ones((4, reference.spec.n_embd), np.float32)
    with reference.ffn(ExpertSet.of([0], [1])) as ffn:
        expected = ffn.compute(0, x[:1], np.array([0]), np.array([1]))
        x[1], x[2, 3], x[3] = np.nan, np.inf, 3e38
        y = ffn.compute(0, x, np.arange(4), np.full(4, 1))
        np.testing.assert_array_equal(y[:1], expected)


def test_few_graphs_are_kept_and_rebuilt_on_demand(open_reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_ffn, "MAX_GRAPHS", 2)
    x = np.random.default_rng(2).standard_normal((1, 256)).astype(np.float32)
    with open_reference("Q8_0").ffn(ExpertSet.of([0, 1], [0])) as ffn:
        first = ffn.compute(0, x, np.zeros(3, np.int64), np.zeros(3, np.int64))
        for n in (1, 2, 4):
            ffn.compute(1, x, np.zeros(n, np.int64), np.zeros(n, np.int64))
            assert len(ffn._graphs) <= 2
        np.testing.assert_array_equal(ffn.compute(0, x, np.zeros(3, np.int64), np.zeros(3, np.int64)), first)


def test_threads_share_a_slice_without_mixing_their_rows(open_reference: Any) -> None:
    rng = np.random.default_rng(4)
    calls = [
        (layer, rng.standard_normal((n, 256)).astype(np.float32), np.arange(n), rng.integers(0, 4, n))
        for n in (1, 2, 3, 5)
        for layer in (0, 1)
    ]
    with open_reference("Q8_0").ffn(ExpertSet.of([0, 1], range(4))) as ffn:
        expected = [ffn.compute(*call) for call in calls]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(10):
                for got, wanted in zip(pool.map(lambda call: ffn.compute(*call), calls), expected, strict=True):
                    np.testing.assert_array_equal(got, wanted)


def test_a_slice_outside_the_model_is_the_users_mistake(open_reference: Any) -> None:
    for experts in (ExpertSet({}), ExpertSet.of([0], [32]), ExpertSet.of([6], [0])):
        with pytest.raises(UserError):
            ExpertFfn(open_reference("Q8_0").spec, experts)


def test_a_choice_is_its_pairs_and_its_sums_are_added_in_order(reference: Any) -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_normal((5, reference.spec.n_embd)).astype(np.float32)
    ids = np.stack([rng.permutation(8)[:3] for _ in range(5)]).astype(np.int32)
    weights = rng.random((5, 3)).astype(np.float32)
    with reference.ffn(ExpertSet.of([2], range(8))) as ffn:
        raw = ffn.compute_choice(2, x, ids)
        pairs = np.stack([[reference.expert(2, e, row) for e in chosen] for row, chosen in zip(x, ids, strict=True)])
        assert raw.shape == pairs.shape
        assert cosine(raw, pairs) > 0.9995
        total = raw[:, 0] * weights[:, :1]
        for slot in (1, 2):
            total = total + raw[:, slot] * weights[:, slot : slot + 1]
        out = np.full((5, reference.spec.n_embd), np.nan, np.float32)
        assert ffn.compute_choice(2, x, ids, weights, out) is out
        np.testing.assert_array_equal(out, total)
        for n_used in (1, 2):  # other graphs: one product, and one sum
            part = ffn.compute_choice(2, x, ids[:, :n_used], np.ones((5, n_used), np.float32))
            np.testing.assert_array_equal(part, raw[:, :n_used].sum(axis=1))
        wide = np.arange(16, dtype=np.int32).reshape(2, 8)[:, :3]  # strided, as llama.cpp's own ids are
        np.testing.assert_array_equal(
            ffn.compute_choice(2, x[:1], wide[:1]), ffn.compute_choice(2, x[:1], wide[:1].copy())
        )


def test_a_choice_above_the_scratch_is_cut_by_rows(open_reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    x = rng.standard_normal((11, 256)).astype(np.float32)
    ids = rng.integers(0, 4, (11, 2)).astype(np.int32)
    weights = rng.random((11, 2)).astype(np.float32)
    with open_reference("Q8_0").ffn(ExpertSet.of([0], range(4))) as ffn:
        whole = ffn.compute_choice(0, x, ids, weights)
        monkeypatch.setattr(ffn, "max_pairs", 7)  # three rows
        np.testing.assert_allclose(ffn.compute_choice(0, x, ids, weights), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"x": np.zeros((2, 255), np.float32)},
        {"experts": np.zeros((3, 2), np.int32)},
        {"experts": np.zeros(2, np.int32)},
        {"experts": np.zeros((2, 0), np.int32)},
        {"weights": np.zeros((2, 1), np.float32)},
        {"weights": np.zeros((2, 2), np.float64)},
        {"out": np.zeros((2, 255), np.float32)},
        {"out": np.zeros((256, 2), np.float32).T},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_choice_that_does_not_fit_is_refused(open_reference: Any, changes: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "x": np.zeros((2, 256), np.float32),
        "experts": np.zeros((2, 2), np.int32),
        "weights": np.zeros((2, 2), np.float32),
        "out": np.zeros((2, 256), np.float32),
    }
    with open_reference("Q8_0").ffn(ExpertSet.of([0], [0])) as ffn:
        ffn.compute_choice(0, **good)
        with pytest.raises(ValueError):
            ffn.compute_choice(0, **(good | changes))


def test_a_closed_slice_raises(open_reference: Any) -> None:
    reference = open_reference("Q8_0")
    ffn = reference.ffn(ExpertSet.of([0], [0]))
    ffn.close()
    ffn.close()
    with pytest.raises(EngineError, match="closed"):
        ffn.compute(0, np.zeros((1, 256), np.float32), np.array([0]), np.array([0]))
    with pytest.raises(EngineError, match="closed"):
        ffn.load(0, 0, reference.block(0, 0))
