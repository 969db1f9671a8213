"""The sizes of a model that its costs depend on, from a list of dimensions or from a GGUF file's spec.

Knows nothing of peers, paths or devices. Axis letters: D = n_embd, E = n_expert, K = n_expert_used, F = n_ff_exp.

    d=4096,E=8,k=2,ff=14336,b=2[,bw=0.56][,layers=32][,shared=0][,vocab=0][,attn=4]

    d, E, k   required
    ff        expert width; 4 d if absent
    b         bytes of one activation value as the model logically moves it (2: bf16)
    bw        bytes of one weight, on disk and in memory; b if absent
    layers    MoE layers; 1 if absent
    shared    width of the shared expert, all of them together
    vocab     rows of the output head
    attn      attention's weights of a layer, in multiples of d x d (4: query, key, value, output of equal size)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from swarm.errors import UserError
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import MAX_DIM, MAX_EXPERTS, MAX_LAYERS, ModelSpec, is_expert_tensor, read_spec

N = TypeVar("N", int, float)

MAX_VOCAB = 1 << 24  # guessed: the largest published vocabularies have 256 thousand entries
MAX_BYTES = 16.0  # bytes of a value or a weight: nothing wider than complex128
MATRICES = 3  # of one expert: gate, up, down; each D x F
Q8_0 = 8  # ggml's number; assumed of a model that is only a list of dimensions
ENGINE_VALUE_BYTES = 4.0  # llama.cpp's hidden states are f32
TABLE_NAME = "token_embd.weight"  # of which a step reads a row per token, unless it is the output head too


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one model.

    Attributes:
        n_layers: MoE layers only: those that can cost a round trip.
        bytes_per_value: b, of one value of a hidden state.
        bytes_per_weight: b_w, the mean over the routed experts' weights.
        expert_bytes: of one expert of one layer, the mean over layers.
        backbone_bytes: everything that one step reads but routed experts: attention, shared experts, output head.
        ggml_types: of the weights that a row meets first (gate, up): they say what `q8` is on the wire.
    """

    name: str
    n_embd: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_layers: int
    bytes_per_value: float
    bytes_per_weight: float
    expert_bytes: float
    backbone_bytes: float
    ggml_types: tuple[int, ...] = (Q8_0,)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n_embd", 1, MAX_DIM),
            ("n_expert", 1, MAX_EXPERTS),
            ("n_expert_used", 1, self.n_expert),
            ("n_ff_exp", 1, MAX_DIM),
            ("n_layers", 1, MAX_LAYERS),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} out of range: got {getattr(self, name)}, expected {low} to {high}")
        if not (0 < self.bytes_per_value <= MAX_BYTES and 0 < self.bytes_per_weight <= MAX_BYTES):
            raise ValueError(
                f"bytes of a value or weight out of range: got {self.bytes_per_value} and {self.bytes_per_weight}, "
                f"expected above 0 and at most {MAX_BYTES:g}"
            )

    @property
    def layer_bytes(self) -> float:
        """All experts of one layer."""
        return self.n_expert * self.expert_bytes

    @property
    def experts_bytes(self) -> float:
        """All experts of all layers."""
        return self.n_layers * self.layer_bytes

    @property
    def flops_per_assignment(self) -> float:
        """Floating-point operations of one row through one expert: a product and a sum for each weight."""
        return 2.0 * MATRICES * self.n_embd * self.n_ff_exp


def parse_shape(text: str) -> ModelShape:
    """Return the shape of a comma list of dimensions, as in the module's table. Raises UserError."""
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        known = _KEYS.get(key.strip().lower())
        if not equals or known is None:
            raise UserError(f"unknown dimension: got {part!r}, expected KEY=NUMBER with one of {', '.join(_SPELLED)}")
        if known in given:
            raise UserError(f"dimension given twice: {key.strip()}")
        given[known] = value.strip()
    missing = [_SPELLED_BY_KEY[key] for key in ("d", "e", "k") if key not in given]
    if missing:
        raise UserError(f"dimension missing: {', '.join(missing)} in {text!r}; try d=4096,E=8,k=2,ff=14336,b=2")

    def whole(key: str, default: int, high: int) -> int:
        return _number(int, key, given.get(key), default, high)

    def real(key: str, default: float) -> float:
        return _number(float, key, given.get(key), default, MAX_BYTES)

    n_embd = whole("d", 0, MAX_DIM)
    n_expert = whole("e", 0, MAX_EXPERTS)
    n_ff_exp = whole("ff", 4 * n_embd, MAX_DIM)
    n_layers = whole("layers", 1, MAX_LAYERS)
    bytes_per_value = real("b", 2.0)
    bytes_per_weight = real("bw", bytes_per_value)
    n_ff_shared = whole("shared", 0, MAX_DIM)
    n_vocab = whole("vocab", 0, MAX_VOCAB)
    attention = real("attn", 4.0) * n_embd * n_embd
    n_backbone = n_layers * (attention + MATRICES * n_embd * n_ff_shared) + n_vocab * n_embd
    try:
        return ModelShape(
            name=text,
            n_embd=n_embd,
            n_expert=n_expert,
            n_expert_used=whole("k", 0, MAX_EXPERTS),
            n_ff_exp=n_ff_exp,
            n_layers=n_layers,
            bytes_per_value=bytes_per_value,
            bytes_per_weight=bytes_per_weight,
            expert_bytes=MATRICES * n_embd * n_ff_exp * bytes_per_weight,
            backbone_bytes=n_backbone * bytes_per_weight,
        )
    except ValueError as error:
        raise UserError(f"impossible dimensions in {text!r}: {error}") from error


def shape_of_model(spec: ModelSpec, *, name: str, backbone_bytes: float) -> ModelShape:
    """Return the shape of a GGUF file; `backbone_bytes` is the size of all its tensors that are read at every step."""
    experts_bytes = spec.n_expert * sum(spec.block_size_bytes(layer) for layer in spec.moe_layers)
    expert_bytes = experts_bytes / (spec.n_expert * len(spec.moe_layers))
    tensors = [tensor for layer in spec.tensors_by_layer for tensor in layer]
    return ModelShape(
        name=name,
        n_embd=spec.n_embd,
        n_expert=spec.n_expert,
        n_expert_used=spec.n_expert_used,
        n_ff_exp=spec.n_ff_exp,
        n_layers=len(spec.moe_layers),
        bytes_per_value=ENGINE_VALUE_BYTES,
        bytes_per_weight=expert_bytes / (MATRICES * spec.n_embd * spec.n_ff_exp),
        expert_bytes=expert_bytes,
        backbone_bytes=backbone_bytes,
        ggml_types=tuple(sorted({each.ggml_type for each in tensors if each.kind != "down"})),
    )


def shape_of_file(path: Path) -> ModelShape:
    """Return the shape of a whole GGUF file. Raises UserError."""
    with GgufFile(path) as file:
        spec = read_spec(file)
        has_head = "output.weight" in file.tensors  # else the table is the output head, and read whole
        backbone_bytes = sum(
            tensor.size_bytes
            for name, tensor in file.tensors.items()
            if not is_expert_tensor(name) and not (has_head and name == TABLE_NAME)
        )
        return shape_of_model(spec, name=path.name, backbone_bytes=backbone_bytes)


_SPELLED = ("d", "E", "k", "ff", "b", "bw", "layers", "shared", "vocab", "attn")
_KEYS = {key.lower(): key.lower() for key in _SPELLED}
_SPELLED_BY_KEY = {key.lower(): key for key in _SPELLED}


def _number(kind: Callable[[str], N], key: str, text: str | None, default: N, high: N) -> N:
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError as error:
        raise UserError(f"{_SPELLED_BY_KEY[key]} is no number: got {text!r}") from error
    if not 0 <= value <= high:
        raise UserError(f"{_SPELLED_BY_KEY[key]} out of range: got {text}, expected 0 to {high}")
    return value
