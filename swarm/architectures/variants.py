"""Which files of each architecture are compared with stock llama.cpp: types as releases use them, and forms of experts."""

from __future__ import annotations

from swarm.architectures.generator import Variant
from swarm.architectures.recipes import N_EMBD, N_FF_EXP, Recipe
from swarm.model.expert_kinds import EXPERT_KINDS

TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q6_K",
    "Q5_K",
    "Q4_K",
    "Q3_K",
    "Q2_K",
    "Q4_0",
    "Q5_1",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
)
"""Every type is tried with every architecture: releases differ, and a type costs a fifth of a second."""

_BY_LAYER: dict[str, tuple[Variant, ...]] = {
    "nemotron_h_moe": (
        Variant(
            name="experts of other widths and numbers in each layer",
            keys=(
                ("block_count", 4),
                ("feed_forward_length", [0, 0, 512, 512]),
                ("attention.head_count", [4, 0, 0, 0]),
                ("attention.head_count_kv", [4, 0, 0, 0]),
                ("expert_feed_forward_length", [0, 0, N_FF_EXP, 2 * N_FF_EXP]),
                ("expert_used_count", [0, 0, 2, 3]),
            ),
        ),
        Variant(name="a latent size before the experts", keys=(("moe_latent_size", N_EMBD // 2),)),
    ),
    "kimi-k3": (Variant(name="a latent size before the experts", keys=(("expert_latent_length", N_EMBD // 2),)),),
    "llama4": (Variant(name="one expert of a row", keys=(("expert_used_count", 1),)),),
    "deepseek2": (
        Variant(
            name="groups of experts",
            keys=(("expert_group_count", 4), ("expert_group_used_count", 2)),
        ),
        Variant(name="a layer that predicts further tokens", keys=(("block_count", 3), ("nextn_predict_layers", 1))),
    ),
    "glm4moe": (
        Variant(name="a layer that predicts further tokens", keys=(("block_count", 3), ("nextn_predict_layers", 1))),
    ),
    "qwen3next": (
        Variant(name="a layer that predicts further tokens", keys=(("block_count", 3), ("nextn_predict_layers", 1))),
    ),
}


def variants_of(recipe: Recipe) -> tuple[Variant, ...]:
    """Return what to make of a recipe; the first is the plain one."""
    kind = EXPERT_KINDS.get(recipe.architecture)
    variants = [Variant(name=name, expert_type=name) for name in TYPES]
    variants.append(Variant(name="Q4_K, down Q6_K", expert_type="Q4_K", down_type="Q6_K"))
    if kind is not None and kind.is_merged:
        variants.append(Variant(name="gate and up apart", splits_gate_up=True))
    if kind is not None and kind.has_scales:
        variants.append(Variant(name="scales", has_scales=True, splits_gate_up=True))
    return (*variants, *_BY_LAYER.get(recipe.architecture, ()))
