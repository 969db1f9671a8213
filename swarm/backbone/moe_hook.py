"""Replaces the stub experts' result in a running llama.cpp graph, through its public eval callback.

llama.cpp calls back for every node of its graph, before (`ask`) and, for the nodes asked for, after computing it:

    ffn_moe_logits-N     after   only while drafting: put out of reach the experts that the draft does without
    ffn_moe_weights*-N   before  remember the last one: the router's final weights [T, K]
    ffn_moe_up-N         after   its src[1] is x [T, D], its src[2] the top-k ids [T, K] (a strided view): begin
      (or ffn_moe_gate_up-N, where the file has both in one tensor)
    ffn_moe_out-N        after   wait for the experts' output and write it over the stub's zeros
      or, later,
    the node before the one that uses ffn_moe_out-N

What the graph computes of the stubs in between is turned off (`stub_nodes`). An experts object that computes at once is asked
only at `ffn_moe_out`, where the graph allows it: one stop of the graph instead of two.

*Overlap.* The shared expert is computed after `ffn_moe_out` and before the sum that uses it. On a layer's first pass the hook
waits at `ffn_moe_out` and learns the name of the node just before its consumer; from then on it waits only there, so that
the shared expert runs during the round trip.

The hook cannot stop the graph. When a layer fails it keeps the first error, writes zeros from there on without asking
anybody, and the engine rolls the step back (`take_error`). It runs on the engine's thread, inside llama_decode.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from swarm.backbone.stub_nodes import MAX_SOURCES, StubNodes
from swarm.errors import EngineError
from swarm.model.expert_kinds import OUTPUT_NODE
from swarm.native.ggml import read_tensor, tensor_name, tensor_source, view_tensor, write_tensor
from swarm.native.layouts import GgmlTensor

_NAME = re.compile(r"ffn_moe_(logits|weights|up|gate_up|gate|out)((?<=weights)[a-z_]*)?-(\d+)")
# What names of `_NAME` begin with.
_MATTERS = (b"ffn_moe_logits", b"ffn_moe_weights", b"ffn_moe_up", b"ffn_moe_gate", b"ffn_moe_out")
_NAME_OFFSET = GgmlTensor.name.offset
# The first eight characters of every name above, as one number: nearly all of a graph's nodes are turned away by one
# comparison, which matters because the callback runs for each of them.
_PREFIX = int.from_bytes(b"ffn_moe_", "little")
_word_at = ctypes.c_uint64.from_address
LEFT_OUT = -1e30  # a router's logit: its softmax and sigmoid are 0, and it is finite, so that no NaN comes of it


class LayerResult(Protocol):
    """An answer that may still be on its way.

    It may have an attribute `done_at`: when the answer was there, `time.perf_counter()` seconds.
    """

    def result(self) -> npt.NDArray[np.float32]:
        """Wait, and return the routed experts' output, [T, D] float32; raises what went wrong."""
        ...


class ExpertBackend(Protocol):
    """Whoever computes the routed experts of a layer: the swarm, or an executor in this process.

    One that computes in the caller's thread can also be an `AtOnceBackend`.
    """

    def begin(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
    ) -> LayerResult:
        """Start computing x [T, D] for the choice [T, K]; must not block, unless it answers at once."""
        ...


@runtime_checkable
class AtOnceBackend(Protocol):
    """Experts in this process: `compute_into` returns with the output written. What it gets is the graph's own memory."""

    def compute_into(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
        out: npt.NDArray[np.float32],
    ) -> None:
        """Write the routed experts' output, [T, D], for x [T, D] and the choice [T, K] (perhaps a strided view)."""
        ...


class _NoRows:
    """The answer for a graph in which a layer has no rows: none of its tokens' logits were asked for."""

    def result(self) -> npt.NDArray[np.float32]:
        return np.empty(0, np.float32)


class _WeightedRows:
    """The answer for a layer whose rows the graph has multiplied with the router's weights before the experts (llama4).

    Each choice then has a row of its own, so it is asked for as one row with one expert; the sums are made here, in
    llama.cpp's order.
    """

    def __init__(
        self, experts: ExpertBackend, layer: int, x: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]
    ) -> None:
        """Ask for x, [.., T, K, D], and ids [T, K]."""
        self._shape = (*ids.shape, x.shape[-1])
        n_pairs = ids.size
        ones = np.ones((n_pairs, 1), np.float32)
        self._answer = experts.begin(layer, x.reshape(n_pairs, -1), ids.reshape(n_pairs, 1), ones)

    @property
    def done_at(self) -> float | None:
        """When the answer was there, if it says so."""
        at: float | None = getattr(self._answer, "done_at", None)
        return at

    def result(self) -> npt.NDArray[np.float32]:
        rows = self._answer.result().reshape(self._shape)  # [T, K, D]
        total = rows[:, 0].copy()
        for k in range(1, self._shape[1]):
            total += rows[:, k]
        return total


@dataclass(slots=True)
class OverlapStats:
    """How much local work ran while a layer's answer was on its way; seconds, sums over all layers so far.

    Attributes:
        local_s: from the start of a dispatch to the node at which it was waited for.
        hidden_s: of that, what ended before the answer came, or would have been waited for anyhow.
        waited_s: blocked in waiting.
    """

    local_s: float = 0.0
    hidden_s: float = 0.0
    waited_s: float = 0.0

    @property
    def hidden_share(self) -> float:
        """hidden_s / local_s; 0 without any local work."""
        return self.hidden_s / self.local_s if self.local_s else 0.0


class _Inputs(NamedTuple):
    """A layer's inputs."""

    x: npt.NDArray[np.float32]  # [T, D]
    ids: npt.NDArray[np.int32]  # [T, K]
    weights: npt.NDArray[np.float32]  # [T, K]

    def copy(self) -> _Inputs:
        """Return arrays of their own."""
        return _Inputs(self.x.copy(), self.ids.copy(), self.weights.copy())


@dataclass(slots=True)
class _Places:
    """Where a layer's inputs and output lie in one graph: views, not copies, made when they are first needed.

    llama.cpp runs a decoded token's graph again as it is, its tensors where they were: looking at them anew takes 40 us a layer
    (measured).

    Attributes:
        is_known: whether it was looked whether they can be viewed: not in a device's memory.
    """

    is_known: bool = False
    inputs: _Inputs | None = None
    out: npt.NDArray[np.float32] | None = None  # [T, D]


class _Deferred(NamedTuple):
    """A layer whose `ffn_moe_out` has passed and which is waited for at a later node."""

    layer: int
    out: int  # pointer of ffn_moe_out
    boundary: str  # the node to wait at


@dataclass(slots=True)
class _Lesson:
    """What is being learned: which node is the last before the consumer of `out`."""

    layer: int
    out: int
    last: str | None = None  # name of the node before the one asked about now; None: `out` itself


class MoeHook:
    """The eval callback of one llama.cpp context."""

    def __init__(
        self,
        moe_layers: tuple[int, ...],
        experts: ExpertBackend,
        *,
        overlaps: bool = True,
        output: str = OUTPUT_NODE,
    ) -> None:
        """Watch graphs of a model.

        Args:
            overlaps: False waits at the output node always: for comparison.
            output: what the model's graph calls that node, where not `ffn_moe_out` (`ExpertKind.output_node`).
        """
        self._output = output
        self._written: set[int] = set()  # layers whose output was written since the last `take_error`
        self._own_output = None if output == OUTPUT_NODE else re.compile(re.escape(output) + r"-(\d+)")
        self.overlap = OverlapStats()
        self._at_once = experts if isinstance(experts, AtOnceBackend) else None
        self._overlaps = overlaps and self._at_once is None
        self._boundaries: dict[int, str | None] = {}  # layer -> node to wait at; None: at ffn_moe_out
        self._lesson: _Lesson | None = None
        self._deferred: _Deferred | None = None
        self._began_at: dict[int, float] = {}
        self._moe_layers = frozenset(moe_layers)
        self._experts = experts
        self._stubs = StubNodes()
        self._kinds: dict[bytes, tuple[str, int] | None] = {}  # name -> kind and layer of a node that matters
        self._boring: set[int] = set()  # the next eight characters of names with which none begins that matters
        # Each node: for a lesson, a node to wait at, or dead ones; always where the output has a name of its own.
        self._is_watching = self._own_output is not None
        self._weights: dict[int, int] = {}  # layer -> pointer of the last ffn_moe_weights* node of this graph
        self._put_off: dict[
            int, int
        ] = {}  # layer -> pointer of the stub's product: computed once ffn_moe_out is reached
        self._places: dict[int, _Places] = collections.defaultdict(_Places)  # layer -> of its latest graph
        self._pending: dict[int, LayerResult] = {}
        self._left_out: Mapping[int, npt.NDArray[np.intp]] = {}  # while drafting: layer -> experts not to be chosen
        self._weighted: set[int] = set()  # layers whose rows come with the router's weights in them
        self._error: BaseException | None = None

    def __call__(self, tensor: int, ask: bool) -> bool:
        """Return whether llama.cpp shall call again after computing `tensor` (ask), or go on (after)."""
        if self._is_watching:  # rare: nearly all nodes are turned away by the one comparison below
            if self._lesson is not None and ask:
                self._learn(self._lesson, tensor)
            if self._deferred is not None and tensor_name(tensor) == self._deferred.boundary:
                if not ask:
                    self._write(self._deferred.layer, self._deferred.out)
                    self._deferred = None
                    self._is_watching = self._own_output is not None
                return True
            if ask and self._stubs.is_searching:
                self._stubs.follow(tensor)
            self._is_watching = (
                self._stubs.is_searching
                or self._lesson is not None
                or self._deferred is not None
                or self._own_output is not None
            )
            if self._own_output is not None and (match := self._own_output.fullmatch(tensor_name(tensor))):
                return self._handle("out", int(match[1]), tensor, ask)
        if _word_at(tensor + _NAME_OFFSET).value != _PREFIX:
            return not ask
        word = _word_at(tensor + _NAME_OFFSET + 8).value
        if word in self._boring:
            return not ask
        name: bytes = GgmlTensor.from_address(tensor).name
        try:
            found = self._kinds[name]
        except KeyError:
            found = self._kinds[name] = _kind_of(name)
            if not name.startswith(_MATTERS):
                self._boring.add(word)
        if found is None:  # "ffn_moe_up-3 (view)" and the like
            return not ask
        return self._handle(*found, tensor, ask)

    def _handle(self, kind: str, layer: int, tensor: int, ask: bool) -> bool:
        if ask:
            return self._is_wanted(kind, layer, tensor)
        if kind == "logits":
            _matrix(view_tensor(tensor))[:, self._left_out[layer]] = LEFT_OUT
            return True
        if kind == "out":
            product = self._put_off.pop(layer, None)
            if product is None:
                self._write(layer, tensor)
            else:
                self._compute_at_once(layer, product, tensor)
            if self._overlaps and layer not in self._boundaries:
                self._lesson = _Lesson(layer, tensor)
                self._is_watching = True
        else:
            self._begin(layer, tensor)
        return True

    def _is_wanted(self, kind: str, layer: int, tensor: int) -> bool:
        """Return whether to be called again once a node of this layer is computed."""
        if kind == "weights":
            self._weights[layer] = tensor
            return False
        if kind == "logits":
            return layer in self._left_out
        if kind == "out":
            if self._stubs.is_searching:
                self._stubs.end(layer)
            boundary = self._boundaries.get(layer)
            if boundary is not None:
                self._deferred = _Deferred(layer, tensor, boundary)
                self._is_watching = True
            return boundary is None
        # The stub's own matrix product alone carries x and the ids; an activation may share the name's beginning.
        if not self._stubs.is_product(tensor):
            return False
        is_new = not self._stubs.is_off(tensor)
        if is_new:
            self._places.pop(layer, None)
            self._stubs.start(tensor)
            self._is_watching = True
        if kind == "gate":
            return False
        if self._at_once is not None and not is_new and self._stubs.is_closed(layer) and layer not in self._weighted:
            self._put_off[layer] = tensor
            return False
        return True

    def _learn(self, lesson: _Lesson, tensor: int) -> None:
        if lesson.out in [tensor_source(tensor, index) for index in range(MAX_SOURCES)]:
            self._boundaries[lesson.layer] = lesson.last
            self._lesson = None
        else:
            lesson.last = tensor_name(tensor)

    @contextlib.contextmanager
    def drafting(self, experts: ExpertBackend, left_out: Mapping[int, npt.NDArray[np.intp]]) -> Iterator[None]:
        """Ask `experts` instead of the usual ones in this block, and keep the router from choosing some; between two steps.

        Args:
            left_out: layer -> ids of experts that are not to be chosen. A router that adds a bias later may still do it.
        """
        usual = self._experts, self._at_once
        self._experts, self._at_once, self._left_out = experts, None, left_out
        try:
            yield
        finally:
            (self._experts, self._at_once), self._left_out = usual, {}

    def take_error(self, *, has_run: bool = False) -> BaseException | None:
        """Return the first error since the last call, and make the hook ready for the next step.

        `has_run`: llama.cpp has computed the step. Then a layer whose output was not written is an error too: its graph has other
        nodes than this hook knows, and its logits are those of a stub.
        """
        error, self._error = self._error, None
        if error is None and has_run and not self._pending and not self._moe_layers.issubset(self._written):
            missed = sorted(self._moe_layers.difference(self._written))
            error = EngineError(
                f"the graph of layers {missed[:8]} is not known: {self._output} or its experts' products were not seen"
            )
        self._written.clear()
        if error is None and self._pending:
            error = EngineError(f"the graph has no node to wait at for layers {sorted(self._pending)}")
            self._boundaries.clear()  # should a graph ever lack a node that another had: learn anew
        self._pending.clear()
        self._weights.clear()
        self._put_off.clear()
        self._stubs.forget()
        self._stubs.end_step(has_run=has_run and error is None)
        self._deferred = self._lesson = None
        self._is_watching = self._own_output is not None
        return error

    def _begin(self, layer: int, tensor: int) -> None:
        if self._error is not None:
            return
        try:
            inputs = self._places[layer].inputs
            if inputs is not None:
                inputs = inputs.copy()  # the graph goes on, and may write over them
            else:
                x_node, ids_node = self._sources(layer, tensor)
                if _is_weighted(x_node):
                    self._begin_weighted(layer, x_node, ids_node)
                    return
                inputs = self._read_inputs(layer, x_node, ids_node)
            self._began_at[layer] = time.perf_counter()
            self._pending[layer] = self._experts.begin(layer, *inputs) if len(inputs.ids) else _NoRows()
        except Exception as error:
            self._error = error

    def _begin_weighted(self, layer: int, x_node: int, ids_node: int) -> None:
        self._weighted.add(layer)
        ids = _matrix(read_tensor(ids_node))  # [T, K]
        self._began_at[layer] = time.perf_counter()
        self._pending[layer] = _WeightedRows(self._experts, layer, read_tensor(x_node), ids) if len(ids) else _NoRows()

    def _read_inputs(self, layer: int, x_node: int, ids_node: int) -> _Inputs:
        """Return copies of a layer's inputs, and learn where they are for the graph's next pass."""
        ids = _matrix(read_tensor(ids_node))  # [T, K]
        if not len(ids):
            return _Inputs(np.empty((0, 0), np.float32), ids, np.empty(ids.shape, np.float32))
        places = self._places[layer]
        if not places.is_known:
            places.is_known = True
            with contextlib.suppress(EngineError, ValueError):  # in a device's memory, or of another shape
                places.inputs = self._view_inputs(layer, x_node, ids_node)
        x = read_tensor(x_node).reshape(len(ids), -1)  # [T, 1, D] -> [T, D]
        return _Inputs(x, ids, read_tensor(self._weights[layer]).reshape(ids.shape))  # [T, 1, K] or [T, K, 1] -> [T, K]

    def _view_inputs(self, layer: int, x_node: int, ids_node: int) -> _Inputs | None:
        """Return a layer's inputs in the graph's own memory; None where an axis cannot be dropped without a copy.

        Raises:
            EngineError: they are not in this process's memory.
        """
        ids = _matrix(view_tensor(ids_node))  # [T, K]
        x, weights = view_tensor(x_node), view_tensor(self._weights[layer])
        inputs = _Inputs(
            x=_matrix(x.swapaxes(1, 2)),  # [1, T, 1, D] -> [T, D]
            ids=ids,
            weights=weights.reshape(ids.shape),  # [T, 1, K] or [T, K, 1] -> [T, K]
        )
        is_in_place = np.may_share_memory(inputs.x, x) and np.may_share_memory(inputs.weights, weights)
        return inputs if is_in_place or not ids.size else None

    def _sources(self, layer: int, tensor: int) -> tuple[int, int]:
        """Return the nodes of x and of the ids of a stub's product."""
        if layer not in self._moe_layers or layer not in self._weights:
            raise EngineError(f"the graph's layer {layer} is not as the model's spec says")
        x_node, ids_node = tensor_source(tensor, 1), tensor_source(tensor, 2)
        if x_node is None or ids_node is None:
            raise EngineError(f"the expert node of layer {layer} has no inputs")
        return x_node, ids_node

    def _compute_at_once(self, layer: int, product: int, out: int) -> None:
        assert self._at_once is not None
        self._written.add(layer)
        if self._error is None:
            try:
                places = self._places[layer]
                if places.inputs is None:
                    places.inputs = self._view_inputs(layer, *self._sources(layer, product))
                if places.inputs is None:
                    raise EngineError(f"layer {layer} has inputs that cannot be viewed")
                if places.out is None:
                    places.out = _matrix(view_tensor(out))
                if len(places.inputs.ids):
                    self._at_once.compute_into(layer, *places.inputs, places.out)
                return
            except BaseException as error:
                self._error = error
        _write_zeros(out)

    def _write(self, layer: int, tensor: int) -> None:
        self._written.add(layer)
        if self._error is None:
            try:
                pending = self._pending.pop(layer, None)
                if pending is None:
                    raise EngineError(f"nothing was dispatched for layer {layer}")
                reached_at = time.perf_counter()
                out = pending.result()
                self._count(layer, reached_at, getattr(pending, "done_at", None))
                places = self._places[layer]
                if places.out is None and places.inputs is not None:
                    with contextlib.suppress(EngineError, ValueError):  # on a device, whatever its inputs are
                        places.out = _matrix(view_tensor(tensor))
                if places.out is not None and places.out.shape == out.shape:
                    places.out[...] = out
                else:
                    write_tensor(tensor, out)
                return
            except BaseException as error:  # a cancelled wait too: the engine's thread must survive it
                self._error = error
        _write_zeros(tensor)

    def _count(self, layer: int, reached_at: float, done_at: float | None) -> None:
        began_at = self._began_at.get(layer, reached_at)
        local_s = reached_at - began_at
        self.overlap.local_s += local_s
        if done_at is not None:
            self.overlap.hidden_s += min(local_s, max(done_at - began_at, 0.0))
        self.overlap.waited_s += time.perf_counter() - reached_at


def _is_weighted(x_node: int) -> bool:
    """Return whether an expert product's input is already multiplied with the router's weights."""
    return tensor_name(x_node).startswith("ffn_moe_weighted")


def _write_zeros(tensor: int) -> None:
    """Zeros, not what the stub left: a NaN would make later layers' routers pick out-of-range experts."""
    shape = tuple(GgmlTensor.from_address(tensor).ne[::-1])
    write_tensor(tensor, np.zeros(shape, np.float32))


def _kind_of(name: bytes) -> tuple[str, int] | None:
    match = _NAME.fullmatch(name.decode("utf-8", "replace"))
    return (match[1], int(match[3])) if match is not None else None


def _matrix(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a tensor's two inner axes."""
    return array.reshape(array.shape[-2:])
