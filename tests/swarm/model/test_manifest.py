"""A manifest names a model by its bytes alone, and a stranger's manifest can raise only RemoteProtocolError."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import IntegrityError, RemoteProtocolError, UserError
from swarm.model import manifest as manifest_module
from swarm.model.expert_kinds import Activation
from swarm.model.gguf_file import GgufFile, TensorInfo
from swarm.model.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    build_manifest,
    hash_backbone,
    manifest_of,
    verify_backbone,
    verify_block,
)
from swarm.model.slices import write_backbone
from swarm.model.spec import ExpertTensor, ModelSpec
from tests.synthetic_moe import write_synthetic_moe

EMBEDDED = Path(__file__).parents[3] / "examples" / "tiny_moe"
NAMES = ("model-Q8_0.gguf", "model-Q4_K_M.gguf")


def built(path: Path) -> Manifest:
    with GgufFile(path) as file:
        return build_manifest(file)


def write_small(path: Path, *, name: str = "synthetic", seed: int = 0, architecture: str = "qwen2moe") -> Path:
    return write_synthetic_moe(
        path,
        architecture=architecture,
        n_embd=64,
        n_layers=2,
        n_expert=4,
        n_expert_used=2,
        n_ff_exp=32,
        n_ff_shared=32,
        name=name,
        seed=seed,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("manifest") / "small.gguf")


@pytest.mark.parametrize("name", NAMES)
def test_block_hashes_are_of_the_planes_that_gguf_py_reads(name: str) -> None:
    manifest = built(EMBEDDED / name)
    tensors = {t.name: t for t in gguf.GGUFReader(EMBEDDED / name).tensors}
    assert [t.name for t in manifest.tensors] == sorted(tensors)
    for layer, expert in [(0, 0), (3, 17), (5, 31)]:
        block = b"".join(
            tensors[f"blk.{layer}.ffn_{k}_exps.weight"].data[expert].tobytes() for k in ("down", "gate", "up")
        )
        assert manifest.block_hashes[layer][expert] == hashlib.sha256(block).digest()
        verify_block(manifest, layer, expert, block)


def test_the_model_id_is_the_hash_of_canonical_json_and_stays_what_it_was() -> None:
    manifest = built(EMBEDDED / "model-Q8_0.gguf")
    data = manifest.to_bytes()
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode("ascii")
    assert manifest.model_id.raw == hashlib.sha256(data).digest()
    # Golden: an id names the model everywhere, so it must never change for the same file.
    assert manifest.model_id.short == "50a4c39e"


def test_the_id_depends_on_neither_path_nor_label_nor_call(small: Path, tmp_path: Path) -> None:
    first = built(small).model_id
    assert built(small).model_id == first
    assert built(Path(shutil.copy(small, tmp_path / "elsewhere.gguf"))).model_id == first
    assert built(write_small(tmp_path / "label.gguf", name="another name, longer")).model_id == first
    assert built(write_small(tmp_path / "weights.gguf", seed=1)).model_id != first


@pytest.mark.parametrize("tensor", ["blk.1.ffn_up_exps.weight", "output.weight", "blk.0.ffn_down_shexp.weight"])
def test_one_flipped_byte_changes_just_the_hash_of_its_part(tensor: str, small: Path, tmp_path: Path) -> None:
    before = built(small)
    data = bytearray(small.read_bytes())
    with GgufFile(small) as file:
        data[file._offsets[tensor] + file.tensors[tensor].size_bytes - 1] ^= 1
    (tmp_path / "flipped.gguf").write_bytes(data)
    after = built(tmp_path / "flipped.gguf")
    assert after.model_id != before.model_id
    if "_exps" in tensor:
        assert after.backbone_hash == before.backbone_hash
        assert after.block_hashes[0] == before.block_hashes[0]
        assert after.block_hashes[1][:3] == before.block_hashes[1][:3]
        assert after.block_hashes[1][3] != before.block_hashes[1][3]
    else:
        assert after.backbone_hash != before.backbone_hash
        assert after.block_hashes == before.block_hashes


def test_changed_metadata_changes_the_backbone_hash(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    at = data.index(b"tokenizer.ggml.eos_token_id") + len(b"tokenizer.ggml.eos_token_id") + 4
    (tmp_path / "eos.gguf").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert built(tmp_path / "eos.gguf").backbone_hash != built(small).backbone_hash


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe", *NAMES])
def test_the_backbone_hash_comes_from_the_whole_file_and_from_the_backbone_alike(
    architecture: str, tmp_path: Path
) -> None:
    source = EMBEDDED / architecture
    if architecture not in NAMES:
        source = write_small(tmp_path / "whole.gguf", architecture=architecture)
    with GgufFile(source) as file:
        manifest = build_manifest(file)
        assert hash_backbone(file) == manifest.backbone_hash
        write_backbone(file, manifest, tmp_path / "backbone.gguf")
    with GgufFile(tmp_path / "backbone.gguf") as backbone:
        assert hash_backbone(backbone) == manifest.backbone_hash


def test_progress_goes_up_to_the_size_of_all_tensors(small: Path) -> None:
    seen: list[tuple[int, int]] = []
    with GgufFile(small) as file:
        build_manifest(file, lambda done, total: seen.append((done, total)))
        total = sum(tensor.size_bytes for tensor in file.tensors.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_a_block_that_is_not_the_experts_is_refused_by_name(small: Path) -> None:
    manifest = built(small)
    with GgufFile(small) as file:
        tensors = manifest.spec.expert_tensors(1)
        block = b"".join(file.read(t.name, 2 * t.expert_size_bytes, t.expert_size_bytes) for t in tensors)
    verify_block(manifest, 1, 2, block)
    for at in (0, len(block) // 2, len(block) - 1):
        damaged = bytearray(block)
        damaged[at] ^= 0x10
        with pytest.raises(IntegrityError, match="layer 1, expert 2 is damaged"):
            verify_block(manifest, 1, 2, bytes(damaged))
    with pytest.raises(IntegrityError, match="layer 1, expert 3"):
        verify_block(manifest, 1, 3, block)
    for wrong in (block[:-1], block + b"\0", b""):
        with pytest.raises(IntegrityError, match="wrong length"):
            verify_block(manifest, 1, 2, wrong)
    for layer, expert in ((2, 0), (1, 4), (1, -1)):
        with pytest.raises(IntegrityError, match="has no layer"):
            verify_block(manifest, layer, expert, block)


# -- the cache


def test_the_cache_spares_the_second_hashing(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = manifest_of(small, tmp_path)
    monkeypatch.setattr(manifest_module, "build_manifest", lambda *_: pytest.fail("hashed again"))
    assert manifest_of(small, tmp_path) == first == built(small)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "digit"])
def test_a_damaged_cache_entry_is_built_again(damage: str, small: Path, tmp_path: Path) -> None:
    first = manifest_of(small, tmp_path)
    [entry] = (tmp_path / "manifests").iterdir()
    good = entry.read_bytes()
    at = good.index(b"block_hashes") + 20
    entry.write_bytes(
        {
            "flip": bytes([good[0] ^ 1]) + good[1:],
            "cut": good[:-1],
            "empty": b"",
            "digit": good[:at] + (b"0" if good[at : at + 1] != b"0" else b"1") + good[at + 1 :],
        }[damage]
    )
    assert manifest_of(small, tmp_path) == first
    assert entry.read_bytes() == good


def test_a_changed_file_is_hashed_anew(tmp_path: Path) -> None:
    path = write_small(tmp_path / "m.gguf")
    first = manifest_of(path, tmp_path / "cache")
    write_small(path, seed=1)
    assert manifest_of(path, tmp_path / "cache").model_id != first.model_id


def test_hashing_that_was_cut_goes_on_after_the_last_whole_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_synthetic_moe(tmp_path / "m.gguf", n_embd=64, n_layers=3, n_expert=4, n_expert_used=2, n_ff_exp=32)
    whole = built(path)
    read: list[str] = []
    chunks = GgufFile.chunks

    def cut(self: GgufFile, name: str, offset: int = 0, size_bytes: int | None = None) -> Iterator[bytes]:
        if name.startswith("blk.2.") and is_cut:
            raise KeyboardInterrupt
        read.append(name)
        return chunks(self, name, offset, size_bytes)

    monkeypatch.setattr(GgufFile, "chunks", cut)
    is_cut = True
    with pytest.raises(KeyboardInterrupt):
        manifest_of(path, tmp_path / "cache")
    assert any(name.startswith("blk.1.ffn_up_exps") for name in read)
    is_cut = False
    read.clear()
    seen: list[int] = []
    assert manifest_of(path, tmp_path / "cache", lambda done, total: seen.append(total - done)) == whole
    assert not any(name.startswith(("blk.0.ffn_up_exps", "blk.1.ffn_up_exps")) for name in read)
    assert any(name.startswith("blk.2.ffn_up_exps") for name in read)
    assert seen[-1] == 0
    assert [entry.suffix for entry in (tmp_path / "cache" / "manifests").iterdir()] == [""], "no remains"


def test_layers_that_predict_further_tokens_stay_in_the_list_and_have_no_hashes(small: Path) -> None:
    plain = json.loads(built(small).to_bytes())
    plain["spec"]["n_layers"] += 1
    extra = f"blk.{plain['spec']['n_layers'] - 1}.ffn_up_exps.weight"
    plain["tensors"] = sorted([*plain["tensors"], [extra, 0, 64, 32, 4]])
    data = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    assert Manifest.from_bytes(data).spec.moe_layers == built(small).spec.moe_layers


def test_a_cache_that_cannot_be_written_costs_only_time(small: Path, tmp_path: Path) -> None:
    (tmp_path / "manifests").write_text("a file where the folder should be")
    assert manifest_of(small, tmp_path) == built(small)


def test_a_missing_model_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot open"):
        manifest_of(tmp_path / "absent.gguf", tmp_path)


# -- a backbone against its manifest


def test_a_backbone_is_hashed_once_and_progress_reaches_its_end(small: Path, tmp_path: Path) -> None:
    manifest, path = built(small), tmp_path / "backbone.gguf"
    with GgufFile(small) as file:
        write_backbone(file, manifest, path)
    seen: list[tuple[int, int]] = []
    verify_backbone(path, manifest, tmp_path / "cache", lambda *given: seen.append(given))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    seen.clear()
    verify_backbone(path, manifest, tmp_path / "cache", lambda *given: seen.append(given))
    assert seen == []


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_memory_of_a_backbone_condemns_nothing(damage: str, small: Path, tmp_path: Path) -> None:
    manifest, path = built(small), tmp_path / "backbone.gguf"
    with GgufFile(small) as file:
        write_backbone(file, manifest, path)
    verify_backbone(path, manifest, tmp_path / "cache")
    [entry] = (tmp_path / "cache" / "backbone_hashes").iterdir()
    good = entry.read_bytes()
    entry.write_bytes(good[:-1] if damage == "cut" else good[:-1] + bytes([good[-1] ^ 1]))
    verify_backbone(path, manifest, tmp_path / "cache")
    assert entry.read_bytes() == good


def test_a_whole_file_is_its_own_backbone_and_another_models_is_not(small: Path, tmp_path: Path) -> None:
    verify_backbone(small, built(small), tmp_path)
    other = write_small(tmp_path / "other.gguf", seed=1)
    with pytest.raises(IntegrityError, match=f"expected {built(small).backbone_hash.hex()}"):
        verify_backbone(other, built(small), tmp_path)


# -- manifests from strangers


ACTIVATIONS = ("swiglu", "geglu", "swiglu_clamp 7.0", "silu_clamp 0.10000000149011612", "situ 4.0 25.0")


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    n_layers = draw(st.integers(1, 5))
    layers = tuple(sorted(draw(st.sets(st.integers(0, n_layers - 1), min_size=1))))
    n_expert, d, f = draw(st.integers(1, 4)), 32 * draw(st.integers(1, 3)), 32 * draw(st.integers(1, 3))
    n_shared = draw(st.sampled_from([0, 1]))
    kinds = {"down": (f, d, n_expert), "gate": (d, f, n_expert), "up": (d, f, n_expert)}
    ggml_type = draw(st.sampled_from([0, 1, 2, 8]))
    spec = ModelSpec(
        architecture=draw(st.sampled_from(["qwen2moe", "qwen3moe"])),
        n_layers=n_layers,
        moe_layers=layers,
        n_expert=n_expert,
        n_expert_used=draw(st.integers(1, n_expert)),
        n_embd=d,
        n_ff_exp=f,
        activations=tuple(Activation.parse(draw(st.sampled_from(ACTIVATIONS))) for _ in layers),
        n_expert_shared=n_shared,
        n_ff_shared=n_shared * 64,
        tensors_by_layer=tuple(
            tuple(
                ExpertTensor(name=f"blk.{n}.ffn_{kind}_exps.weight", kind=kind, ggml_type=ggml_type, shape=shape)
                for kind, shape in kinds.items()
            )
            for n in layers
        ),
    )
    names = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20)
    shapes = st.lists(st.integers(1, 1000), min_size=1, max_size=4).map(tuple)
    others = draw(st.dictionaries(names.filter(lambda name: "exps." not in name), shapes, max_size=4))
    tensors = [TensorInfo(name=name, ggml_type=0, shape=shape) for name, shape in others.items()]
    tensors += [tensor.info for row in spec.tensors_by_layer for tensor in row]
    digest = st.binary(min_size=32, max_size=32)
    return Manifest(
        spec=spec,
        tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)),
        block_hashes={layer: tuple(draw(digest) for _ in range(n_expert)) for layer in layers},
        backbone_hash=draw(digest),
    )


@given(manifests())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_bytes_round_trip(manifest: Manifest) -> None:
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert again.model_id == manifest.model_id


@given(manifests(), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_damaged_bytes_raise_only_protocol_errors(manifest: Manifest, data: st.DataObject) -> None:
    good = manifest.to_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    how = data.draw(st.sampled_from(["cut", "flip", "insert", "random", "swap"]))
    if how == "flip":
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    elif how == "insert":
        bad = good[:at] + data.draw(st.binary(min_size=1, max_size=8)) + good[at:]
    elif how == "random":
        bad = data.draw(st.binary(max_size=200))
    elif how == "swap":
        value = data.draw(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists))
        plain = json.loads(good)
        plain[data.draw(st.sampled_from(sorted(plain)))] = value
        bad = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    else:
        bad = good[:at]
    try:
        read = Manifest.from_bytes(bad)
    except RemoteProtocolError:
        return
    # A flip can make another legal manifest: then it is one, with an id of its own.
    assert read.to_bytes() == bad
    assert how in ("flip", "insert")


def test_bytes_that_are_no_manifest_are_refused_before_memory_is_taken() -> None:
    for bad, message in (
        (b"x" * (MAX_MANIFEST_BYTES + 1), "too large"),
        (b"[" * 1_000_000, "too many values"),
        (b"[" + b"0," * 2_000_000 + b"0]", "too many values"),
        (b"[" * 100_000, "bad manifest"),
        (b"9" * 100_000, "bad manifest"),
        (b"\xff", "bad manifest"),
        (b"null", "bad manifest"),
        (b"{}", "bad manifest"),
    ):
        with pytest.raises(RemoteProtocolError, match=message):
            Manifest.from_bytes(bad)


def test_contradictions_and_other_spellings_are_refused(small: Path) -> None:
    good = built(small).to_bytes()
    plain = json.loads(good)

    def refused(message: str, **changed: object) -> None:
        data = json.dumps({**plain, **changed}, sort_keys=True, separators=(",", ":")).encode()
        with pytest.raises(RemoteProtocolError, match=message):
            Manifest.from_bytes(data)

    refused("unknown format", format=2)
    refused("differ", tensors=[row for row in plain["tensors"] if "_exps" not in row[0]])
    refused("differ", tensors=sorted([*plain["tensors"], ["blk.9.ffn_up_exps.weight", 0, 1]]))
    refused("name order", tensors=plain["tensors"][::-1])
    refused("name order", tensors=[plain["tensors"][0], *plain["tensors"]])
    refused("bad tensor name", tensors=[["\n", 0, 1], *plain["tensors"]])
    refused("bad shape", tensors=[["a", 0], *plain["tensors"]])
    refused("bad shape", tensors=[["a", 0, 0], *plain["tensors"]])
    refused("too large", tensors=[["a", 0, 1 << 62, 1 << 62], *plain["tensors"]])
    refused("bad manifest", block_hashes=plain["block_hashes"][:1])
    refused("block hashes", block_hashes=[hashes[:3] for hashes in plain["block_hashes"]])
    refused("wrong length", backbone_hash="00")
    refused("canonical", backbone_hash=plain["backbone_hash"].upper())
    for spelling in (good + b"\n", json.dumps(plain).encode(), good.replace(b'{"backbone', b'{"format":1,"backbone')):
        with pytest.raises(RemoteProtocolError, match="canonical"):
            Manifest.from_bytes(spelling)
