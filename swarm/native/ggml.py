"""ggml through ctypes: tensors to numpy and back, and a CPU backend that computes small graphs.

Tensors, contexts and graphs are plain addresses (int). An address is valid as long as whoever owns the tensor says so;
nothing here keeps one alive. numpy arrays have ggml's four axes reversed, `(ne3, ne2, ne1, ne0)`, C order.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from swarm.errors import EngineError, EngineUnavailable
from swarm.native.addresses import address_of
from swarm.native.layouts import GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_I32, GgmlTensor
from swarm.native.library import load_library

DTYPES: dict[int, np.dtype[Any]] = {
    GGML_TYPE_F32: np.dtype(np.float32),
    GGML_TYPE_F16: np.dtype(np.float16),
    GGML_TYPE_I32: np.dtype(np.int32),
}
GRAPH_SIZE = 32  # nodes, and leaves, that a graph of `TensorContext` can hold unless asked for more
REPACK_NAME = b"CPU_REPACK"  # the buffer type whose layout keeps every expert's bytes where they were
LAST_OP = b"GLU"  # last of enum ggml_op in both builds: ggml_op_name reads past its table after it
MAX_OPS = 256  # far above the count of ops in both builds


class _Ggml:
    """The functions used here, looked up once. Only computing gives up the GIL; the rest takes microseconds."""

    def __init__(self) -> None:
        find = functools.partial(load_library().function, keeps_gil=True)
        p, i32, i64, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
        self.op_name = find("ggml_op_name", ctypes.c_char_p, i32)
        self.block_size = find("ggml_blck_size", i64, i32)
        self.type_size = find("ggml_type_size", size, i32)
        self.tensor_get = find("ggml_backend_tensor_get", None, p, p, size, size)
        self.tensor_set = find("ggml_backend_tensor_set", None, p, p, size, size)
        self.tensor_overhead = find("ggml_tensor_overhead", size)
        self.graph_overhead = find("ggml_graph_overhead_custom", size, size, ctypes.c_bool)
        self.init = find("ggml_init", p, load_library().layouts.init_params)
        self.free = find("ggml_free", None, p)
        self.new_tensor = find("ggml_new_tensor", p, p, i32, i32, ctypes.POINTER(i64))
        self.mul_mat_id = find("ggml_mul_mat_id", p, p, p, p, p)
        f32 = ctypes.c_float
        self.glu_splits = {
            name: find(f"ggml_{name}_split", p, p, p, p) for name in ("swiglu", "geglu", "reglu")
        }  # of (gate, up)
        self.unary = {
            name: find(f"ggml_{name}", p, p, p) for name in ("silu", "gelu", "relu", "sqr", "tanh", "sigmoid")
        }
        self.swiglu_oai = find("ggml_swiglu_oai", p, p, p, p, f32, f32)
        self.swiglu_clamp = find("ggml_swiglu_clamp", p, p, p, p, f32)
        self.clamp = find("ggml_clamp", p, p, p, f32, f32)
        self.scale = find("ggml_scale", p, p, p, f32)
        self.add_id = find("ggml_add_id", p, p, p, p, p)
        self.mul = find("ggml_mul", p, p, p, p)
        self.mul_inplace = find("ggml_mul_inplace", p, p, p, p)
        self.add = find("ggml_add", p, p, p, p)
        self.add_inplace = find("ggml_add_inplace", p, p, p, p)
        self.view_3d = find("ggml_view_3d", p, p, p, i64, i64, i64, size, size, size)
        self.new_graph = find("ggml_new_graph_custom", p, p, size, ctypes.c_bool)
        self.expand = find("ggml_build_forward_expand", None, p, p)
        self.cpu_init = find("ggml_backend_cpu_init", p)
        self.cpu_set_n_threads = find("ggml_backend_cpu_set_n_threads", None, p, i32)
        self.backend_free = find("ggml_backend_free", None, p)
        self.alloc_buffer = find("ggml_backend_alloc_buffer", p, p, size)
        self.buft_alloc_buffer = find("ggml_backend_buft_alloc_buffer", p, p, size)
        self.buft_name = find("ggml_backend_buft_name", ctypes.c_char_p, p)
        self.get_device = find("ggml_backend_get_device", p, p)
        self.device_registry = find("ggml_backend_dev_backend_reg", p, p)
        self.proc_address = find("ggml_backend_reg_get_proc_address", p, p, ctypes.c_char_p)
        self.buffer_free = find("ggml_backend_buffer_free", None, p)
        self.buffer_name = find("ggml_backend_buffer_name", ctypes.c_char_p, p)
        self.buffer_is_host = find("ggml_backend_buffer_is_host", ctypes.c_bool, p)
        self.buffer_base = find("ggml_backend_buffer_get_base", p, p)
        self.buffer_size = find("ggml_backend_buffer_get_size", size, p)
        self.buffer_alignment = find("ggml_backend_buffer_get_alignment", size, p)
        self.alignment = find("ggml_backend_get_alignment", size, p)
        self.buffer_alloc_size = find("ggml_backend_buffer_get_alloc_size", size, p, p)
        self.tensor_alloc = find("ggml_backend_tensor_alloc", i32, p, p, p)
        self.view_init = find("ggml_backend_view_init", i32, p)
        self.supports_op = find("ggml_backend_supports_op", ctypes.c_bool, p, p)
        self.graph_compute = load_library().function("ggml_backend_graph_compute", i32, p, p)


@functools.cache
def _ggml() -> _Ggml:
    return _Ggml()


def tensor_at(pointer: int) -> GgmlTensor:
    """Return the struct at this address: a view of ggml's memory, not a copy."""
    return GgmlTensor.from_address(pointer)


def tensor_name(pointer: int) -> str:
    """Return the tensor's name, such as `ffn_moe_up-3`."""
    return bytes(GgmlTensor.from_address(pointer).name).decode("utf-8", "replace")


def tensor_op(pointer: int) -> int:
    """Return the code of the operation that makes the tensor; compare it with `op_code`."""
    return int(GgmlTensor.from_address(pointer).op)


def set_tensor_op(pointer: int, code: int) -> None:
    """Make another operation of the tensor, such as NONE, which computes nothing; a code from `op_code`."""
    GgmlTensor.from_address(pointer).op = code


def tensor_source(pointer: int, index: int) -> int | None:
    """Return the address of the tensor's `src[index]`, or None."""
    address: int | None = GgmlTensor.from_address(pointer).src[index]
    return address


@functools.cache
def op_code(name: str) -> int:
    """Return this build's code of an operation named as ggml names it: "MUL_MAT_ID", "VIEW".

    Raises:
        EngineUnavailable: this build has no such operation.
    """
    wanted = name.encode()
    for code in range(MAX_OPS):
        found = _ggml().op_name(code)
        if found == wanted:
            return code
        if found == LAST_OP:
            break
    raise EngineUnavailable(f"the llama.cpp library has no operation {name}")


def type_layout(ggml_type: int) -> tuple[int, int]:
    """Return (elements per block, bytes per block) of a type that exists: ggml reads past its table otherwise."""
    return int(_ggml().block_size(ggml_type)), int(_ggml().type_size(ggml_type))


def quantize(ggml_type: int, rows: npt.NDArray[np.float32]) -> bytes:
    """Return rows [N, C] as ggml stores them in a type that needs no importance matrix.

    Raises:
        ValueError: the rows do not fill whole blocks of the type.
    """
    block, block_bytes = type_layout(ggml_type)
    n_rows, n_columns = rows.shape
    if n_columns % block:
        raise ValueError(f"rows of {n_columns} values do not fill blocks of {block}")
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty(n_rows * (n_columns // block) * block_bytes, np.uint8)
    i32, i64, p = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    chunk = load_library().function("ggml_quantize_chunk", ctypes.c_size_t, i32, p, p, i64, i64, i64, p)
    n_bytes = chunk(ggml_type, rows.ctypes.data, out.ctypes.data, 0, n_rows, n_columns, None)
    assert n_bytes == out.nbytes
    return out.tobytes()


def read_tensor(pointer: int) -> npt.NDArray[Any]:
    """Return a fresh, C-contiguous copy of the tensor, shape (ne3, ne2, ne1, ne0), of type f32, f16 or i32.

    Follows the strides, so views are read right; works for memory of any backend.

    Raises:
        EngineError: the tensor has another type or no memory.
    """
    tensor, dtype, shape, strides, span_bytes = _geometry(pointer)
    if 0 in shape:
        return np.empty(shape, dtype)
    span = np.empty(span_bytes, np.uint8)
    _ggml().tensor_get(pointer, span.ctypes.data, 0, span_bytes)
    if span_bytes == math.prod(shape) * dtype.itemsize and _is_dense(tensor, dtype):
        return span.view(dtype).reshape(shape)
    return np.ndarray(shape, dtype, span.data, 0, strides).copy()


def view_tensor(pointer: int) -> npt.NDArray[Any]:
    """Return the tensor itself, shape (ne3, ne2, ne1, ne0), of type f32, f16 or i32: no copy, and only while it has that memory.

    Raises:
        EngineError: the tensor has another type, or no memory that this process can read.
    """
    tensor, dtype, shape, strides, span_bytes = _geometry(pointer)
    if not tensor.buffer or not _ggml().buffer_is_host(tensor.buffer):
        raise EngineError(f"tensor {tensor_name(pointer)} is not in this process's memory")
    memory = memoryview((ctypes.c_uint8 * span_bytes).from_address(tensor.data))
    return np.ndarray(shape, dtype, memory, 0, strides)


def memory_name(pointer: int) -> str:
    """Return what ggml calls the memory that a tensor lies in: "CPU", "CUDA_Host"; empty: it has none yet."""
    tensor = GgmlTensor.from_address(pointer)
    if not tensor.data or not tensor.buffer:
        return ""
    name: bytes = _ggml().buffer_name(tensor.buffer)
    return name.decode()


def write_tensor(pointer: int, array: npt.ArrayLike) -> None:
    """Overwrite the tensor with an array of as many elements, taken in C order and converted to the tensor's type.

    Follows the strides: of a view, only the view's own elements change.

    Raises:
        EngineError: the tensor has another type or no memory, or the array another number of elements.
    """
    tensor, dtype, shape, strides, span_bytes = _geometry(pointer)
    values = np.ascontiguousarray(array, dtype)
    if values.size != math.prod(shape):
        raise EngineError(
            f"array does not fit tensor {tensor_name(pointer)}: got shape {values.shape}, expected {shape}"
        )
    if values.size == 0:
        return
    if not _is_dense(tensor, dtype):
        span = np.empty(span_bytes, np.uint8)
        _ggml().tensor_get(pointer, span.ctypes.data, 0, span_bytes)
        np.ndarray(shape, dtype, span.data, 0, strides)[...] = values.reshape(shape)
        values = span
    _ggml().tensor_set(pointer, values.ctypes.data, 0, span_bytes)


def write_bytes(pointer: int, data: npt.NDArray[np.uint8]) -> None:
    """Overwrite the whole tensor, of any type, with its bytes as GGUF stores them.

    Raises:
        EngineError: the tensor has no memory, or another size.
    """
    tensor = GgmlTensor.from_address(pointer)
    size_bytes = tensor.ne[3] * tensor.nb[3]
    if not tensor.data or data.nbytes != size_bytes or not data.flags.c_contiguous:
        raise EngineError(f"bytes do not fit tensor {tensor_name(pointer)}: got {data.nbytes}, expected {size_bytes}")
    _ggml().tensor_set(pointer, data.ctypes.data, 0, size_bytes)


def write_part(pointer: int, data: npt.NDArray[np.uint8], offset: int) -> None:
    """Overwrite `data.nbytes` bytes of a tensor from `offset` on, as GGUF stores them; its memory may be any device's.

    Raises:
        EngineError: the tensor has no memory, or ends before.
    """
    tensor = GgmlTensor.from_address(pointer)
    size_bytes = tensor.ne[3] * tensor.nb[3]
    if not tensor.data or not 0 <= offset <= offset + data.nbytes <= size_bytes or not data.flags.c_contiguous:
        raise EngineError(
            f"bytes do not fit tensor {tensor_name(pointer)}: got {data.nbytes} at {offset} of {size_bytes}"
        )
    _ggml().tensor_set(pointer, data.ctypes.data, offset, data.nbytes)


def is_repacked(pointer: int) -> bool:
    """Return whether a tensor in a buffer of `CpuBackend.repack_type` is stored in another form than GGUF's."""
    return bool(GgmlTensor.from_address(pointer).extra)


def point_at(pointer: int, array: npt.NDArray[Any]) -> None:
    """Let the tensor's data be this array's memory, C order; the caller keeps the array alive for every computation."""
    GgmlTensor.from_address(pointer).data = address_of(array)


def _geometry(pointer: int) -> tuple[GgmlTensor, np.dtype[Any], tuple[int, ...], tuple[int, ...], int]:
    """Return (struct, dtype, shape, strides in bytes, bytes from the first to the end of the last element)."""
    tensor = GgmlTensor.from_address(pointer)
    dtype = DTYPES.get(tensor.type)
    if dtype is None:
        raise EngineError(
            f"cannot read tensor {tensor_name(pointer)}: got ggml type {tensor.type}, expected f32 or i32"
        )
    if not tensor.data:
        raise EngineError(f"tensor {tensor_name(pointer)} has no memory yet")
    shape = tuple(tensor.ne[::-1])
    strides = tuple(tensor.nb[::-1])
    span_bytes = 0
    if 0 not in shape:
        span_bytes = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return tensor, dtype, shape, strides, span_bytes


def _is_dense(tensor: GgmlTensor, dtype: np.dtype[Any]) -> bool:
    """Return whether the elements lie in C order without gaps (strides of axes of length 1 do not matter)."""
    step: int = dtype.itemsize
    for n, stride in zip(tensor.ne, tensor.nb, strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


class HostBuffer:
    """Memory of the CPU backend, seen from Python.

    Attributes:
        data: the whole buffer as writable bytes. Do not use it, or arrays made from it, after `close`.
        alignment: of tensors in it, in bytes.
    """

    def __init__(self, backend: int, size_bytes: int, *, buffer_type: int | None = None) -> None:
        self._handle: int | None = (
            _ggml().alloc_buffer(backend, size_bytes)
            if buffer_type is None
            else _ggml().buft_alloc_buffer(buffer_type, size_bytes)
        )
        if not self._handle:
            raise EngineError(f"cannot allocate {size_bytes} bytes for tensors")
        self._base: int = _ggml().buffer_base(self._handle)
        self.alignment: int = _ggml().buffer_alignment(self._handle)
        raw = (ctypes.c_uint8 * size_bytes).from_address(self._base)
        self.data: npt.NDArray[np.uint8] = np.ctypeslib.as_array(raw)

    def place(self, tensor: int, offset: int) -> npt.NDArray[np.uint8]:
        """Give a tensor its memory at `offset`; return that memory as bytes, without the padding."""
        struct = GgmlTensor.from_address(tensor)
        size_bytes: int = _ggml().buffer_alloc_size(self._handle, tensor)
        if offset % self.alignment or offset + size_bytes > self.data.size:
            raise EngineError(f"tensor does not fit its buffer: {size_bytes} bytes at {offset} of {self.data.size}")
        if _ggml().tensor_alloc(self._handle, tensor, self._base + offset) != 0:
            raise EngineError("ggml refused to place a tensor")
        return self.data[offset : offset + struct.ne[3] * struct.nb[3]]

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        if self._handle:
            _ggml().buffer_free(self._handle)
            self._handle = None
            self.data = np.empty(0, np.uint8)


class TensorContext:
    """Tensors' headers and one graph over them; holds no tensor data."""

    def __init__(self, n_tensors: int, *, with_graph: bool = False) -> None:
        size_bytes = n_tensors * _ggml().tensor_overhead()
        self._graph_size = max(GRAPH_SIZE, n_tensors)
        if with_graph:
            size_bytes += _ggml().graph_overhead(self._graph_size, False)
        params = load_library().layouts.init_params(size_bytes, None, True)
        self._handle: int | None = _ggml().init(params)
        self._room = n_tensors
        if not self._handle:
            raise EngineError("ggml cannot make a context")

    def _take(self, function: Callable[..., Any], *arguments: object) -> int:
        if self._room == 0:  # ggml would abort the process
            raise EngineError("the context has no room for another tensor")
        self._room -= 1
        pointer: int = function(self._handle, *arguments)
        return pointer

    def new_tensor(self, ggml_type: int, *ne: int) -> int:
        """Return a new tensor without memory; `ne` is in ggml's order, fastest first."""
        return self._take(_ggml().new_tensor, ggml_type, len(ne), (ctypes.c_int64 * len(ne))(*ne))

    def mul_mat_id(self, experts: int, x: int, ids: int) -> int:
        """Return the node `experts[ids] @ x`: experts (a, b, E), x (a, 1 or K, T), ids (K, T) give (b, K, T)."""
        return self._take(_ggml().mul_mat_id, experts, x, ids)

    def glu(self, name: str, gate: int, up: int) -> int:
        """Return the node `act(gate) * up`: "swiglu", "geglu" or "reglu"."""
        return self._take(_ggml().glu_splits[name], gate, up)

    def unary(self, name: str, x: int) -> int:
        """Return the node `act(x)`: "silu", "gelu", "relu", "sqr", "tanh" or "sigmoid"."""
        return self._take(_ggml().unary[name], x)

    def swiglu_oai(self, gate: int, up: int, alpha: float, limit: float) -> int:
        """Return the node `h sigmoid(alpha h) (1 + clamp(up, -limit, limit))` with `h = min(gate, limit)`."""
        return self._take(_ggml().swiglu_oai, gate, up, alpha, limit)

    def swiglu_clamp(self, gate: int, up: int, limit: float) -> int:
        """Return the node `silu(min(gate, limit)) * clamp(up, -limit, limit)`."""
        return self._take(_ggml().swiglu_clamp, gate, up, limit)

    def clamp(self, x: int, low: float, high: float) -> int:
        """Return a view of x whose computing clamps it in place."""
        return self._take(_ggml().clamp, x, low, high)

    def scale(self, x: int, factor: float) -> int:
        """Return the node `x * factor`."""
        return self._take(_ggml().scale, x, factor)

    def add_id(self, x: int, bias: int, ids: int) -> int:
        """Return the node `x + bias[ids]`: x (b, K, T), bias (b, E), ids (K, T)."""
        return self._take(_ggml().add_id, x, bias, ids)

    def mul(self, a: int, b: int, *, in_place: bool = False) -> int:
        """Return the node `a * b`, or with `in_place` a view of a; b is repeated along axes of length 1."""
        return self._take(_ggml().mul_inplace if in_place else _ggml().mul, a, b)

    def add(self, a: int, b: int, *, in_place: bool = False) -> int:
        """Return the node `a + b`, or with `in_place` a view of a."""
        return self._take(_ggml().add_inplace if in_place else _ggml().add, a, b)

    def slot(self, tensor: int, index: int) -> int:
        """Return the view (a, c) of a tensor (a, b, c) at `index` of its middle axis."""
        struct = GgmlTensor.from_address(tensor)
        shape = (struct.ne[0], struct.ne[2], 1, struct.nb[2], struct.nb[3])
        return self._take(_ggml().view_3d, tensor, *shape, index * struct.nb[1])

    def halves(self, tensor: int) -> tuple[int, int]:
        """Return views of the first and the second half of the tensor's fastest axis."""
        struct = GgmlTensor.from_address(tensor)
        half = struct.ne[0] // 2
        shape = (half, struct.ne[1], struct.ne[2], struct.nb[1], struct.nb[2])
        first = self._take(_ggml().view_3d, tensor, *shape, 0)
        return first, self._take(_ggml().view_3d, tensor, *shape, half * struct.nb[0])

    def bind_view(self, view: int) -> None:
        """Point a view at the memory of its source, which must have been placed."""
        if _ggml().view_init(view) != 0:
            raise EngineError("ggml refused to place a view")

    def graph(self, output: int) -> int:
        """Return the graph that computes `output`; the context must have been made with room for one."""
        graph: int = _ggml().new_graph(self._handle, self._graph_size, False)
        _ggml().expand(graph, output)
        return graph

    def close(self) -> None:
        """Free the headers and the graph; a second call does nothing."""
        if self._handle:
            _ggml().free(self._handle)
            self._handle = None


class DeviceBuffer:
    """Memory of any device: tensors in it are written and read with `write_part`, `write_tensor` and `read_tensor`."""

    def __init__(self, backend: int, size_bytes: int) -> None:
        self._handle: int | None = _ggml().alloc_buffer(backend, size_bytes)
        if not self._handle:
            raise EngineError(f"the device cannot allocate {size_bytes} bytes for tensors")
        self._base: int = _ggml().buffer_base(self._handle)
        self._size_bytes = size_bytes
        self.alignment: int = _ggml().buffer_alignment(self._handle)

    def place(self, tensor: int, offset: int) -> int:
        """Give a tensor its memory at `offset`; return where the next one may lie."""
        size_bytes: int = _ggml().buffer_alloc_size(self._handle, tensor)
        if offset % self.alignment or offset + size_bytes > self._size_bytes:
            raise EngineError(f"tensor does not fit its buffer: {size_bytes} bytes at {offset} of {self._size_bytes}")
        if _ggml().tensor_alloc(self._handle, tensor, self._base + offset) != 0:
            raise EngineError("ggml refused to place a tensor")
        return offset + -(-size_bytes // self.alignment) * self.alignment

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        if self._handle:
            _ggml().buffer_free(self._handle)
            self._handle = None


class _Backend:
    """What all backends do with graphs whose tensors lie in their buffers. One caller at a time."""

    def __init__(self, handle: int | None, name: str) -> None:
        if not handle:
            raise EngineError(f"ggml cannot start {name}")
        self._handle: int | None = handle
        self._name = name

    def supports(self, node: int) -> bool:
        """Return whether this backend can compute the node."""
        return bool(_ggml().supports_op(self._open_handle(), node))

    def compute(self, graph: int) -> None:
        """Compute the graph, giving up the GIL meanwhile. Raises EngineError when ggml fails."""
        status = _ggml().graph_compute(self._open_handle(), graph)
        if status != 0:
            raise EngineError(f"ggml could not compute: status {status}")

    def _open_handle(self) -> int:
        if not self._handle:
            raise EngineError(f"{self._name} is closed")
        return self._handle

    def close(self) -> None:
        """Free the backend; close its buffers first. A second call does nothing."""
        if self._handle:
            _ggml().backend_free(self._handle)
            self._handle = None


class DeviceBackend(_Backend):
    """A backend of a device from the registry."""

    def __init__(self, device: int) -> None:
        """Start it; `device` is a `swarm.native.devices.Device.handle`."""
        init = load_library().function("ggml_backend_dev_init", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
        super().__init__(init(device, None), "the device's backend")

    def allocate(self, size_bytes: int) -> DeviceBuffer:
        """Return a new buffer, not zeroed. Raises EngineError when memory is short."""
        return DeviceBuffer(self._open_handle(), size_bytes)


class CpuBackend(_Backend):
    """A CPU backend of its own."""

    def __init__(self, n_threads: int = 1) -> None:
        super().__init__(_ggml().cpu_init(), "the CPU backend")
        _ggml().cpu_set_n_threads(self._handle, n_threads)
        self.alignment: int = _ggml().alignment(self._handle)

    def allocate(self, size_bytes: int, *, buffer_type: int | None = None) -> HostBuffer:
        """Return a new buffer, not zeroed, of a type such as `repack_type`. Raises EngineError when memory is short."""
        return HostBuffer(self._open_handle(), size_bytes, buffer_type=buffer_type)

    def repack_type(self) -> int | None:
        """Return the type of buffers that interleave the rows of quantised matrices for faster products, if there is one.

        What is written into such a buffer with `write_bytes` is repacked on its way, if `is_repacked` says so of its tensor.
        """
        registry = _ggml().device_registry(_ggml().get_device(self._open_handle()))
        address = _ggml().proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        find = ctypes.PYFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
        for buffer_type in find(_ggml().get_device(self._open_handle())) or ():
            if not buffer_type:  # the list ends with a null
                return None
            if _ggml().buft_name(buffer_type) == REPACK_NAME:
                return int(buffer_type)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
