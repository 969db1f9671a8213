"""A block store keeps only what passes its hash, and picks up where a cut download stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import ExpertUnavailable, IntegrityError, UserError
from swarm.files import replacing
from swarm.ids import ExpertSet
from swarm.model.block_store import TORN_S, BlockStore
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest, build_manifest
from swarm.model.source import GgufSource
from tests.synthetic_moe import write_synthetic_moe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[GgufSource, Manifest]:
    path = tmp_path_factory.mktemp("store") / "m.gguf"
    write_synthetic_moe(path, n_embd=64, n_layers=2, n_expert=4, n_expert_used=2, n_ff_exp=32)
    file = GgufFile(path)
    return GgufSource(file), build_manifest(file)


def test_a_kept_block_is_there_for_the_next_process(model: tuple[GgufSource, Manifest], tmp_path: Path) -> None:
    source, manifest = model
    store = BlockStore(tmp_path, manifest)
    assert not store.has(1, 2)
    assert len(store.experts) == 0
    store.add(1, 2, source.read_block(1, 2))
    again = BlockStore(tmp_path, manifest)
    assert again.has(1, 2)
    assert not again.has(1, 3)
    assert again.experts == ExpertSet({1: frozenset({2})})
    assert again.read_block(1, 2) == source.read_block(1, 2)
    assert [p.name for p in (tmp_path / "blocks" / str(manifest.model_id)).iterdir()] == ["blk.1.2"]


def test_a_block_with_one_flipped_byte_is_not_kept(model: tuple[GgufSource, Manifest], tmp_path: Path) -> None:
    source, manifest = model
    store = BlockStore(tmp_path, manifest)
    block = bytearray(source.read_block(0, 1))
    block[100] ^= 1
    with pytest.raises(IntegrityError, match="layer 0, expert 1"):
        store.add(0, 1, bytes(block))
    with pytest.raises(IntegrityError):
        store.add(0, 2, source.read_block(0, 1))
    assert list(store.folder.iterdir()) == []


def test_a_block_damaged_on_disk_is_deleted_when_read(model: tuple[GgufSource, Manifest], tmp_path: Path) -> None:
    source, manifest = model
    store = BlockStore(tmp_path, manifest)
    store.add(0, 1, source.read_block(0, 1))
    path = store.folder / "blk.0.1"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert store.has(0, 1)
    with pytest.raises(IntegrityError, match="layer 0, expert 1 is damaged"):
        store.read_block(0, 1)
    assert not store.has(0, 1)
    with pytest.raises(ExpertUnavailable):
        store.read_block(0, 1)
    store.add(0, 1, source.read_block(0, 1))
    assert store.read_block(0, 1) == source.read_block(0, 1)


def test_foreign_and_cut_files_do_not_count(model: tuple[GgufSource, Manifest], tmp_path: Path) -> None:
    source, manifest = model
    store = BlockStore(tmp_path, manifest)
    block = source.read_block(0, 0)
    (store.folder / "blk.0.0").write_bytes(block[:-1])
    for name in ("blk.0.4", "blk.9.0", "blk.0.01", "blk.0.1.part", "notes.txt", ".blk.0.2.x.part"):
        (store.folder / name).write_bytes(block)
    assert len(store.experts) == 0
    assert not store.has(0, 0)
    with pytest.raises(ExpertUnavailable):
        store.read_block(0, 0)


def test_a_folder_that_cannot_be_made_is_a_users_mistake(model: tuple[GgufSource, Manifest], tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text("in the way")
    with pytest.raises(UserError, match="cannot make the folder"):
        BlockStore(tmp_path, model[1])


def test_a_disk_that_fails_is_the_users_to_mend_and_named(
    model: tuple[GgufSource, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, manifest = model
    store = BlockStore(tmp_path, manifest)
    block = source.read_block(1, 2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("swarm.files.os.fsync", full)
        with pytest.raises(UserError, match=r"cannot keep blocks in .*: No space left on device"):
            store.add(1, 2, block)
    assert not store.has(1, 2)
    store.add(1, 2, block)

    def broken(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(UserError, match=r"cannot read .*blk\.1\.2: Input/output error"):
        store.read_block(1, 2)


def test_a_folder_that_vanished_is_said(model: tuple[GgufSource, Manifest], tmp_path: Path) -> None:
    store = BlockStore(tmp_path, model[1])
    store.folder.rmdir()
    with pytest.raises(UserError, match=r"cannot read .*: No such file"):
        _ = store.experts


def test_a_block_that_is_not_wanted_any_more_is_removed(model: tuple[GgufSource, Manifest], tmp_path: Path) -> None:
    source, manifest = model
    store = BlockStore(tmp_path, manifest)
    store.add(0, 1, source.read_block(0, 1))
    store.add(0, 2, source.read_block(0, 2))
    store.remove(0, 1)
    store.remove(0, 1)
    assert set(store.experts) == {(0, 2)}


def test_what_a_killed_process_left_is_removed_and_what_is_being_written_is_not(
    model: tuple[GgufSource, Manifest], tmp_path: Path
) -> None:
    source, manifest = model
    store = BlockStore(tmp_path, manifest)
    store.add(0, 1, source.read_block(0, 1))
    with replacing(store.folder / "blk.0.2") as being_written:
        now = being_written.stat().st_mtime
        store.remove_torn(now + 60.0)
        assert being_written.exists()
        store.remove_torn(now + TORN_S + 60.0)
        assert [path.name for path in store.folder.iterdir()] == ["blk.0.1"]
        being_written.write_bytes(b"x")
