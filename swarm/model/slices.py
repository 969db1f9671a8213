"""Plans and writes what `swarm split` makes of a model: the backbone with stub experts, and expert slices.

A plan is pure: a finished GGUF header and, for every tensor, the pieces of the source file that fill it. Writing a
plan streams those pieces (memory stays at one expert's plane) into a file that is either whole or not there.

A slice file keeps tensor names; the last dimension of a tensor is the number of experts held, in ascending order of
their ids. Its metadata: `swarm.model_id`, `swarm.file` = "slice", and for each layer `swarm.blk.N.experts`, the ids.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf

from swarm.errors import IntegrityError, UserError
from swarm.files import replacing
from swarm.ids import ExpertSet
from swarm.model.gguf_file import CHUNK_BYTES, MAGIC, GgufFile, MetadataValue, Progress, TensorInfo, padded
from swarm.model.manifest import MODEL_ID_KEY, Manifest
from swarm.model.spec import FILE_KEY, SUPPORTED, ExpertTensor, read_spec

STUB_WIDTH = 1
STUB_TYPE = int(gguf.GGMLQuantizationType.F16)
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


def plan_backbone(file: GgufFile, manifest: Manifest) -> FilePlan:
    """Return the plan of `backbone.gguf`: the whole file with experts of width 1 in it (zeros, F16).

    llama.cpp sizes experts by `<arch>.expert_feed_forward_length`, so that key becomes 1; the shared expert's
    width is then written out, for archs that would derive it.

    Raises:
        UserError: the file is not the manifest's model.
    """
    spec = manifest.spec
    _require_same_model(file, manifest)
    support = SUPPORTED[spec.architecture]
    metadata = dict(file.metadata)
    metadata[f"{spec.architecture}.{support.width_key}"] = MetadataValue.of_uint32(STUB_WIDTH)
    if spec.n_ff_shared:
        metadata[f"{spec.architecture}.{support.shared_width_key}"] = MetadataValue.of_uint32(spec.n_ff_shared)
    metadata[MODEL_ID_KEY] = MetadataValue.of_text(str(manifest.model_id))
    metadata[FILE_KEY] = MetadataValue.of_text("backbone")

    experts = {tensor.name: tensor for tensors in spec.tensors_by_layer for tensor in tensors}
    tensors = []
    for tensor in file.tensors.values():
        if tensor.name in experts:
            stub = _stub(experts[tensor.name])
            tensors.append((stub, (Piece(None, 0, stub.size_bytes),)))
        else:
            tensors.append((tensor, (Piece(tensor.name, 0, tensor.size_bytes),)))
    return _plan(metadata, tensors, file.alignment)


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
            info = TensorInfo(name=tensor.name, ggml_type=tensor.ggml_type, shape=(*tensor.shape[:2], len(ids)))
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
                for chunk in _bytes_of(piece, file):
                    out.write(chunk)
                    if piece.block:
                        hashes[piece.block].update(chunk)
                    done += len(chunk)
                    if progress is not None and done < total:
                        progress(done, total)
            padding = padded(tensor.size_bytes, plan.alignment) - tensor.size_bytes
            out.write(bytes(padding))
            done += padding
        for (layer, expert), found in hashes.items():
            if found.digest() != manifest.block_hashes[layer][expert]:
                raise IntegrityError(
                    f"layer {layer}, expert {expert} of {file.path} differs from the manifest: the file has changed"
                )
        out.flush()
        if progress is not None:
            progress(total, total)


def _bytes_of(piece: Piece, file: GgufFile) -> Iterator[bytes]:
    if piece.source is not None:
        yield from file.chunks(piece.source, piece.offset, piece.size_bytes)
        return
    for start in range(0, piece.size_bytes, CHUNK_BYTES):
        yield bytes(min(CHUNK_BYTES, piece.size_bytes - start))


def _stub(tensor: ExpertTensor) -> TensorInfo:
    n_in, n_out, n_expert = tensor.shape
    if tensor.kind == "down":
        n_in = STUB_WIDTH
    else:
        n_out = 2 * STUB_WIDTH if tensor.kind == "gate_up" else STUB_WIDTH
    return TensorInfo(name=tensor.name, ggml_type=STUB_TYPE, shape=(n_in, n_out, n_expert))


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
    header = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _string(key) + struct.pack("<I", value.type) + value.raw
    offset = 0
    for tensor, _ in tensors:
        header += _string(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        header += struct.pack("<IQ", tensor.ggml_type, offset)
        offset += padded(tensor.size_bytes, alignment)
    header += bytes(padded(len(header), alignment) - len(header))
    return FilePlan(header=bytes(header), tensors=tensors, alignment=alignment)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
