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
from swarm.model.expert_kinds import EXPERT_KINDS, Activation, ExpertKind, activation_of
from swarm.model.gguf_file import GgufFile, TensorInfo, tensor_size_bytes

MAX_LAYERS = 1024  # guessed: the deepest models have about 130
MAX_EXPERTS = 4096  # guessed: the widest published models have 512
MAX_DIM = 1 << 20  # guessed: the widest hidden states have 16,384 values
MAX_BLOCK_BYTES = 2 << 30  # guessed: an expert of Grok-1 in f16 takes 1.2 GB

FILE_KEY = "swarm.file"
"""Says in a file written by `swarm split` what it is: `backbone` or `slice`."""


SPLIT_ONLY = frozenset({"swiglu_clamp", "silu_clamp"})  # llama.cpp clamps only where gate and up are two tensors
MAX_KINDS = 9  # a gate, an up and a down, each with a bias and a scale
EXPERT_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,3})\.ffn_(gate_up|gate|up|down)_exps\.(weight|bias|scale)", re.ASCII)
# Numbers that only some devices' kernels use; no graph of llama.cpp's reads them, so no block holds them.
IGNORED_TENSOR = re.compile(r"blk\.\d{1,4}\.ffn_(gate_up|gate|up|down)_exps\.input_scale", re.ASCII)
# What stays in the backbone although it says "exps": arctic's norm, and the second expert group of grovemoe, which is small.
BACKBONE_TENSOR = re.compile(r"blk\.\d{1,4}\.(ffn_norm_exps|ffn_(gate|up|down)_chexps)\.weight", re.ASCII)
ANY_EXPERT_TENSOR = re.compile(r"_(?:ch)?exps\.")
SHARED_DOWN = re.compile(r"blk\.\d{1,4}\.ffn_down_shexp\.weight", re.ASCII)
NOT_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64"})
F32 = int(gguf.GGMLQuantizationType.F32)


def is_expert_tensor(name: str) -> bool:
    """Return whether the tensor belongs to routed experts, and so not to the backbone."""
    return ANY_EXPERT_TENSOR.search(name) is not None and BACKBONE_TENSOR.fullmatch(name) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor:
    """One tensor that holds a plane for each expert of a layer.

    Attributes:
        name: `blk.3.ffn_up_exps.weight`, `.bias` or `.scale`.
        kind: `gate`, `up`, `down` or `gate_up`, with `.bias` or `.scale` behind it.
        shape: GGUF order, fastest dimension first, E last: (D, F, E); down (F, D, E); gate_up (D, 2F, E); a bias has
            one dimension less, a scale only E.
    """

    name: str
    kind: str
    ggml_type: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        match = EXPERT_TENSOR.fullmatch(self.name)
        if match is None or kind_of(match) != self.kind:
            raise ValueError(f"not an expert tensor of kind {self.kind}: got {self.name!r}")
        n_dims = {"weight": 3, "bias": 2, "scale": 1}[match[3]]
        if len(self.shape) != n_dims:
            raise ValueError(f"bad shape of {self.name}: got {self.shape}, expected {n_dims} dimensions")
        if n_dims < 3 and self.ggml_type != F32:
            raise ValueError(f"bad type of {self.name}: got ggml type {self.ggml_type}, expected F32")
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
    def is_weight(self) -> bool:
        """Whether it is a matrix, neither bias nor scale."""
        return len(self.shape) == 3

    @property
    def expert_size_bytes(self) -> int:
        """How many bytes one expert's plane takes."""
        return tensor_size_bytes(self.ggml_type, self.shape[:-1] or (1,))

    @property
    def info(self) -> TensorInfo:
        """Name, type and shape alone."""
        return TensorInfo(name=self.name, ggml_type=self.ggml_type, shape=self.shape)


def kind_of(match: re.Match[str]) -> str:
    """Return the kind of a tensor whose name matches `EXPERT_TENSOR`."""
    return match[2] if match[3] == "weight" else f"{match[2]}.{match[3]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and expert tensors of one model. Breaking a bound or contradicting itself raises ValueError.

    Attributes:
        moe_layers: the layers that have routed experts, ascending. Those that only predict further tokens (MTP) are not among
            them.
        n_expert_used: K of the layer with the most.
        n_embd: D of the rows that experts take and give: mostly the hidden size; less where a model projects them before.
        n_ff_exp: F of the layer with the widest experts.
        activations: of each of `moe_layers`.
        n_expert_shared, n_ff_shared: 0 where there is no shared expert.
        tensors_by_layer: for each of `moe_layers`, its expert tensors in name order.
        used_by_layer: K of each of `moe_layers`; empty where it is the same everywhere.
    """

    architecture: str
    n_layers: int
    moe_layers: tuple[int, ...]
    n_expert: int
    n_expert_used: int
    n_embd: int
    n_ff_exp: int
    activations: tuple[Activation, ...]
    n_expert_shared: int
    n_ff_shared: int
    tensors_by_layer: tuple[tuple[ExpertTensor, ...], ...]
    used_by_layer: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in EXPERT_KINDS:
            raise ValueError(f"unsupported architecture: got {self.architecture!r}, expected one of docs/models.md")
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
        if len(self.tensors_by_layer) != len(layers) or len(self.activations) != len(layers):
            raise ValueError(
                f"expert tensors for {len(self.tensors_by_layer)} and activations for {len(self.activations)} layers, "
                f"expected {len(layers)}"
            )
        for layer, activation, tensors in zip(layers, self.activations, self.tensors_by_layer, strict=True):
            self._check_layer(layer, activation, tensors)
        if self.n_ff_exp != max(self.width(layer) for layer in layers):
            raise ValueError(f"n_ff_exp is {self.n_ff_exp}, but the widest experts have another width")
        used = self.used_by_layer
        if used and (
            len(used) != len(layers) or min(used) < 1 or max(used) != self.n_expert_used or len(set(used)) < 2
        ):
            raise ValueError(f"bad numbers of experts used by layer: got {used[:8]}")

    def _check_layer(self, layer: int, activation: Activation, tensors: tuple[ExpertTensor, ...]) -> None:
        kinds = {tensor.kind: tensor for tensor in tensors}
        products = sorted(kind for kind in kinds if "." not in kind)
        expected_products = [["down", "gate_up"], ["down", "gate", "up"]] if activation.is_gated else [["down", "up"]]
        if len(kinds) != len(tensors) or products not in expected_products:
            raise ValueError(
                f"layer {layer} has the expert tensors {', '.join(sorted(kinds)) or 'none'}: "
                f"{activation.name} takes {' or '.join(', '.join(names) for names in expected_products)}"
            )
        if stray := sorted(kind for kind in kinds if "." in kind and kind.split(".")[0] not in products):
            raise ValueError(f"layer {layer} has {', '.join(stray)} without its weights")
        if activation.name in SPLIT_ONLY and "gate_up" in products:
            raise ValueError(f"layer {layer} has gate and up in one tensor: {activation.name} takes two")
        if [tensor.name for tensor in tensors] != sorted(tensor.name for tensor in tensors):
            raise ValueError(f"expert tensors of layer {layer} are not in name order")
        width = kinds["down"].shape[0]
        shapes = {
            "gate": (self.n_embd, width),
            "up": (self.n_embd, width),
            "gate_up": (self.n_embd, 2 * width),
            "down": (width, self.n_embd),
        }
        for tensor in tensors:
            product, _, suffix = tensor.kind.partition(".")
            plane = {"": shapes[product], "bias": shapes[product][1:], "scale": ()}[suffix]
            expected = (*plane, self.n_expert)
            if tensor.layer != layer or tensor.shape != expected:
                raise ValueError(f"{tensor.name} in layer {layer} has shape {tensor.shape}, expected {expected}")
        if sum(tensor.expert_size_bytes for tensor in tensors) > MAX_BLOCK_BYTES:
            raise ValueError(f"an expert of layer {layer} takes more than {MAX_BLOCK_BYTES} bytes")

    @property
    def expert_kind(self) -> ExpertKind:
        """The architecture's row of the table."""
        return EXPERT_KINDS[self.architecture]

    def activation(self, layer: int) -> Activation:
        """Return the layer's activation; raises ValueError for a layer without experts."""
        return self.activations[self.moe_layers.index(layer)]

    def width(self, layer: int) -> int:
        """Return F of the layer's experts; raises ValueError for a layer without experts."""
        return next(tensor.shape[0] for tensor in self.expert_tensors(layer) if tensor.kind == "down")

    def n_used(self, layer: int) -> int:
        """Return K of the layer; raises ValueError for a layer without experts."""
        return self.used_by_layer[self.moe_layers.index(layer)] if self.used_by_layer else self.n_expert_used

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
        """Return plain JSON values; what is the same in all layers is written once."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in ("architecture", *NUMBER_FIELDS)}
        texts = [str(activation) for activation in self.activations]
        plain["activation"] = texts[0] if len(set(texts)) == 1 else texts
        plain["moe_layers"] = list(self.moe_layers)
        plain["expert_tensors"] = [
            [{"ggml_type": t.ggml_type, "kind": t.kind, "name": t.name, "shape": list(t.shape)} for t in tensors]
            for tensors in self.tensors_by_layer
        ]
        if self.used_by_layer:
            plain["used_by_layer"] = list(self.used_by_layer)
        return plain

    @classmethod
    def from_json(cls, untrusted: object) -> Self:
        """Return the spec that `to_json` wrote.

        Raises:
            RemoteProtocolError: anything is missing, extra, of another type, out of bounds or inconsistent.
        """
        fields: tuple[str, ...] = ("architecture", "activation", *NUMBER_FIELDS, "moe_layers", "expert_tensors")
        if isinstance(untrusted, dict) and "used_by_layer" in untrusted:
            fields = (*fields, "used_by_layer")
        try:
            plain = untrusted_object(untrusted, fields)
            layers = untrusted_list(plain["moe_layers"], MAX_LAYERS)
            return cls(
                moe_layers=tuple(untrusted_int(layer) for layer in layers),
                tensors_by_layer=tuple(
                    tuple(_untrusted_tensor(tensor) for tensor in untrusted_list(tensors, MAX_KINDS))
                    for tensors in untrusted_list(plain["expert_tensors"], MAX_LAYERS)
                ),
                architecture=untrusted_text(plain["architecture"]),
                activations=_untrusted_activations(plain["activation"], len(layers)),
                n_layers=untrusted_int(plain["n_layers"]),
                n_expert=untrusted_int(plain["n_expert"]),
                n_expert_used=untrusted_int(plain["n_expert_used"]),
                n_embd=untrusted_int(plain["n_embd"]),
                n_ff_exp=untrusted_int(plain["n_ff_exp"]),
                n_expert_shared=untrusted_int(plain["n_expert_shared"]),
                n_ff_shared=untrusted_int(plain["n_ff_shared"]),
                used_by_layer=tuple(
                    untrusted_int(n) for n in untrusted_list(plain.get("used_by_layer", []), MAX_LAYERS)
                ),
            )
        except ValueError as error:
            raise RemoteProtocolError(f"bad model spec: {error}") from error


NUMBER_FIELDS = ("n_layers", "n_expert", "n_expert_used", "n_embd", "n_ff_exp", "n_expert_shared", "n_ff_shared")


def _untrusted_activations(value: object, n_layers: int) -> tuple[Activation, ...]:
    if isinstance(value, str):
        return (Activation.parse(untrusted_text(value)),) * n_layers
    return tuple(Activation.parse(untrusted_text(text)) for text in untrusted_list(value, MAX_LAYERS))


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
        UnsupportedModel: dense, an unproven architecture, or expert tensors that we do not compute; the message names them.
        UserError: the file was itself written by `swarm split`.
    """
    path = file.path
    architecture = file.text("general.architecture")
    if architecture is None:
        raise UserError(f"{path} is no model: it has no general.architecture")
    if FILE_KEY in file.metadata:
        raise UserError(f"{path} is a {file.text(FILE_KEY)} written by swarm split: give the original model file")
    if not any(is_expert_tensor(name) for name in file.tensors):
        raise UnsupportedModel(f"{path} has no experts ({architecture}): swarm serves Mixture-of-Experts models only")
    kind = EXPERT_KINDS.get(architecture)
    if kind is None:
        raise UnsupportedModel(
            f"cannot serve {path}: got architecture {architecture}, which has no row in the table of expert kinds; "
            f"supported are {', '.join(sorted(EXPERT_KINDS))}"
        )
    try:
        return _read_spec(file, architecture, kind)
    except ValueError as error:
        raise UnsupportedModel(f"cannot serve {path}: {error}") from error


def _read_spec(file: GgufFile, architecture: str, kind: ExpertKind) -> ModelSpec:
    def numbers(key: str) -> tuple[float, ...]:
        value = file.metadata.get(f"{architecture}.{key}")
        try:
            return () if value is None else value.numbers()
        except ValueError as error:
            raise ValueError(f"bad metadata {architecture}.{key}: {error}") from error

    def by_layer(key: str, layer: int) -> float:
        """Return a number that the file states once, or for each layer; 0 where it does not."""
        found = numbers(key)
        return 0.0 if not found else found[0] if len(found) == 1 else found[layer] if layer < len(found) else 0.0

    n_all = file.integer(f"{architecture}.block_count") or 0
    n_layers = n_all - (file.integer(f"{architecture}.nextn_predict_layers") or 0)
    found: dict[int, list[ExpertTensor]] = {}
    for name in sorted(file.tensors):
        if not is_expert_tensor(name) or IGNORED_TENSOR.fullmatch(name):
            continue
        match = EXPERT_TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(f"got expert tensor {name}, which no known architecture has")
        _require_known(name, match, kind, architecture)
        if int(match[1]) >= n_all:
            raise ValueError(f"bad MoE layers: got {name}, expected layers below {n_all}")
        if int(match[1]) < n_layers:  # the rest predict further tokens; nobody runs them
            tensor = file.tensors[name]
            expert = ExpertTensor(name=name, kind=kind_of(match), ggml_type=tensor.ggml_type, shape=tensor.shape)
            found.setdefault(expert.layer, []).append(expert)
    layers = tuple(sorted(found))
    if not layers:
        raise ValueError(f"it has experts only in layers that predict further tokens, from layer {n_layers} on")
    downs = [tensor for layer in layers for tensor in found[layer] if tensor.kind == "down"]
    if not downs:
        raise ValueError(f"layer {layers[0]} has no blk.{layers[0]}.ffn_down_exps.weight")
    shared = {tensor.shape[0] for name, tensor in file.tensors.items() if SHARED_DOWN.fullmatch(name)}
    if len(shared) > 1:
        raise ValueError(f"shared experts of several widths: got {sorted(shared)}, expected one")
    for down in downs:
        stated = by_layer(kind.width, down.layer)
        if stated not in (0, down.shape[0]):  # old files leave the key out; llama.cpp then derives it
            raise ValueError(f"{kind.width} is {stated:.0f}, but {down.name} has a width of {down.shape[0]}")
    used = tuple(int(by_layer("expert_used_count", layer)) for layer in layers)
    return ModelSpec(
        architecture=architecture,
        n_layers=n_all,
        moe_layers=layers,
        n_expert=file.integer(f"{architecture}.expert_count") or 0,
        n_expert_used=max(used),
        n_embd=downs[0].shape[1],
        n_ff_exp=max(down.shape[0] for down in downs),
        activations=tuple(
            activation_of(
                kind,
                is_gated=any(tensor.kind in ("gate", "gate_up") for tensor in found[layer]),
                is_split=any(tensor.kind == "gate" for tensor in found[layer]),
                limit=by_layer("swiglu_clamp_exp", layer),
                situ=(
                    (numbers("activation.situ_beta") or (1.0,))[0],
                    (numbers("activation.situ_linear_beta") or (0.0,))[0],
                ),
            )
            for layer in layers
        ),
        n_expert_shared=len(shared),
        n_ff_shared=max(shared, default=0),
        tensors_by_layer=tuple(tuple(found[layer]) for layer in layers),
        used_by_layer=used if len(set(used)) > 1 else (),
    )


def _require_known(name: str, match: re.Match[str], kind: ExpertKind, architecture: str) -> None:
    """Raise ValueError for a tensor that llama.cpp does not load, or does not use, for this architecture."""
    if match[3] == "bias" and not kind.has_biases:
        raise ValueError(f"got expert tensor {name}: llama.cpp knows no biases of experts for {architecture}")
    if match[3] == "scale" and not kind.has_scales:
        raise ValueError(f"got expert tensor {name}: llama.cpp does not apply scales of experts for {architecture}")
    if match[2] == "gate_up" and not kind.is_merged:
        raise ValueError(f"got expert tensor {name}: llama.cpp takes gate and up apart for {architecture}")
