"""Where the bytes of expert blocks come from. A source does not judge them: check with `manifest.verify_block`."""

from __future__ import annotations

from typing import Protocol

from swarm.errors import ExpertUnavailable, UserError
from swarm.ids import ExpertSet, ModelId
from swarm.model.gguf_file import GgufFile, tensor_size_bytes
from swarm.model.manifest import MODEL_ID_KEY
from swarm.model.ranges import Plane
from swarm.model.slices import experts_key
from swarm.model.spec import EXPERT_TENSOR, FILE_KEY, read_spec


class BlockSource(Protocol):
    """Anything that gives blocks: a file, a folder of fetched blocks, a remote node's store."""

    @property
    def experts(self) -> ExpertSet:
        """Which blocks it has now."""
        ...

    def read_block(self, layer: int, expert: int) -> bytes:
        """Return one block's bytes: its planes of the layer's expert tensors, in tensor name order.

        Raises:
            ExpertUnavailable: it does not have that block.
        """
        ...


class GgufSource:
    """Blocks of a whole model file or of a slice file."""

    def __init__(self, file: GgufFile) -> None:
        """Take an open file; it stays the caller's to close.

        Raises:
            UserError: a backbone file (it has no experts), or a slice file that contradicts itself.
            UnsupportedModel: a whole file that cannot be served.
        """
        self._file = file
        self._positions: dict[int, dict[int, int]] = {}  # layer -> expert -> index of its plane
        self._planes: dict[int, list[tuple[str, int]]] = {}  # layer -> (tensor name, bytes per plane), in name order
        self.model_id: ModelId | None = None
        """What a slice file says it is part of; a whole file does not say."""
        if file.text(FILE_KEY) == "slice":
            self._index_slice()
        else:
            self._index_whole()

    def _index_whole(self) -> None:
        spec = read_spec(self._file)
        for layer in spec.moe_layers:
            self._positions[layer] = {expert: expert for expert in range(spec.n_expert)}
            self._planes[layer] = [(tensor.name, tensor.expert_size_bytes) for tensor in spec.expert_tensors(layer)]

    def _index_slice(self) -> None:
        self.model_id = ModelId.parse(self._file.text(MODEL_ID_KEY) or "")
        for name in sorted(self._file.tensors):
            tensor = self._file.tensors[name]
            match = EXPERT_TENSOR.fullmatch(name)
            if match is None or len(tensor.shape) > 3:
                raise UserError(f"{self._file.path} is no slice file: it has tensor {name}")
            layer = int(match[1])
            try:
                ids = self._file.metadata[experts_key(layer)].integers()
            except (KeyError, ValueError) as error:
                raise UserError(f"{self._file.path} does not say which experts it holds of layer {layer}") from error
            if list(ids) != sorted(set(ids)) or len(ids) != tensor.shape[-1]:
                raise UserError(f"{name} of {self._file.path} has {tensor.shape[-1]} planes for experts {ids}")
            self._positions[layer] = {expert: index for index, expert in enumerate(ids)}
            self._planes.setdefault(layer, []).append(
                (name, tensor_size_bytes(tensor.ggml_type, tensor.shape[:-1] or (1,)))
            )

    @property
    def experts(self) -> ExpertSet:
        """Which blocks the file holds."""
        return ExpertSet({layer: frozenset(positions) for layer, positions in self._positions.items()})

    def places(self, layer: int, expert: int) -> list[Plane]:
        """Return where a block's planes lie, in the order in which they make it; none: the file does not hold it."""
        position = self._positions.get(layer, {}).get(expert)
        if position is None:
            return []
        found = []
        for name, size in self._planes[layer]:
            path, start = self._file.position(name)
            found.append(Plane(path.name, start + position * size, size))
        return found

    def read_block(self, layer: int, expert: int) -> bytes:
        """Return one block's bytes, read now.

        Raises:
            ExpertUnavailable: the file does not hold that block.
            UserError: the file became shorter since it was opened.
        """
        position = self._positions.get(layer, {}).get(expert)
        if position is None:
            raise ExpertUnavailable(layer, (expert,), "the file does not hold it")  # no path: strangers may read this
        return b"".join(self._file.read(name, position * size, size) for name, size in self._planes[layer])
