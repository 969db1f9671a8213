"""A GGUF file on disk: its metadata as raw values, its tensors, and where their bytes lie.

Refuses to know what the metadata means: that is `swarm.model.spec`. All numbers are little endian:

    magic "GGUF" | version u32 (2 or 3) | n_tensors u64 | n_kv u64
    n_kv x       key string | type u32 | value          a string is length u64 | bytes
    n_tensors x  name string | n_dims u32 | dims u64... | ggml type u32 | offset u64
    padding to `general.alignment` | tensor data, to which the offsets are relative

The header is parsed here and not by `gguf.GGUFReader`, because that reader trusts lengths: one damaged array
length makes it loop and grow for ever. Here every length is compared with what is left of the file first.
Bytes are read, not mapped: a file that shrinks under a mapping kills the process with SIGBUS.
"""

from __future__ import annotations

import math
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import gguf

from swarm.errors import UserError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32  # bytes; the GGUF specification's
MAX_HEADER_BYTES = 256 << 20  # guessed: vocabularies of 256k tokens with merges take about 20 MB
MAX_KEY_BYTES = 65_535  # the GGUF specification's
MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME less its NUL
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_KEYS = 65_536  # guessed: models have some fifty, slices one more for each layer; each takes 300 bytes of memory
MAX_TENSORS = 65_536  # guessed: the largest models have a few thousand
CHUNK_BYTES = 1 << 20  # of a streamed read; guessed: large enough that calls cost nothing

# A file split by `llama-gguf-split`: keys, and names.
SHARD_PREFIX = "split."
SHARD_NUMBER_KEY, SHARD_COUNT_KEY, SHARD_TENSORS_KEY = "split.no", "split.count", "split.tensors.count"
SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MAX_SHARDS = 1024  # guessed: the largest published models have about 40

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class ValueType:
    """The type numbers of metadata values."""

    UINT32 = 4
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10


SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
INTEGER_TYPES = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
NUMBER_TYPES = INTEGER_TYPES | {6, 12}


def tensor_size_bytes(ggml_type: int, shape: Sequence[int]) -> int:
    """Return how many bytes a tensor takes; `shape` in GGUF order, fastest dimension first.

    Raises:
        ValueError: the type is unknown, or a row does not fill whole quantisation blocks.
    """
    try:
        kind = gguf.GGMLQuantizationType(ggml_type)
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ValueError(f"unknown ggml type: got {ggml_type}") from error
    if shape[0] % block_values:
        raise ValueError(f"row of {shape[0]} values does not fill {kind.name} blocks of {block_values}")
    return math.prod(shape) // block_values * int(block_bytes)


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """One metadata value as it stands in the file, so that copying it changes no bit.

    Attributes:
        type: a GGUF value type number.
        raw: the value's bytes; an array's begin with its element type and count.
    """

    type: int
    raw: bytes

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return a string value."""
        data = text.encode()
        return cls(ValueType.STRING, struct.pack("<Q", len(data)) + data)

    @classmethod
    def of_uint32(cls, number: int) -> Self:
        """Return a 32-bit unsigned value."""
        return cls(ValueType.UINT32, struct.pack("<I", number))

    @classmethod
    def of_uint32s(cls, numbers: Sequence[int]) -> Self:
        """Return an array of 32-bit unsigned values."""
        return cls(ValueType.ARRAY, struct.pack(f"<IQ{len(numbers)}I", ValueType.UINT32, len(numbers), *numbers))

    @classmethod
    def of_bool(cls, value: bool) -> Self:
        """Return a truth value."""
        return cls(ValueType.BOOL, struct.pack("<?", value))

    @classmethod
    def of_float32(cls, number: float) -> Self:
        """Return a 32-bit float."""
        return cls(ValueType.FLOAT32, struct.pack("<f", number))

    @classmethod
    def of_float32s(cls, numbers: Sequence[float]) -> Self:
        """Return an array of 32-bit floats."""
        return cls(ValueType.ARRAY, struct.pack(f"<IQ{len(numbers)}f", ValueType.FLOAT32, len(numbers), *numbers))

    @classmethod
    def of_uint64s(cls, numbers: Sequence[int]) -> Self:
        """Return an array of 64-bit unsigned values."""
        return cls(ValueType.ARRAY, struct.pack(f"<IQ{len(numbers)}Q", ValueType.UINT64, len(numbers), *numbers))

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Self:
        """Return an array of strings."""
        raw = struct.pack("<IQ", ValueType.STRING, len(texts)) + b"".join(map(_string, texts))
        return cls(ValueType.ARRAY, raw)

    def text(self) -> str:
        """Return a string value's text; raises ValueError for another type or bytes that are not UTF-8."""
        if self.type != ValueType.STRING:
            raise ValueError(f"got type {self.type}, expected a string")
        return self.raw[8:].decode()

    def integer(self) -> int:
        """Return an integer value; raises ValueError for another type."""
        if self.type not in INTEGER_TYPES:
            raise ValueError(f"got type {self.type}, expected an integer")
        return int(struct.unpack("<" + SCALAR_FORMATS[self.type], self.raw)[0])

    def integers(self) -> tuple[int, ...]:
        """Return an integer array's numbers; raises ValueError for another type."""
        element, count = struct.unpack_from("<IQ", self.raw) if self.type == ValueType.ARRAY else (-1, 0)
        if element not in INTEGER_TYPES:
            raise ValueError(f"got type {self.type}, expected an array of integers")
        return struct.unpack_from(f"<{count}{SCALAR_FORMATS[element]}", self.raw, 12)

    def numbers(self) -> tuple[float, ...]:
        """Return a number, or an array's numbers, as floats; raises ValueError for another type."""
        if self.type in NUMBER_TYPES:
            return (float(struct.unpack("<" + SCALAR_FORMATS[self.type], self.raw)[0]),)
        element, count = struct.unpack_from("<IQ", self.raw) if self.type == ValueType.ARRAY else (-1, 0)
        if element not in NUMBER_TYPES:
            raise ValueError(f"got type {self.type}, expected numbers")
        return tuple(map(float, struct.unpack_from(f"<{count}{SCALAR_FORMATS[element]}", self.raw, 12)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor's name, type and shape (GGUF order, fastest dimension first)."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """How many bytes its data takes."""
        return tensor_size_bytes(self.ggml_type, self.shape)


class FileEnds(ValueError):
    """A file ends inside its header: of one that is still being fetched, more may mend it."""


class _HeaderReader:
    """Takes the header apart; every error is a ValueError that says at which byte."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self.file = file
        self.size_bytes = size_bytes
        self.position = 0

    def require(self, n_bytes: int, what: str) -> None:
        left = min(self.size_bytes, MAX_HEADER_BYTES) - self.position
        if n_bytes > left:
            raise ValueError(f"{what} at byte {self.position} is cut short: {n_bytes} bytes needed, {left} left")

    def take(self, n_bytes: int, what: str) -> bytes:
        self.require(n_bytes, what)
        data = self.file.read(n_bytes)
        if len(data) != n_bytes:
            raise FileEnds(f"file ends inside {what} at byte {self.position}")
        self.position += n_bytes
        return data

    def number(self, format_: str, what: str) -> int:
        return int(struct.unpack("<" + format_, self.take(struct.calcsize("<" + format_), what))[0])

    def name(self, limit_bytes: int, what: str) -> str:
        length = self.number("Q", f"length of a {what}")
        if not 0 < length <= limit_bytes:
            raise ValueError(
                f"bad length of a {what} at byte {self.position}: got {length}, expected 1 to {limit_bytes}"
            )
        text = self.take(length, what).decode("ascii", errors="replace")
        if not (text.isascii() and text.isprintable()):
            raise ValueError(f"unreadable {what} at byte {self.position}: got {text!r}, expected printable ASCII")
        return text

    def value(self) -> MetadataValue:
        type_ = self.number("I", "type of a value")
        if type_ in SCALAR_FORMATS:
            return MetadataValue(type_, self.take(struct.calcsize("<" + SCALAR_FORMATS[type_]), "value"))
        if type_ == ValueType.STRING:
            return MetadataValue(type_, self._string())
        if type_ != ValueType.ARRAY:
            raise ValueError(f"unknown type of a value at byte {self.position}: got {type_}, expected 0 to 12")
        head = self.take(12, "array")
        element, count = struct.unpack("<IQ", head)
        if element in SCALAR_FORMATS:
            return MetadataValue(
                type_, head + self.take(count * struct.calcsize("<" + SCALAR_FORMATS[element]), "array")
            )
        if element != ValueType.STRING:
            raise ValueError(
                f"unknown type of array at byte {self.position}: got {element}, expected scalars or strings"
            )
        texts = bytearray(head)  # and no list of them: empty ones would take six times their bytes
        for _ in range(count):
            texts += self._string()
        return MetadataValue(type_, bytes(texts))

    def _string(self) -> bytes:
        head = self.take(8, "string")
        return head + self.take(struct.unpack("<Q", head)[0], "string")

    def tensor(self) -> tuple[TensorInfo, int]:
        name = self.name(MAX_TENSOR_NAME_BYTES, "tensor name")
        n_dims = self.number("I", "number of dimensions")
        if not 1 <= n_dims <= MAX_DIMS:
            raise ValueError(f"bad number of dimensions of {name}: got {n_dims}, expected 1 to {MAX_DIMS}")
        shape: tuple[int, ...] = struct.unpack(f"<{n_dims}Q", self.take(8 * n_dims, "dimensions"))
        if min(shape) < 1:
            raise ValueError(f"bad shape of {name}: got {shape}, expected positive dimensions")
        ggml_type = self.number("I", "tensor type")
        return TensorInfo(name=name, ggml_type=ggml_type, shape=shape), self.number("Q", "tensor offset")


class GgufFile:
    """An open GGUF file, or the files of one that was split into shards. Reads may come from several threads.

    Attributes:
        path: as given: of shards, the first.
        metadata: key -> value, in file order; of shards, the first one's, without what says that they are shards.
        tensors: name -> TensorInfo, in file order.
        alignment: of tensor data, in bytes.
        size_bytes, mtime_ns: when it was opened; of shards, the sum and the latest.
    """

    def __init__(self, path: Path, *, is_shard: bool = False, sizes: Mapping[str, int] | None = None) -> None:
        """Open and check the header; of the first of several shards, those of all.

        Args:
            is_shard: open this one file, whatever it says of others.
            sizes: file name -> bytes, of files of which only the headers are here; their tensors cannot be read.

        Raises:
            UserError: a file cannot be read, is not GGUF, or is damaged; the message names it.
        """
        self.path = path
        self.metadata: Mapping[str, MetadataValue] = {}
        self.tensors: Mapping[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        self._shards: list[GgufFile] = []  # but the first
        self._shard_of: dict[str, GgufFile] = {}  # tensor -> where it is, if not here
        self._lock = threading.Lock()
        try:
            self._file = path.open("rb")
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
            raise UserError(f"cannot open {path}: {getattr(error, 'strerror', None) or error}") from error
        try:
            status = path.stat()
            self.size_bytes = status.st_size if sizes is None else sizes[path.name]
            self.mtime_ns = status.st_mtime_ns
            self._parse()
        except (ValueError, OSError) as error:
            self._file.close()
            raise UserError(f"cannot use {path} as a GGUF file: {error}") from error
        if is_shard:
            return
        try:
            n_shards = self.integer(SHARD_COUNT_KEY) or 0
            if n_shards > 1:
                self._open_shards(n_shards, sizes)
        except BaseException:
            self.close()
            raise

    def _open_shards(self, n_shards: int, sizes: Mapping[str, int] | None) -> None:
        """Open the other shards and take their tensors; `self` must be the first."""
        tensors = dict(self.tensors)
        paths = shard_paths(self.path, n_shards)
        for number, path in enumerate(paths[1:], 1):
            shard = GgufFile(path, is_shard=True, sizes=sizes)
            self._shards.append(shard)
            if shard.integer(SHARD_NUMBER_KEY) != number or shard.integer(SHARD_COUNT_KEY) != n_shards:
                raise UserError(f"{path} is not shard {number + 1} of {n_shards}, as its name says")
            if twice := tensors.keys() & shard.tensors.keys():
                raise UserError(f"{path} has {min(twice)}, which an earlier shard has too")
            tensors.update(shard.tensors)
            self._shard_of.update(dict.fromkeys(shard.tensors, shard))
        expected = self.integer(SHARD_TENSORS_KEY)
        if expected is not None and expected != len(tensors):
            raise UserError(f"the shards of {self.path} have {len(tensors)} tensors, expected {expected}")
        self.tensors = tensors
        self.metadata = {key: value for key, value in self.metadata.items() if not key.startswith(SHARD_PREFIX)}
        self.size_bytes += sum(shard.size_bytes for shard in self._shards)
        self.mtime_ns = max(self.mtime_ns, *(shard.mtime_ns for shard in self._shards))

    def _parse(self) -> None:
        header = _HeaderReader(self._file, self.size_bytes)
        magic = header.take(4, "magic")
        if magic != MAGIC:
            raise ValueError(f"wrong magic: got {magic!r}, expected {MAGIC!r}")
        version = header.number("I", "version")
        if version not in (2, 3):
            reason = "a big-endian file" if version and version & 0xFFFF == 0 else f"version {version}"
            raise ValueError(f"unsupported layout: got {reason}, expected little-endian version 2 or 3")
        n_tensors, n_kv = header.number("Q", "number of tensors"), header.number("Q", "number of keys")
        header.require(n_kv * 13, "metadata")  # the least that a key takes: an 8-byte length, a type and a byte
        if n_kv > MAX_KEYS:
            raise ValueError(f"too many metadata keys: got {n_kv}, expected at most {MAX_KEYS}")
        if n_tensors > MAX_TENSORS:
            raise ValueError(f"too many tensors: got {n_tensors}, expected at most {MAX_TENSORS}")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(n_kv):
            key = header.name(MAX_KEY_BYTES, "metadata key")
            if key in metadata:
                raise ValueError(f"metadata key twice: {key}")
            metadata[key] = header.value()
        self.metadata = metadata
        self.alignment = self.integer("general.alignment") or DEFAULT_ALIGNMENT
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"bad alignment: got {self.alignment}, expected a power of two")

        found = [header.tensor() for _ in range(n_tensors)]
        self.tensors = {tensor.name: tensor for tensor, _ in found}
        if len(self.tensors) != n_tensors:
            raise ValueError("two tensors have the same name")
        data_start = padded(header.position, self.alignment)
        previous_end, previous_name = data_start, "the header"
        for tensor, offset in sorted(found, key=lambda pair: pair[1]):
            start = data_start + offset
            try:
                end = start + tensor.size_bytes
            except ValueError as error:
                raise ValueError(f"bad tensor {tensor.name}: {error}") from error
            if start < previous_end or start % self.alignment or end > self.size_bytes:
                raise ValueError(
                    f"{tensor.name} lies at bytes {start} to {end}: expected a multiple of {self.alignment}, "
                    f"after {previous_name} (ends at {previous_end}), within the file's {self.size_bytes} bytes"
                )
            self._offsets[tensor.name] = start
            previous_end, previous_name = end, tensor.name

    def text(self, key: str) -> str | None:
        """Return a string of the metadata, None where the key is absent; raises UserError for another type."""
        try:
            return self.metadata[key].text() if key in self.metadata else None
        except ValueError as error:
            raise UserError(f"bad metadata {key} in {self.path}: {error}") from error

    def integer(self, key: str) -> int | None:
        """Return an integer of the metadata, None where the key is absent; raises UserError for another type."""
        try:
            return self.metadata[key].integer() if key in self.metadata else None
        except ValueError as error:
            raise UserError(f"bad metadata {key} in {self.path}: {error}") from error

    def position(self, name: str) -> tuple[Path, int]:
        """Return in which file a tensor's data are, and at which byte they begin."""
        shard = self._shard_of.get(name, self)
        return shard.path, shard._offsets[name]

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        """Return `size_bytes` of a tensor's data from `offset` on.

        Raises:
            UserError: the file became shorter since it was opened, or the disk fails.
        """
        assert 0 <= offset <= offset + size_bytes <= self.tensors[name].size_bytes
        if name in self._shard_of:
            return self._shard_of[name].read(name, offset, size_bytes)
        try:
            with self._lock:
                self._file.seek(self._offsets[name] + offset)
                data = self._file.read(size_bytes)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        if len(data) != size_bytes:
            raise UserError(f"{self.path} changed while it was read: {name} is cut short; run again")
        return data

    def chunks(self, name: str, offset: int = 0, size_bytes: int | None = None) -> Iterator[bytes]:
        """Yield a tensor's data, or the part of it from `offset` on, in pieces of at most `CHUNK_BYTES`."""
        end = self.tensors[name].size_bytes if size_bytes is None else offset + size_bytes
        for start in range(offset, end, CHUNK_BYTES):
            yield self.read(name, start, min(CHUNK_BYTES, end - start))

    def forget_metadata(self) -> None:
        """Free the metadata, of which a vocabulary may take 20 MB: for who only reads tensors from now on."""
        self.metadata = {}
        for shard in self._shards:
            shard.metadata = {}

    def require_unchanged(self) -> None:
        """Raise UserError when a file's size or time of change is not what it was when opened."""
        size_bytes, mtime_ns = 0, 0
        for path in (self.path, *(shard.path for shard in self._shards)):
            try:
                status = path.stat()
            except OSError as error:
                raise UserError(f"{path} vanished while it was read: {error.strerror}") from error
            size_bytes, mtime_ns = size_bytes + status.st_size, max(mtime_ns, status.st_mtime_ns)
        if (size_bytes, mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise UserError(f"{self.path} changed while it was read: run again")

    def close(self) -> None:
        """Close the files; reads fail from now on."""
        self._file.close()
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def shard_paths(path: Path, n_shards: int) -> list[Path]:
    """Return the paths of all shards, of which `path` must be the first; raises UserError otherwise."""
    match = SHARD_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != n_shards or n_shards > MAX_SHARDS:
        raise UserError(
            f"{path} says that it is one of {n_shards} shards, but is not called so: expected a name like "
            f"model-00001-of-{n_shards:05}.gguf"
        )
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{n_shards:05}.gguf") for number in range(1, n_shards + 1)]
    if path != paths[0]:
        raise UserError(f"{path} is one of {n_shards} shards: give the first, {paths[0].name}")
    return paths


def encode_header(metadata: Mapping[str, MetadataValue], tensors: Sequence[TensorInfo], alignment: int) -> bytes:
    """Return a file's bytes up to the tensors' data, padding included; the data follow in this order, each padded."""
    header = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _string(key) + struct.pack("<I", value.type) + value.raw
    offset = 0
    for tensor in tensors:
        header += _string(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        header += struct.pack("<IQ", tensor.ggml_type, offset)
        offset += padded(tensor.size_bytes, alignment)
    return bytes(header) + bytes(padded(len(header), alignment) - len(header))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def padded(n_bytes: int, alignment: int) -> int:
    """Return the least multiple of `alignment` that is not below `n_bytes`."""
    return -(-n_bytes // alignment) * alignment
