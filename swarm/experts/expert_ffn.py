"""The feed-forward network of an expert slice, in ggml.

For each (row, expert) pair: `down(act(gate(x), up(x)))` (`expert_graph`), computed by ggml's grouped `mul_mat_id`. Two forms:

    pairs     ids of shape [1, P]: any rows with any experts, grouped by expert without padding; raw rows come back
    choice    ids of shape [K, N]: K experts for each of N rows, as llama.cpp's own graph has them; x is read where it lies,
              and with weights each row's sum is made by ggml too, in llama.cpp's order

With exact kernels the weights stay as they are stored, and a pair's result does not depend on the other pairs of its call.
It knows nothing of the network and trusts its callers to have checked what came from there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from swarm.errors import EngineError
from swarm.experts.expert_graph import build, pair_size_bytes
from swarm.experts.slice_memory import ExpertNotLoaded, SliceMemory
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import ModelSpec
from swarm.native.ggml import CpuBackend, TensorContext, point_at
from swarm.native.layouts import GGML_TYPE_F32, GGML_TYPE_I32
from swarm.native.library import has_exact_kernels

__all__ = ["ExpertFfn", "ExpertNotLoaded"]

# Activations of one graph: 655 pairs of D=2048, F=768; more pairs are cut, by expert. 4,096 pairs of that shape (E=128, Q4_K, one
# thread): 64 MiB 443 ms cut as they come, 359 ms by expert; by expert with 32, 16, 8 MiB 357, 360, 367 ms.
SCRATCH_BYTES = 16 << 20
MAX_PLACED = 32  # tensors of a graph that lie in the scratch buffer, each aligned: 23 at most
MAX_GRAPHS = 1024  # graphs kept, about 6 KB each: 48 layers with P of 1 to 20

Rows = npt.NDArray[np.float32]


class _Graph(NamedTuple):
    """A graph of one layer and shape. x and out are pointed at arrays before each computation.

    Attributes:
        x_rows: scratch for rows that must be copied together, [P, D]; None in the choice form.
        ids: [N, K], in the scratch buffer.
        weights: [N, K], in the scratch buffer; None: raw rows are the output.
        out: tensor of the output.
        scales: for each product that has them: the experts' numbers [n_local], and where those of a choice go, [N, K].
    """

    context: TensorContext
    handle: int
    x: int
    x_rows: Rows | None
    ids: npt.NDArray[np.int32]
    weights: Rows | None
    out: int
    scales: tuple[tuple[Rows, Rows], ...]

    def choose(self, ids: npt.NDArray[np.int32]) -> None:
        """Set the experts, [N, K]: indices in the slice."""
        self.ids[:] = ids
        for numbers, chosen in self.scales:
            np.take(numbers, ids, out=chosen)


class ExpertFfn:
    """The experts of a slice. Safe to use from several threads; one computes at a time.

    Attributes:
        experts: the slice: what `load` accepts.
        max_pairs: more pairs than these are computed in several graphs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        experts: ExpertSet,
        *,
        n_threads: int = 1,
        repacks: bool | None = None,
        mapped: GgufFile | None = None,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """Reserve memory for the slice; nothing is loaded yet but what is mapped.

        Args:
            n_threads: 1 unless this process has its cores for itself: idle OpenMP threads spin.
            repacks: interleave the weights' rows where ggml can, as stock llama.cpp does; None: unless kernels are exact.
            mapped: the whole model's file, whose pages serve layers that are held whole and not interleaved.

        Raises:
            UserError: the set is empty or outside the model.
            UnsupportedModel: ggml cannot compute a weight's type.
            EngineUnavailable: no usable llama.cpp library.
            EngineError: memory is short.
        """
        spec.require_experts(experts)
        self.experts = experts
        self._spec = spec
        self._lock = threading.Lock()
        self._is_closed = False
        self._graphs: OrderedDict[tuple[int, int, int, bool], _Graph] = OrderedDict()
        self._backend = CpuBackend(n_threads)
        try:
            if repacks is None:
                repacks = not has_exact_kernels()
            self._memory = SliceMemory(spec, experts, self._backend, repacks=repacks, mapped=mapped)
        except BaseException:
            self._backend.close()
            raise
        # A pair's x, id and weight, and all that becomes of them.
        self._pair_bytes = 4 * (spec.n_embd + 2) + max(pair_size_bytes(spec, layer) for layer in experts.by_layer)
        self.max_pairs = max(1, scratch_bytes // self._pair_bytes)
        try:
            self._scratch = self._backend.allocate(
                self.max_pairs * self._pair_bytes + MAX_PLACED * self._backend.alignment
            )
        except BaseException:
            self._memory.close()
            self._backend.close()
            raise

    @property
    def n_repacked_bytes(self) -> int:
        """How much of the slice has interleaved rows."""
        return self._memory.n_repacked_bytes

    @property
    def n_mapped_bytes(self) -> int:
        """How much of the slice lies in the model file's pages."""
        return self._memory.n_mapped_bytes

    def load(self, layer: int, expert: int, block: bytes | memoryview) -> None:
        """Copy a block (the expert's planes in tensor name order) into its tensors; check its hash before.

        Raises:
            ExpertNotLoaded: the expert is outside the slice.
            IntegrityError: the block has a wrong size.
        """
        with self._lock:
            self._require_open()
            self._memory.load(layer, expert, block)

    @property
    def loaded(self) -> ExpertSet:
        """The experts whose blocks are loaded."""
        with self._lock:
            return self._memory.loaded

    def compute(
        self,
        layer: int,
        x: Rows,
        row_index: npt.NDArray[np.integer],
        experts: npt.NDArray[np.integer],
        out: Rows | None = None,
    ) -> Rows:
        """Return the output of each pair (row `row_index[p]` of x, expert `experts[p]`), [P, D].

        Args:
            x: [N, D], float32.
            row_index: [P], 0 to N-1.
            experts: [P], global expert ids.
            out: where to write, C order; None: freshly allocated.

        Raises:
            ExpertNotLoaded: an expert is outside the slice or not loaded; nothing was computed.
            ValueError: shapes that do not fit each other or the model.
            EngineError: ggml failed, or this object is closed.
        """
        n_embd, n_pairs = self._spec.n_embd, len(experts)
        self._check_x(x)
        if row_index.shape != (n_pairs,) or experts.shape != (n_pairs,):
            raise ValueError(f"pairs do not fit: got {row_index.shape} rows and {experts.shape} experts")
        if n_pairs == 0:
            return np.empty((0, n_embd), np.float32)
        if row_index.min() < 0 or row_index.max() >= x.shape[0]:
            raise ValueError(f"row index out of range: expected 0 to {x.shape[0] - 1}")
        y = np.empty((n_pairs, n_embd), np.float32) if out is None else out
        if y.shape != (n_pairs, n_embd) or y.dtype != np.float32 or not y.flags.c_contiguous:
            raise ValueError(
                f"out has a wrong form: got {y.dtype} {y.shape}, expected float32 {(n_pairs, n_embd)}, C order"
            )
        with self._lock:
            self._require_open()
            local = self._memory.local(layer, experts)
            if n_pairs <= self.max_pairs:
                self._run_pairs(layer, x, row_index, local, y)
                return y
            order = np.argsort(local, kind="stable")  # [P]: by expert, so that most weights are read by one cut only
            part = np.empty((self.max_pairs, n_embd), np.float32)
            for start in range(0, n_pairs, self.max_pairs):
                cut = order[start : start + self.max_pairs]
                self._run_pairs(layer, x, row_index[cut], local[cut], part[: len(cut)])
                y[cut] = part[: len(cut)]
        return y

    def compute_choice(
        self,
        layer: int,
        x: Rows,
        experts: npt.NDArray[np.integer],
        weights: Rows | None = None,
        out: Rows | None = None,
    ) -> Rows:
        """Return the outputs of K experts for each row of x: [N, K, D], or with weights their sums, [N, D].

        A row's products are added as llama.cpp adds them: y0*w0, then + y1*w1, and so on, each step rounded to float32.

        Args:
            x: [N, D], float32, read where it lies.
            experts: [N, K], global expert ids.
            weights: [N, K], float32.
            out: where to write, C order; None: freshly allocated.

        Raises:
            ExpertNotLoaded: an expert is outside the slice or not loaded; nothing was computed.
            ValueError: shapes that do not fit each other or the model.
            EngineError: ggml failed, or this object is closed.
        """
        self._check_x(x)
        if experts.ndim != 2 or len(experts) != len(x) or experts.shape[1] == 0:
            raise ValueError(f"experts have a wrong form: got {experts.shape}, expected ({len(x)}, K)")
        n_rows, n_used = experts.shape
        if weights is not None and (weights.shape != experts.shape or weights.dtype != np.float32):
            raise ValueError(f"weights have a wrong form: got {weights.dtype} {weights.shape}")
        shape = (n_rows, n_used, self._spec.n_embd) if weights is None else (n_rows, self._spec.n_embd)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"out has a wrong form: got {out.dtype} {out.shape}, expected float32 {shape}, C order")
        if n_rows == 0:
            return out
        x = np.ascontiguousarray(x)
        cut = max(1, self.max_pairs // n_used)
        with self._lock:
            self._require_open()
            local = self._memory.local(layer, experts)
            if n_rows <= cut:
                self._run_choice(layer, x, local, weights, out)
                return out
            for start in range(0, n_rows, cut):
                at = slice(start, start + cut)
                self._run_choice(layer, x[at], local[at], None if weights is None else weights[at], out[at])
        return out

    def _run_choice(self, layer: int, x: Rows, local: npt.NDArray[np.int32], weights: Rows | None, out: Rows) -> None:
        """Write the outputs of N rows' experts, or their sums, to out; x and out in C order."""
        n_rows, n_used = local.shape
        graph = self._graph(layer, n_rows, n_used, weights is not None)
        graph.choose(local)
        if graph.weights is not None and weights is not None:
            graph.weights[:] = weights
        point_at(graph.x, x)
        point_at(graph.out, out)
        self._backend.compute(graph.handle)

    def _check_x(self, x: Rows) -> None:
        if x.ndim != 2 or x.shape[1] != self._spec.n_embd or x.dtype != np.float32:
            raise ValueError(f"x has a wrong form: got {x.dtype} {x.shape}, expected float32 (N, {self._spec.n_embd})")

    def _run_pairs(
        self, layer: int, x: Rows, row_index: npt.NDArray[np.integer], local: npt.NDArray[np.int32], y: Rows
    ) -> None:
        """Write the pairs' outputs to y, [P, D], C order."""
        graph = self._graph(layer, len(local), 0, False)
        assert graph.x_rows is not None
        np.take(x, row_index, axis=0, out=graph.x_rows, mode="clip")  # checked by `compute`; "raise" would copy
        graph.choose(local[:, None])
        point_at(graph.out, y)
        self._backend.compute(graph.handle)

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("the expert slice is closed")

    def _graph(self, layer: int, n_rows: int, n_used: int, is_weighted: bool) -> _Graph:
        """Return a graph, from the latest used ones or new. All share the scratch buffer. `n_used` 0: pairs."""
        key = (layer, n_rows, n_used, is_weighted)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph
        graph = self._graphs[key] = self._build(*key)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)[1].context.close()
        return graph

    def _build(self, layer: int, n_rows: int, n_used: int, is_weighted: bool) -> _Graph:
        is_pairs, n_used = n_used == 0, max(n_used, 1)
        context = TensorContext(n_tensors=40 + 2 * n_used, with_graph=True)
        try:
            x = context.new_tensor(GGML_TYPE_F32, self._spec.n_embd, 1, n_rows)
            ids = context.new_tensor(GGML_TYPE_I32, n_used, n_rows)
            activation, planes = self._spec.activation(layer), self._memory.pointers(layer)
            nodes = build(context, planes, activation, x, ids, (n_used, n_rows))
            if not all(self._backend.supports(node) for node in nodes.computed):
                raise EngineError(f"ggml's CPU backend cannot compute the experts of layer {layer}")
            y, views = nodes.output, nodes.views
            placed = [ids, *(node for node in nodes.placed if node != y)]
            weights: int | None = None
            out = y
            if is_weighted:
                weights = context.new_tensor(GGML_TYPE_F32, 1, n_used, n_rows)
                placed += [weights, y]
                out = context.mul(y, weights, in_place=n_used > 1)
                if n_used > 1:  # the sum grows in the place of the first product
                    slots = [context.slot(out, k) for k in range(n_used)]
                    views += [out, *slots]
                    total = slots[0]
                    for slot in slots[1:-1]:
                        total = context.add(total, slot, in_place=True)
                        views.append(total)
                    out = context.add(total, slots[-1])
            memory: dict[int, npt.NDArray[np.uint8]] = {}
            if is_pairs:
                placed.append(x)
            offset = 0
            for tensor in placed:
                memory[tensor] = self._scratch.place(tensor, offset)
                offset += -(-memory[tensor].size // self._scratch.alignment) * self._scratch.alignment
            for view in views:
                context.bind_view(view)
            return _Graph(
                context,
                context.graph(out),
                x,
                memory[x].view(np.float32).reshape(n_rows, -1) if is_pairs else None,
                memory[ids].view(np.int32).reshape(n_rows, n_used),
                memory[weights].view(np.float32).reshape(n_rows, n_used) if weights is not None else None,
                out,
                tuple(
                    (self._memory.scales(layer, product), memory[scale].view(np.float32).reshape(n_rows, n_used))
                    for product, scale in nodes.scales.items()
                ),
            )
        except BaseException:
            context.close()
            raise

    def flip_byte(self, layer: int, expert: int, offset: int) -> None:
        """Invert the bits of one byte of a loaded block in memory: the fault that a verification must find.

        Args:
            offset: within the block as it lies in memory.
        """
        with self._lock:
            self._require_open()
            self._memory.flip_byte(layer, expert, offset)

    def close(self) -> None:
        """Free everything once a running computation has ended; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            while self._graphs:
                self._graphs.popitem()[1].context.close()
            self._memory.close()
            self._scratch.close()
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
