"""An expert slice in ggml tensors, and the feed-forward network of its experts.

For each (row, expert) pair: `down(silu(gate(x)) * up(x))`, computed by ggml's grouped `mul_mat_id` with ids of shape
[1, P], so that pairs are grouped by expert without padding. The weights stay as they are stored (never repacked), and
with exact kernels a pair's result does not depend on the other pairs of its call. It knows nothing of the network and
trusts its callers to have checked what came from there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Self

import gguf
import numpy as np
import numpy.typing as npt

from swarm.errors import EngineError, IntegrityError, LocalProtocolError, UnsupportedModel
from swarm.ids import ExpertSet, format_index_set
from swarm.model.spec import ExpertTensor, ModelSpec
from swarm.native.ggml import CpuBackend, HostBuffer, TensorContext, type_layout
from swarm.native.layouts import GGML_TYPE_F32, GGML_TYPE_I32

SCRATCH_BYTES = 64 << 20  # activations of one graph; a guess: 2,600 pairs of D=2048, F=768; more pairs are cut
MAX_GRAPHS = 1024  # graphs kept, about 6 KB each: 48 layers with P of 1 to 20
# Stored only in memory, as activations: ggml has no dot product for weights of these types.
NOT_COMPUTABLE = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})


class ExpertNotLoaded(LocalProtocolError):
    """A computation was asked of experts that are outside the slice, or whose block is not loaded yet.

    Attributes:
        layer: the N of `blk.N`.
        experts: global expert ids, ascending.
    """

    def __init__(self, layer: int, experts: Sequence[int]) -> None:
        self.layer = layer
        self.experts = tuple(sorted(set(experts)))
        shown = format_index_set(self.experts[:16]) or "all"
        super().__init__(f"experts are not loaded: got layer {layer}, experts {shown}, expected some of the slice")


class _Plane(NamedTuple):
    """One tensor of a layer's slice: [n_local, bytes of one expert] of ggml's own memory."""

    pointer: int
    memory: npt.NDArray[np.uint8]


class _Graph(NamedTuple):
    """A graph of one layer and number of pairs, and numpy views of its ends in the scratch buffer."""

    context: TensorContext
    handle: int
    x: npt.NDArray[np.float32]  # [P, D]
    ids: npt.NDArray[np.int32]  # [P]
    y: npt.NDArray[np.float32]  # [P, D]


class ExpertFfn:
    """The experts of a slice. Safe to use from several threads; one computes at a time.

    Attributes:
        experts: the slice: what `load` accepts.
        max_pairs: more pairs than these are computed in several graphs.
    """

    def __init__(self, spec: ModelSpec, experts: ExpertSet, *, n_threads: int = 1) -> None:
        """Reserve memory for the slice; nothing is loaded yet.

        Args:
            n_threads: 1 unless this process has its cores for itself: idle OpenMP threads spin.

        Raises:
            UserError: the set is empty or outside the model.
            UnsupportedModel: ggml cannot compute the activation or a weight's type.
            EngineUnavailable: no usable llama.cpp library.
            EngineError: memory is short.
        """
        spec.require_experts(experts)
        if spec.activation != "swiglu":
            raise UnsupportedModel(f"cannot compute the activation: got {spec.activation!r}, expected 'swiglu'")
        self.experts = experts
        self._spec = spec
        self._lock = threading.Lock()
        self._is_closed = False
        self._graphs: OrderedDict[tuple[int, int], _Graph] = OrderedDict()
        self._kinds: dict[int, dict[str, int]] = {}  # layer -> kind -> index into _planes[layer]
        self._planes: dict[int, list[_Plane]] = {}  # layer -> in name order
        self._local: dict[int, npt.NDArray[np.int32]] = {}  # layer -> [E]: index in the slice, or -1
        self._is_loaded: dict[int, npt.NDArray[np.bool_]] = {}  # layer -> [E]
        for layer in experts.by_layer:
            for tensor in spec.expert_tensors(layer):
                _require_computable(tensor)

        self._backend = CpuBackend(n_threads)
        self._buffers: list[HostBuffer] = []
        self._weights = TensorContext(sum(len(spec.expert_tensors(layer)) for layer in experts.by_layer))
        try:
            self._reserve()
            pair_bytes = 4 * (2 * spec.n_embd + 3 * spec.n_ff_exp + 1)
            self.max_pairs = max(1, SCRATCH_BYTES // pair_bytes)
            self._scratch = self._backend.allocate(self.max_pairs * pair_bytes + 8 * self._backend.alignment)
            self._buffers.append(self._scratch)
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        """Make and place the tensors of the slice, in one buffer; memory is touched only as blocks are loaded."""
        align = self._backend.alignment
        size_bytes = align
        for layer, chosen in self.experts.by_layer.items():
            for tensor in self._spec.expert_tensors(layer):
                size_bytes += -(-tensor.expert_size_bytes * len(chosen) // align) * align
        buffer = self._backend.allocate(size_bytes)
        self._buffers.append(buffer)
        offset = 0
        for layer, chosen in self.experts.by_layer.items():
            local = np.full(self._spec.n_expert, -1, np.int32)
            local[sorted(chosen)] = np.arange(len(chosen))
            self._local[layer] = local
            self._is_loaded[layer] = np.zeros(self._spec.n_expert, np.bool_)
            tensors = self._spec.expert_tensors(layer)
            self._kinds[layer] = {tensor.kind: index for index, tensor in enumerate(tensors)}
            self._planes[layer] = []
            for tensor in tensors:
                pointer = self._weights.new_tensor(tensor.ggml_type, *tensor.shape[:2], len(chosen))
                memory = buffer.place(pointer, offset)
                self._planes[layer].append(_Plane(pointer, memory.reshape(len(chosen), tensor.expert_size_bytes)))
                offset += -(-memory.size // align) * align

    def load(self, layer: int, expert: int, block: bytes | memoryview) -> None:
        """Copy a block (the expert's planes in tensor name order) into its tensors; check its hash before.

        Raises:
            ExpertNotLoaded: the expert is outside the slice.
            IntegrityError: the block has a wrong size.
        """
        raw = np.frombuffer(block, np.uint8)
        local = self._require_in_slice(layer, expert)
        expected = self._spec.block_size_bytes(layer)
        if raw.size != expected:
            raise IntegrityError(
                f"block of layer {layer}, expert {expert} has a wrong size: got {raw.size} bytes, expected {expected}"
            )
        with self._lock:
            self._require_open()
            start = 0
            for plane in self._planes[layer]:
                end = start + plane.memory.shape[1]
                plane.memory[local] = raw[start:end]
                start = end
            self._is_loaded[layer][expert] = True

    @property
    def loaded(self) -> ExpertSet:
        """The experts whose blocks are loaded."""
        with self._lock:
            return ExpertSet(
                {layer: frozenset(np.flatnonzero(mask).tolist()) for layer, mask in self._is_loaded.items()}
            )

    def compute(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        row_index: npt.NDArray[np.integer],
        experts: npt.NDArray[np.integer],
    ) -> npt.NDArray[np.float32]:
        """Return the output of each pair (row `row_index[p]` of x, expert `experts[p]`), [P, D], freshly allocated.

        Args:
            x: [N, D], float32.
            row_index: [P], 0 to N-1.
            experts: [P], global expert ids.

        Raises:
            ExpertNotLoaded: an expert is outside the slice or not loaded; nothing was computed.
            ValueError: shapes that do not fit each other or the model.
            EngineError: ggml failed, or this object is closed.
        """
        n_embd, n_pairs = self._spec.n_embd, len(experts)
        if x.ndim != 2 or x.shape[1] != n_embd or x.dtype != np.float32:
            raise ValueError(f"x has a wrong form: got {x.dtype} {x.shape}, expected float32 (N, {n_embd})")
        if row_index.shape != (n_pairs,) or experts.shape != (n_pairs,):
            raise ValueError(f"pairs do not fit: got {row_index.shape} rows and {experts.shape} experts")
        if n_pairs == 0:
            return np.empty((0, n_embd), np.float32)
        if row_index.min() < 0 or row_index.max() >= x.shape[0]:
            raise ValueError(f"row index out of range: expected 0 to {x.shape[0] - 1}")
        local = self._require_loaded(layer, experts)
        y = np.empty((n_pairs, n_embd), np.float32)
        with self._lock:
            self._require_open()
            for start in range(0, n_pairs, self.max_pairs):
                cut = slice(start, start + self.max_pairs)
                ids = local[cut]
                graph = self._graph(layer, len(ids))
                np.take(x, row_index[cut], axis=0, out=graph.x, mode="clip")  # checked above; "raise" would copy
                graph.ids[:] = ids
                self._backend.compute(graph.handle)
                y[cut] = graph.y
        return y

    def _require_loaded(self, layer: int, experts: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """Return the experts' indices in the slice, [P]."""
        is_loaded = self._is_loaded.get(layer)
        if is_loaded is None:
            raise ExpertNotLoaded(layer, experts.tolist())
        if experts.min() < 0 or experts.max() >= is_loaded.size or not is_loaded[experts].all():
            raise ExpertNotLoaded(
                layer, [e for e in set(experts.tolist()) if not 0 <= e < is_loaded.size or not is_loaded[e]]
            )
        local: npt.NDArray[np.int32] = self._local[layer][experts]
        return local

    def _require_in_slice(self, layer: int, expert: int) -> int:
        if (layer, expert) not in self.experts:
            raise ExpertNotLoaded(layer, [expert])
        return int(self._local[layer][expert])

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("the expert slice is closed")

    def _graph(self, layer: int, n_pairs: int) -> _Graph:
        """Return the graph for P pairs, from the latest used ones or new. All share the scratch buffer."""
        key = (layer, n_pairs)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph
        graph = self._graphs[key] = self._build(layer, n_pairs)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)[1].context.close()
        return graph

    def _build(self, layer: int, n_pairs: int) -> _Graph:
        context = TensorContext(n_tensors=10, with_graph=True)
        try:
            weights = {kind: self._planes[layer][index].pointer for kind, index in self._kinds[layer].items()}
            x = context.new_tensor(GGML_TYPE_F32, self._spec.n_embd, 1, n_pairs)
            ids = context.new_tensor(GGML_TYPE_I32, 1, n_pairs)
            views: tuple[int, ...] = ()
            if "gate_up" in weights:
                products = [context.mul_mat_id(weights["gate_up"], x, ids)]
                views = gate, up = context.halves(products[0])
            else:
                products = [context.mul_mat_id(weights[kind], x, ids) for kind in ("gate", "up")]
                gate, up = products
            hidden = context.swiglu_split(gate, up)
            y = context.mul_mat_id(weights["down"], hidden, ids)
            if not all(self._backend.supports(node) for node in (*products, hidden, y)):
                raise EngineError(f"ggml's CPU backend cannot compute the experts of layer {layer}")
            memory = {}
            offset = 0
            for tensor in (x, ids, *products, hidden, y):
                memory[tensor] = self._scratch.place(tensor, offset)
                offset += -(-memory[tensor].size // self._scratch.alignment) * self._scratch.alignment
            for view in views:
                context.bind_view(view)
            return _Graph(
                context,
                context.graph(y),
                memory[x].view(np.float32).reshape(n_pairs, -1),
                memory[ids].view(np.int32),
                memory[y].view(np.float32).reshape(n_pairs, -1),
            )
        except BaseException:
            context.close()
            raise

    def flip_byte(self, layer: int, expert: int, offset: int) -> None:
        """Invert the bits of one byte of a loaded block in memory: the fault that a verification must find.

        Args:
            offset: within the block.
        """
        with self._lock:
            self._require_open()
            local = self._require_in_slice(layer, expert)
            rest = offset
            for plane in self._planes[layer]:
                if 0 <= rest < plane.memory.shape[1]:
                    plane.memory[local, rest] ^= 0xFF
                    return
                rest -= plane.memory.shape[1]
        raise ValueError(f"no such byte: got {offset}, expected 0 to {self._spec.block_size_bytes(layer) - 1}")

    def close(self) -> None:
        """Free everything once a running computation has ended; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            while self._graphs:
                self._graphs.popitem()[1].context.close()
            self._planes.clear()
            self._weights.close()
            for buffer in self._buffers:
                buffer.close()
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_computable(tensor: ExpertTensor) -> None:
    """Raise UnsupportedModel for a type that ggml would abort on, or that it stores in another size than GGUF."""
    type_name = gguf.GGMLQuantizationType(tensor.ggml_type).name
    if type_name in NOT_COMPUTABLE:
        raise UnsupportedModel(f"cannot compute {tensor.name}: ggml has no dot product for weights of type {type_name}")
    block, size_bytes = type_layout(tensor.ggml_type)
    if (block, size_bytes) != tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.ggml_type)]):
        raise UnsupportedModel(f"cannot compute {tensor.name}: this engine stores {type_name} in another form")
