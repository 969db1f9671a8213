"""The table of Mixture-of-Experts architectures: how llama.cpp computes their routed experts, and how a stub is cut.

Nothing outside this table asks for an architecture's name: what a model needs is read from its row and its tensors, once, in
`swarm.model.spec`. Each row was compared with stock llama.cpp, bit for bit (docs/models.md); no row without that. Facts, not
code, were read from llama.cpp's `build_moe_ffn` and its callers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Self

WIDTH = "expert_feed_forward_length"
DENSE_WIDTH = "feed_forward_length"
SHARED_WIDTH = "expert_shared_feed_forward_length"
SHARED_COUNT = "expert_shared_count"

OUTPUT_NODE = "ffn_moe_out"  # what llama.cpp's graphs call the routed experts' output

SILU, GELU, RELU, RELU_SQR = "silu", "gelu", "relu", "relu_sqr"
SWIGLU_OAI, SITU = "swiglu_oai", "situ"

OAI_ALPHA, OAI_LIMIT = 1.702, 7.0  # constants of llama.cpp's `build_moe_ffn`
MIN_LIMIT = 1e-6  # a clamp below this is none, says llama.cpp


class Shared(enum.Enum):
    """Where llama.cpp takes the width of shared experts from, which a stub must leave as it was."""

    NONE = "nowhere: there is none, or its width hangs on nothing that a stub changes"
    WIDTH = "expert_shared_feed_forward_length"
    COUNT = "the experts' width times expert_shared_count"
    WIDTH_BY_COUNT = "expert_shared_feed_forward_length times expert_shared_count"


class Stub(enum.Enum):
    """How a backbone file stands in for routed experts."""

    NARROW = "tensors of width 1"
    SPARSE = "tensors of full width, as holes of the file: the width is also that of tensors that stay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKind:
    """One row.

    Attributes:
        activation: between the up/gate and the down product, by llama.cpp's name; which form of it, the tensors decide.
        is_merged: the loader also takes gate and up in one tensor.
        has_biases: the loader takes, and the graph adds, a bias for each product.
        has_scales: the graph multiplies each product with a number for each expert, where the file has such numbers.
        clamps_fused: where metadata sets a limit, gate and up are clamped before the activation, by one operation; else after it.
        width: the metadata key that sizes the experts.
        shared: see there.
        stub: see there.
        output_node: the name of the routed experts' output in the graph.
    """

    activation: str = SILU
    is_merged: bool = False
    has_biases: bool = False
    has_scales: bool = False
    clamps: bool = False
    clamps_fused: bool = False
    width: str = WIDTH
    shared: Shared = Shared.NONE
    stub: Stub = Stub.NARROW
    output_node: str = OUTPUT_NODE

    def stub_keys(self, architecture: str) -> frozenset[str]:
        """Return the metadata keys in which a stub may differ from the original."""
        keys = {self.width}
        if self.shared in (Shared.WIDTH, Shared.WIDTH_BY_COUNT):
            keys.add(SHARED_WIDTH)
        if self.shared is Shared.COUNT:
            keys.add(SHARED_COUNT)
        if self.stub is Stub.SPARSE:
            return frozenset()
        return frozenset(f"{architecture}.{key}" for key in keys)


_BY_KEY = ExpertKind(shared=Shared.WIDTH)
_BY_COUNT = ExpertKind(shared=Shared.COUNT)
_MERGED_BY_KEY = ExpertKind(is_merged=True, has_scales=True, shared=Shared.WIDTH)

EXPERT_KINDS: dict[str, ExpertKind] = {
    "afmoe": _BY_COUNT,
    "arctic": ExpertKind(width=DENSE_WIDTH),
    "bailingmoe": _BY_COUNT,
    "bailingmoe2": ExpertKind(shared=Shared.WIDTH_BY_COUNT),
    "bailingmoe3": ExpertKind(clamps=True, shared=Shared.WIDTH),
    "cohere2moe": _MERGED_BY_KEY,
    "dbrx": ExpertKind(width=DENSE_WIDTH),
    "deepseek": _BY_COUNT,
    "deepseek2": ExpertKind(is_merged=True, shared=Shared.COUNT),
    "deepseek2-ocr": ExpertKind(is_merged=True, shared=Shared.COUNT),
    "deepseek32": ExpertKind(has_scales=True, shared=Shared.COUNT),
    "deepseek4": ExpertKind(clamps=True, clamps_fused=True, shared=Shared.COUNT),
    "dots1": _BY_COUNT,
    "dots3note": ExpertKind(has_scales=True, shared=Shared.COUNT),
    "ernie4_5-moe": _BY_KEY,
    "exaone-moe": _BY_KEY,
    "gemma4": ExpertKind(activation=GELU, is_merged=True, has_scales=True),
    "glm-dsa": ExpertKind(has_scales=True, shared=Shared.COUNT),
    "glm4moe": _BY_COUNT,
    "glm5-next": ExpertKind(clamps=True, clamps_fused=True, shared=Shared.COUNT),
    "gpt-oss": ExpertKind(activation=SWIGLU_OAI, has_biases=True),
    "granite": ExpertKind(width=DENSE_WIDTH, shared=Shared.WIDTH),
    "granite_swa": ExpertKind(is_merged=True, width=DENSE_WIDTH, shared=Shared.WIDTH),
    "granitehybrid": ExpertKind(width=DENSE_WIDTH, shared=Shared.WIDTH),
    "granitemoe": ExpertKind(width=DENSE_WIDTH, shared=Shared.WIDTH),
    "grok": ExpertKind(activation=GELU),
    "grovemoe": ExpertKind(),
    "hunyuan-moe": ExpertKind(width=DENSE_WIDTH, shared=Shared.WIDTH),
    "hy_v3": _MERGED_BY_KEY,
    "hy_v4": ExpertKind(clamps=True, clamps_fused=True, shared=Shared.COUNT),
    "jamba": ExpertKind(width=DENSE_WIDTH, stub=Stub.SPARSE),
    "kimi-k3": ExpertKind(activation=SITU, shared=Shared.COUNT),
    "kimi-linear": _BY_COUNT,
    "laguna": _BY_KEY,
    "lfm2moe": ExpertKind(),
    "llada-moe": ExpertKind(),
    "llama": ExpertKind(has_scales=True, width=DENSE_WIDTH, shared=Shared.WIDTH),
    "llama4": ExpertKind(stub=Stub.SPARSE),
    "maple": ExpertKind(clamps=True, clamps_fused=True),
    "mellum": ExpertKind(has_scales=True),
    "mimo2": ExpertKind(),
    "minicpm": ExpertKind(width=DENSE_WIDTH, shared=Shared.WIDTH),
    "minimax-01": ExpertKind(width=DENSE_WIDTH),
    "minimax-m2": ExpertKind(width=DENSE_WIDTH),
    "minimax-m3": ExpertKind(activation=SWIGLU_OAI, shared=Shared.COUNT),
    "mistral3": ExpertKind(has_scales=True, width=DENSE_WIDTH, shared=Shared.WIDTH),
    "mistral4": ExpertKind(is_merged=True, shared=Shared.COUNT),
    "nemotron_h": ExpertKind(activation=RELU_SQR, has_scales=True, shared=Shared.WIDTH),
    "nemotron_h_moe": ExpertKind(activation=RELU_SQR, has_scales=True, shared=Shared.WIDTH),
    "olmoe": ExpertKind(width=DENSE_WIDTH),
    "phimoe": ExpertKind(width=DENSE_WIDTH),
    "qwen2moe": _BY_KEY,
    "qwen35moe": _MERGED_BY_KEY,
    "qwen3moe": ExpertKind(has_scales=True, shared=Shared.WIDTH),
    "qwen3next": _MERGED_BY_KEY,
    "qwen3vlmoe": ExpertKind(),
    "qwen4exp": _MERGED_BY_KEY,
    "rnd1": ExpertKind(),
    "smallthinker": ExpertKind(activation=RELU, output_node="ffn_out"),
    "step35": ExpertKind(clamps=True, shared=Shared.WIDTH),
}


_N_NUMBERS = {
    "swiglu": 0,
    "silu": 0,
    "geglu": 0,
    "gelu": 0,
    "reglu": 0,
    "relu": 0,
    "relu_sqr": 0,
    "swiglu_clamp": 1,
    "silu_clamp": 1,
    "swiglu_oai": 2,
    "situ": 2,
}
GATED = frozenset({"swiglu", "geglu", "reglu", "swiglu_clamp", "silu_clamp", "swiglu_oai", "situ"})


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between the up/gate and the down product. Written as its name and numbers: `swiglu`, `swiglu_oai 1.702 7.0`.

    With gate g and up u, by name:

        swiglu, geglu, reglu    silu(g) u, gelu(g) u, relu(g) u
        silu, gelu, relu        of u alone: there is no gate
        relu_sqr                relu(u)^2
        swiglu_clamp L          silu(min(g, L)) clamp(u, -L, L)
        silu_clamp L            min(silu(g), L) clamp(u, -L, L)
        swiglu_oai A L          h sigmoid(A h) (1 + clamp(u, -L, L)) with h = min(g, L)
        situ B C                B tanh(g/B) sigmoid(g) times C tanh(u/C), or u where C is 0
    """

    name: str
    numbers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        expected = _N_NUMBERS.get(self.name)
        if expected is None:
            raise ValueError(f"unknown activation: got {self.name[:40]!r}, expected {', '.join(_N_NUMBERS)}")
        if len(self.numbers) != expected:
            raise ValueError(f"activation {self.name} takes {expected} numbers: got {len(self.numbers)}")
        if not all(0 <= number < 1e30 for number in self.numbers):  # NaN fails too
            raise ValueError(f"bad number of activation {self.name}: got {self.numbers}")
        if 0.0 in self.numbers[: 1 if self.name == "situ" else None]:
            raise ValueError(f"bad number of activation {self.name}: got {self.numbers}, expected none that is 0")

    @property
    def is_gated(self) -> bool:
        """Whether there is a gate product."""
        return self.name in GATED

    def __str__(self) -> str:
        return " ".join((self.name, *map(repr, self.numbers)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what `str` wrote; raises ValueError for anything else."""
        name, *numbers = text.split(" ")
        activation = cls(name, tuple(float(number) for number in numbers))
        if str(activation) != text:
            raise ValueError(f"activation is not in canonical form: got {text[:64]!r}")
        return activation


def activation_of(
    kind: ExpertKind, *, is_gated: bool, is_split: bool, limit: float, situ: tuple[float, float]
) -> Activation:
    """Return a layer's activation.

    Args:
        is_gated: the layer has a gate, alone or merged with up.
        is_split: the gate is a tensor of its own; a limit counts only then.
        limit: the layer's `swiglu_clamp_exp`, 0 for none.
        situ: the model's beta and linear beta.

    Raises:
        ValueError: the architecture's activation takes a gate and there is none, or the other way round.
    """
    gated = {SILU: "swiglu", GELU: "geglu", RELU: "reglu"}
    if kind.activation == SWIGLU_OAI and is_gated:
        return Activation(SWIGLU_OAI, (OAI_ALPHA, OAI_LIMIT))
    if kind.activation == SITU and is_gated:
        return Activation(SITU, situ)
    if kind.activation == RELU_SQR and not is_gated:
        return Activation(RELU_SQR)
    if kind.activation in gated:
        if not is_gated:
            return Activation(kind.activation)
        if kind.activation == SILU and kind.clamps and is_split and limit > MIN_LIMIT:
            return Activation("swiglu_clamp" if kind.clamps_fused else "silu_clamp", (limit,))
        return Activation(gated[kind.activation])
    raise ValueError(f"activation {kind.activation} {'with' if is_gated else 'without'} a gate is not known")
