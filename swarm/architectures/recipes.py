"""What a small model of each Mixture-of-Experts architecture says of itself: GGUF metadata, as data.

One broad set of keys serves nearly all; an architecture's recipe adds or replaces a few. llama.cpp ignores keys that it does not
ask for. The facts (which key an architecture needs, and in which form) were read from llama.cpp's loaders and its own
architecture test. Weights, types and files are made in `swarm.architectures.generator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]
"""Written as bool, u32, f32, string, and arrays of the last three; a list of `Wide` as u64."""


class Wide(int):
    """A number that llama.cpp wants as u64."""


N_VOCAB = 128
N_CTX = 512
N_EMBD = 256  # one block of the K-quants
N_HEAD = 4
N_FF = 512  # of dense layers
N_FF_EXP = 256  # of routed experts
N_EXPERT = 8
N_EXPERT_USED = 2

SIGMOID, SQRT_SOFTPLUS = 2, 4  # of enum llama_expert_gating_func_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to describe one small model.

    Attributes:
        architecture: llama.cpp's name.
        source: the file of llama.cpp that calls `build_moe_ffn` for it, below src/models; some serve several architectures.
        keys: metadata beyond the broad set, without the architecture's prefix.
        left_out: keys of the broad set that it must not have.
        why_not: why no file can be made, or none that can be compared; empty: it can.
    """

    architecture: str
    source: str
    n_layers: int = 2
    keys: Mapping[str, Value] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    why_not: str = ""


def metadata(recipe: Recipe, **replaced: Value) -> dict[str, Value]:
    """Return the metadata of a small model, in file order."""
    keys: dict[str, Value] = {**_broad(recipe), **recipe.keys, **replaced}
    plain = {key: value for key, value in keys.items() if key not in recipe.left_out}
    return {
        "general.architecture": recipe.architecture,
        "general.name": f"small random {recipe.architecture}",
        **{f"{recipe.architecture}.{key}": value for key, value in plain.items()},
        "tokenizer.ggml.model": "test",  # llama.cpp's own dummy
        "tokenizer.ggml.tokens": [f"tok_{i}" for i in range(N_VOCAB)],
        "tokenizer.ggml.scores": [0.0] * N_VOCAB,
    }


def _broad(recipe: Recipe) -> dict[str, Value]:
    n_layers = recipe.n_layers
    head = N_EMBD // N_HEAD
    return {
        "vocab_size": N_VOCAB,
        "context_length": N_CTX,
        "embedding_length": N_EMBD,
        "features_length": N_EMBD,
        "block_count": n_layers,
        "leading_dense_block_count": 1,
        "feed_forward_length": N_FF,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "full_attention_interval": 2,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD,
        "attention.max_alibi_bias": 8.0,
        "attention.clamp_kqv": 1.0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 512,
        "attention.sliding_window": 64,
        "attention.sliding_window_pattern": 2,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 131_072,  # everything: a near-tie in the indexer would hide differences elsewhere
        "attention.indexer.block_size": 4,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.local_blocks": 1,
        "rope.dimension_sections": [head // 4] * 4,
        "expert_feed_forward_length": N_FF_EXP,
        "expert_shared_feed_forward_length": 2 * N_FF_EXP,
        "expert_latent_length": N_EMBD,
        "interleave_moe_layer_step": 2,
        "expert_count": N_EXPERT,
        "expert_used_count": N_EXPERT_USED,
        "expert_shared_count": 1,
        "expert_gating_func": SIGMOID,
        "expert_group_scale": 0.5,
        "experts_per_group": 2,
        "ssm.inner_size": 2 * N_EMBD,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.time_step_rank": N_HEAD,
        "ssm.group_count": 2,
        "kda.head_dim": 128,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "shortconv.l_cache": 3,
        "residual_scale": 1.0,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
    }


def _latent_attention(**more: Value) -> dict[str, Value]:
    """Return the keys of multi-head latent attention, one head."""
    return {
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "rope.dimension_count": 64,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "attention.q_lora_rank": 512,
        **more,
    }


def _alternating(n_layers: int) -> list[int]:
    return [layer % 2 for layer in range(n_layers)]


def _heads(n_layers: int, n_head: int = N_HEAD) -> list[int]:
    """Return heads by layer: layer 1 is recurrent, so it has none."""
    return [0 if layer == 1 else n_head for layer in range(n_layers)]


_PATTERN: dict[str, Value] = {"attention.sliding_window_pattern": _alternating(2)}
_HYPER: dict[str, Value] = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
    "hyper_connection.magnitude": 2.0,
}
_HYBRID: dict[str, Value] = {"attention.head_count": _heads(2), "attention.head_count_kv": _heads(2)}
_N_PLE_HEADS = 4
_PLE: dict[str, Value] = {
    "attention.compress_ratios": [4, 4],
    "ple.layers": [0],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 2,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 0,
    "embedding_length_per_layer_input": N_EMBD // _N_PLE_HEADS,
    "ple.layer_multipliers": [Wide(1), Wide(3), Wide(5)],
    "ple.head_offsets": [Wide(head * N_VOCAB) for head in range(_N_PLE_HEADS)],
    "ple.head_vocab_sizes": [Wide(N_VOCAB)] * _N_PLE_HEADS,
}

RECIPES: tuple[Recipe, ...] = (
    Recipe(architecture="afmoe", source="afmoe"),
    Recipe(architecture="arctic", source="arctic"),
    Recipe(architecture="bailingmoe", source="bailingmoe"),
    Recipe(architecture="bailingmoe2", source="bailingmoe2"),
    Recipe(
        architecture="bailingmoe3",
        source="bailingmoe3",
        keys={
            **_latent_attention(),
            "attention.head_count": _heads(2, 1),
            "attention.head_count_kv": _heads(2, 1),
            "rope.dimension_sections": [8, 12, 12, 0],
            "swiglu_clamp_exp": [0.0, 4.0],
            "swiglu_clamp_shexp": [0.0, 5.0],
        },
        left_out=frozenset({"kda.safe_gate"}),
    ),
    Recipe(
        architecture="nomic-bert-moe",
        source="bert",
        why_not="an embedding model: it has no logits to compare, and swarm serves text",
    ),
    Recipe(architecture="cohere2moe", source="cohere2moe", keys=_PATTERN),
    Recipe(architecture="dbrx", source="dbrx"),
    Recipe(architecture="deepseek", source="deepseek"),
    Recipe(architecture="deepseek2", source="deepseek2", keys=_latent_attention()),
    Recipe(architecture="deepseek2-ocr", source="deepseek"),
    Recipe(architecture="deepseek32", source="deepseek32", keys=_latent_attention()),
    Recipe(
        architecture="deepseek4",
        source="deepseek4",
        n_layers=4,
        keys={
            **_HYPER,
            "embedding_length": 512,
            "attention.head_count": 8,
            "attention.head_count_kv": 1,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.dimension_count": 32,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": [0, 0, 4, 128],
            "attention.compress_rope_freq_base": 160_000.0,
            "hash_layer_count": 0,
            "swiglu_clamp_exp": 10.0,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "expert_gating_func": SQRT_SOFTPLUS,
        },
    ),
    Recipe(
        architecture="dflash",
        source="dflash",
        why_not="a draft model: it runs only beside the model it drafts for, and has no logits of its own",
    ),
    Recipe(architecture="dots1", source="dots1"),
    Recipe(
        architecture="dots3note",
        source="dots3note",
        keys={
            **_latent_attention(),
            **_PATTERN,
            "attention.kv_lora_rank_swa": 512,
            "attention.key_length_swa": 576,
            "attention.value_length_swa": 512,
            "attention.key_length_mla_swa": 192,
            "attention.value_length_mla_swa": 128,
            "rope.freq_base_swa": 10_000.0,
            "attention.indexer.types": [1, 0],
        },
    ),
    Recipe(architecture="ernie4_5-moe", source="ernie4-5-moe"),
    Recipe(architecture="exaone-moe", source="exaone-moe"),
    Recipe(
        architecture="gemma4",
        source="gemma4",
        n_layers=6,
        keys={
            "embedding_length_per_layer_input": 64,
            "attention.shared_kv_layers": 0,
            "attention.key_length_swa": 64,
            "attention.value_length_swa": 64,
            "rope.freq_base_swa": 10_000.0,
            "attention.sliding_window_pattern": [1, 1, 1, 1, 1, 0],
        },
    ),
    Recipe(architecture="glm-dsa", source="glm-dsa", keys=_latent_attention()),
    Recipe(architecture="glm4moe", source="glm4-moe"),
    Recipe(
        architecture="glm5-next",
        source="glm5-next",
        keys={
            **_latent_attention(),
            **_HYPER,
            **_PLE,
            "attention.key_length": 512,
            "rope.dimension_count": 0,
            "attention.head_count_kv": _heads(2, 1),
        },
    ),
    Recipe(architecture="granitehybrid", source="granite-hybrid", keys=_HYBRID),
    Recipe(architecture="granite", source="granite"),
    Recipe(architecture="granite_swa", source="granite-swa", keys=_PATTERN),
    Recipe(architecture="granitemoe", source="granite"),
    Recipe(architecture="grok", source="grok"),
    Recipe(architecture="grovemoe", source="grovemoe", keys={"expert_chunk_feed_forward_length": 64}),
    Recipe(architecture="hunyuan-moe", source="hunyuan-moe"),
    Recipe(architecture="hy_v3", source="hy-v3"),
    Recipe(
        architecture="hy_v4",
        source="hy-v4",
        keys={
            **_latent_attention(),
            **_HYPER,
            "swiglu_clamp_exp": 10.0,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "attention.indexer.types": [1, 0],
        },
    ),
    Recipe(architecture="jamba", source="jamba", keys=_HYBRID),
    Recipe(
        architecture="kimi-k3",
        source="kimi-k3",
        keys={
            **_latent_attention(),
            "attention.head_count": _heads(2, 1),
            "attention.head_count_kv": _heads(2, 1),
            "expert_latent_length": N_EMBD,
        },
    ),
    Recipe(
        architecture="kimi-linear",
        source="kimi-linear",
        keys={
            **_latent_attention(),
            "attention.head_count": _heads(2, 1),
            "attention.head_count_kv": _heads(2, 1),
        },
    ),
    Recipe(architecture="laguna", source="laguna", keys=_PATTERN),
    Recipe(architecture="lfm2moe", source="lfm2", keys=_HYBRID),
    Recipe(architecture="llada-moe", source="llada-moe"),
    Recipe(architecture="llama", source="llama"),
    Recipe(architecture="llama4", source="llama4", n_layers=4),
    Recipe(architecture="maple", source="maple", keys={**_PATTERN, "swiglu_clamp_exp": 7.0}),
    Recipe(architecture="mellum", source="mellum"),
    Recipe(architecture="mimo2", source="mimo2", keys=_PATTERN),
    Recipe(architecture="minicpm", source="granite"),
    Recipe(architecture="minimax-01", source="minimax-01"),
    Recipe(architecture="minimax-m2", source="minimax-m2"),
    Recipe(
        architecture="minimax-m3",
        source="minimax-m3",
        keys={"rope.dimension_count": 64, "attention.indexer.head_count": N_HEAD},
    ),
    Recipe(architecture="mistral3", source="mistral3"),
    Recipe(architecture="mistral4", source="deepseek2", keys=_latent_attention()),
    Recipe(
        architecture="nemotron_h",
        source="nemotron-h",
        n_layers=3,
        keys={
            "feed_forward_length": [0, 0, N_FF],
            "attention.head_count": _heads(3),
            "attention.head_count_kv": _heads(3),
        },
    ),
    Recipe(
        architecture="nemotron_h_moe",
        source="nemotron-h-moe",
        n_layers=3,
        keys={
            "feed_forward_length": [0, 0, N_FF],
            "attention.head_count": _heads(3),
            "attention.head_count_kv": _heads(3),
        },
    ),
    Recipe(architecture="olmoe", source="olmoe"),
    Recipe(architecture="gpt-oss", source="openai-moe"),
    Recipe(architecture="phimoe", source="phi3"),
    Recipe(architecture="qwen2moe", source="qwen2moe"),
    Recipe(architecture="qwen35moe", source="qwen35moe", keys={"ssm.inner_size": 256, "ssm.time_step_rank": 2}),
    Recipe(architecture="qwen3moe", source="qwen3moe"),
    Recipe(architecture="qwen3next", source="qwen3next", keys={"ssm.inner_size": 256, "ssm.time_step_rank": 2}),
    Recipe(architecture="qwen3vlmoe", source="qwen3vlmoe"),
    Recipe(
        architecture="qwen4exp",
        source="qwen4exp",
        keys={
            **_HYPER,
            **_PLE,
            "ssm.inner_size": 256,
            "ssm.time_step_rank": 2,
            "attention.indexer.key_length": N_EMBD // N_HEAD,
        },
    ),
    Recipe(architecture="rnd1", source="rnd1"),
    Recipe(architecture="smallthinker", source="smallthinker"),
    Recipe(architecture="step35", source="step35", keys={**_PATTERN, "swiglu_clamp_exp": [0.0, 4.0]}),
)
