"""Writes small GGUF models with random weights, of any architecture that the installed llama.cpp can load.

Which tensors an architecture has, and in which shapes, llama.cpp says itself: `llama_model_init_from_user` builds a model from
metadata alone and names each tensor it wants. Weights are drawn by seed and name, so the same recipe gives the same bytes;
routed experts are then quantised by ggml.

llama.cpp aborts the process on metadata it does not like: run this in a process of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np
import numpy.typing as npt

from swarm.architectures.recipes import Recipe, Value, Wide, metadata
from swarm.errors import EngineError
from swarm.files import replacing
from swarm.model.gguf_file import DEFAULT_ALIGNMENT, MetadataValue, TensorInfo, encode_header, padded
from swarm.native.bindings import llama, log_router
from swarm.native.ggml import quantize, tensor_at, tensor_name
from swarm.native.library import load_library

F32 = int(gguf.GGMLQuantizationType.F32)
MERGED = "ffn_gate_up_exps"
SCALED = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight")
ROUTED = re.compile(r"blk\.\d+\.ffn_(gate_up|gate|up|down)_exps\.weight")
SCALES = re.compile(r"(?<!ffn_gate_inp)\.(input_)?scale$")  # optional; gemma4's router needs its own
# llama.cpp reads some shapes from these tensors' entries in the file, not from metadata; only their type counts.
_PROBES = ("conv{}d.weight", "posnet.{}.conv1.weight", "posnet.{}.conv2.weight", "convnext.{}.dw.weight")

_SetTensorData = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class _InitParams(ctypes.Structure):
    """struct gguf_init_params."""

    _fields_: ClassVar[list[tuple[str, type]]] = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What to make of a recipe.

    Attributes:
        name: shown to people.
        expert_type: ggml's name of the routed experts' type: "F32", "Q4_K", "MXFP4".
        down_type: that of their down product; None: the same.
        has_scales: with a number for each expert and product.
        splits_gate_up: where llama.cpp would take gate and up in one tensor, give it two.
        keys: metadata to replace, without the architecture's prefix.
    """

    name: str
    expert_type: str = "F32"
    down_type: str | None = None
    has_scales: bool = False
    splits_gate_up: bool = False
    keys: tuple[tuple[str, Value], ...] = ()
    seed: int = 0


def encode_metadata(plain: Mapping[str, Value]) -> dict[str, MetadataValue]:
    """Return metadata as GGUF stores it."""
    return {key: _encode(value) for key, value in plain.items()}


def _encode(value: Value) -> MetadataValue:
    if isinstance(value, bool):
        return MetadataValue.of_bool(value)
    if isinstance(value, int):
        return MetadataValue.of_uint32(value)
    if isinstance(value, float):
        return MetadataValue.of_float32(value)
    if isinstance(value, str):
        return MetadataValue.of_text(value)
    if isinstance(value[0], str):
        return MetadataValue.of_texts([str(text) for text in value])
    if isinstance(value[0], float):
        return MetadataValue.of_float32s([float(number) for number in value])
    if isinstance(value[0], Wide):
        return MetadataValue.of_uint64s([int(number) for number in value])
    return MetadataValue.of_uint32s([int(number) for number in value])


def wanted_tensors(encoded: Mapping[str, MetadataValue]) -> list[TensorInfo]:
    """Return every tensor that llama.cpp would take of a model with this metadata, optional ones too, all F32.

    Raises:
        EngineError: llama.cpp refuses the metadata; the message carries its reason.
    """
    library = load_library()
    log_router().first_error = ""
    found: dict[str, TensorInfo] = {}

    def note(tensor: int, _user_data: object) -> None:
        shape = list(tensor_at(tensor).ne)
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        name = tensor_name(tensor)
        found.setdefault(name, TensorInfo(name=name, ggml_type=F32, shape=tuple(shape)))

    n_layers = max([value.integer() for key, value in encoded.items() if key.endswith(".block_count")], default=1)
    probes = [
        TensorInfo(name=form.format(layer), ggml_type=1, shape=(1,)) for layer in range(n_layers) for form in _PROBES
    ]
    with tempfile.TemporaryDirectory(prefix="swarm-generator-") as folder:
        path = Path(folder) / "metadata.gguf"
        size_bytes = sum(padded(probe.size_bytes, DEFAULT_ALIGNMENT) for probe in probes)
        path.write_bytes(encode_header(encoded, probes, DEFAULT_ALIGNMENT) + bytes(size_bytes))
        p = ctypes.c_void_p
        handle = library.function("gguf_init_from_file", p, ctypes.c_char_p, _InitParams)(
            str(path).encode(), _InitParams(True, None)
        )
    if not handle:
        raise EngineError(f"llama.cpp cannot read the metadata: {log_router().first_error or 'no reason given'}")
    try:
        params = llama().model_defaults()
        params.n_gpu_layers = 0
        params.load_mtp = True  # else llama.cpp asserts that it takes what it leaves out
        callback = _SetTensorData(note)
        model = library.function("llama_model_init_from_user", p, p, _SetTensorData, p, library.layouts.model_params)(
            handle, callback, None, params
        )
        if not model:
            raise EngineError(f"llama.cpp refuses the metadata: {log_router().first_error or 'no reason given'}")
        llama().model_free(model)
    finally:
        library.function("gguf_free", None, p)(handle)
    return list(found.values())


def write_model(path: Path, recipe: Recipe, variant: Variant) -> None:
    """Write a model, whole or not at all.

    Raises:
        EngineError: llama.cpp refuses the metadata.
        ValueError: the expert type does not exist, or the shapes do not fit its blocks.
    """
    encoded = encode_metadata(metadata(recipe, **dict(variant.keys)))
    wanted = [tensor for tensor in wanted_tensors(encoded) if not SCALES.search(tensor.name)]
    if variant.splits_gate_up:
        wanted = [part for tensor in wanted for part in _split(tensor)]
    tensors = [_typed(tensor, variant) for tensor in wanted]
    if variant.has_scales:
        tensors += [
            TensorInfo(name=tensor.name.replace(".weight", ".scale"), ggml_type=F32, shape=tensor.shape[2:])
            for tensor in tensors
            if SCALED.fullmatch(tensor.name)
        ]
    with replacing(path) as temporary, temporary.open("wb") as out:
        out.write(encode_header(encoded, tensors, DEFAULT_ALIGNMENT))
        for tensor in tensors:
            data = draw(tensor, variant.seed)
            out.write(data)
            out.write(bytes(padded(len(data), DEFAULT_ALIGNMENT) - len(data)))


def _typed(tensor: TensorInfo, variant: Variant) -> TensorInfo:
    if ROUTED.fullmatch(tensor.name) is None:
        return tensor
    name = variant.down_type if variant.down_type and "_down_" in tensor.name else variant.expert_type
    return TensorInfo(name=tensor.name, ggml_type=int(gguf.GGMLQuantizationType[name]), shape=tensor.shape)


def _split(tensor: TensorInfo) -> list[TensorInfo]:
    """Return a merged gate_up as two tensors; anything else as it is."""
    if MERGED not in tensor.name:
        return [tensor]
    n_in, n_out, n_expert = tensor.shape
    return [
        TensorInfo(name=tensor.name.replace(MERGED, part), ggml_type=F32, shape=(n_in, n_out // 2, n_expert))
        for part in ("ffn_gate_exps", "ffn_up_exps")
    ]


def draw(tensor: TensorInfo, seed: int) -> bytes:
    """Return a tensor's random data. Norms lie around 1, weights have about unit gain, decays are negative."""
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    shape = tensor.shape[::-1]
    values: npt.NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32)
    stem = re.sub(r"^blk\.\d+\.", "", tensor.name)
    if tensor.name.endswith(".scale"):
        values = 1 + 0.2 * values
    elif stem == "ssm_a":
        values = -np.abs(values)
    elif "norm" in stem and len(shape) == 1:
        values = 1 + 0.1 * values
    elif "rope_freqs" in stem or "rope_factors" in stem:
        values = np.ones_like(values)
    elif len(shape) == 1 or tensor.name.endswith(".bias"):
        values = 0.1 * values
    else:
        values *= shape[-1] ** -0.5
    values = np.ascontiguousarray(values, np.float32)
    if tensor.ggml_type == F32:
        return values.tobytes()
    return quantize(tensor.ggml_type, values.reshape(-1, shape[-1]))


def model_file(folder: Path, recipe: Recipe, variant: Variant) -> Path:
    """Return a model's file in `folder`, written now unless it is there; raises as `write_model`."""
    path = folder / file_name(recipe, variant)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_model(path, recipe, variant)
    return path


def file_name(recipe: Recipe, variant: Variant) -> str:
    """Return a name under which a generated file can be kept: another for everything that changes its bytes."""
    what = hashlib.sha256(repr((metadata(recipe), recipe, variant)).encode()).hexdigest()[:12]
    return f"{recipe.architecture}-{what}.gguf"
