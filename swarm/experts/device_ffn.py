"""The feed-forward network of an expert slice on any device of ggml's registry: what `ExpertFfn` is for the CPU.

    weights, once            -> the device
    rows, ids of each call   -> the device -> the nodes of `expert_graph` -> raw rows back

Sums of a row's experts are made here, in llama.cpp's order. It knows nothing of the network and trusts its callers.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from swarm.errors import EngineError, IntegrityError, UnsupportedModel
from swarm.experts.expert_ffn import ExpertFfn
from swarm.experts.expert_graph import build, pair_size_bytes
from swarm.experts.slice_memory import ExpertNotLoaded
from swarm.ids import ExpertSet
from swarm.model.spec import ExpertTensor, ModelSpec
from swarm.native.devices import Device, choose_device
from swarm.native.ggml import DeviceBackend, DeviceBuffer, TensorContext, read_tensor, write_part, write_tensor
from swarm.native.layouts import GGML_TYPE_F32, GGML_TYPE_I32

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 64 << 20  # activations of one graph; guessed: a device is fast with many rows
MAX_GRAPHS = 64
MAX_PLACED = 32  # tensors of a graph, each aligned

Rows = npt.NDArray[np.float32]


class _Graph(NamedTuple):
    context: TensorContext
    handle: int
    x: int
    ids: int
    scales: dict[str, int]
    out: int


class DeviceFfn:
    """The experts of a slice on a device. Safe to use from several threads; one computes at a time.

    Attributes:
        experts: the slice: what `load` accepts.
        max_pairs: more pairs than these are computed in several graphs.
    """

    n_repacked_bytes = 0
    n_mapped_bytes = 0

    def __init__(
        self, spec: ModelSpec, experts: ExpertSet, device: Device, *, scratch_bytes: int = SCRATCH_BYTES
    ) -> None:
        """Reserve the device's memory for the slice.

        Raises:
            UserError: the set is empty or outside the model.
            UnsupportedModel: the device cannot compute one of the layers.
            EngineError: its memory is short.
        """
        spec.require_experts(experts)
        self.experts = experts
        self._spec = spec
        self._device = device
        self._lock = threading.Lock()
        self._graphs: OrderedDict[tuple[int, int], _Graph] = OrderedDict()
        self._buffers: list[DeviceBuffer] = []
        self._planes: dict[int, dict[str, tuple[ExpertTensor, int]]] = {}  # layer -> kind -> tensor
        self._scales: dict[tuple[int, str], Rows] = {}  # (layer, kind) -> [n_local]: chosen on the host
        self._slice_index = {layer: sorted(chosen) for layer, chosen in experts.by_layer.items()}
        self._loaded: dict[int, npt.NDArray[np.int32]] = {
            layer: np.full(spec.n_expert, -1, np.int32) for layer in experts.by_layer
        }
        n_tensors = sum(len(spec.expert_tensors(layer)) for layer in experts.by_layer)
        self._context = TensorContext(n_tensors)
        self._backend = DeviceBackend(device.handle)
        try:
            self._reserve()
            pair_bytes = 4 * (spec.n_embd + 1) + max(pair_size_bytes(spec, layer) for layer in experts.by_layer)
            self.max_pairs = max(1, scratch_bytes // pair_bytes)
            probe = self._backend.allocate(1)
            room = MAX_PLACED * probe.alignment
            probe.close()
            self._scratch = self._backend.allocate(self.max_pairs * pair_bytes + room)
            self._buffers.append(self._scratch)
            for layer in experts.by_layer:
                self._graph(layer, 1)  # refused now, not at the first dispatch
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        for layer, chosen in self.experts.by_layer.items():
            planes = self._planes[layer] = {}
            size_bytes = 0
            for tensor in self._spec.expert_tensors(layer):
                if tensor.kind.endswith(".scale"):
                    self._scales[layer, tensor.kind] = np.zeros(len(chosen), np.float32)
                pointer = self._context.new_tensor(tensor.ggml_type, *tensor.shape[:-1], len(chosen))
                planes[tensor.kind] = (tensor, pointer)
                size_bytes += (
                    tensor.expert_size_bytes * len(chosen) + 4096
                )  # more than any device's alignment and padding
            buffer = self._backend.allocate(size_bytes)  # one for each layer: devices limit the size of one
            self._buffers.append(buffer)
            offset = 0
            for _, pointer in planes.values():
                offset = buffer.place(pointer, offset)

    def load(self, layer: int, expert: int, block: bytes | memoryview) -> None:
        """Copy a block (the expert's planes in tensor name order) to the device; check its hash before.

        Raises:
            ExpertNotLoaded: the expert is outside the slice.
            IntegrityError: the block has a wrong size.
        """
        if (layer, expert) not in self.experts:
            raise ExpertNotLoaded(layer, [expert])
        raw = np.frombuffer(block, np.uint8)
        expected = self._spec.block_size_bytes(layer)
        if raw.size != expected:
            raise IntegrityError(
                f"block of layer {layer}, expert {expert} has a wrong size: got {raw.size} bytes, expected {expected}"
            )
        local = self._slice_index[layer].index(expert)
        with self._lock:
            self._require_open()
            start = 0
            for kind, (tensor, pointer) in self._planes[layer].items():
                end = start + tensor.expert_size_bytes
                if (layer, kind) in self._scales:
                    self._scales[layer, kind][local] = raw[start:end].view(np.float32)[0]
                else:
                    write_part(pointer, raw[start:end], local * tensor.expert_size_bytes)
                start = end
            self._loaded[layer][expert] = local

    @property
    def loaded(self) -> ExpertSet:
        """The experts whose blocks are on the device."""
        with self._lock:
            return ExpertSet(
                {layer: frozenset(np.flatnonzero(index >= 0).tolist()) for layer, index in self._loaded.items()}
            )

    def compute(
        self,
        layer: int,
        x: Rows,
        row_index: npt.NDArray[np.integer],
        experts: npt.NDArray[np.integer],
        out: Rows | None = None,
    ) -> Rows:
        """Return the output of each pair (row `row_index[p]` of x, expert `experts[p]`), [P, D]; in `out`, if it is given.

        Raises:
            ExpertNotLoaded: an expert is outside the slice or not loaded; nothing was computed.
            ValueError: shapes that do not fit each other or the model.
            EngineError: the device failed, or this object is closed.
        """
        n_pairs = len(experts)
        if x.ndim != 2 or x.shape[1] != self._spec.n_embd or x.dtype != np.float32:
            raise ValueError(f"x has a wrong form: got {x.dtype} {x.shape}, expected float32 (N, {self._spec.n_embd})")
        if row_index.shape != (n_pairs,) or experts.shape != (n_pairs,):
            raise ValueError(f"pairs do not fit: got {row_index.shape} rows and {experts.shape} experts")
        y = np.empty((n_pairs, self._spec.n_embd), np.float32) if out is None else out
        if n_pairs == 0:
            return y
        if row_index.min() < 0 or row_index.max() >= x.shape[0]:
            raise ValueError(f"row index out of range: expected 0 to {x.shape[0] - 1}")
        with self._lock:
            self._require_open()
            local = self._local(layer, experts)
            for start in range(0, n_pairs, self.max_pairs):
                cut = slice(start, start + self.max_pairs)
                y[cut] = self._run(layer, x[row_index[cut]], local[cut])
        return y

    def compute_choice(
        self,
        layer: int,
        x: Rows,
        experts: npt.NDArray[np.integer],
        weights: Rows | None = None,
        out: Rows | None = None,
    ) -> Rows:
        """Return the outputs of K experts for each row of x: [N, K, D], or with weights their sums, [N, D]; as `ExpertFfn`."""
        if experts.ndim != 2 or len(experts) != len(x) or experts.shape[1] == 0:
            raise ValueError(f"experts have a wrong form: got {experts.shape}, expected ({len(x)}, K)")
        n_rows, n_used = experts.shape
        raw = self.compute(layer, x, np.repeat(np.arange(n_rows), n_used), experts.ravel())
        y = raw.reshape(n_rows, n_used, -1)  # [N, K, D]
        if weights is not None:
            if weights.shape != experts.shape or weights.dtype != np.float32:
                raise ValueError(f"weights have a wrong form: got {weights.dtype} {weights.shape}")
            total = y[:, 0] * weights[:, :1]
            for k in range(1, n_used):
                total += y[:, k] * weights[:, k : k + 1]
            y = total  # [N, D]
        if out is None:
            return y
        out[...] = y
        return out

    def _local(self, layer: int, experts: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        index = self._loaded.get(layer)
        if index is None or experts.min() < 0 or experts.max() >= index.size or (index[experts] < 0).any():
            asked = set(experts.ravel().tolist())
            missing = [e for e in asked if index is None or not 0 <= e < index.size or index[e] < 0]
            raise ExpertNotLoaded(layer, missing)
        local: npt.NDArray[np.int32] = index[experts]
        return local

    def _run(self, layer: int, rows: Rows, local: npt.NDArray[np.int32]) -> Rows:
        graph = self._graph(layer, len(local))
        write_tensor(graph.x, rows)
        write_tensor(graph.ids, local)
        for product, scale in graph.scales.items():
            write_tensor(scale, self._scales[layer, f"{product}.scale"][local])
        self._backend.compute(graph.handle)
        y: Rows = read_tensor(graph.out).reshape(len(local), -1)
        return y

    def _graph(self, layer: int, n_pairs: int) -> _Graph:
        key = (layer, n_pairs)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        context = TensorContext(n_tensors=40, with_graph=True)
        try:
            x = context.new_tensor(GGML_TYPE_F32, self._spec.n_embd, 1, n_pairs)
            ids = context.new_tensor(GGML_TYPE_I32, 1, n_pairs)
            planes = {kind: pointer for kind, (_, pointer) in self._planes[layer].items()}
            nodes = build(context, planes, self._spec.activation(layer), x, ids, (1, n_pairs))
            if not all(self._backend.supports(node) for node in nodes.computed):
                types = ", ".join(sorted({str(tensor.ggml_type) for tensor, _ in self._planes[layer].values()}))
                raise UnsupportedModel(
                    f"device {self._device.name} cannot compute the experts of layer {layer} (ggml types {types}): "
                    "choose --device cpu"
                )
            offset = 0
            for tensor in (x, ids, *nodes.placed):
                offset = self._scratch.place(tensor, offset)
            for view in nodes.views:
                context.bind_view(view)
            graph = _Graph(context, context.graph(nodes.output), x, ids, nodes.scales, nodes.output)
        except BaseException:
            context.close()
            raise
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)[1].context.close()
        return graph

    def flip_byte(self, layer: int, expert: int, offset: int) -> None:
        """Refused: a fault is planted in memory that can be seen."""
        raise EngineError("cannot change a byte on a device: plant the fault at a peer with --device cpu")

    def _require_open(self) -> None:
        if not self._buffers:
            raise EngineError("the expert slice is closed")

    def close(self) -> None:
        """Free everything once a running computation has ended; a second call does nothing."""
        with self._lock:
            while self._graphs:
                self._graphs.popitem()[1].context.close()
            self._context.close()
            while self._buffers:
                self._buffers.pop().close()
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reserve_slice(spec: ModelSpec, experts: ExpertSet, *, device: str, n_threads: int) -> ExpertFfn | DeviceFfn:
    """Return an empty slice on the device that `--device` names.

    Raises:
        UserError: there is no such device, or the set is empty or outside the model.
        UnsupportedModel: the device cannot compute one of the layers.
        EngineError: memory is short.
    """
    chosen = choose_device(device)
    if chosen.is_cpu:
        return ExpertFfn(spec, experts, n_threads=n_threads)
    logger.info("experts go to %s (%s)", chosen.name, chosen.description)
    return DeviceFfn(spec, experts, chosen)
