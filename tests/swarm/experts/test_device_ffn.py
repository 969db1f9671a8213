"""A slice on a device computes what the CPU's own does. The device here is the CPU, through the registry like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swarm.architectures.generator import Variant, write_model
from swarm.architectures.recipes import RECIPES
from swarm.errors import EngineError, IntegrityError, UserError
from swarm.experts.device_ffn import DeviceFfn, reserve_slice
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn, ExpertNotLoaded
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from swarm.model.spec import ModelSpec, read_spec
from swarm.native.devices import choose_device

FORMS = {
    "qwen3moe": Variant(name="scales", has_scales=True, expert_type="Q4_K"),
    "gpt-oss": Variant(name="biases", expert_type="MXFP4"),
    "kimi-k3": Variant(name="situ"),
    "qwen3next": Variant(name="merged", expert_type="Q8_0"),
}


@pytest.fixture(params=FORMS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> GgufSource:
    path = tmp_path / "m.gguf"
    write_model(path, next(r for r in RECIPES if r.architecture == request.param), FORMS[request.param])
    return GgufSource(GgufFile(path))


def spec_of(source: GgufSource) -> ModelSpec:
    return read_spec(source._file)


def test_pairs_and_sums_are_the_cpus(opened: GgufSource) -> None:
    spec = spec_of(opened)
    layer = spec.moe_layers[-1]
    experts = ExpertSet.of([layer], [1, 4, 6])
    rng = np.random.default_rng(2)
    x = rng.standard_normal((5, spec.n_embd)).astype(np.float32)
    rows, ids = rng.integers(0, 5, 9), rng.choice([1, 4, 6], 9)
    counts, chosen = np.full(5, 2, np.uint8), rng.choice([1, 4, 6], 10)
    weights = rng.random(10).astype(np.float32)
    with (
        DeviceFfn(spec, experts, choose_device("cpu"), scratch_bytes=40_000) as device,
        ExpertFfn(spec, experts, repacks=False) as cpu,
    ):
        assert 1 <= device.max_pairs < 9, "several graphs"
        for ffn in (device, cpu):
            for expert in (6, 1, 4):
                ffn.load(layer, expert, opened.read_block(layer, expert))
            assert ffn.loaded == experts
        np.testing.assert_allclose(
            device.compute(layer, x, rows, ids), cpu.compute(layer, x, rows, ids), rtol=1e-4, atol=1e-5
        )
        for given in (None, weights):
            ours, theirs = (ExpertExecutor(ffn, spec).run(layer, x, counts, chosen, given) for ffn in (device, cpu))
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_is_not_loaded_or_does_not_fit_is_refused(opened: GgufSource) -> None:
    spec = spec_of(opened)
    layer = spec.moe_layers[0]
    x = np.zeros((2, spec.n_embd), np.float32)
    with DeviceFfn(spec, ExpertSet.of([layer], [3, 5]), choose_device("cpu")) as ffn:
        ffn.load(layer, 3, opened.read_block(layer, 3))
        for expert in (5, 4, -1, 99):
            with pytest.raises(ExpertNotLoaded):
                ffn.compute(layer, x, np.array([0]), np.array([expert]))
        with pytest.raises(ExpertNotLoaded):
            ffn.load(layer, 4, b"")
        with pytest.raises(IntegrityError, match="wrong size"):
            ffn.load(layer, 5, b"123")
        for rows, experts in (([2], [3]), ([-1], [3]), ([0, 1], [3])):
            with pytest.raises(ValueError):
                ffn.compute(layer, x, np.array(rows), np.array(experts))
        with pytest.raises(ValueError):
            ffn.compute(layer, x.astype(np.float64), np.array([0]), np.array([3]))
    with pytest.raises(EngineError, match="closed"):
        ffn.compute(layer, x, np.array([0]), np.array([3]))


def test_a_slice_is_reserved_where_the_user_says(opened: GgufSource) -> None:
    spec = spec_of(opened)
    experts = ExpertSet.of([spec.moe_layers[0]], [0, 1])
    with reserve_slice(spec, experts, device="cpu", n_threads=1) as ffn:
        assert isinstance(ffn, ExpertFfn)
    with pytest.raises(UserError, match="no device quantum"):
        reserve_slice(spec, experts, device="quantum", n_threads=1)
