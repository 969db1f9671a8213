"""llama.cpp's by-value structs, one table entry per pinned package version, and the check of a loaded library.

A wrong layout does not fail, it corrupts memory: so nothing but the versions in `LAYOUTS` is ever called, and even
those only after `verify_layouts` has seen the expected sizes and default values. Source: llama.h and ggml.h of each
build. The two differ in `llama_context_params`, both 160 bytes long:

    offset   xllamacpp 2026.10.11549 (b11549)    llama-cpp-python 0.3.36
    128      ctx_other (pointer)                 embeddings .. kv_unified (six bools)
    136      embeddings .. kv_unified            samplers
    144      samplers                            n_samplers
    152      n_samplers                          ctx_other (pointer)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from swarm.errors import EngineUnavailable

GGML_TYPE_F32 = 0
GGML_TYPE_F16 = 1
GGML_TYPE_I32 = 26
GGML_OBJECT_SIZE_BYTES = 32  # sizeof(struct ggml_object), which ggml_tensor_overhead() counts in
OPAQUE_SIZE_BYTES = 512  # more than any of the structs: a longer one than expected must not overrun our memory

EvalCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

Fields = list[tuple[str, Any]]
FunctionLookup = Callable[..., Callable[..., Any]]  # swarm.native.library.Library.function


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor. Axes are in ggml's order, fastest first: `ne` counts elements, `nb` is in bytes."""

    _fields_: ClassVar[Fields] = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class GgmlInitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_: ClassVar[Fields] = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class LlamaModelParams(ctypes.Structure):
    """struct llama_model_params."""

    _fields_: ClassVar[Fields] = [
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
    ]


class LlamaSamplerChainParams(ctypes.Structure):
    """struct llama_sampler_chain_params."""

    _fields_: ClassVar[Fields] = [("no_perf", ctypes.c_bool)]


class LlamaBatch(ctypes.Structure):
    """struct llama_batch."""

    _fields_: ClassVar[Fields] = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_CONTEXT_HEAD: Fields = [
    ("n_ctx", ctypes.c_uint32),
    ("n_batch", ctypes.c_uint32),
    ("n_ubatch", ctypes.c_uint32),
    ("n_seq_max", ctypes.c_uint32),
    ("n_rs_seq", ctypes.c_uint32),
    ("n_outputs_max", ctypes.c_uint32),
    ("n_outputs_max_per_seq", ctypes.c_uint32),
    ("n_threads", ctypes.c_int32),
    ("n_threads_batch", ctypes.c_int32),
    ("ctx_type", ctypes.c_int),
    ("rope_scaling_type", ctypes.c_int),
    ("pooling_type", ctypes.c_int),
    ("attention_type", ctypes.c_int),
    ("flash_attn_type", ctypes.c_int),
    ("rope_freq_base", ctypes.c_float),
    ("rope_freq_scale", ctypes.c_float),
    ("yarn_ext_factor", ctypes.c_float),
    ("yarn_attn_factor", ctypes.c_float),
    ("yarn_beta_fast", ctypes.c_float),
    ("yarn_beta_slow", ctypes.c_float),
    ("yarn_orig_ctx", ctypes.c_uint32),
    ("defrag_thold", ctypes.c_float),
    ("cb_eval", EvalCallback),
    ("cb_eval_user_data", ctypes.c_void_p),
    ("type_k", ctypes.c_int),
    ("type_v", ctypes.c_int),
    ("abort_callback", ctypes.c_void_p),
    ("abort_callback_data", ctypes.c_void_p),
]
_CONTEXT_BOOLS: Fields = [
    (name, ctypes.c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")
]
_CONTEXT_SAMPLERS: Fields = [("samplers", ctypes.c_void_p), ("n_samplers", ctypes.c_size_t)]
_CONTEXT_OTHER: Fields = [("ctx_other", ctypes.c_void_p)]


class LlamaContextParamsB11549(ctypes.Structure):
    """struct llama_context_params of xllamacpp 2026.10.11549."""

    _fields_: ClassVar[Fields] = [*_CONTEXT_HEAD, *_CONTEXT_OTHER, *_CONTEXT_BOOLS, *_CONTEXT_SAMPLERS]


class LlamaContextParams0336(ctypes.Structure):
    """struct llama_context_params of llama-cpp-python 0.3.36."""

    _fields_: ClassVar[Fields] = [*_CONTEXT_HEAD, *_CONTEXT_BOOLS, *_CONTEXT_SAMPLERS, *_CONTEXT_OTHER]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructLayouts:
    """The structs of one version."""

    context_params: type[ctypes.Structure]
    model_params: type[ctypes.Structure] = LlamaModelParams
    sampler_chain_params: type[ctypes.Structure] = LlamaSamplerChainParams
    batch: type[ctypes.Structure] = LlamaBatch
    tensor: type[ctypes.Structure] = GgmlTensor
    init_params: type[ctypes.Structure] = GgmlInitParams


# (package, version) -> layouts. Adding a version: run a probe of the opaque default structs, compare with its llama.h.
LAYOUTS: dict[tuple[str, str], StructLayouts] = {
    ("xllamacpp", "2026.10.11549"): StructLayouts(context_params=LlamaContextParamsB11549),
    ("llama-cpp-python", "0.3.36"): StructLayouts(context_params=LlamaContextParams0336),
}

# What the *_default_params functions return, read from both builds (every field that is not a constant is left out).
MODEL_DEFAULTS: Mapping[str, object] = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "progress_callback": None,
    "progress_callback_user_data": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
CONTEXT_DEFAULTS: Mapping[str, object] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval_user_data": None,
    "type_k": GGML_TYPE_F16,
    "type_v": GGML_TYPE_F16,
    "abort_callback": None,
    "abort_callback_data": None,
    "ctx_other": None,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
}


class _Opaque(ctypes.Structure):
    _fields_: ClassVar[Fields] = [("raw", ctypes.c_uint8 * OPAQUE_SIZE_BYTES)]


def verify_layouts(layouts: StructLayouts, function: FunctionLookup, label: str) -> None:
    """Check a loaded library against its layouts.

    Args:
        function: looks up an exported function: (name, restype, *argtypes).
        label: package and version, for messages.

    Raises:
        EngineUnavailable: a size or a known value differs; the message names the struct and field.
    """
    _verify_defaults("llama_model", layouts.model_params, MODEL_DEFAULTS, function, label)
    _verify_defaults("llama_context", layouts.context_params, CONTEXT_DEFAULTS, function, label)
    chain = function("llama_sampler_chain_default_params", layouts.sampler_chain_params)()
    _expect(label, "llama_sampler_chain_params.no_perf", chain.no_perf, True)
    _verify_batch(layouts, function, label)
    _verify_tensor(layouts, function, label)


def _expect(label: str, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise EngineUnavailable(
            f"the llama.cpp library of {label} is not the one this program was written for: "
            f"{what} is {got!r}, expected {expected!r}"
        )


def _verify_defaults(
    prefix: str,
    struct: type[ctypes.Structure],
    defaults: Mapping[str, object],
    function: FunctionLookup,
    label: str,
) -> None:
    opaque = function(f"{prefix}_default_params", _Opaque)()
    params = struct.from_buffer_copy(opaque)
    for field, expected in defaults.items():
        _expect(label, f"{prefix}_params.{field}", getattr(params, field), expected)


def _verify_batch(layouts: StructLayouts, function: FunctionLookup, label: str) -> None:
    init = function("llama_batch_init", _Opaque, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
    batch = layouts.batch.from_buffer_copy(init(4, 0, 1))
    _expect(label, "llama_batch.n_tokens", batch.n_tokens, 0)
    _expect(label, "llama_batch.embd", bool(batch.embd), False)
    for field in ("token", "pos", "n_seq_id", "seq_id", "logits"):
        _expect(label, f"llama_batch.{field}", bool(getattr(batch, field)), True)
    function("llama_batch_free", None, layouts.batch)(batch)


def _verify_tensor(layouts: StructLayouts, function: FunctionLookup, label: str) -> None:
    """Build a tensor and a view of it, and read back what must be in them."""
    overhead = function("ggml_tensor_overhead", ctypes.c_size_t)()
    _expect(label, "sizeof ggml_tensor", overhead - GGML_OBJECT_SIZE_BYTES, ctypes.sizeof(layouts.tensor))
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    context = function("ggml_init", pointer, layouts.init_params)(layouts.init_params(4 * overhead, None, True))
    _expect(label, "ggml_init", bool(context), True)
    try:
        new_2d = function("ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, int64, int64)
        view_1d = function("ggml_view_1d", pointer, pointer, pointer, int64, ctypes.c_size_t)
        name = function("ggml_set_name", pointer, pointer, ctypes.c_char_p)
        address = new_2d(context, GGML_TYPE_I32, 5, 3)
        tensor = layouts.tensor.from_address(name(address, b"probe"))
        view = layouts.tensor.from_address(view_1d(context, address, 2, 8))
        for field, got, expected in (
            ("type", tensor.type, GGML_TYPE_I32),
            ("ne", list(tensor.ne), [5, 3, 1, 1]),
            ("nb", list(tensor.nb), [4, 20, 60, 60]),
            ("op", tensor.op, 0),
            ("data", tensor.data, None),
            ("name", tensor.name, b"probe"),
            ("src", view.src[0], address),
            ("view_src", view.view_src, address),
            ("view_offs", view.view_offs, 8),
        ):
            _expect(label, f"ggml_tensor.{field}", got, expected)
    finally:
        function("ggml_free", None, pointer)(context)
