"""What a model file is, in hashes: the list of its tensors, sha256 of every (layer, expert) block, sha256 of the rest.

The model id is sha256 of the manifest as canonical JSON (sorted keys, no spaces, ASCII). Where bytes lie, where they
come from and what people call the model stay outside, so the same model has the same id everywhere.
A manifest comes from strangers: `Manifest.from_bytes` trusts nothing in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from swarm.errors import IntegrityError, RemoteProtocolError, UserError
from swarm.files import write_atomically
from swarm.ids import ModelId
from swarm.model.expert_kinds import EXPERT_KINDS
from swarm.model.gguf_file import (
    MAX_DIMS,
    MAX_TENSOR_NAME_BYTES,
    MAX_TENSORS,
    SHARD_PREFIX,
    GgufFile,
    Progress,
    TensorInfo,
)
from swarm.model.spec import (
    EXPERT_TENSOR,
    IGNORED_TENSOR,
    ModelSpec,
    is_expert_tensor,
    read_spec,
    untrusted_int,
    untrusted_list,
    untrusted_object,
    untrusted_text,
)

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_MANIFEST_BYTES = 16_000_000  # chosen: 60 layers of 384 experts, the most published so far, take 1.6 MB
# JSON grows when parsed: a list takes 56 bytes for the two it is written with. So the values are counted first.
MAX_BRACKETS = 2 * MAX_TENSORS + 8 * 1024
MAX_COMMAS = 1_000_000
HASH_BYTES = 32

MODEL_ID_KEY = "swarm.model_id"
SOURCES_KEY = "swarm.sources"
"""Of a backbone file: where the whole model can be had, a name on each line; in no hash, as all that begins with `swarm.`."""
MANIFEST_NAME = "manifest.json"
"""What `swarm split` calls the manifest that it writes beside the other files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Hashes of one model. Contradicting itself raises ValueError.

    Attributes:
        spec: sizes and expert tensors.
        tensors: every tensor of the file, in name order.
        block_hashes: MoE layer -> for each expert sha256 of its block, 32 bytes.
        backbone_hash: see `hash_backbone`.
    """

    spec: ModelSpec
    tensors: tuple[TensorInfo, ...]
    block_hashes: Mapping[int, tuple[bytes, ...]]
    backbone_hash: bytes
    _encoded: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if len(names) > MAX_TENSORS or names != sorted(set(names)):
            raise ValueError("tensors are too many, or not in name order")
        experts = {tensor for tensor in self.tensors if is_expert_tensor(tensor.name)}
        served = {tensor.info for tensors in self.spec.tensors_by_layer for tensor in tensors}
        if not served <= experts or any(not self._is_unused(tensor.name) for tensor in experts - served):
            raise ValueError("expert tensors of the list and of the spec differ")
        for tensor in self.tensors:
            _check_tensor(tensor)
        if tuple(self.block_hashes) != self.spec.moe_layers:
            raise ValueError("layers of the block hashes and of the spec differ")
        for layer, hashes in self.block_hashes.items():
            if len(hashes) != self.spec.n_expert:
                raise ValueError(f"layer {layer} has {len(hashes)} block hashes, expected {self.spec.n_expert}")
        if any(len(h) != HASH_BYTES for hs in (*self.block_hashes.values(), (self.backbone_hash,)) for h in hs):
            raise ValueError(f"a hash has a wrong length, expected {HASH_BYTES} bytes")
        object.__setattr__(self, "_encoded", json.dumps(self._plain(), **CANONICAL).encode())

    def _is_unused(self, name: str) -> bool:
        """Return whether an expert tensor is of use to nobody: of a layer that predicts further tokens, or in no graph."""
        match = EXPERT_TENSOR.fullmatch(name)
        if match is None:
            return IGNORED_TENSOR.fullmatch(name) is not None
        return int(match[1]) < self.spec.n_layers and int(match[1]) not in self.spec.moe_layers

    def _plain(self) -> dict[str, Any]:
        return {
            "backbone_hash": self.backbone_hash.hex(),
            "block_hashes": [[block.hex() for block in hashes] for hashes in self.block_hashes.values()],
            "format": FORMAT,
            "spec": self.spec.to_json(),
            "tensors": [[tensor.name, tensor.ggml_type, *tensor.shape] for tensor in self.tensors],
        }

    def to_bytes(self) -> bytes:
        """Return the manifest as canonical JSON."""
        return self._encoded

    @classmethod
    def from_bytes(cls, untrusted: bytes) -> Self:
        """Return the manifest that `to_bytes` wrote.

        Raises:
            RemoteProtocolError: too large, malformed, inconsistent, or not in canonical form.
        """
        if len(untrusted) > MAX_MANIFEST_BYTES:
            raise RemoteProtocolError(
                f"manifest is too large: got {len(untrusted)} bytes, expected at most {MAX_MANIFEST_BYTES}"
            )
        if untrusted.count(b"[") + untrusted.count(b"{") > MAX_BRACKETS or untrusted.count(b",") > MAX_COMMAS:
            raise RemoteProtocolError("manifest has too many values")
        try:
            plain = untrusted_object(
                json.loads(untrusted.decode("ascii")), ("backbone_hash", "block_hashes", "format", "spec", "tensors")
            )
            if untrusted_int(plain["format"]) != FORMAT:
                raise ValueError(f"unknown format: got {plain['format']}, expected {FORMAT}")
            spec = ModelSpec.from_json(plain["spec"])
            lists = untrusted_list(plain["block_hashes"], len(spec.moe_layers))
            manifest = cls(
                spec=spec,
                tensors=tuple(_untrusted_tensor(row) for row in untrusted_list(plain["tensors"], MAX_TENSORS)),
                block_hashes=dict(
                    zip(
                        spec.moe_layers,
                        (tuple(_untrusted_hash(h) for h in untrusted_list(hs, spec.n_expert)) for hs in lists),
                        strict=True,
                    )
                ),
                backbone_hash=_untrusted_hash(plain["backbone_hash"]),
            )
        except (ValueError, RecursionError) as error:  # ValueError: also JSON's and Unicode's errors
            raise RemoteProtocolError(f"bad manifest: {error}") from error
        if manifest.to_bytes() != untrusted:
            raise RemoteProtocolError("bad manifest: not in canonical form")
        return manifest

    @property
    def model_id(self) -> ModelId:
        """sha256 of `to_bytes()`."""
        return ModelId(hashlib.sha256(self._encoded).digest())


CANONICAL: dict[str, Any] = {
    "sort_keys": True,
    "separators": (",", ":"),
    "ensure_ascii": True,
    "allow_nan": False,
}


def _check_tensor(tensor: TensorInfo) -> None:
    name = tensor.name
    if not (0 < len(name) <= MAX_TENSOR_NAME_BYTES and name.isascii() and name.isprintable()):
        raise ValueError(f"bad tensor name: got {name[:80]!r}")
    if not 1 <= len(tensor.shape) <= MAX_DIMS or min(tensor.shape) < 1:
        raise ValueError(f"bad shape of {name}: got {tensor.shape}")
    if tensor.size_bytes >= 1 << 63:
        raise ValueError(f"{name} is too large: got shape {tensor.shape}")


def _untrusted_tensor(value: object) -> TensorInfo:
    name, ggml_type, *shape = untrusted_list(value, 2 + MAX_DIMS)
    return TensorInfo(
        name=untrusted_text(name),
        ggml_type=untrusted_int(ggml_type),
        shape=tuple(untrusted_int(dim) for dim in shape),
    )


def _untrusted_hash(value: object) -> bytes:
    return bytes.fromhex(untrusted_text(value))


BlockHashes = Mapping[int, tuple[bytes, ...]]
"""MoE layer -> for each expert sha256 of its block."""


def build_manifest(
    file: GgufFile,
    progress: Progress | None = None,
    *,
    done_layers: BlockHashes = MappingProxyType({}),
    keep: Callable[[BlockHashes], None] | None = None,
) -> Manifest:
    """Return the manifest of a whole model file, read once from end to end, a chunk at a time.

    Args:
        progress: called with bytes read and bytes in all.
        done_layers: layers that were hashed before; they are not read again.
        keep: called with what was hashed so far, after each layer.

    Raises:
        UserError: the file cannot be served (`read_spec`), or it changed meanwhile.
    """
    spec = read_spec(file)
    tensors = tuple(file.tensors[name] for name in sorted(file.tensors))
    total = sum(tensor.size_bytes for tensor in tensors)
    done = 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress(done, total)

    block_hashes: dict[int, tuple[bytes, ...]] = {}
    for layer in spec.moe_layers:
        if layer in done_layers and len(done_layers[layer]) == spec.n_expert:
            block_hashes[layer] = done_layers[layer]
            advance(spec.n_expert * spec.block_size_bytes(layer))
            continue
        hashes = [hashlib.sha256() for _ in range(spec.n_expert)]
        for tensor in spec.expert_tensors(layer):  # tensor by tensor reads the disk in order
            size = tensor.expert_size_bytes
            for expert, block_hash in enumerate(hashes):
                for chunk in file.chunks(tensor.name, expert * size, size):
                    block_hash.update(chunk)
                    advance(len(chunk))
        block_hashes[layer] = tuple(block_hash.digest() for block_hash in hashes)
        if keep is not None:
            keep(block_hashes)
    backbone_hash = hash_backbone(file, advance)

    file.require_unchanged()
    return Manifest(spec=spec, tensors=tensors, block_hashes=block_hashes, backbone_hash=backbone_hash)


def hash_backbone(file: GgufFile, advance: Callable[[int], None] | None = None) -> bytes:
    """Return sha256 over everything but the routed experts; the same for a whole file and its `backbone.gguf`.

    Hashed: each metadata key with its type and raw value, in key order; each tensor but the experts', with name,
    type, shape and data, in name order. Left out: `general.*` labels except the architecture, what `swarm split`
    adds, and the keys that a stub changes (the manifest's spec holds those numbers).
    `advance` is called with the size of each piece that was read.
    """
    digest = hashlib.sha256(b"swarm backbone 1\0")
    architecture = file.text("general.architecture") or ""
    stub_keys = EXPERT_KINDS[architecture].stub_keys(architecture) if architecture in EXPERT_KINDS else frozenset()
    for key in sorted(file.metadata):
        if key in stub_keys or key.startswith(("swarm.", SHARD_PREFIX)):  # a file joined of shards is the same model
            continue
        if key.startswith("general.") and key != "general.architecture":
            continue
        value = file.metadata[key]
        digest.update(struct.pack("<QIQ", len(key), value.type, len(value.raw)) + key.encode() + value.raw)
    for name in sorted(file.tensors):
        if is_expert_tensor(name):
            continue
        tensor = file.tensors[name]
        head = struct.pack(f"<QII{len(tensor.shape)}Q", len(name), tensor.ggml_type, len(tensor.shape), *tensor.shape)
        digest.update(head + name.encode())
        for chunk in file.chunks(name):
            digest.update(chunk)
            if advance is not None:
                advance(len(chunk))
    return digest.digest()


def verify_block(manifest: Manifest, layer: int, expert: int, block: bytes) -> None:
    """Raise IntegrityError unless `block` is that expert's, by length and hash."""
    hashes = manifest.block_hashes.get(layer, ())
    if not 0 <= expert < len(hashes):
        raise IntegrityError(f"model {manifest.model_id.short} has no layer {layer}, expert {expert}")
    size = manifest.spec.block_size_bytes(layer)
    if len(block) != size:
        raise IntegrityError(
            f"block of layer {layer}, expert {expert} has a wrong length: got {len(block)} bytes, expected {size}"
        )
    found = hashlib.sha256(block).digest()
    if found != hashes[expert]:
        raise IntegrityError(
            f"block of layer {layer}, expert {expert} is damaged: "
            f"got sha256 {found.hex()[:16]}, expected {hashes[expert].hex()[:16]}"
        )


def manifest_of(path: Path, cache_dir: Path, progress: Progress | None = None) -> Manifest:
    """Return the manifest of a model file, from `cache_dir` where the file was seen before.

    The cache goes by absolute path, size and time of change; a damaged entry is built again. A run that was cut goes on after the
    last layer that it hashed.

    Raises:
        UserError: the file cannot be read or served.
    """
    with GgufFile(path) as file:
        entry = _cache_entry(cache_dir / "manifests", file)
        with contextlib.suppress(RemoteProtocolError):
            if (kept := _read_entry(entry)) is not None:
                return Manifest.from_bytes(kept)
        part = entry.with_name(entry.name + ".part")
        manifest = build_manifest(
            file,
            progress,
            done_layers=_unpack(_read_entry(part)),
            keep=lambda done: _write_entry(part, _pack(done), level=logging.DEBUG),
        )
    _write_entry(entry, manifest.to_bytes())
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)
    return manifest


def _pack(hashes: BlockHashes) -> bytes:
    return b"".join(struct.pack("<II", layer, len(each)) + b"".join(each) for layer, each in hashes.items())


def _unpack(packed: bytes | None) -> BlockHashes:
    """Return what `_pack` was given; its checksum was looked at before."""
    hashes: dict[int, tuple[bytes, ...]] = {}
    position = 0
    while packed and position < len(packed):
        layer, n_experts = struct.unpack_from("<II", packed, position)
        position += 8
        hashes[layer] = tuple(
            packed[start : start + HASH_BYTES]
            for start in range(position, position + n_experts * HASH_BYTES, HASH_BYTES)
        )
        position += n_experts * HASH_BYTES
    return hashes


def manifest_beside(path: Path) -> Manifest:
    """Return the manifest that `swarm split` wrote beside `path`; whether it belongs to it is for the caller to see.

    Raises:
        UserError: it is not there, or it is damaged.
    """
    beside = path.with_name(MANIFEST_NAME)
    try:
        if beside.stat().st_size > MAX_MANIFEST_BYTES:
            raise UserError(f"{beside} is too large for a manifest: expected at most {MAX_MANIFEST_BYTES} bytes")
        return Manifest.from_bytes(beside.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {beside}, which belongs to {path.name}: {error.strerror}") from error
    except RemoteProtocolError as error:
        raise UserError(f"{beside} is damaged: {error}") from error


def verify_backbone(path: Path, manifest: Manifest, cache_dir: Path, progress: Progress | None = None) -> None:
    """Raise IntegrityError unless `path` is the manifest's model without its routed experts, by `hash_backbone`.

    A file that was seen before is not read again: its hash is kept in `cache_dir`, by absolute path, size and time of change.

    Raises:
        UserError: the file cannot be read, or changed meanwhile.
    """
    with GgufFile(path) as file:
        entry = _cache_entry(cache_dir / "backbone_hashes", file)
        found = _read_entry(entry)
        if found is None:
            total = sum(tensor.size_bytes for name, tensor in file.tensors.items() if not is_expert_tensor(name))
            done = 0

            def advance(n_bytes: int) -> None:
                nonlocal done
                done += n_bytes
                if progress is not None:
                    progress(done, total)

            found = hash_backbone(file, advance)
            file.require_unchanged()
            _write_entry(entry, found)
    if found != manifest.backbone_hash:
        raise IntegrityError(
            f"{path} is damaged, or of another model: got backbone hash {found.hex()}, "
            f"expected {manifest.backbone_hash.hex()}; split the model again"
        )


def _cache_entry(folder: Path, file: GgufFile) -> Path:
    """Return where to keep what is known of a file; another one once its path, size or time of change is another."""
    seen = f"{file.path.resolve()}\0{file.size_bytes}\0{file.mtime_ns}"
    return folder / hashlib.sha256(seen.encode(errors="surrogateescape")).hexdigest()


def _read_entry(entry: Path) -> bytes | None:
    """Return what `_write_entry` kept; None where it is not there, or damaged."""
    try:
        if entry.stat().st_size > MAX_MANIFEST_BYTES + HASH_BYTES:
            return None
        data = entry.read_bytes()
    except OSError:
        return None
    return data[HASH_BYTES:] if hashlib.sha256(data[HASH_BYTES:]).digest() == data[:HASH_BYTES] else None


def _write_entry(entry: Path, data: bytes, *, level: int = logging.WARNING) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(entry, hashlib.sha256(data).digest() + data)
    except OSError as error:  # the next start hashes the file again, nothing worse
        logger.log(
            level, "cannot keep what was hashed, so it will be hashed again: %s: %s", entry.parent, error.strerror
        )
