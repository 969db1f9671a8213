"""Random models of any size: llama.cpp runs them, their weights are what they should be, and a seed fixes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType

from swarm.backbone.engine import EngineConfig
from swarm.backbone.stock import StockModel
from swarm.bench.dispatch import DispatchOptions, draw_choices
from swarm.bench.synthetic import SYNTH16, SyntheticModel, write_synthetic
from swarm.errors import UserError
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from swarm.native.ggml import tensor_name, view_tensor
from swarm.native.llama import LlamaContext, LlamaModel
from swarm.wire.rows import parse_wire

SMALL: dict[str, Any] = {"n_layers": 2, "n_embd": 256, "n_expert": 8, "n_expert_used": 2, "n_ff_exp": 256, "n_head": 4}


@pytest.mark.parametrize("weight_type", [GgmlType.F16, GgmlType.Q8_0, GgmlType.Q4_K], ids=lambda t: t.name)
@pytest.mark.parametrize("n_ff_shared", [0, 256])
def test_llama_cpp_runs_it_and_its_weights_have_unit_gain(
    tmp_path: Path, weight_type: GgmlType, n_ff_shared: int
) -> None:
    model = SyntheticModel(**SMALL, weight_type=weight_type, n_ff_shared=n_ff_shared)
    path = write_synthetic(tmp_path / "m.gguf", model)
    with GgufFile(path) as file:
        spec = read_spec(file)
    assert (spec.n_layers, spec.n_embd, spec.n_expert, spec.n_expert_used, spec.n_ff_exp) == (2, 256, 8, 2, 256)
    assert spec.n_ff_shared == n_ff_shared
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up_exps.weight")
    assert tensor.tensor_type == weight_type
    weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert abs(weights.mean()) < 0.01 * weights.std()
    assert weights.std() * 256**0.5 == pytest.approx(1, rel=0.01)
    with StockModel(path, EngineConfig(n_ctx=64)) as stock:
        logits = stock.logits(list(range(20)), 0)
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2, "neither dead nor exploding"


def test_a_seed_fixes_the_bytes(tmp_path: Path) -> None:
    first = write_synthetic(tmp_path / "a.gguf", SyntheticModel(**SMALL)).read_bytes()
    assert write_synthetic(tmp_path / "b.gguf", SyntheticModel(**SMALL)).read_bytes() == first
    assert write_synthetic(tmp_path / "c.gguf", SyntheticModel(**SMALL, seed=1)).read_bytes() != first


def test_the_standard_model_is_as_the_benchmarks_say() -> None:
    m = SYNTH16
    assert (m.n_layers, m.n_embd, m.n_expert, m.n_expert_used, m.n_ff_exp, m.n_ff_shared) == (16, 1024, 64, 8, 256, 512)
    assert m.weight_type is GgmlType.Q8_0


@pytest.mark.parametrize(
    "wrong",
    [{"weight_type": GgmlType.Q2_K}, {"n_embd": 200}, {"n_head": 3}, {"n_expert_used": 9}, {"n_vocab": 256}],
    ids=str,
)
def test_a_shape_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        SyntheticModel(**(SMALL | wrong))


def routing(path: Path, n_layers: int, n_expert: int) -> np.ndarray:
    """Return how often each expert is chosen for random tokens, [L, E]; not of the last layer, which sees one row."""
    counts = np.zeros((n_layers - 1, n_expert))

    def look(tensor: int, ask: bool) -> bool:
        name = tensor_name(tensor)
        if not name.startswith("ffn_moe_topk-"):
            return not ask
        layer = int(name.removeprefix("ffn_moe_topk-"))
        if not ask and layer < n_layers - 1:
            counts[layer] += np.bincount(view_tensor(tensor).ravel(), minlength=n_expert)
        return layer < n_layers - 1 if ask else True

    tokens = np.random.default_rng(0).integers(1, 400, 512).tolist()
    with LlamaModel(path) as model:
        context = LlamaContext(model, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, eval_callback=look)
        context.decode(tokens, first_position=0, logits="last")
        assert context.take_callback_error() is None
        context.close()
    return counts


@pytest.mark.parametrize("skew", [0.5, 1.0, 1.5])
def test_a_skewed_router_chooses_by_zipfs_law(tmp_path: Path, skew: float) -> None:
    shape = SMALL | {
        "n_layers": 4,
        "n_embd": 512,
        "n_expert": 64,
        "n_expert_used": 8,
        "n_ff_exp": 32,
        "n_ff_shared": 32,
    }
    path = write_synthetic(tmp_path / "m.gguf", SyntheticModel(**shape, router_skew=skew))
    counts = routing(path, 4, 64)
    shares = -np.sort(-counts, axis=1)
    shares /= shares.sum(axis=1, keepdims=True)
    rng = np.random.default_rng(1)
    ids, _ = draw_choices(rng, DispatchOptions(wire=parse_wire("f32"), n_tokens=4000, skew=skew))
    law = -np.sort(-np.bincount(ids.ravel(), minlength=64) / ids.size)
    assert np.abs(shares[:, :8].sum(axis=1) - law[:8].sum()).max() < 0.06, "the hottest eighth"
    assert np.abs(shares[:, :32].sum(axis=1) - law[:32].sum()).max() < 0.06, "the hottest half"
    hottest = [set(np.argsort(-row)[:8].tolist()) for row in counts]
    assert len(hottest[0] & hottest[1]) < 6, "each layer has its own order"
