"""Writes small Mixture-of-Experts GGUF files with random weights, which llama.cpp loads and runs. A test helper."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as GgmlType


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable stand-ins for the 256 byte values, by byte value."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


def write_synthetic_moe(
    path: Path,
    *,
    architecture: str = "qwen2moe",
    n_embd: int = 256,
    n_layers: int = 4,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_expert: int = 32,
    n_expert_used: int = 4,
    n_ff_exp: int = 256,
    n_ff_shared: int = 256,
    n_vocab: int = 512,
    weight_type: GgmlType = GgmlType.Q8_0,
    name: str = "synthetic",
    seed: int = 0,
) -> Path:
    """Write a random model to `path` and return it. qwen2moe has a shared expert, qwen3moe has none.

    Args:
        weight_type: of attention and expert weights; F32, F16 or a type that gguf-py can quantise.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = n_embd // n_head
    writer.add_name(name)
    writer.add_context_length(4096)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(n_ff_exp * n_expert_used)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(n_expert_used)
    writer.add_expert_feed_forward_length(n_ff_exp)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(n_ff_shared)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_alphabet(), "<|eos|>", *(f"<|x{i}|>" for i in range(n_vocab - 257))])
    writer.add_token_types([1] * 256 + [3] * (n_vocab - 256))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)

    def weight(tensor: str, *shape: int, type_: GgmlType = weight_type, scale: float | None = None) -> None:
        values: npt.NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(shape[-1] ** -0.5 if scale is None else scale)
        writer.add_tensor(tensor, gguf.quants.quantize(values, type_), raw_dtype=type_)

    def constant(tensor: str, size: int, value: float) -> None:
        writer.add_tensor(tensor, np.full(size, value, np.float32))

    weight("token_embd.weight", n_vocab, n_embd, type_=GgmlType.F32, scale=1.0)
    constant("output_norm.weight", n_embd, 1)
    weight("output.weight", n_vocab, n_embd, type_=GgmlType.F32)
    for layer in range(n_layers):
        block = f"blk.{layer}."
        constant(block + "attn_norm.weight", n_embd, 1)
        constant(block + "ffn_norm.weight", n_embd, 1)
        for letter, size in (("q", n_embd), ("k", n_head_kv * head_dim), ("v", n_head_kv * head_dim)):
            weight(block + f"attn_{letter}.weight", size, n_embd)
            if architecture == "qwen2moe":
                constant(block + f"attn_{letter}.bias", size, 0)
            elif letter != "v":
                constant(block + f"attn_{letter}_norm.weight", head_dim, 1)
        weight(block + "attn_output.weight", n_embd, n_embd)
        weight(block + "ffn_gate_inp.weight", n_expert, n_embd, type_=GgmlType.F32)
        weight(block + "ffn_gate_exps.weight", n_expert, n_ff_exp, n_embd)
        weight(block + "ffn_up_exps.weight", n_expert, n_ff_exp, n_embd)
        weight(block + "ffn_down_exps.weight", n_expert, n_embd, n_ff_exp)
        if architecture == "qwen2moe":
            weight(block + "ffn_gate_inp_shexp.weight", n_embd, type_=GgmlType.F32)
            weight(block + "ffn_gate_shexp.weight", n_ff_shared, n_embd)
            weight(block + "ffn_up_shexp.weight", n_ff_shared, n_embd)
            weight(block + "ffn_down_shexp.weight", n_embd, n_ff_shared)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
