"""Whole files, slice files and block stores give the same blocks: one contract, checked against the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import ExpertUnavailable, UserError
from swarm.ids import ExpertSet
from swarm.model.block_store import BlockStore
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest, build_manifest, verify_block
from swarm.model.slices import write_backbone, write_slice
from swarm.model.source import BlockSource, GgufSource
from tests.synthetic_moe import write_synthetic_moe

HELD = ExpertSet({0: frozenset({1, 3}), 1: frozenset({0, 2, 3})})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("source")
    path = write_synthetic_moe(folder / "m.gguf", n_embd=64, n_layers=2, n_expert=4, n_expert_used=2, n_ff_exp=32)
    with GgufFile(path) as file:
        manifest = build_manifest(file)
        write_slice(file, manifest, HELD, folder / "slice.gguf")
        write_backbone(file, manifest, folder / "backbone.gguf")
    return path, manifest


@pytest.fixture(params=["whole", "slice", "store"])
def source(request: pytest.FixtureRequest, model: tuple[Path, Manifest], tmp_path: Path) -> BlockSource:
    path, manifest = model
    if request.param == "slice":
        return GgufSource(GgufFile(path.with_name("slice.gguf")))
    whole = GgufSource(GgufFile(path))
    if request.param == "whole":
        return whole
    store = BlockStore(tmp_path, manifest)
    for layer, expert in HELD:
        store.add(layer, expert, whole.read_block(layer, expert))
    return store


def test_every_block_it_says_it_has_passes_its_hash(source: BlockSource, model: tuple[Path, Manifest]) -> None:
    manifest = model[1]
    assert set(HELD) <= set(source.experts)
    for layer, expert in source.experts:
        verify_block(manifest, layer, expert, source.read_block(layer, expert))


def test_a_block_it_has_not_is_unavailable_by_name(source: BlockSource) -> None:
    for layer, expert in ((2, 0), (0, 4), (0, 0)):
        if (layer, expert) not in source.experts:
            with pytest.raises(ExpertUnavailable) as caught:
                source.read_block(layer, expert)
            assert (caught.value.layer, caught.value.experts) == (layer, (expert,))
            assert "/" not in str(caught.value), "strangers may read it: no path"


def test_what_files_say_they_hold(model: tuple[Path, Manifest]) -> None:
    path, manifest = model
    whole, part = GgufSource(GgufFile(path)), GgufSource(GgufFile(path.with_name("slice.gguf")))
    assert (whole.experts, whole.model_id) == (manifest.spec.all_experts, None)
    assert (part.experts, part.model_id) == (HELD, manifest.model_id)


def test_a_backbone_gives_no_blocks(model: tuple[Path, Manifest]) -> None:
    with GgufFile(model[0].with_name("backbone.gguf")) as file, pytest.raises(UserError, match="is a backbone"):
        GgufSource(file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"swarm.blk.1.experts", b"swarm.blk.7.experts", "does not say which experts it holds of layer 1"),
        (b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_up_exps.weighs", "no slice file"),
        (b"swarm.model_id", b"swarm.model_ix", "not a model id"),
        (
            b"\x03\0\0\0\0\0\0\0\0\0\0\0\x02\0\0\0\x03\0\0\0",
            b"\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0",
            "planes",
        ),
        (b"\x02\0\0\0\0\0\0\0\x01\0\0\0\x03\0\0\0", b"\x02\0\0\0\0\0\0\0\x03\0\0\0\x03\0\0\0", "planes"),
    ],
)
def test_a_slice_that_contradicts_itself_is_refused(
    old: bytes, new: bytes, message: str, model: tuple[Path, Manifest], tmp_path: Path
) -> None:
    data = model[0].with_name("slice.gguf").read_bytes()
    assert data.count(old) == 1
    (tmp_path / "bad.gguf").write_bytes(data.replace(old, new))
    with GgufFile(tmp_path / "bad.gguf") as file, pytest.raises(UserError, match=message):
        GgufSource(file)
