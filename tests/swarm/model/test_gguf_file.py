"""A GGUF file opens as gguf-py reads it, or fails with UserError; nothing else, and never slowly."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import pytest

from swarm.errors import UserError
from swarm.model.gguf_file import FileEnds, GgufFile, MetadataValue, encode_header, tensor_size_bytes
from tests.gguf_shards import write_shards
from tests.synthetic_moe import write_synthetic_moe

EMBEDDED = Path(__file__).parents[3] / "examples" / "tiny_moe"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return write_synthetic_moe(path, n_embd=64, n_layers=2, n_expert=4, n_expert_used=2, n_ff_exp=32, n_ff_shared=32)


def header_of(kv: bytes = b"", n_kv: int = 0, tensors: bytes = b"", n_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_kv) + kv + tensors


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor(name: bytes, shape: tuple[int, ...], ggml_type: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, ggml_type, offset)


@pytest.mark.parametrize("name", ["model-Q8_0.gguf", "model-Q4_K_M.gguf"])
def test_tensors_and_metadata_equal_what_gguf_py_reads(name: str) -> None:
    reader = gguf.GGUFReader(EMBEDDED / name)
    with GgufFile(EMBEDDED / name) as file:
        assert list(file.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert (ours.ggml_type, ours.shape) == (int(theirs.tensor_type), tuple(theirs.shape.tolist()))
            assert b"".join(file.chunks(theirs.name)) == theirs.data.tobytes()
        assert list(file.metadata) == [key for key in reader.fields if not key.startswith("GGUF.")]
        for key, value in file.metadata.items():
            assert value.raw == b"".join(p.tobytes() for p in reader.fields[key].parts[3:])
        assert file.text("general.architecture") == "qwen2moe"
        assert file.integer("qwen2moe.expert_count") == 32
        assert file.text("absent") is None
        assert file.integer("absent") is None
        with pytest.raises(UserError, match=r"expert_count.*expected a string"):
            file.text("qwen2moe.expert_count")


def test_chunks_of_a_part_are_that_part(small: Path) -> None:
    with GgufFile(small) as file:
        whole = b"".join(file.chunks("output.weight"))
        assert b"".join(file.chunks("output.weight", 100, 777)) == whole[100:877]


def test_values_round_trip() -> None:
    assert MetadataValue.of_text("größe").text() == "größe"
    assert MetadataValue.of_uint32(7).integer() == 7
    assert MetadataValue.of_uint32s([3, 9]).integers() == (3, 9)
    with pytest.raises(ValueError, match="expected an array"):
        MetadataValue.of_uint32(7).integers()


def test_a_file_cut_anywhere_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    with GgufFile(small) as file:
        last = max(file._offsets, key=lambda name: file._offsets[name])
        needed = file._offsets[last] + file.tensors[last].size_bytes
    header_end = data.index(b"output.weight") + 40
    rng = random.Random(1)
    cuts = [*range(400), *rng.sample(range(400, header_end), 200), *rng.sample(range(header_end, needed), 60)]
    path = tmp_path / "cut.gguf"
    for cut in [*cuts, needed - 1]:
        path.write_bytes(data[:cut])
        with pytest.raises(UserError, match=r"cut\.gguf"):
            GgufFile(path)


def test_a_damaged_header_opens_or_raises_only_user_error(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    header_end = data.index(b"blk.1.ffn_up_exps.weight") + 400
    rng = random.Random(2)
    path = tmp_path / "flipped.gguf"
    n_refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            at = rng.randrange(rng.choice((64, 1200, header_end)))
            damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            GgufFile(path).close()
        except UserError:
            n_refused += 1
    assert n_refused > 100


def test_random_bytes_are_refused(tmp_path: Path) -> None:
    rng = random.Random(3)
    path = tmp_path / "noise.gguf"
    for n in (0, 1, 3, 4, 24, 100, 5000):
        for start in (b"", b"GGUF", b"GGUF" + struct.pack("<I", 3), header_of(n_kv=2), header_of(n_tensors=2)):
            path.write_bytes(start + rng.randbytes(n))
            with pytest.raises(UserError):
                GgufFile(path)


ARRAY_OF_U32 = string(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61)
ARRAY_OF_STRINGS = string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61)
NESTED = string(b"k") + struct.pack("<IIQ", 9, 9, 1)
U32 = struct.pack("<II", 4, 5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(100), "wrong magic"),
        (header_of(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header_of(n_kv=1 << 60), "cut short"),
        (header_of(n_tensors=1 << 60), "too many tensors"),
        (header_of(n_kv=70_000) + bytes(70_000 * 13), "too many metadata keys"),
        (header_of(ARRAY_OF_U32, 1) + bytes(99), "cut short"),
        (header_of(ARRAY_OF_STRINGS, 1) + bytes(99), "cut short"),
        (header_of(NESTED, 1) + bytes(99), "unknown type of array"),
        (header_of(string(b"k") + struct.pack("<IQ", 8, 1 << 62), 1) + bytes(99), "cut short"),
        (header_of(string(b"k") + struct.pack("<I", 13), 1) + bytes(99), "unknown type of a value"),
        (header_of((string(b"k") + U32) * 2, 2), "key twice"),
        (header_of(string(b"") + U32, 1), "bad length of a metadata key"),
        (header_of(string(b"\xff") + U32, 1), "unreadable metadata key"),
        (header_of(string(b"general.alignment") + U32, 1), "power of two"),
        (header_of(tensors=tensor(b"t", (1,) * 5, 0, 0), n_tensors=1) + bytes(99), "number of dimensions"),
        (header_of(tensors=tensor(b"t", (4, 0), 0, 0), n_tensors=1) + bytes(99), "positive dimensions"),
        (header_of(tensors=tensor(b"t", (8,), 99, 0), n_tensors=1) + bytes(99), "unknown ggml type"),
        (header_of(tensors=tensor(b"t", (8,), 8, 0), n_tensors=1) + bytes(99), "does not fill Q8_0 blocks"),
        (header_of(tensors=tensor(b"t", (1 << 62, 1 << 62), 0, 0), n_tensors=1) + bytes(99), "t lies at bytes"),
        (header_of(tensors=tensor(b"t", (8,), 0, 1 << 63), n_tensors=1) + bytes(99), "t lies at bytes"),
        (header_of(tensors=tensor(b"t", (8,), 0, 4), n_tensors=1) + bytes(99), "multiple of 32"),
        (header_of(tensors=tensor(b"t", (8,), 0, 0) * 2, n_tensors=2) + bytes(199), "same name"),
        (header_of(tensors=tensor(b"t", (8,), 0, 0) + tensor(b"u", (8,), 0, 0), n_tensors=2) + bytes(199), "after t"),
        (header_of(tensors=tensor(b"t" * 64, (8,), 0, 0), n_tensors=1) + bytes(99), "expected 1 to 63"),
    ],
)
def test_a_header_that_lies_is_refused_with_its_reason(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lies.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        GgufFile(path)
    assert "lies.gguf" in str(caught.value)


@pytest.mark.parametrize("name", ["absent.gguf", ".", "nul\0.gguf"])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot open"):
        GgufFile(tmp_path / name)


def test_a_file_that_shrinks_or_changes_after_opening_is_told(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(small.read_bytes())
    with GgufFile(path) as file:
        file.require_unchanged()
        with path.open("r+b") as writer:
            writer.truncate(2000)
        with pytest.raises(UserError, match="cut short"):
            file.read("output.weight", 0, file.tensors["output.weight"].size_bytes)
        with pytest.raises(UserError, match="changed"):
            file.require_unchanged()
        path.unlink()
        with pytest.raises(UserError, match="vanished"):
            file.require_unchanged()


def test_sizes_of_quantised_tensors() -> None:
    assert tensor_size_bytes(0, (3, 5)) == 60  # F32
    assert tensor_size_bytes(8, (64, 2)) == 2 * 2 * 34  # Q8_0: 32 values in 34 bytes
    assert tensor_size_bytes(12, (256, 3)) == 3 * 144  # Q4_K: 256 values in 144 bytes


def test_shards_are_one_file_whose_tensors_lie_in_several(small: Path, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, small, 3)
    with GgufFile(paths[0]) as file, GgufFile(small) as whole:
        assert file.tensors == whole.tensors
        assert file.metadata == whole.metadata, "nothing of the shards"
        assert file.size_bytes == sum(path.stat().st_size for path in paths)
        for name in whole.tensors:
            assert b"".join(file.chunks(name)) == b"".join(whole.chunks(name))
            path, start = file.position(name)
            assert path.read_bytes()[start : start + 16] == whole.read(name, 0, 16)
        file.require_unchanged()
        paths[2].write_bytes(paths[2].read_bytes() + b"\0")
        with pytest.raises(UserError, match="changed"):
            file.require_unchanged()


def test_shards_that_do_not_belong_together_are_refused(small: Path, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, small, 3)
    with pytest.raises(UserError, match=r"give the first, model-00001-of-00003\.gguf"):
        GgufFile(paths[1])
    for n_shards, total, message in ((2, 5, "tensors, expected 5"), (2, None, "")):
        first, second = write_shards(tmp_path, small, n_shards, stem="other", total=total)
        if message:
            with pytest.raises(UserError, match=message):
                GgufFile(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match="is not shard 2 of 2"):
        GgufFile(first)
    second.unlink()
    with pytest.raises(UserError, match=r"cannot open .*other-00002-of-00002"):
        GgufFile(first)
    with pytest.raises(UserError, match=r"expected a name like model-00001-of-00003\.gguf"):
        GgufFile(paths[0].rename(tmp_path / "renamed.gguf"))


def test_values_written_here_are_read_by_gguf_py(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": MetadataValue.of_text("x"),
        "a": MetadataValue.of_bool(True),
        "b": MetadataValue.of_float32(0.5),
        "c": MetadataValue.of_float32s([1.5, -2.0]),
        "d": MetadataValue.of_uint64s([1 << 40]),
        "e": MetadataValue.of_texts(["one", "zwei"]),
    }
    (tmp_path / "m.gguf").write_bytes(encode_header(metadata, [], 32))
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert {key: fields[key].contents() for key in "abcde"} == {
        "a": True,
        "b": 0.5,
        "c": [1.5, -2.0],
        "d": [1 << 40],
        "e": ["one", "zwei"],
    }
    assert metadata["b"].numbers() == (0.5,)
    assert metadata["c"].numbers() == (1.5, -2.0)
    for wrong in ("a", "e", "general.architecture"):
        with pytest.raises(ValueError, match="expected numbers"):
            metadata[wrong].numbers()


def test_a_header_alone_says_where_tensors_lie(small: Path, tmp_path: Path) -> None:
    with GgufFile(small) as whole:
        tensors, positions = dict(whole.tensors), [whole.position(name)[1] for name in whole.tensors]
    header = tmp_path / "small.gguf"
    header.write_bytes(small.read_bytes()[: min(positions)])
    with pytest.raises(UserError, match="within the file's"):
        GgufFile(header)
    with GgufFile(header, sizes={"small.gguf": small.stat().st_size}) as file:
        assert (file.tensors, file.size_bytes) == (tensors, small.stat().st_size)
        assert [file.position(name)[1] for name in tensors] == positions
        with pytest.raises(UserError, match="is cut short"):
            file.read(next(iter(tensors)), 0, 1)


@pytest.mark.parametrize("n_bytes", [0, 3, 20, 100, 1000])
def test_a_header_that_is_still_being_fetched_is_told_from_a_damaged_one(
    small: Path, tmp_path: Path, n_bytes: int
) -> None:
    header = tmp_path / "small.gguf"
    data = small.read_bytes()
    header.write_bytes(data[:n_bytes])
    with pytest.raises(UserError) as cut:
        GgufFile(header, sizes={"small.gguf": len(data)})
    assert isinstance(cut.value.__cause__, FileEnds)
    header.write_bytes(b"FUGG" + data[4:])
    with pytest.raises(UserError) as damaged:
        GgufFile(header, sizes={"small.gguf": len(data)})
    assert not isinstance(damaged.value.__cause__, FileEnds)


def test_tensors_are_read_without_the_metadata_too(small: Path) -> None:
    with GgufFile(small) as file:
        name = next(iter(file.tensors))
        before = file.read(name, 0, 16)
        file.forget_metadata()
        assert not file.metadata
        assert file.read(name, 0, 16) == before
