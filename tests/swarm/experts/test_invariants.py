"""What lets experts live anywhere: they add up over any partition, and a slice's bytes are the file's own.

The third invariant, that one hook serves all architectures, is `swarm verify --arch all`, and
tests/swarm/gate/test_architecture_check.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest

from swarm.architectures.generator import Variant, write_model
from swarm.architectures.recipes import N_EXPERT, RECIPES
from swarm.architectures.variants import TYPES
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from swarm.model.spec import read_spec

FORMS = {
    "qwen3moe": Variant(name="scales", has_scales=True, expert_type="Q4_K"),
    "gpt-oss": Variant(name="biases", expert_type="MXFP4"),
    "nemotron_h_moe": Variant(name="no gate", expert_type="Q8_0"),
    "qwen3next": Variant(name="merged", expert_type="Q6_K"),
    "kimi-k3": Variant(name="situ", expert_type="IQ4_NL"),
}


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Variant], GgufFile]:
    folder = tmp_path_factory.mktemp("invariants")

    @cache
    def find(name: str, variant: Variant) -> GgufFile:
        path: Path = folder / f"{name}-{variant.name}.gguf"
        write_model(path, next(recipe for recipe in RECIPES if recipe.architecture == name), variant)
        return GgufFile(path)

    return find


def loaded(file: GgufFile, experts: ExpertSet) -> ExpertExecutor:
    source = GgufSource(file)
    spec = read_spec(file)
    ffn = ExpertFfn(spec, experts, repacks=False)
    for layer, expert in experts:
        ffn.load(layer, expert, source.read_block(layer, expert))
    return ExpertExecutor(ffn, spec)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_weighted_outputs_over_any_partition_of_the_experts_add_up_to_the_whole(
    file_of: Callable[[str, Variant], GgufFile], name: str, seed: int
) -> None:
    file = file_of(name, FORMS[name])
    spec = read_spec(file)
    rng = np.random.default_rng(seed)
    layer, n_used, n_rows = spec.moe_layers[-1], spec.n_expert_used, 12
    x = rng.standard_normal((n_rows, spec.n_embd)).astype(np.float32)
    ids = np.stack([rng.permutation(N_EXPERT)[:n_used] for _ in range(n_rows)])  # [N, K]
    weights = rng.random((n_rows, n_used)).astype(np.float32)
    whole = loaded(file, ExpertSet.of([layer], range(N_EXPERT)))
    counts = np.full(n_rows, n_used, np.uint8)
    expected = whole.run(layer, x, counts, ids.ravel(), weights.ravel())

    owner = rng.integers(0, 3, N_EXPERT)
    total = np.zeros_like(expected)
    for part in set(owner.tolist()):
        mine = owner[ids] == part  # [N, K]
        rows = np.flatnonzero(mine.any(axis=1))
        executor = loaded(file, ExpertSet.of([layer], np.flatnonzero(owner == part).tolist()))
        total[rows] += executor.run(
            layer, x[rows], mine[rows].sum(axis=1).astype(np.uint8), ids[mine], weights[mine].astype(np.float32)
        )
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected).max() > 0.05, "nothing was computed"


@pytest.mark.parametrize("expert_type", TYPES)
def test_a_slice_of_each_type_is_that_byte_range_of_the_source(
    file_of: Callable[[str, Variant], GgufFile], expert_type: str
) -> None:
    file = file_of("olmoe", Variant(name=expert_type, expert_type=expert_type))
    source = GgufSource(file)
    raw = file.path.read_bytes()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file.path).tensors}
    for expert in (0, 3, N_EXPERT - 1):
        expected = b""
        for kind in ("down", "gate", "up"):
            tensor = tensors[f"blk.1.ffn_{kind}_exps.weight"]
            assert tensor.tensor_type.name == expert_type
            assert tensor.shape[2] == N_EXPERT, "experts are the outermost axis"
            size = tensor.n_bytes // N_EXPERT
            start = tensor.data_offset + expert * size
            expected += raw[start : start + size]
        assert source.read_block(1, expert) == expected
