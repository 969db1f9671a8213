"""A model's files as a backbone needs them: what is checked, what is written, what is remembered."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.backbone.prepared import prepare_model
from swarm.errors import IntegrityError, UserError
from swarm.files import Folders
from swarm.ids import ExpertSet
from swarm.model import manifest as manifest_module
from swarm.model import slices
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import MANIFEST_NAME, hash_backbone
from swarm.model.slices import write_slice
from swarm.wire import messages as m
from tests.swarm.backbone.local_experts import SplitModel


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders.below(tmp_path)


def lay_out(model: SplitModel, folder: Path, manifest: bytes | None = None) -> Path:
    """Put a backbone file and its manifest side by side, as `swarm split` does; return the file's path."""
    folder.mkdir()
    shutil.copy(model.backbone, folder / "backbone.gguf")
    (folder / MANIFEST_NAME).write_bytes(model.manifest.to_bytes() if manifest is None else manifest)
    return folder / "backbone.gguf"


async def test_a_whole_file_is_cut_once_and_offers_its_blocks(tiny: SplitModel, folders: Folders) -> None:
    prepared = prepare_model(tiny.file, folders)
    assert prepared.manifest == tiny.manifest
    assert prepared.backbone_path.read_bytes() == tiny.backbone.read_bytes()
    assert prepared.backbone_path.name == f"{tiny.manifest.model_id}.gguf"
    assert (prepared.name, prepared.size_bytes) == ("model-Q8_0", tiny.file.stat().st_size)
    assert prepared.offers_blocks
    block = m.GetBlock(model_id=tiny.manifest.model_id, layer=1, expert=2)
    assert isinstance(await prepared.share.answer(block), m.BlockBytes)
    before = prepared.backbone_path.stat().st_mtime_ns
    seen: list[int] = []
    again = prepare_model(tiny.file, folders, lambda done, _total: seen.append(done))
    assert again.backbone_path.stat().st_mtime_ns == before
    assert not seen, "the manifest comes from the cache"


async def test_a_backbone_file_with_its_manifest_offers_the_manifest_alone(
    tiny: SplitModel, folders: Folders, tmp_path: Path
) -> None:
    path = lay_out(tiny, tmp_path / "split")
    prepared = prepare_model(path, folders)
    assert prepared.manifest == tiny.manifest
    assert prepared.backbone_path == path
    assert not prepared.offers_blocks
    with pytest.raises(LookupError):
        await prepared.share.answer(m.GetBlock(model_id=tiny.manifest.model_id, layer=1, expert=2))


def test_a_slice_cannot_be_served(tiny: SplitModel, folders: Folders, tmp_path: Path) -> None:
    path = tmp_path / "slice.gguf"
    with GgufFile(tiny.file) as file:
        write_slice(file, tiny.manifest, ExpertSet.of([0], [1, 2]), path)
    with pytest.raises(UserError, match="is an expert slice"):
        prepare_model(path, folders)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "is damaged"),
        (lambda data: b"", "is damaged"),
        (lambda data: b"[" * 100_000, "is damaged"),
        (lambda data: data + bytes(16_000_000), "too large for a manifest"),
        (lambda data: data.replace(b'"n_expert_shared":1', b'"n_expert_shared":2'), "does not belong to"),
    ],
)
def test_a_manifest_that_is_not_the_backbones_is_refused(
    tiny: SplitModel, folders: Folders, tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    data = damage(tiny.manifest.to_bytes())
    assert data != tiny.manifest.to_bytes()
    with pytest.raises(UserError, match=message):
        prepare_model(lay_out(tiny, tmp_path / "split", data), folders)


def test_a_backbone_file_needs_its_manifest(tiny: SplitModel, folders: Folders, tmp_path: Path) -> None:
    path = lay_out(tiny, tmp_path / "split")
    (tmp_path / "split" / MANIFEST_NAME).unlink()
    with pytest.raises(UserError, match=r"cannot read .*manifest\.json, which belongs to backbone\.gguf"):
        prepare_model(path, folders)


# Checked once


def flip(path: Path, tensor: str) -> None:
    """Change one byte of a tensor's data."""
    with GgufFile(path) as file:
        data = file.read(tensor, 0, file.tensors[tensor].size_bytes)
    whole = bytearray(path.read_bytes())
    assert whole.count(data) == 1
    whole[whole.index(data) + len(data) // 2] ^= 1
    path.write_bytes(whole)


def count_hashings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list to which every hashing of a backbone adds its file."""
    hashed: list[Path] = []

    def counted(file: GgufFile, advance: Callable[[int], None] | None = None) -> bytes:
        hashed.append(file.path)
        return hash_backbone(file, advance)

    monkeypatch.setattr(manifest_module, "hash_backbone", counted)
    return hashed


def test_a_given_backbone_is_hashed_once_and_again_when_it_changed(
    tiny: SplitModel, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = count_hashings(monkeypatch)
    path = lay_out(tiny, tmp_path / "split")
    for _ in range(2):
        prepare_model(path, folders)
    assert hashed == [path]
    flip(path, "blk.2.attn_q.weight")
    os.utime(path, ns=(1, 1))
    for _ in range(2):
        with pytest.raises(IntegrityError) as caught:
            prepare_model(path, folders)
        with GgufFile(path) as file:
            assert hash_backbone(file).hex() in str(caught.value)
        assert tiny.manifest.backbone_hash.hex() in str(caught.value)
        assert str(path) in str(caught.value)
    assert hashed == [path, path]


def test_a_backbone_of_another_model_under_this_ones_name_is_refused(
    tiny: SplitModel, open_model: Callable[[str], SplitModel], folders: Folders, tmp_path: Path
) -> None:
    """A string in the file says which model it is: that alone proves nothing."""
    path = lay_out(tiny, tmp_path / "split")
    other = open_model("Q4_K_M")
    data = other.backbone.read_bytes()
    path.write_bytes(data.replace(str(other.manifest.model_id).encode(), str(tiny.manifest.model_id).encode()))
    with pytest.raises(IntegrityError, match="got backbone hash"):
        prepare_model(path, folders)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_cached_backbone_is_written_again(
    tiny: SplitModel, folders: Folders, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with prepare_model(tiny.file, folders) as prepared:
        path = prepared.backbone_path
    if damage == "flip":
        flip(path, "blk.2.attn_q.weight")
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:-100])
    os.utime(path, ns=(1, 1))
    with caplog.at_level(logging.WARNING), prepare_model(tiny.file, folders) as prepared:
        assert prepared.backbone_path == path
    assert path.read_bytes() == tiny.backbone.read_bytes()
    assert "writing the cached backbone again" in caplog.text


def test_a_cached_backbone_is_hashed_once(tiny: SplitModel, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = count_hashings(monkeypatch)
    for _ in range(3):
        with prepare_model(tiny.file, folders) as prepared:
            pass
    assert hashed == [tiny.file, prepared.backbone_path], "the whole file for its manifest, and what was written"


# What goes wrong


class _Stop(BaseException):
    pass


@pytest.mark.parametrize("part", ["hashing", "writing", "checking"])
def test_check_ends_every_part_of_the_work(
    tiny: SplitModel, folders: Folders, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing half done behind."""
    is_armed = part == "hashing"

    def arm(*_: object) -> None:
        nonlocal is_armed
        is_armed = True

    def check() -> None:
        if is_armed:
            raise _Stop

    backbones = folders.cache / "backbones"
    if part == "writing":
        plan = slices.plan_backbone
        monkeypatch.setattr(slices, "plan_backbone", lambda *given: (arm(), plan(*given))[1])
    if part == "checking":
        prepare_model(tiny.file, folders).close()
        shutil.rmtree(folders.cache / "backbone_hashes")
        arm()
    with pytest.raises(_Stop):
        prepare_model(tiny.file, folders, check=check)
    assert is_armed
    found = [path.name for path in backbones.iterdir()] if backbones.exists() else []
    assert found == ([f"{tiny.manifest.model_id}.gguf"] if part == "checking" else [])
    prepare_model(tiny.file, folders).close()


def test_a_full_disk_is_said_in_one_line_with_the_path(
    tiny: SplitModel, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swarm.files.os.fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*backbones.*: No space left on device; set SWARM_HOME"):
        prepare_model(tiny.file, folders)


def test_a_cache_that_cannot_be_made_is_the_users_mistake(tiny: SplitModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot write .*/file/cache/backbones/.*: Not a directory"):
        prepare_model(tiny.file, Folders(tmp_path, tmp_path, tmp_path / "file" / "cache"))
