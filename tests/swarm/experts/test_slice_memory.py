"""Where weights lie: what is refused, what is interleaved and what stays in the file's pages, and that all compute alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest

from swarm.bench.synthetic import SyntheticModel, write_synthetic
from swarm.errors import UnsupportedModel
from swarm.experts import slice_memory
from swarm.experts.expert_ffn import ExpertFfn, ExpertNotLoaded
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from swarm.model.spec import ExpertTensor, ModelSpec, read_spec
from swarm.native.ggml import CpuBackend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = SyntheticModel(
        n_layers=2,
        n_embd=256,
        n_expert=6,
        n_expert_used=2,
        n_ff_exp=256,
        n_head=4,
        weight_type=gguf.GGMLQuantizationType.Q4_K,
    )
    return write_synthetic(tmp_path_factory.mktemp("model") / "m.gguf", shape)


def open_slice(
    model: Path, experts: ExpertSet | None, *, repacks: bool, is_mapped: bool
) -> tuple[ExpertFfn, ModelSpec]:
    with GgufFile(model) as file:
        spec, source = read_spec(file), GgufSource(file)
        chosen = experts or spec.all_experts
        ffn = ExpertFfn(spec, chosen, repacks=repacks, mapped=file if is_mapped else None)
        loaded = ffn.loaded
        for layer, expert in chosen:
            if (layer, expert) not in loaded:
                ffn.load(layer, expert, source.read_block(layer, expert))
    return ffn, spec


def outputs(ffn: ExpertFfn, layer: int, experts: list[int]) -> np.ndarray:
    x = np.random.default_rng(5).standard_normal((len(experts), 256)).astype(np.float32)
    return ffn.compute(layer, x, np.arange(len(experts)), np.array(experts))


def can_repack() -> bool:
    with CpuBackend() as backend:
        return backend.repack_type() is not None


@pytest.mark.parametrize(
    "chosen", [None, ExpertSet({0: frozenset({1, 3, 4}), 1: frozenset({0, 5})})], ids=["all", "some"]
)
def test_interleaved_weights_compute_what_plain_ones_do(model: Path, chosen: ExpertSet | None) -> None:
    if not can_repack():
        pytest.skip("this build of ggml interleaves nothing on this processor")
    with open_slice(model, chosen, repacks=False, is_mapped=False)[0] as plain:
        repacked, spec = open_slice(model, chosen, repacks=True, is_mapped=False)
        with repacked:
            assert plain.n_repacked_bytes == 0
            assert repacked.n_repacked_bytes == len(repacked.experts) * spec.block_size_bytes(0)
            for layer, experts in repacked.experts.by_layer.items():
                ids = sorted(experts) * 3
                expected = outputs(plain, layer, ids)
                scale = np.abs(expected).max()
                np.testing.assert_allclose(outputs(repacked, layer, ids), expected, rtol=0, atol=1e-5 * scale)


def test_each_block_of_an_interleaved_slice_goes_to_its_own_place(model: Path) -> None:
    chosen = ExpertSet({0: frozenset({1, 3, 4})})
    ffn, spec = open_slice(model, chosen, repacks=True, is_mapped=False)
    with ffn, GgufFile(model) as file:
        source = GgufSource(file)
        before = outputs(ffn, 0, [1, 3, 4])
        ffn.load(0, 3, source.read_block(0, 5))  # another expert's weights
        after = outputs(ffn, 0, [1, 3, 4])
        np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
        assert not np.array_equal(after[1], before[1])
        ffn.load(0, 3, source.read_block(0, 3))
        np.testing.assert_array_equal(outputs(ffn, 0, [1, 3, 4]), before)
        assert spec.block_size_bytes(0) > 0


def test_a_layer_held_whole_is_computed_in_the_files_own_pages(model: Path) -> None:
    before = model.read_bytes()
    mapped, spec = open_slice(model, None, repacks=False, is_mapped=True)
    with mapped, open_slice(model, None, repacks=False, is_mapped=False)[0] as copied:
        assert mapped.n_mapped_bytes == len(spec.all_experts) * spec.block_size_bytes(0)
        assert copied.n_mapped_bytes == 0
        ids = list(range(6))
        expected = outputs(copied, 1, ids)
        np.testing.assert_array_equal(outputs(mapped, 1, ids), expected)
        mapped.flip_byte(1, 2, 8)  # a private page: the file stays
        assert not np.array_equal(outputs(mapped, 1, ids), expected)
    assert model.read_bytes() == before


def test_a_layer_held_in_part_is_copied_and_loaded_block_by_block(model: Path) -> None:
    chosen = ExpertSet({0: frozenset({2}), 1: frozenset(range(6))})
    with GgufFile(model) as file, ExpertFfn(read_spec(file), chosen, repacks=False, mapped=file) as ffn:
        assert ffn.loaded == ExpertSet({1: frozenset(range(6))})
        with pytest.raises(ExpertNotLoaded):
            outputs(ffn, 0, [2])
        outputs(ffn, 1, [0, 5])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint64])
def test_ids_out_of_range_are_not_loaded_whatever_their_type(model: Path, dtype: Any) -> None:
    ffn, _ = open_slice(model, None, repacks=False, is_mapped=False)
    with ffn:
        for wrong in (-1, 6, 1 << 15, -(1 << 31)):
            if wrong < 0 and np.dtype(dtype).kind == "u":
                continue
            with pytest.raises(ExpertNotLoaded):
                ffn.compute_choice(0, np.zeros((1, 256), np.float32), np.array([[0, wrong]], np.int64).astype(dtype))


@pytest.mark.parametrize("type_name", sorted(slice_memory.NOT_COMPUTABLE))
def test_weights_that_ggml_cannot_multiply_are_refused_before_it_aborts(type_name: str) -> None:
    tensor = SimpleNamespace(name="blk.2.ffn_up_exps.weight", ggml_type=gguf.GGMLQuantizationType[type_name].value)
    with pytest.raises(UnsupportedModel, match=type_name):
        slice_memory._require_computable(cast(ExpertTensor, tensor))
