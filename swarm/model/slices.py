"""Plans and writes what `swarm split` makes of a model: the backbone with stub experts, and expert slices.

A plan is pure: a finished GGUF header and, for every tensor, the pieces of the source file that fill it. Writing a
plan streams those pieces (memory stays at one expert's plane) into a file that is either whole or not there.

A slice file keeps tensor names; the last dimension of a tensor is the number of experts held, in ascending order of
their ids. Its metadata: `swarm.model_id`, `swarm.file` = "slice", and for each layer `swarm.blk.N.experts`, the ids.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf

from swarm.errors import IntegrityError, UserError
from swarm.files import replacing
from swarm.ids import ExpertSet
from swarm.model.expert_kinds import SHARED_COUNT, SHARED_WIDTH, Shared, Stub
from swarm.model.gguf_file import (
    GgufFile,
    MetadataValue,
    Progress,
    TensorInfo,
    ValueType,
    encode_header,
    padded,
)
from swarm.model.manifest import MODEL_ID_KEY, SOURCES_KEY, Manifest
from swarm.model.spec import EXPERT_TENSOR, FILE_KEY, ModelSpec, is_expert_tensor, read_spec

STUB_WIDTH = 1
STUB_TYPE = int(gguf.GGMLQuantizationType.F16)
# (type, values of a block) of a stub of full width: the fewest bytes that the shape allows.
SPARSE_TYPES = (
    (int(gguf.GGMLQuantizationType.IQ1_S), 256),
    (int(gguf.GGMLQuantizationType.Q4_0), 32),
    (STUB_TYPE, 1),
)
OPTIONAL_TENSOR = re.compile(r"scale$")  # with scales the graph's product has another node's name
LABELS = ("general.name", "general.license", "general.license.link")  # a slice of a model carries its licence too


def experts_key(layer: int) -> str:
    """Return the metadata key that lists the experts a slice file holds of a layer."""
    return f"swarm.blk.{layer}.experts"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes to write: from a tensor of the source file, or zeros.

    Attributes:
        source: name of the source's tensor; None writes zeros.
        block: (layer, expert) whose hash these bytes count towards.
    """

    source: str | None
    offset: int
    size_bytes: int
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """Everything about a file to write but the tensors' bytes.

    Attributes:
        header: with its padding.
        tensors: in file order, each with the pieces that fill it.
    """

    header: bytes
    tensors: tuple[tuple[TensorInfo, tuple[Piece, ...]], ...]
    alignment: int

    @property
    def size_bytes(self) -> int:
        """The size of the file to come."""
        return len(self.header) + sum(padded(tensor.size_bytes, self.alignment) for tensor, _ in self.tensors)

    def is_whole_at(self, path: Path) -> bool:
        """Return whether the file is there already, by header (which names the model) and size: files appear only when whole."""
        try:
            if path.stat().st_size != self.size_bytes:
                return False
            with path.open("rb") as file:
                return file.read(len(self.header)) == self.header
        except OSError:
            return False

    @property
    def disk_bytes(self) -> int:
        """How much of it takes space on the disk, where holes take none."""
        return self.size_bytes - sum(
            piece.size_bytes for _, pieces in self.tensors for piece in pieces if piece.source is None
        )


def plan_backbone(file: GgufFile, manifest: Manifest, sources: Sequence[str] = ()) -> FilePlan:
    """Return the plan of `backbone.gguf`: the whole file with stubs for experts, all zeros.

    A narrow stub has width 1: the metadata key that sizes experts becomes 1, and the shared expert's width, where llama.cpp
    would derive it from that, is written out. A sparse stub keeps its shape, in the smallest type there is, as holes of the file.
    What only experts need, and llama.cpp can do without, is left out.

    Args:
        sources: names on the web of the whole model, which the file is to carry.

    Raises:
        UserError: the file is not the manifest's model.
    """
    spec = manifest.spec
    _require_same_model(file, manifest)
    metadata = dict(file.metadata)
    metadata.update(_stub_metadata(file, spec))
    metadata[MODEL_ID_KEY] = MetadataValue.of_text(str(manifest.model_id))
    metadata[FILE_KEY] = MetadataValue.of_text("backbone")
    if sources:
        metadata[SOURCES_KEY] = MetadataValue.of_text("\n".join(sources))

    tensors = []
    for tensor in file.tensors.values():
        if not is_expert_tensor(tensor.name):
            tensors.append((tensor, (Piece(tensor.name, 0, tensor.size_bytes),)))
        elif not OPTIONAL_TENSOR.search(tensor.name):
            stub = _stub(tensor, spec.expert_kind.stub)
            tensors.append((stub, (Piece(None, 0, stub.size_bytes),)))
    return _plan(metadata, tensors, file.alignment)


def _stub_metadata(file: GgufFile, spec: ModelSpec) -> dict[str, MetadataValue]:
    """Return the keys that a stub replaces."""
    kind = spec.expert_kind
    if kind.stub is Stub.SPARSE:
        return {}
    prefix = spec.architecture
    replaced = {f"{prefix}.{kind.width}": _narrow(file.metadata.get(f"{prefix}.{kind.width}"))}
    if not spec.n_ff_shared:
        return replaced
    n_shared = max(1, file.integer(f"{prefix}.{SHARED_COUNT}") or 1)
    if kind.shared is Shared.WIDTH:
        replaced[f"{prefix}.{SHARED_WIDTH}"] = MetadataValue.of_uint32(spec.n_ff_shared)
    elif kind.shared is Shared.WIDTH_BY_COUNT:
        replaced[f"{prefix}.{SHARED_WIDTH}"] = MetadataValue.of_uint32(spec.n_ff_shared // n_shared)
    elif kind.shared is Shared.COUNT:
        replaced[f"{prefix}.{SHARED_COUNT}"] = MetadataValue.of_uint32(spec.n_ff_shared // STUB_WIDTH)
    return replaced


def _narrow(stated: MetadataValue | None) -> MetadataValue:
    """Return a width, or widths by layer, cut to the stub's; 0 stays: llama.cpp takes it for a layer without experts."""
    if stated is None or stated.type != ValueType.ARRAY:
        return MetadataValue.of_uint32(STUB_WIDTH)
    return MetadataValue.of_uint32s([min(STUB_WIDTH, width) for width in stated.integers()])


def plan_slice(file: GgufFile, manifest: Manifest, experts: ExpertSet) -> FilePlan:
    """Return the plan of a slice file with just these experts' planes.

    Raises:
        UserError: the file is not the manifest's model, or the model lacks some of the experts.
    """
    spec = manifest.spec
    _require_same_model(file, manifest)
    spec.require_experts(experts)
    kept = {"general.architecture", "general.alignment", *LABELS}
    metadata = {
        key: value for key, value in file.metadata.items() if key in kept or key.startswith(f"{spec.architecture}.")
    }
    metadata[MODEL_ID_KEY] = MetadataValue.of_text(str(manifest.model_id))
    metadata[FILE_KEY] = MetadataValue.of_text("slice")
    tensors = []
    for layer, chosen in experts.by_layer.items():
        ids = sorted(chosen)
        metadata[experts_key(layer)] = MetadataValue.of_uint32s(ids)
        for tensor in spec.expert_tensors(layer):
            size = tensor.expert_size_bytes
            info = TensorInfo(name=tensor.name, ggml_type=tensor.ggml_type, shape=(*tensor.shape[:-1], len(ids)))
            tensors.append((info, tuple(Piece(tensor.name, e * size, size, (layer, e)) for e in ids)))
    return _plan(metadata, tensors, file.alignment)


def write_backbone(file: GgufFile, manifest: Manifest, path: Path, progress: Progress | None = None) -> None:
    """Write `backbone.gguf` to `path`, atomically. Raises as `plan_backbone` and `write_plan` do."""
    write_plan(plan_backbone(file, manifest), file, manifest, path, progress)


def write_slice(
    file: GgufFile, manifest: Manifest, experts: ExpertSet, path: Path, progress: Progress | None = None
) -> None:
    """Write a slice file with just these experts to `path`, atomically. Raises as `plan_slice` and `write_plan` do."""
    write_plan(plan_slice(file, manifest, experts), file, manifest, path, progress)


def write_plan(
    plan: FilePlan, file: GgufFile, manifest: Manifest, path: Path, progress: Progress | None = None
) -> None:
    """Write a plan to `path`; on any failure nothing is left there. `progress`: bytes written, bytes in all.

    Raises:
        IntegrityError: an expert's bytes differ from the manifest (the file changed since it was hashed).
        UserError: the source became shorter, or `path` is the source itself.
        OSError: the disk is full, or the folder cannot be written.
    """
    if path.exists() and path.samefile(file.path):
        raise UserError(f"refusing to overwrite the model itself: {path}; choose another --out")
    hashes = {piece.block: hashlib.sha256() for _, pieces in plan.tensors for piece in pieces if piece.block}
    total, done = plan.size_bytes, len(plan.header)
    with replacing(path) as temporary, temporary.open("wb") as out:
        out.write(plan.header)
        for tensor, pieces in plan.tensors:  # a layer's tensors come in name order, the order of the hash
            for piece in pieces:
                if piece.source is None:
                    out.seek(piece.size_bytes, os.SEEK_CUR)  # a hole reads as zeros and takes no space
                    done += piece.size_bytes
                    continue
                for chunk in file.chunks(piece.source, piece.offset, piece.size_bytes):
                    out.write(chunk)
                    if piece.block:
                        hashes[piece.block].update(chunk)
                    done += len(chunk)
                    if progress is not None and done < total:
                        progress(done, total)
            padding = padded(tensor.size_bytes, plan.alignment) - tensor.size_bytes
            out.seek(padding, os.SEEK_CUR)
            done += padding
        for (layer, expert), found in hashes.items():
            if found.digest() != manifest.block_hashes[layer][expert]:
                raise IntegrityError(
                    f"layer {layer}, expert {expert} of {file.path} differs from the manifest: the file has changed"
                )
        out.truncate(total)  # where it ends with a hole
        out.flush()
        if progress is not None:
            progress(total, total)


def _stub(tensor: TensorInfo, form: Stub) -> TensorInfo:
    """Return what stands in the backbone for a tensor of routed experts."""
    match = EXPERT_TENSOR.fullmatch(tensor.name)
    if match is None or len(tensor.shape) not in (2, 3):
        raise UserError(f"cannot cut {tensor.name}: its shape {tensor.shape} is none of an expert tensor")
    is_weight = match[3] == "weight"
    if form is Stub.SPARSE:
        ggml_type = (
            next(t for t, block in SPARSE_TYPES if tensor.shape[0] % block == 0) if is_weight else tensor.ggml_type
        )
        return TensorInfo(name=tensor.name, ggml_type=ggml_type, shape=tensor.shape)
    shape = list(tensor.shape)
    if match[2] != "down":
        shape[-2] = 2 * STUB_WIDTH if match[2] == "gate_up" else STUB_WIDTH
    elif is_weight:
        shape[0] = STUB_WIDTH
    return TensorInfo(name=tensor.name, ggml_type=STUB_TYPE if is_weight else tensor.ggml_type, shape=tuple(shape))


def _require_same_model(file: GgufFile, manifest: Manifest) -> None:
    if (
        read_spec(file) != manifest.spec
        or tuple(file.tensors[name] for name in sorted(file.tensors)) != manifest.tensors
    ):
        raise UserError(f"{file.path} is not model {manifest.model_id.short}: its tensors differ from the manifest's")


def _plan(
    metadata: Mapping[str, MetadataValue],
    tensors: Iterable[tuple[TensorInfo, tuple[Piece, ...]]],
    alignment: int,
) -> FilePlan:
    tensors = tuple(tensors)
    header = encode_header(metadata, [tensor for tensor, _ in tensors], alignment)
    return FilePlan(header=header, tensors=tensors, alignment=alignment)
