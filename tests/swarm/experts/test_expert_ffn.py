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
from swarm.model.expert_kinds import Activation
from swarm.model.spec import ExpertTensor, ModelSpec

ROOT = Path(swarm.__file__).parents[1]
GGML_TYPE_F32 = 0


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


D, F, E = 16, 8, 5
SHAPES = {"gate": (D, F, E), "up": (D, F, E), "down": (F, D, E), "gate_up": (D, 2 * F, E)}


def f32_spec(kinds: tuple[str, ...], activation: str = "swiglu") -> ModelSpec:
    """A model of one layer, with weights that ggml does not round; kinds such as `up`, `up.bias`, `down.scale`."""
    tensors = []
    for kind in kinds:
        product, _, suffix = kind.partition(".")
        shape = {"": SHAPES[product], "bias": SHAPES[product][1:], "scale": (E,)}[suffix]
        name = f"blk.2.ffn_{product}_exps.{suffix or 'weight'}"
        tensors.append(ExpertTensor(name=name, kind=kind, ggml_type=GGML_TYPE_F32, shape=shape))
    return ModelSpec(
        architecture="qwen3moe",
        n_layers=3,
        moe_layers=(2,),
        n_expert=E,
        n_expert_used=2,
        n_embd=D,
        n_ff_exp=F,
        activations=(Activation.parse(activation),),
        n_expert_shared=0,
        n_ff_shared=0,
        tensors_by_layer=(tuple(sorted(tensors, key=lambda tensor: tensor.name)),),
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


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))


def oai(g: np.ndarray, u: np.ndarray) -> np.ndarray:
    g = np.minimum(g, 1.5)
    return g / (1 + np.exp(-0.7 * g)) * (1 + np.clip(u, -1.5, 1.5))


def situ(g: np.ndarray, u: np.ndarray) -> np.ndarray:
    return 1.25 * np.tanh(g / 1.25) / (1 + np.exp(-g)) * 2.0 * np.tanh(u / 2.0)


REFERENCES: dict[str, Any] = {
    "swiglu": lambda g, u: silu(g) * u,
    "geglu": lambda g, u: gelu(g) * u,
    "reglu": lambda g, u: np.maximum(g, 0) * u,
    "swiglu_clamp 1.5": lambda g, u: silu(np.minimum(g, 1.5)) * np.clip(u, -1.5, 1.5),
    "silu_clamp 0.75": lambda g, u: np.minimum(silu(g), 0.75) * np.clip(u, -0.75, 0.75),
    "swiglu_oai 0.7 1.5": oai,
    "situ 1.25 2.0": situ,
    "situ 1.25 0.0": lambda g, u: 1.25 * np.tanh(g / 1.25) / (1 + np.exp(-g)) * u,
    "silu": lambda g, u: silu(u),
    "gelu": lambda g, u: gelu(u),
    "relu": lambda g, u: np.maximum(u, 0),
    "relu_sqr": lambda g, u: np.maximum(u, 0) ** 2,
}
PARTS = [
    pytest.param((), id="weights"),
    pytest.param(("bias",), id="biases"),
    pytest.param(("scale",), id="scales"),
    pytest.param(("bias", "scale"), id="biases and scales"),
]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("activation", REFERENCES)
def test_every_activation_with_biases_and_scales_is_numpys_to_rounding(activation: str, parts: tuple[str, ...]) -> None:
    is_gated = Activation.parse(activation).is_gated
    products = ("gate", "up", "down") if is_gated else ("up", "down")
    check_against_numpy(activation, (*products, *(f"{product}.{part}" for product in products for part in parts)))


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "swiglu_oai 0.7 1.5"])
def test_gate_and_up_in_one_tensor_are_numpys_to_rounding(activation: str) -> None:
    check_against_numpy(activation, ("gate_up", "down", "gate_up.bias", "down.bias"))


# ggml looks gelu up in a table of halves.
TOLERANCES = {"geglu": 2e-2, "gelu": 2e-2}


def check_against_numpy(activation: str, kinds: tuple[str, ...]) -> None:
    rng = np.random.default_rng(5)
    spec = f32_spec(kinds, activation)
    planes: dict[str, np.ndarray] = {}
    for product, size in (("gate", F), ("up", F), ("down", D)):
        planes[product] = rng.standard_normal((E, size, D + F - size)).astype(np.float32) / 2
        planes[f"{product}.bias"] = rng.standard_normal((E, size)).astype(np.float32)
        planes[f"{product}.scale"] = rng.uniform(0.5, 2, E).astype(np.float32)
    for suffix in ("", ".bias"):
        planes[f"gate_up{suffix}"] = np.concatenate([planes[f"gate{suffix}"], planes[f"up{suffix}"]], axis=1)
    has_bias, has_scale = any("bias" in kind for kind in kinds), any("scale" in kind for kind in kinds)

    def product(name: str, of: np.ndarray) -> np.ndarray:
        y = np.einsum("pab,pb->pa", planes[name][ids].astype(np.float64), of)
        y = y * planes[f"{name}.scale"][ids, None] if has_scale else y
        return y + planes[f"{name}.bias"][ids] if has_bias else y

    x = rng.standard_normal((3, D)).astype(np.float32)
    rows, ids = np.array([2, 0, 0, 1]), np.array([4, 1, 4, 3])
    hidden = REFERENCES[activation](product("gate", x[rows]), product("up", x[rows]))
    expected = product("down", hidden)
    tolerance = TOLERANCES.get(activation, 2e-3)
    with ExpertFfn(spec, ExpertSet.of([2], [4, 1, 3])) as ffn:
        for expert in (1, 3, 4):
            ffn.load(2, expert, b"".join(planes[t.kind][expert].tobytes() for t in spec.expert_tensors(2)))
        np.testing.assert_allclose(ffn.compute(2, x, rows, ids), expected, rtol=tolerance, atol=tolerance)
        # K experts of each row, with weights: other graphs, the same numbers
        raw = ffn.compute_choice(2, x[rows[:2]], ids.reshape(2, 2)[:, ::-1].astype(np.int32).copy())
        assert raw.shape == (2, 2, D)
        ones = np.ones((4, 1), np.float32)
        single = ffn.compute_choice(2, x[rows], ids[:, None].astype(np.int32), ones)
        np.testing.assert_allclose(single, expected, rtol=tolerance, atol=tolerance)


def test_the_least_memory_computes_what_much_memory_does() -> None:
    spec = f32_spec(
        ("gate", "up", "down", *(f"{p}.{s}" for p in ("gate", "up", "down") for s in ("bias", "scale"))),
        "situ 1.25 2.0",
    )
    rng = np.random.default_rng(6)
    blocks = [rng.standard_normal(spec.block_size_bytes(2) // 4).astype(np.float32).tobytes() for _ in range(E)]
    x, rows = rng.standard_normal((7, D)).astype(np.float32), np.arange(7)
    results = []
    for scratch_bytes in (1, 1 << 20):  # one pair at a time, and all at once
        with ExpertFfn(spec, ExpertSet.of([2], range(E)), scratch_bytes=scratch_bytes) as ffn:
            for expert, block in enumerate(blocks):
                ffn.load(2, expert, block)
            results.append(ffn.compute(2, x, rows, rows % E))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-5)


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
        read_only = x.copy()
        read_only.flags.writeable = False  # as what was decoded in place, and weights that lie in a message
        strided = np.repeat(weights, 2, axis=1)[:, ::2]
        np.testing.assert_array_equal(ffn.compute_choice(2, read_only, ids, strided), total)
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
