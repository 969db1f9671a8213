"""Where an expert slice's weights lie: ggml tensors over ggml's memory, or over the model file itself.

Three places, tensor by tensor:

    repacked   ggml's own copy with rows interleaved, as stock llama.cpp keeps them: the fastest for few rows per expert
    plain      ggml's own copy, byte for byte as in GGUF; with exact kernels, or for types that nothing interleaves
    mapped     the file's pages, no copy at all: a plain tensor of a layer that is held whole

It knows nothing of computing; whoever uses it holds a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from swarm.errors import IntegrityError, LocalProtocolError, UnsupportedModel
from swarm.ids import ExpertSet, format_index_set
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import ExpertTensor, ModelSpec
from swarm.native.bindings import set_log_handler
from swarm.native.ggml import (
    CpuBackend,
    HostBuffer,
    TensorContext,
    is_repacked,
    point_at,
    type_layout,
    write_bytes,
)

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
    """One tensor of a layer's slice.

    Attributes:
        pointer: of the ggml tensor, (a, b, n_local).
        memory: its bytes, [n_local, bytes of one expert].
        buffer: where it was placed; None: mapped.
        offset: of `memory` in the buffer.
    """

    tensor: ExpertTensor
    pointer: int
    memory: npt.NDArray[np.uint8]
    buffer: HostBuffer | None
    offset: int


class SliceMemory:
    """The tensors of a slice.

    Attributes:
        experts: the slice.
    """

    def __init__(
        self, spec: ModelSpec, experts: ExpertSet, backend: CpuBackend, *, repacks: bool, mapped: GgufFile | None = None
    ) -> None:
        """Reserve memory for the slice; nothing but what is mapped is loaded.

        Args:
            repacks: interleave rows where ggml can.
            mapped: the whole model's file; it may be closed afterwards, but must not shrink.

        Raises:
            UserError: the set is empty or outside the model.
            UnsupportedModel: ggml cannot compute a weight's type.
            EngineError: memory is short.
        """
        spec.require_experts(experts)
        for layer in experts.by_layer:
            for tensor in spec.expert_tensors(layer):
                _require_computable(tensor)
        self.experts = experts
        self._spec = spec
        self._backend = backend
        set_log_handler()  # ggml tells of every matrix it repacks
        self._repack_type = backend.repack_type() if repacks else None
        self._can_repack: dict[tuple[int, int, int], bool] = {}
        self._buffers: list[HostBuffer] = []
        self._planes: dict[int, list[_Plane]] = {}  # layer -> in name order
        self._slice_index: dict[int, npt.NDArray[np.int32]] = {}  # layer -> [E]: index in the slice, or -1
        self._loaded_index: dict[int, npt.NDArray[np.int32]] = {}  # the same of those that are loaded
        self._complete: set[int] = set()  # layers of which every expert of the model is loaded
        self._context = TensorContext(sum(len(spec.expert_tensors(layer)) for layer in experts.by_layer))
        try:
            self._reserve(mapped)
        except BaseException:
            self.close()
            raise

    def _reserve(self, mapped: GgufFile | None) -> None:
        """Make and place the tensors, in one buffer of each kind; memory is touched only as blocks are loaded."""
        align = self._backend.alignment
        pages: dict[Path, npt.NDArray[np.uint8]] = {}  # of each file
        placed: dict[bool, list[tuple[int, ExpertTensor, int]]] = {False: [], True: []}
        sizes = {False: 0, True: 0}
        planes: dict[tuple[int, str], _Plane] = {}
        for layer, chosen in self.experts.by_layer.items():
            self._slice_index[layer] = np.full(self._spec.n_expert, -1, np.int32)
            self._slice_index[layer][sorted(chosen)] = np.arange(len(chosen))
            self._loaded_index[layer] = np.full(self._spec.n_expert, -1, np.int32)
            for tensor in self._spec.expert_tensors(layer):
                pointer = self._context.new_tensor(tensor.ggml_type, *tensor.shape[:-1], len(chosen))
                size_bytes = tensor.expert_size_bytes * len(chosen)
                # ggml's check of its own layout takes a matrix for each expert: two at least.
                repacks = len(chosen) > 1 and self._is_repackable(tensor)
                if not repacks and mapped is not None and len(chosen) == self._spec.n_expert:
                    path, start = mapped.position(tensor.name)
                    if path not in pages:
                        pages[path] = np.memmap(path, np.uint8, mode="c")  # private: `flip_byte` stays ours
                    memory = pages[path][start : start + size_bytes].reshape(len(chosen), -1)
                    point_at(pointer, memory)
                    planes[layer, tensor.name] = _Plane(tensor, pointer, memory, None, 0)
                    continue
                placed[repacks].append((pointer, tensor, sizes[repacks]))
                sizes[repacks] += -(-size_bytes // align) * align
        for repacks, tensors in placed.items():
            if not tensors:
                continue
            buffer = self._backend.allocate(sizes[repacks] + align, buffer_type=self._repack_type if repacks else None)
            self._buffers.append(buffer)
            for pointer, tensor, offset in tensors:
                memory = buffer.place(pointer, offset).reshape(-1, tensor.expert_size_bytes)
                planes[tensor.layer, tensor.name] = _Plane(tensor, pointer, memory, buffer, offset)
        for layer in self.experts.by_layer:
            self._planes[layer] = [planes[layer, tensor.name] for tensor in self._spec.expert_tensors(layer)]
            if all(plane.buffer is None for plane in self._planes[layer]):
                self._loaded_index[layer] = self._slice_index[layer].copy()
                self._complete.add(layer)

    def _is_repackable(self, tensor: ExpertTensor) -> bool:
        """Return whether ggml interleaves the rows of such a matrix, without changing its size."""
        if self._repack_type is None or not tensor.is_weight or tensor.expert_size_bytes % self._backend.alignment:
            return False
        key = (tensor.ggml_type, tensor.shape[0], tensor.shape[1])
        if key not in self._can_repack:
            context = TensorContext(1)
            size_bytes = tensor.expert_size_bytes + self._backend.alignment
            buffer = self._backend.allocate(size_bytes, buffer_type=self._repack_type)
            try:
                pointer = context.new_tensor(*key)
                buffer.place(pointer, 0)
                self._can_repack[key] = is_repacked(pointer)
            finally:
                buffer.close()
                context.close()
        return self._can_repack[key]

    def pointers(self, layer: int) -> dict[str, int]:
        """Return kind -> ggml tensor of a layer of the slice."""
        return {plane.tensor.kind: plane.pointer for plane in self._planes[layer]}

    def scales(self, layer: int, product: str) -> npt.NDArray[np.float32]:
        """Return the experts' numbers of a product that has them, [n_local]: memory of this object."""
        plane = next(plane for plane in self._planes[layer] if plane.tensor.kind == f"{product}.scale")
        return plane.memory.reshape(-1).view(np.float32)

    @property
    def n_repacked_bytes(self) -> int:
        """How much of the slice is interleaved."""
        return sum(
            plane.memory.size
            for planes in self._planes.values()
            for plane in planes
            if plane.buffer is not None and is_repacked(plane.pointer)
        )

    @property
    def n_mapped_bytes(self) -> int:
        """How much of the slice lies in the file's pages."""
        return sum(plane.memory.size for planes in self._planes.values() for plane in planes if plane.buffer is None)

    def load(self, layer: int, expert: int, block: bytes | memoryview) -> None:
        """Copy a block (the expert's planes in tensor name order) into its tensors; those that are mapped have it.

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
        start = 0
        for plane in self._planes[layer]:
            end = start + plane.memory.shape[1]
            self._fill(plane, local, raw[start:end])
            start = end
        self._loaded_index[layer][expert] = local
        if self._loaded_index[layer].min() >= 0:
            self._complete.add(layer)

    def _fill(self, plane: _Plane, local: int, raw: npt.NDArray[np.uint8]) -> None:
        if plane.buffer is None:
            return
        if not is_repacked(plane.pointer):
            plane.memory[local] = raw
            return
        # ggml repacks whole tensors only: a header for this one expert's matrix, over its part of the memory.
        context = TensorContext(1)
        try:
            matrix = context.new_tensor(plane.tensor.ggml_type, *plane.tensor.shape[:2])
            plane.buffer.place(matrix, plane.offset + local * plane.memory.shape[1])
            write_bytes(matrix, raw)
        finally:
            context.close()

    @property
    def loaded(self) -> ExpertSet:
        """The experts whose weights are there."""
        return ExpertSet(
            {layer: frozenset(np.flatnonzero(index >= 0).tolist()) for layer, index in self._loaded_index.items()}
        )

    def local(self, layer: int, experts: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """Return the experts' indices in the slice, of the same shape.

        Raises:
            ExpertNotLoaded: some are outside the slice, or not loaded.
        """
        index = self._loaded_index.get(layer)
        if index is None:
            raise ExpertNotLoaded(layer, experts.ravel().tolist())
        ids: npt.NDArray[np.integer]
        if experts.dtype.kind == "u":  # on every token's way, as the next: what is out of range `take` finds
            is_known, ids = True, experts
        elif experts.dtype == np.int32:  # negative ids are out of range as unsigned numbers
            is_known, ids = True, experts.view(np.uint32)
        else:
            is_known, ids = bool(experts.min() >= 0 and experts.max() < index.size), experts
        if is_known:
            try:
                local: npt.NDArray[np.int32] = index.take(ids)
                if layer in self._complete or np.minimum.reduce(local, axis=None) >= 0:
                    return local
            except IndexError:
                pass
        asked = set(experts.ravel().tolist())
        raise ExpertNotLoaded(layer, [e for e in asked if not 0 <= e < index.size or index[e] < 0])

    def _require_in_slice(self, layer: int, expert: int) -> int:
        if (layer, expert) not in self.experts:
            raise ExpertNotLoaded(layer, [expert])
        return int(self._slice_index[layer][expert])

    def flip_byte(self, layer: int, expert: int, offset: int) -> None:
        """Invert the bits of one byte of a loaded block in memory: the fault that a verification must find.

        Args:
            offset: within the block as it lies in memory.
        """
        local = self._require_in_slice(layer, expert)
        rest = offset
        for plane in self._planes[layer]:
            if 0 <= rest < plane.memory.shape[1]:
                plane.memory[local, rest] ^= 0xFF
                return
            rest -= plane.memory.shape[1]
        raise ValueError(f"no such byte: got {offset}, expected 0 to {self._spec.block_size_bytes(layer) - 1}")

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self._planes.clear()
        self._context.close()
        for buffer in self._buffers:
            buffer.close()


def _require_computable(tensor: ExpertTensor) -> None:
    """Raise UnsupportedModel for a type that ggml would abort on, or that it stores in another size than GGUF."""
    type_name = gguf.GGMLQuantizationType(tensor.ggml_type).name
    if type_name in NOT_COMPUTABLE:
        raise UnsupportedModel(f"cannot compute {tensor.name}: ggml has no dot product for weights of type {type_name}")
    block, size_bytes = type_layout(tensor.ggml_type)
    if (block, size_bytes) != tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.ggml_type)]):
        raise UnsupportedModel(f"cannot compute {tensor.name}: this engine stores {type_name} in another form")
