"""A spec says what the GGUF file says; whatever we cannot serve correctly is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from swarm.errors import RemoteProtocolError, UnsupportedModel, UserError
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import MAX_DIM, ModelSpec, is_expert_tensor, read_spec
from tests.synthetic_moe import write_synthetic_moe

EMBEDDED = Path(__file__).parents[3] / "examples" / "tiny_moe"
D, F, E = 32, 64, 4


def spec_of(path: Path) -> ModelSpec:
    with GgufFile(path) as file:
        return read_spec(file)


def write(
    path: Path,
    extra: Mapping[str, tuple[int, ...] | int] | None = None,
    *,
    architecture: str = "qwen3moe",
    drop: str = "",
) -> Path:
    """Write a bare two-layer model; layer 0 is dense. `extra` adds or replaces tensors (shapes) and keys (ints)."""
    writer = gguf.GGUFWriter(path, architecture)
    keys = {"block_count": 2, "embedding_length": D, "expert_count": E, "expert_used_count": 2}
    tensors: dict[str, tuple[int, ...]] = {
        "ffn_gate_exps.weight": (E, F, D),
        "ffn_up_exps.weight": (E, F, D),
        "ffn_down_exps.weight": (E, D, F),
    }
    for name, value in (extra or {}).items():
        if isinstance(value, int):
            keys[name] = value
        else:
            tensors[name] = value
    for key, number in keys.items():
        writer.add_uint32(f"{architecture}.{key}" if "." not in key else key, number)
    writer.add_tensor("output.weight", np.zeros((2, D), np.float32))
    for name, shape in tensors.items():
        if name != drop:
            writer.add_tensor(f"blk.1.{name}", np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "block_bytes"), [("model-Q8_0.gguf", 3 * 128 * 256 // 32 * 34), ("model-Q4_K_M.gguf", 59392)]
)
def test_the_embedded_model(name: str, block_bytes: int) -> None:
    spec = spec_of(EMBEDDED / name)
    assert spec.architecture == "qwen2moe"
    assert {str(spec.activation(layer)) for layer in spec.moe_layers} == {"swiglu"}
    assert (spec.n_layers, spec.moe_layers) == (6, (0, 1, 2, 3, 4, 5))
    assert (spec.n_expert, spec.n_expert_used, spec.n_embd, spec.n_ff_exp) == (32, 4, 256, 128)
    assert (spec.n_expert_shared, spec.n_ff_shared) == (1, 256)
    tensors = spec.expert_tensors(1)
    assert [(t.name, t.kind, t.shape) for t in tensors] == [
        ("blk.1.ffn_down_exps.weight", "down", (128, 256, 32)),
        ("blk.1.ffn_gate_exps.weight", "gate", (256, 128, 32)),
        ("blk.1.ffn_up_exps.weight", "up", (256, 128, 32)),
    ]
    assert spec.block_size_bytes(1) == block_bytes == sum(t.expert_size_bytes for t in tensors)
    assert len(spec.all_experts) == 6 * 32
    reader = gguf.GGUFReader(EMBEDDED / name)
    sizes = {t.name: t.n_bytes for t in reader.tensors}
    for layer in spec.moe_layers:
        assert all(t.expert_size_bytes * 32 == sizes[t.name] for t in spec.expert_tensors(layer))


def test_a_synthetic_model_without_a_shared_expert(tmp_path: Path) -> None:
    path = write_synthetic_moe(
        tmp_path / "m.gguf", architecture="qwen3moe", n_embd=64, n_layers=1, n_expert=8, n_ff_exp=32
    )
    spec = spec_of(path)
    assert (spec.architecture, spec.n_expert, spec.n_ff_exp) == ("qwen3moe", 8, 32)
    assert (spec.n_expert_shared, spec.n_ff_shared) == (0, 0)


def test_only_layers_with_experts_are_moe_layers(tmp_path: Path) -> None:
    spec = spec_of(write(tmp_path / "m.gguf"))
    assert (spec.n_layers, spec.moe_layers, spec.n_ff_exp) == (2, (1,), F)
    with pytest.raises(ValueError):
        spec.expert_tensors(0)


def write_dense(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor("output.weight", np.zeros((2, D), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (write_dense, r"no experts \(qwen3\)"),
        (lambda p: write(p, architecture="newmoe"), "newmoe, which has no row in the table .* afmoe, arctic"),
        (lambda p: write(p, {"ffn_up_exps.bias": (E, F)}), r"blk\.1\.ffn_up_exps\.bias: llama.cpp knows no biases"),
        (
            lambda p: write(p, {"ffn_up_exps.scale": (E,)}, architecture="olmoe"),
            r"blk\.1\.ffn_up_exps\.scale: llama.cpp does not apply",
        ),
        (lambda p: write(p, {"ffn_up_exps.scale": (E,)}), r"bad type of blk\.1\.ffn_up_exps\.scale"),
        (
            lambda p: write(p, {"ffn_up_chexps.bias": (E, F)}),
            r"blk\.1\.ffn_up_chexps\.bias, which no known architecture",
        ),
        (lambda p: write(p, {"ffn_sideways_exps.weight": (E, F, D)}), r"blk\.1\.ffn_sideways_exps\.weight, which no"),
        (
            lambda p: write(p, {"ffn_gate_up_exps.weight": (E, 2 * F, D)}),
            r"blk\.1\.ffn_gate_up_exps\.weight: llama.cpp takes gate and up apart",
        ),
        (
            lambda p: write(p, {"ffn_gate_up_exps.weight": (E, 2 * F, D)}, architecture="qwen3next"),
            "expert tensors down, gate, gate_up, up: swiglu takes down, gate_up or down, gate, up",
        ),
        (
            lambda p: write(p, drop="ffn_gate_exps.weight", architecture="gpt-oss"),
            "activation swiglu_oai without a gate is not known",
        ),
        (lambda p: write(p, architecture="nemotron_h"), "activation relu_sqr with a gate is not known"),
        (lambda p: write(p, drop="ffn_up_exps.weight"), "the expert tensors down, gate: swiglu takes"),
        (lambda p: write(p, drop="ffn_down_exps.weight"), r"no blk\.1\.ffn_down_exps\.weight"),
        (lambda p: write(p, {"ffn_up_exps.weight": (E, F, 2 * D)}), r"shape \(64, 64, 4\), expected \(32, 64, 4\)"),
        (lambda p: write(p, {"ffn_up_exps.weight": (F, D)}), "expected 3 dimensions"),
        (lambda p: write(p, {"expert_count": 5}), "expected"),
        (lambda p: write(p, {"nextn_predict_layers": 1}), "only in layers that predict further tokens, from layer 1"),
        (lambda p: write(p, {"expert_used_count": 5}), "n_expert_used out of range"),
        (lambda p: write(p, {"expert_used_count": 0}), "n_expert_used out of range"),
        (lambda p: write(p, {"block_count": 1}), "bad MoE layers"),
        (
            lambda p: write(p, {"expert_feed_forward_length": 63}),
            "63, but blk.1.ffn_down_exps.weight has a width of 64",
        ),
    ],
)
def test_an_unsupported_model_is_refused_by_name(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path / "odd.gguf")
    with pytest.raises(UnsupportedModel, match=message) as caught:
        spec_of(path)
    assert "odd.gguf" in str(caught.value)


def write_keys(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Path:
    """Write a model of D=32, E=4 with these keys, and F32 tensors of these shapes, slowest dimension first."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in ({"embedding_length": D, "expert_count": E, "expert_used_count": 2} | dict(keys)).items():
        add = (
            writer.add_array
            if isinstance(value, list)
            else writer.add_float32
            if isinstance(value, float)
            else writer.add_uint32
        )
        add(f"{architecture}.{key}", value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def layer_of(layer: int, width: int = F, kinds: str = "gate up down") -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (E, width, D), "up": (E, width, D), "down": (E, D, width), "gate_up": (E, 2 * width, D)}
    return {f"blk.{layer}.ffn_{kind}_exps.weight": shapes[kind] for kind in kinds.split()}


def test_width_number_and_activation_may_differ_by_layer(tmp_path: Path) -> None:
    keys = {
        "block_count": 4,
        "expert_feed_forward_length": [0, F, 2 * F, F],
        "expert_used_count": [0, 1, 3, 2],
        "swiglu_clamp_exp": [0.0, 0.0, 7.0, 4.0],
    }
    tensors = layer_of(1) | layer_of(2, 2 * F) | layer_of(3)
    spec = spec_of(write_keys(tmp_path / "m.gguf", "step35", keys, tensors))
    assert (spec.moe_layers, spec.n_ff_exp, spec.n_expert_used) == ((1, 2, 3), 2 * F, 3)
    assert [spec.width(layer) for layer in spec.moe_layers] == [F, 2 * F, F]
    assert [spec.n_used(layer) for layer in spec.moe_layers] == [1, 3, 2]
    assert [str(spec.activation(layer)) for layer in spec.moe_layers] == ["swiglu", "silu_clamp 7.0", "silu_clamp 4.0"]
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_biases_and_scales_are_a_part_of_the_block(tmp_path: Path) -> None:
    more = {f"blk.0.ffn_{kind}_exps.bias": (E, n) for kind, n in (("gate", F), ("up", F), ("down", D))}
    spec = spec_of(write_keys(tmp_path / "m.gguf", "gpt-oss", {"block_count": 1}, layer_of(0) | more))
    assert [t.kind for t in spec.expert_tensors(0)] == ["down.bias", "down", "gate.bias", "gate", "up.bias", "up"]
    assert spec.block_size_bytes(0) == 4 * (3 * D * F + 2 * F + D)
    assert str(spec.activation(0)) == "swiglu_oai 1.702 7.0"
    scales = {f"blk.0.ffn_{kind}_exps.scale": (E,) for kind in ("gate", "up", "down")}
    spec = spec_of(write_keys(tmp_path / "s.gguf", "qwen3moe", {"block_count": 1}, layer_of(0) | scales))
    assert spec.block_size_bytes(0) == 4 * (3 * D * F + 3)
    ignored = {"blk.0.ffn_up_exps.input_scale": (E,)}
    plain = spec_of(write_keys(tmp_path / "i.gguf", "qwen3moe", {"block_count": 1}, layer_of(0) | ignored))
    assert plain.block_size_bytes(0) == 4 * 3 * D * F


def test_layers_that_predict_further_tokens_are_no_moe_layers(tmp_path: Path) -> None:
    keys = {"block_count": 3, "nextn_predict_layers": 1}
    spec = spec_of(write_keys(tmp_path / "m.gguf", "glm4moe", keys, layer_of(1) | layer_of(2)))
    assert (spec.n_layers, spec.moe_layers) == (3, (1,))


def test_a_number_of_another_type_is_refused_by_its_key(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "step35")
    writer.add_uint32("step35.block_count", 1)
    writer.add_uint32("step35.expert_used_count", 2)
    writer.add_string("step35.swiglu_clamp_exp", "seven")
    for name, shape in layer_of(0).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"bad metadata step35\.swiglu_clamp_exp: got type 8, expected numbers"):
        spec_of(tmp_path / "m.gguf")


def test_experts_that_work_on_a_smaller_row_say_so(tmp_path: Path) -> None:
    spec = spec_of(
        write_keys(tmp_path / "m.gguf", "kimi-k3", {"block_count": 1, "embedding_length": 8 * D}, layer_of(0))
    )
    assert spec.n_embd == D
    assert str(spec.activation(0)) == "situ 1.0 0.0"


def test_experts_that_the_model_lacks_are_a_users_mistake(tmp_path: Path) -> None:
    spec = spec_of(write(tmp_path / "m.gguf"))
    spec.require_experts(ExpertSet.of([1], [0, 3]))
    for layers, experts, message in (([0], [1], "layer 0 has no experts"), ([1], [4], "0-3"), ([1], [], "no experts")):
        with pytest.raises(UserError, match=message):
            spec.require_experts(ExpertSet.of(layers, experts))


def test_expert_tensors_are_told_from_routers_and_shared_experts() -> None:
    assert is_expert_tensor("blk.0.ffn_gate_exps.weight")
    assert is_expert_tensor("blk.0.ffn_down_exps.scale")
    for name in (
        "blk.0.ffn_norm_exps.weight",  # arctic's
        "blk.0.ffn_down_chexps.weight",  # grovemoe's second group stays in the backbone
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_up_shexp.weight",
        "blk.0.exp_probs_b.bias",
    ):
        assert not is_expert_tensor(name)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return spec_of(EMBEDDED / "model-Q4_K_M.gguf").to_json()


def test_json_round_trip(plain: dict[str, Any]) -> None:
    spec = ModelSpec.from_json(json.loads(json.dumps(plain)))
    assert spec == spec_of(EMBEDDED / "model-Q4_K_M.gguf")
    assert hash(spec) == hash(dataclasses.replace(spec))


PATHS: list[tuple[Any, ...]] = [
    ("architecture",),
    ("activation",),
    ("n_layers",),
    ("n_expert",),
    ("n_expert_used",),
    ("n_embd",),
    ("n_ff_exp",),
    ("n_ff_shared",),
    ("moe_layers",),
    ("moe_layers", 0),
    ("expert_tensors",),
    ("expert_tensors", 2),
    ("expert_tensors", 2, 1),
    ("expert_tensors", 2, 1, "name"),
    ("expert_tensors", 2, 1, "kind"),
    ("expert_tensors", 2, 1, "ggml_type"),
    ("expert_tensors", 2, 1, "shape"),
    ("expert_tensors", 2, 1, "shape", 0),
]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_json_with_any_wrong_value_is_a_protocol_error(path: tuple[Any, ...], plain: dict[str, Any]) -> None:
    wrong: list[Any] = [
        None,
        True,
        -1,
        1.5,
        MAX_DIM + 1,
        1 << 80,
        "",
        "x" * 100,
        [],
        [[]],
        {},
        float("nan"),
        24,
        ["a"] * 5000,
    ]
    for value in wrong:
        damaged = copy.deepcopy(plain)
        parent = damaged
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = value
        if value == 24 and path in (("n_layers",), ("n_expert_used",), ("n_ff_shared",)):
            continue  # legal there
        with pytest.raises(RemoteProtocolError):
            ModelSpec.from_json(damaged)


def test_json_with_a_missing_or_extra_key_is_a_protocol_error(plain: dict[str, Any]) -> None:
    for key in plain:
        with pytest.raises(RemoteProtocolError):
            ModelSpec.from_json({k: v for k, v in plain.items() if k != key})
    with pytest.raises(RemoteProtocolError):
        ModelSpec.from_json({**plain, "extra": 1})
    others: list[Any] = [None, [], "spec", 3]
    for other in others:
        with pytest.raises(RemoteProtocolError):
            ModelSpec.from_json(other)


def test_json_out_of_bounds_is_a_protocol_error(plain: dict[str, Any]) -> None:
    huge = {**plain, "n_ff_exp": MAX_DIM, "n_embd": MAX_DIM}
    huge["expert_tensors"] = [
        [{**t, "ggml_type": 0, "shape": [MAX_DIM, MAX_DIM, 32]} for t in tensors] for tensors in plain["expert_tensors"]
    ]
    with pytest.raises(RemoteProtocolError, match="takes more than"):
        ModelSpec.from_json(huge)
    for swap in ([1, 0, 2, 3, 4, 5], [0, 0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4]):
        with pytest.raises(RemoteProtocolError):
            ModelSpec.from_json({**plain, "moe_layers": swap})
    reordered = {**plain, "expert_tensors": [tensors[::-1] for tensors in plain["expert_tensors"]]}
    with pytest.raises(RemoteProtocolError, match="name order"):
        ModelSpec.from_json(reordered)
