"""Generated models: the same bytes for the same seed, readable by gguf-py, with the tensors that llama.cpp asks for."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from swarm.architectures import generator
from swarm.architectures.generator import (
    Variant,
    draw,
    encode_metadata,
    file_name,
    model_file,
    wanted_tensors,
    write_model,
)
from swarm.architectures.recipes import N_EMBD, N_EXPERT, N_FF_EXP, RECIPES, Recipe, metadata
from swarm.errors import EngineError
from swarm.model.gguf_file import GgufFile, TensorInfo
from swarm.model.spec import read_spec

BY_NAME = {recipe.architecture: recipe for recipe in RECIPES}


def written(folder: Path, name: str, variant: Variant) -> Path:
    path = folder / "m.gguf"
    write_model(path, BY_NAME[name], variant)
    return path


def test_the_same_recipe_and_seed_give_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    files = [
        written(tmp_path, "olmoe", Variant(name="a", expert_type="Q8_0", seed=seed)).read_bytes() for seed in (1, 1, 2)
    ]
    assert files[0] == files[1]
    assert files[0] != files[2]


@pytest.mark.parametrize("expert_type", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4"])
def test_gguf_py_reads_experts_of_each_type_as_the_floats_that_were_drawn(expert_type: str, tmp_path: Path) -> None:
    path = written(tmp_path, "qwen3moe", Variant(name="x", expert_type=expert_type))
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up_exps.weight")
    assert tensor.tensor_type.name == expert_type
    plain = np.frombuffer(
        draw(TensorInfo(name=tensor.name, ggml_type=0, shape=(N_EMBD, N_FF_EXP, N_EXPERT)), 0), np.float32
    )
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
    cosine = float(values @ plain / np.sqrt((values @ values) * (plain @ plain)))
    assert cosine > 0.99


def test_scales_and_parted_products_stand_in_the_place_of_merged_ones(tmp_path: Path) -> None:
    with GgufFile(written(tmp_path, "qwen3next", Variant(name="x"))) as file:
        assert file.tensors["blk.0.ffn_gate_up_exps.weight"].shape == (N_EMBD, 2 * N_FF_EXP, N_EXPERT)
    variant = Variant(name="x", has_scales=True, splits_gate_up=True)
    with GgufFile(written(tmp_path, "qwen3next", variant)) as file:
        assert "blk.0.ffn_gate_up_exps.weight" not in file.tensors
        for kind in ("gate", "up", "down"):
            assert file.tensors[f"blk.0.ffn_{kind}_exps.scale"].shape == (N_EXPERT,)
        assert read_spec(file).expert_tensors(0)[0].kind == "down.scale"


def test_layers_that_predict_further_tokens_have_experts_in_the_file_and_none_in_the_spec(tmp_path: Path) -> None:
    keys = (("block_count", 3), ("nextn_predict_layers", 1))
    with GgufFile(written(tmp_path, "glm4moe", Variant(name="x", keys=keys))) as file:
        assert "blk.2.ffn_up_exps.weight" in file.tensors
        assert read_spec(file).moe_layers == (1,)


def test_what_llama_cpp_refuses_is_an_error_with_its_reason() -> None:
    recipe = Recipe(architecture="deepseek2", source="x", left_out=frozenset({"attention.kv_lora_rank"}))
    with pytest.raises(EngineError, match="kv_lora_rank"):
        wanted_tensors(encode_metadata(metadata(recipe)))
    with pytest.raises(EngineError, match="unknown model architecture"):
        wanted_tensors(encode_metadata(metadata(Recipe(architecture="newmoe", source="x"))))


def test_decays_are_negative_and_norms_lie_around_one() -> None:
    decay = np.frombuffer(draw(TensorInfo(name="blk.1.ssm_a", ggml_type=0, shape=(1, 64)), 0), np.float32)
    assert (decay < 0).all()
    for name in ("blk.1.attn_norm.weight", "output_norm.weight"):
        norm = np.frombuffer(draw(TensorInfo(name=name, ggml_type=0, shape=(256,)), 0), np.float32)
        assert 0.9 < norm.mean() < 1.1


def test_a_model_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file(tmp_path / "kept", BY_NAME["olmoe"], Variant(name="a"))
    monkeypatch.setattr(generator, "write_model", None)
    assert model_file(tmp_path / "kept", BY_NAME["olmoe"], Variant(name="a")) == path
    with GgufFile(path) as file:
        assert file.text("general.architecture") == "olmoe"


def test_a_files_name_changes_with_everything_that_changes_its_bytes() -> None:
    names = {
        file_name(BY_NAME[name], variant)
        for name in ("olmoe", "dbrx")
        for variant in (Variant(name="a"), Variant(name="a", seed=1), Variant(name="a", expert_type="Q4_K"))
    }
    assert len(names) == 6
