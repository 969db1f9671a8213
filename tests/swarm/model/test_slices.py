"""What split writes is valid GGUF with exactly the source's bytes in it, and a failure leaves nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from swarm.architectures.generator import Variant, write_model
from swarm.architectures.recipes import RECIPES
from swarm.errors import IntegrityError, UserError
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import SOURCES_KEY, Manifest, build_manifest, hash_backbone
from swarm.model.slices import plan_backbone, plan_slice, write_backbone, write_plan, write_slice
from swarm.model.source import GgufSource
from swarm.model.spec import is_expert_tensor
from swarm.native.llama import LlamaModel
from tests.synthetic_moe import write_synthetic_moe

EMBEDDED = Path(__file__).parents[3] / "examples" / "tiny_moe"
Opened = tuple[GgufFile, Manifest]


def opened(path: Path) -> Opened:
    file = GgufFile(path)
    return file, build_manifest(file)


@pytest.fixture(scope="module", params=["qwen2moe", "qwen3moe", "model-Q8_0.gguf", "model-Q4_K_M.gguf"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    if request.param.endswith(".gguf"):
        return opened(EMBEDDED / request.param)
    path = tmp_path_factory.mktemp("slices") / "whole.gguf"
    return opened(write_synthetic_moe(path, architecture=request.param, n_layers=2, n_expert=8, n_ff_exp=64))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    path = tmp_path_factory.mktemp("slices") / "small.gguf"
    return opened(write_synthetic_moe(path, n_embd=64, n_layers=2, n_expert=4, n_expert_used=2, n_ff_exp=32))


def test_the_backbone_is_the_source_with_experts_of_width_one(source: Opened, tmp_path: Path) -> None:
    file, manifest = source
    path = tmp_path / "backbone.gguf"
    write_backbone(file, manifest, path)
    whole, backbone = gguf.GGUFReader(file.path), gguf.GGUFReader(path)
    assert path.stat().st_size == plan_backbone(file, manifest).size_bytes

    spec = manifest.spec
    stubs = {"down": (1, spec.n_embd), "gate": (spec.n_embd, 1), "up": (spec.n_embd, 1)}
    assert [t.name for t in backbone.tensors] == [t.name for t in whole.tensors]
    for theirs, ours in zip(whole.tensors, backbone.tensors, strict=True):
        if is_expert_tensor(theirs.name):
            kind = theirs.name.split("_")[1]
            assert tuple(ours.shape.tolist()) == (*stubs[kind], spec.n_expert)
            assert ours.tensor_type == gguf.GGMLQuantizationType.F16
            assert not np.any(ours.data)
        else:
            assert (ours.tensor_type, ours.shape.tolist()) == (theirs.tensor_type, theirs.shape.tolist())
            assert ours.data.tobytes() == theirs.data.tobytes()

    changed = {f"{spec.architecture}.expert_feed_forward_length": 1}
    if spec.n_ff_shared:
        changed[f"{spec.architecture}.expert_shared_feed_forward_length"] = spec.n_ff_shared
    added = {"swarm.model_id": str(manifest.model_id), "swarm.file": "backbone"}
    before = {k: f.contents() for k, f in whole.fields.items() if not k.startswith("GGUF.")}
    after = {k: f.contents() for k, f in backbone.fields.items() if not k.startswith("GGUF.")}
    assert after == {**before, **changed, **added}


def test_the_shared_width_is_written_out_even_where_the_source_leaves_it_to_llama_cpp(tmp_path: Path) -> None:
    path = write_synthetic_moe(tmp_path / "m.gguf", n_embd=64, n_layers=1, n_expert=2, n_expert_used=1, n_ff_exp=32)
    data = path.read_bytes().replace(b"expert_shared_feed_forward_length", b"expert_shared_feed_forward_lengtX")
    path.write_bytes(data)
    file, manifest = opened(path)
    write_backbone(file, manifest, tmp_path / "b.gguf")
    assert gguf.GGUFReader(tmp_path / "b.gguf").fields["qwen2moe.expert_shared_feed_forward_length"].contents() == 256


def test_a_slice_holds_exactly_the_chosen_planes(source: Opened, tmp_path: Path) -> None:
    file, manifest = source
    last = manifest.spec.n_expert - 1
    experts = ExpertSet({0: frozenset({1, 2, last}), 1: frozenset({0})})
    path = tmp_path / "slice.gguf"
    write_slice(file, manifest, experts, path)
    assert path.stat().st_size == plan_slice(file, manifest, experts).size_bytes

    whole = {t.name: t for t in gguf.GGUFReader(file.path).tensors}
    reader = gguf.GGUFReader(path)
    assert len(reader.tensors) == 6
    for tensor in reader.tensors:
        chosen = sorted(experts.by_layer[int(tensor.name.split(".")[1])])
        assert tensor.tensor_type == whole[tensor.name].tensor_type
        assert tensor.shape.tolist() == [*whole[tensor.name].shape.tolist()[:2], len(chosen)]
        assert np.array_equal(tensor.data, whole[tensor.name].data[chosen])
    assert reader.fields["general.architecture"].contents() == manifest.spec.architecture
    assert reader.fields["swarm.file"].contents() == "slice"
    assert reader.fields["swarm.model_id"].contents() == str(manifest.model_id)
    assert reader.fields["swarm.blk.0.experts"].contents() == [1, 2, last]
    assert reader.fields["swarm.blk.1.experts"].contents() == [0]
    assert not any(key.startswith("tokenizer.") for key in reader.fields)


def test_an_odd_alignment_is_kept(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_custom_alignment(256)
    for key, number in {"block_count": 1, "embedding_length": 32, "expert_count": 2, "expert_used_count": 1}.items():
        writer.add_uint32(f"qwen3moe.{key}", number)
    writer.add_tensor("output.weight", np.arange(3, dtype=np.float32))
    for kind in ("gate", "up", "down"):
        writer.add_tensor(f"blk.0.ffn_{kind}_exps.weight", np.random.default_rng(0).random((2, 32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, manifest = opened(tmp_path / "m.gguf")
    write_backbone(file, manifest, tmp_path / "b.gguf")
    write_slice(file, manifest, manifest.spec.all_experts, tmp_path / "s.gguf")
    for name in ("b.gguf", "s.gguf"):
        assert all(t.data_offset % 256 == 0 for t in gguf.GGUFReader(tmp_path / name).tensors)
    assert gguf.GGUFReader(tmp_path / "b.gguf").tensors[0].data.tolist() == [0, 1, 2]


def test_progress_ends_at_the_size_of_the_file(small: Opened, tmp_path: Path) -> None:
    file, manifest = small
    seen: list[tuple[int, int]] = []
    path = tmp_path / "s.gguf"
    write_slice(file, manifest, manifest.spec.all_experts, path, lambda done, total: seen.append((done, total)))
    size = path.stat().st_size
    assert seen == sorted(seen)
    assert [done for done, _ in seen].count(size) == 1
    assert seen[-1] == (size, size)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("fail", [disk_full, ctrl_c])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_failure_in_mid_write_leaves_what_was_there(
    fail: Callable[[], None], is_there: bool, small: Opened, tmp_path: Path
) -> None:
    file, manifest = small
    path = tmp_path / "backbone.gguf"
    if is_there:
        path.write_text("old")

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            fail()

    with pytest.raises((OSError, KeyboardInterrupt)):
        write_backbone(file, manifest, path, progress)
    assert [p.name for p in tmp_path.iterdir()] == (["backbone.gguf"] if is_there else [])
    if is_there:
        assert path.read_text() == "old"


def test_a_source_that_changed_since_it_was_hashed_is_refused(small: Opened, tmp_path: Path) -> None:
    file, manifest = small
    data = bytearray(file.path.read_bytes())
    name = "blk.1.ffn_gate_exps.weight"
    data[file._offsets[name] + 2 * manifest.spec.expert_tensors(1)[1].expert_size_bytes] ^= 1
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    with GgufFile(path) as changed:
        with pytest.raises(IntegrityError, match="layer 1, expert 2"):
            write_slice(changed, manifest, ExpertSet.of([0, 1], [1, 2]), tmp_path / "s.gguf")
        write_slice(changed, manifest, ExpertSet.of([0, 1], [1, 3]), tmp_path / "s.gguf")


def test_the_wrong_model_the_wrong_experts_and_the_source_itself_are_refused(small: Opened, tmp_path: Path) -> None:
    file, manifest = small
    other = write_synthetic_moe(tmp_path / "o.gguf", n_embd=64, n_layers=1, n_expert=4, n_expert_used=2, n_ff_exp=32)
    with GgufFile(other) as other_file:
        with pytest.raises(UserError, match="is not model"):
            plan_backbone(other_file, manifest)
        with pytest.raises(UserError, match="is not model"):
            plan_slice(other_file, manifest, ExpertSet.of([0], [0]))
    with pytest.raises(UserError, match="no such experts"):
        plan_slice(file, manifest, ExpertSet.of([0], [4]))
    with pytest.raises(UserError, match="the model itself"):
        write_backbone(file, manifest, file.path)


def test_a_split_file_cannot_be_split_again(small: Opened, tmp_path: Path) -> None:
    file, manifest = small
    write_backbone(file, manifest, tmp_path / "b.gguf")
    write_slice(file, manifest, ExpertSet.of([0], [0]), tmp_path / "s.gguf")
    for name, kind in (("b.gguf", "backbone"), ("s.gguf", "slice")):
        with GgufFile(tmp_path / name) as again, pytest.raises(UserError, match=f"is a {kind} written by swarm split"):
            build_manifest(again)


def test_llama_cpp_loads_a_backbone(source: Opened, tmp_path: Path) -> None:
    llama = pytest.importorskip("swarm.native.llama")
    file, manifest = source
    write_backbone(file, manifest, tmp_path / "backbone.gguf")
    llama.LlamaModel(tmp_path / "backbone.gguf").close()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("olmoe", {"feed_forward_length": 1}),
        ("deepseek", {"expert_feed_forward_length": 1, "expert_shared_count": 512}),
        ("bailingmoe2", {"expert_feed_forward_length": 1}),
        ("ernie4_5-moe", {"expert_feed_forward_length": 1}),
        ("gpt-oss", {"expert_feed_forward_length": 1}),
        ("llama4", {}),
    ],
)
def test_a_stub_changes_what_the_table_says_and_llama_cpp_loads_it(
    name: str, keys: dict[str, int], tmp_path: Path
) -> None:
    variant = Variant(name="x", keys=(("expert_shared_count", 2),))
    write_model(tmp_path / "m.gguf", next(recipe for recipe in RECIPES if recipe.architecture == name), variant)
    file, manifest = opened(tmp_path / "m.gguf")
    backbone = tmp_path / "b.gguf"
    write_backbone(file, manifest, backbone)
    with GgufFile(backbone) as cut:
        changed = {
            key.removeprefix(f"{name}."): value.integer()
            for key, value in cut.metadata.items()
            if not key.startswith("swarm.") and value != file.metadata.get(key)
        }
        assert changed == keys
        assert hash_backbone(cut) == manifest.backbone_hash
    LlamaModel(backbone).close()


def test_a_stub_of_full_width_takes_no_space_on_the_disk(tmp_path: Path) -> None:
    write_model(
        tmp_path / "m.gguf",
        next(recipe for recipe in RECIPES if recipe.architecture == "llama4"),
        Variant(name="x", keys=(("expert_count", 64),)),
    )
    file, manifest = opened(tmp_path / "m.gguf")
    write_backbone(file, manifest, tmp_path / "b.gguf")
    plan = plan_backbone(file, manifest)
    n_hole_bytes = sum(tensor.size_bytes for tensor, _ in plan.tensors if is_expert_tensor(tensor.name))
    status = (tmp_path / "b.gguf").stat()
    assert status.st_size == plan.size_bytes
    assert plan.disk_bytes == plan.size_bytes - n_hole_bytes
    assert n_hole_bytes > 4 << 20
    assert status.st_blocks * 512 < plan.disk_bytes + (n_hole_bytes >> 1), "the file system makes no holes"
    with GgufFile(tmp_path / "b.gguf") as cut:
        assert cut.tensors["blk.1.ffn_up_exps.weight"].shape == file.tensors["blk.1.ffn_up_exps.weight"].shape
        assert not any(cut.read("blk.1.ffn_up_exps.weight", 0, 1000))


def test_scales_are_no_part_of_a_stub_and_biases_are_cut_with_their_product(tmp_path: Path) -> None:
    for name, variant in (("qwen3moe", Variant(name="x", has_scales=True)), ("gpt-oss", Variant(name="x"))):
        write_model(tmp_path / "m.gguf", next(recipe for recipe in RECIPES if recipe.architecture == name), variant)
        file, manifest = opened(tmp_path / "m.gguf")
        write_backbone(file, manifest, tmp_path / "b.gguf")
        with GgufFile(tmp_path / "b.gguf") as cut:
            assert not any(tensor.endswith(".scale") for tensor in cut.tensors)
            shapes = {tensor: cut.tensors[tensor].shape for tensor in cut.tensors if tensor.startswith("blk.0.ffn_")}
        if name == "gpt-oss":
            assert shapes["blk.0.ffn_up_exps.bias"] == (1, 8)
            assert shapes["blk.0.ffn_down_exps.bias"] == (256, 8)
            assert shapes["blk.0.ffn_down_exps.weight"] == (1, 256, 8)


def test_a_slice_carries_biases_and_scales_of_its_experts(tmp_path: Path) -> None:
    variant = Variant(name="x", has_scales=True, expert_type="Q4_K")
    write_model(tmp_path / "m.gguf", next(r for r in RECIPES if r.architecture == "qwen3moe"), variant)
    file, manifest = opened(tmp_path / "m.gguf")
    write_slice(file, manifest, ExpertSet.of([0, 1], [2, 7]), tmp_path / "s.gguf")
    with GgufFile(tmp_path / "s.gguf") as part:
        assert part.tensors["blk.1.ffn_up_exps.scale"].shape == (2,)
        source = GgufSource(part)
        whole = GgufSource(file)
        for expert in (2, 7):
            assert source.read_block(1, expert) == whole.read_block(1, expert)


def test_sources_are_carried_and_change_no_hash(small: Opened, tmp_path: Path) -> None:
    file, manifest = small
    names = ("hf://owner/repo/m.gguf", "https://h.example/m.gguf")
    write_plan(plan_backbone(file, manifest, names), file, manifest, tmp_path / "backbone.gguf")
    with GgufFile(tmp_path / "backbone.gguf") as backbone:
        assert (backbone.text(SOURCES_KEY) or "").splitlines() == list(names)
        assert hash_backbone(backbone) == manifest.backbone_hash
    write_backbone(file, manifest, tmp_path / "without.gguf")
    with GgufFile(tmp_path / "without.gguf") as backbone:
        assert SOURCES_KEY not in backbone.metadata
