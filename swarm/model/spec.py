"""What swarm must know of a Mixture-of-Experts model: sizes, activation, and the expert tensors of each layer.

A *block* is the unit that travels and is hashed: the bytes of one (layer, expert), its planes of the layer's
expert tensors concatenated in tensor name order. Axis letters: D = n_embd, F = n_ff_exp, E = n_expert, K = n_expert_used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

import gguf

from swarm.errors import RemoteProtocolError, UnsupportedModel, UserError
from swarm.ids import ExpertSet, format_index_set
from swarm.model.gguf_file import GgufFile, TensorInfo, tensor_size_bytes

MAX_LAYERS = 1024  # guessed: the deepest models have about 130
MAX_EXPERTS = 4096  # guessed: the widest published models have 512
MAX_DIM = 1 << 20  # guessed: the widest hidden states have 16,384 values
MAX_BLOCK_BYTES = 2 << 30  # guessed: an expert of Grok-1 in f16 takes 1.2 GB

FILE_KEY = "swarm.file"
"""Says in a file written by `swarm split` what it is: `backbone` or `slice`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """How one architecture is served.

    Attributes:
        kinds: the expert tensors of a layer that llama.cpp's loader of the architecture takes.
        activation: between the up/gate and the down product.
        width_key: the metadata key (after `<arch>.`) that a stub sets to 1.
        shared_width_key: the key that then must state the shared expert's width.
    """

    kinds: frozenset[str] = frozenset({"gate", "up", "down"})
    activation: str = "swiglu"
    width_key: str = "expert_feed_forward_length"
    shared_width_key: str = "expert_shared_feed_forward_length"

    def stub_keys(self, architecture: str) -> frozenset[str]:
        """Return the metadata keys in which a stub may differ from the original."""
        return frozenset({f"{architecture}.{self.width_key}", f"{architecture}.{self.shared_width_key}"})


# Each was shown bit-identical to stock llama.cpp as a stub with our experts; no entry without that proof.
SUPPORTED = {"qwen2moe": Support(), "qwen3moe": Support()}

MAX_KINDS = 4  # gate, up, down, gate_up
WEIGHT = re.compile(r"blk\.(0|[1-9]\d{0,3})\.ffn_(gate|up|down|gate_up)_exps\.weight", re.ASCII)
ANY_EXPERT_TENSOR = re.compile(r"_(?:ch)?exps\.")
SHARED_DOWN = re.compile(r"blk\.\d{1,4}\.ffn_down_shexp\.weight", re.ASCII)
NOT_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64"})


def is_expert_tensor(name: str) -> bool:
    """Return whether the tensor belongs to routed experts."""
    return ANY_EXPERT_TENSOR.search(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor:
    """One tensor that holds a plane for each expert of a layer.

    Attributes:
        name: `blk.3.ffn_up_exps.weight`.
        kind: `gate`, `up`, `down` or `gate_up`.
        shape: GGUF order, fastest dimension first: (D, F, E); down (F, D, E); gate_up (D, 2F, E).
    """

    name: str
    kind: str
    ggml_type: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        match = WEIGHT.fullmatch(self.name)
        if match is None or match[2] != self.kind:
            raise ValueError(f"not an expert tensor of kind {self.kind}: got {self.name!r}")
        if len(self.shape) != 3:
            raise ValueError(f"bad shape of {self.name}: got {self.shape}, expected three dimensions")
        try:
            tensor_size_bytes(self.ggml_type, self.shape)
        except ValueError as error:
            raise ValueError(f"bad tensor {self.name}: {error}") from error
        if gguf.GGMLQuantizationType(self.ggml_type).name in NOT_WEIGHTS:
            raise ValueError(f"bad type of {self.name}: ggml type {self.ggml_type} holds no weights")

    @property
    def layer(self) -> int:
        """The N of `blk.N`."""
        return int(self.name.split(".")[1])

    @property
    def expert_size_bytes(self) -> int:
        """How many bytes one expert's plane takes."""
        return tensor_size_bytes(self.ggml_type, self.shape[:2])

    @property
    def info(self) -> TensorInfo:
        """Name, type and shape alone."""
        return TensorInfo(name=self.name, ggml_type=self.ggml_type, shape=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and expert tensors of one model. Breaking a bound or contradicting itself raises ValueError.

    Attributes:
        moe_layers: the layers that have routed experts, ascending.
        n_expert_shared, n_ff_shared: 0 where there is no shared expert.
        tensors_by_layer: for each of `moe_layers`, its expert tensors in name order.
    """

    architecture: str
    n_layers: int
    moe_layers: tuple[int, ...]
    n_expert: int
    n_expert_used: int
    n_embd: int
    n_ff_exp: int
    activation: str
    n_expert_shared: int
    n_ff_shared: int
    tensors_by_layer: tuple[tuple[ExpertTensor, ...], ...]

    def __post_init__(self) -> None:
        support = SUPPORTED.get(self.architecture)
        if support is None:
            raise ValueError(f"unsupported architecture: got {self.architecture!r}, expected {' or '.join(SUPPORTED)}")
        if self.activation != support.activation:
            raise ValueError(f"wrong activation: got {self.activation!r}, expected {support.activation!r}")
        for name, low, high in (
            ("n_layers", 1, MAX_LAYERS),
            ("n_expert", 1, MAX_EXPERTS),
            ("n_expert_used", 1, self.n_expert),
            ("n_embd", 1, MAX_DIM),
            ("n_ff_exp", 1, MAX_DIM),
            ("n_expert_shared", 0, MAX_EXPERTS),
            ("n_ff_shared", 0, MAX_DIM),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} out of range: got {getattr(self, name)}, expected {low} to {high}")
        if bool(self.n_expert_shared) != bool(self.n_ff_shared):
            raise ValueError(f"{self.n_expert_shared} shared experts cannot have a width of {self.n_ff_shared}")
        layers = self.moe_layers
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.n_layers:
            raise ValueError(f"bad MoE layers: got {layers[:8]}, expected ascending numbers below {self.n_layers}")
        if len(self.tensors_by_layer) != len(layers):
            raise ValueError(f"expert tensors for {len(self.tensors_by_layer)} layers, expected {len(layers)}")
        for layer, tensors in zip(layers, self.tensors_by_layer, strict=True):
            self._check_layer(layer, tensors)

    def _check_layer(self, layer: int, tensors: tuple[ExpertTensor, ...]) -> None:
        kinds = sorted(tensor.kind for tensor in tensors)
        expected_kinds = sorted(SUPPORTED[self.architecture].kinds)
        if kinds != expected_kinds:
            raise ValueError(
                f"layer {layer} has the expert tensors {', '.join(kinds) or 'none'}: "
                f"supported for {self.architecture} are {', '.join(expected_kinds)}"
            )
        if [tensor.name for tensor in tensors] != sorted(tensor.name for tensor in tensors):
            raise ValueError(f"expert tensors of layer {layer} are not in name order")
        shapes = {"down": (self.n_ff_exp, self.n_embd), "gate_up": (self.n_embd, 2 * self.n_ff_exp)}
        for tensor in tensors:
            expected = (*shapes.get(tensor.kind, (self.n_embd, self.n_ff_exp)), self.n_expert)
            if tensor.layer != layer or tensor.shape != expected:
                raise ValueError(f"{tensor.name} in layer {layer} has shape {tensor.shape}, expected {expected}")
        if sum(tensor.expert_size_bytes for tensor in tensors) > MAX_BLOCK_BYTES:
            raise ValueError(f"an expert of layer {layer} takes more than {MAX_BLOCK_BYTES} bytes")

    def expert_tensors(self, layer: int) -> tuple[ExpertTensor, ...]:
        """Return the layer's expert tensors in name order; raises ValueError for a layer without experts."""
        return self.tensors_by_layer[self.moe_layers.index(layer)]

    def block_size_bytes(self, layer: int) -> int:
        """Return how many bytes one expert of the layer takes; raises ValueError for a layer without experts."""
        return sum(tensor.expert_size_bytes for tensor in self.expert_tensors(layer))

    @property
    def all_experts(self) -> ExpertSet:
        """Every expert of every MoE layer."""
        return ExpertSet.of(self.moe_layers, range(self.n_expert))

    def require_experts(self, experts: ExpertSet) -> None:
        """Raise UserError unless the set is not empty and the model has all of it."""
        if not len(experts):
            raise UserError(f"no experts chosen: expected some of experts 0-{self.n_expert - 1}")
        for layer, chosen in experts.by_layer.items():
            if layer not in self.moe_layers:
                raise UserError(
                    f"layer {layer} has no experts: the model's MoE layers are {format_index_set(self.moe_layers)}"
                )
            if max(chosen) >= self.n_expert or min(chosen) < 0:
                raise UserError(
                    f"no such experts: got {format_index_set(chosen)}, the model's are 0-{self.n_expert - 1}"
                )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in (*TEXT_FIELDS, *NUMBER_FIELDS)}
        plain["moe_layers"] = list(self.moe_layers)
        plain["expert_tensors"] = [
            [{"ggml_type": t.ggml_type, "kind": t.kind, "name": t.name, "shape": list(t.shape)} for t in tensors]
            for tensors in self.tensors_by_layer
        ]
        return plain

    @classmethod
    def from_json(cls, untrusted: object) -> Self:
        """Return the spec that `to_json` wrote.

        Raises:
            RemoteProtocolError: anything is missing, extra, of another type, out of bounds or inconsistent.
        """
        try:
            plain = untrusted_object(untrusted, (*TEXT_FIELDS, *NUMBER_FIELDS, "moe_layers", "expert_tensors"))
            layers = untrusted_list(plain["moe_layers"], MAX_LAYERS)
            return cls(
                moe_layers=tuple(untrusted_int(layer) for layer in layers),
                tensors_by_layer=tuple(
                    tuple(_untrusted_tensor(tensor) for tensor in untrusted_list(tensors, MAX_KINDS))
                    for tensors in untrusted_list(plain["expert_tensors"], MAX_LAYERS)
                ),
                architecture=untrusted_text(plain["architecture"]),
                activation=untrusted_text(plain["activation"]),
                n_layers=untrusted_int(plain["n_layers"]),
                n_expert=untrusted_int(plain["n_expert"]),
                n_expert_used=untrusted_int(plain["n_expert_used"]),
                n_embd=untrusted_int(plain["n_embd"]),
                n_ff_exp=untrusted_int(plain["n_ff_exp"]),
                n_expert_shared=untrusted_int(plain["n_expert_shared"]),
                n_ff_shared=untrusted_int(plain["n_ff_shared"]),
            )
        except ValueError as error:
            raise RemoteProtocolError(f"bad model spec: {error}") from error


TEXT_FIELDS = ("architecture", "activation")
NUMBER_FIELDS = ("n_layers", "n_expert", "n_expert_used", "n_embd", "n_ff_exp", "n_expert_shared", "n_ff_shared")


def untrusted_int(value: object) -> int:
    """Return a JSON number that is a non-negative integer of at most 63 bits; raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:  # a bool is an int, but no number
        raise ValueError(f"got {str(value)[:40]}, expected a non-negative integer")
    return value


def untrusted_text(value: object) -> str:
    """Return a JSON string of at most 64 characters; raises ValueError."""
    if not isinstance(value, str) or len(value) > 64:
        raise ValueError(f"got {str(value)[:40]}, expected a short text")
    return value


def untrusted_list(value: object, limit: int) -> list[object]:
    """Return a JSON list of at most `limit` values; raises ValueError."""
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"got {type(value).__name__}, expected a list of at most {limit}")
    return value


def untrusted_object(value: object, keys: tuple[str, ...]) -> dict[str, object]:
    """Return a JSON object that has exactly these keys; raises ValueError."""
    if not isinstance(value, dict) or value.keys() != set(keys):
        raise ValueError(f"got {str(value)[:40]}, expected an object with {', '.join(sorted(keys))}")
    return value


def _untrusted_tensor(value: object) -> ExpertTensor:
    plain = untrusted_object(value, ("ggml_type", "kind", "name", "shape"))
    return ExpertTensor(
        name=untrusted_text(plain["name"]),
        kind=untrusted_text(plain["kind"]),
        ggml_type=untrusted_int(plain["ggml_type"]),
        shape=tuple(untrusted_int(dim) for dim in untrusted_list(plain["shape"], 3)),
    )


def read_spec(file: GgufFile) -> ModelSpec:
    """Return the spec of a whole model file.

    Raises:
        UnsupportedModel: dense, an unproven architecture, or expert tensors that we do not compute (biases, scales, ...).
        UserError: the file is one shard of several, or was itself written by `swarm split`.
    """
    path = file.path
    architecture = file.text("general.architecture")
    if architecture is None:
        raise UserError(f"{path} is no model: it has no general.architecture")
    if FILE_KEY in file.metadata:
        raise UserError(f"{path} is a {file.text(FILE_KEY)} written by swarm split: give the original model file")
    if (file.integer("split.count") or 1) > 1:
        raise UserError(f"{path} is one shard of several: join them first with llama-gguf-split --merge")
    expert_names = sorted(name for name in file.tensors if is_expert_tensor(name))
    if not expert_names:
        raise UnsupportedModel(f"{path} has no experts ({architecture}): swarm serves Mixture-of-Experts models only")
    support = SUPPORTED.get(architecture)
    if support is None:
        known = ", ".join(sorted(SUPPORTED))
        raise UnsupportedModel(f"cannot serve {path}: got architecture {architecture}, supported are {known}")
    for name in expert_names:
        if WEIGHT.fullmatch(name) is None:
            raise UnsupportedModel(
                f"cannot serve {path}: got expert tensor {name}, supported are weights of the kinds "
                f"{', '.join(sorted(support.kinds))} with no bias and no scale"
            )

    by_layer: dict[int, list[ExpertTensor]] = {}
    try:
        for name in expert_names:
            tensor = file.tensors[name]
            kind = name.split(".")[2].removeprefix("ffn_").removesuffix("_exps")
            expert = ExpertTensor(name=name, kind=kind, ggml_type=tensor.ggml_type, shape=tensor.shape)
            by_layer.setdefault(expert.layer, []).append(expert)
        layers = tuple(sorted(by_layer))
        downs = [tensor for tensor in by_layer[layers[0]] if tensor.kind == "down"]
        n_ff_exp = downs[0].shape[0] if downs else 0
        shared = {tensor.shape[0] for name, tensor in file.tensors.items() if SHARED_DOWN.fullmatch(name)}
        if len(shared) > 1:
            raise ValueError(f"shared experts of several widths: got {sorted(shared)}, expected one")
        stated = file.integer(f"{architecture}.{support.width_key}")
        if stated not in (None, 0, n_ff_exp):  # old files leave the key out; llama.cpp then derives it
            raise ValueError(f"{support.width_key} is {stated}, but the expert tensors have a width of {n_ff_exp}")
        return ModelSpec(
            architecture=architecture,
            n_layers=file.integer(f"{architecture}.block_count") or 0,
            moe_layers=layers,
            n_expert=file.integer(f"{architecture}.expert_count") or 0,
            n_expert_used=file.integer(f"{architecture}.expert_used_count") or 0,
            n_embd=file.integer(f"{architecture}.embedding_length") or 0,
            n_ff_exp=n_ff_exp,
            activation=support.activation,
            n_expert_shared=len(shared),
            n_ff_shared=max(shared, default=0),
            tensors_by_layer=tuple(tuple(by_layer[layer]) for layer in layers),
        )
    except ValueError as error:
        raise UnsupportedModel(f"cannot serve {path}: {error}") from error
