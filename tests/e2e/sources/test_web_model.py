"""Models on the web: their headers, their shards, their experts' blocks, from servers of all kinds."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from swarm.errors import RemoteProtocolError, SourceUnusable
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest, build_manifest, verify_block
from swarm.model.slices import write_backbone, write_slice
from swarm.sources import web_model
from swarm.sources.locations import locate
from swarm.sources.web import Web
from swarm.sources.web_model import WebModel
from tests.e2e.sources.file_server import FileServer, serving
from tests.gguf_shards import write_shards
from tests.synthetic_moe import write_synthetic_moe

WANTED = [(0, 1), (0, 2), (0, 3), (1, 5)]


@dataclass
class Stage:
    server: FileServer
    manifest: Manifest
    whole: bytes
    path: Path
    folder: Path
    web: Web

    async def open(self, name: str = "m.gguf") -> WebModel:
        return await WebModel.open(self.web, locate(f"{self.server.url}/{name}", is_asked=True), self.folder / "cache")

    async def check(self, model: WebModel, *, n_bytes: int | None = None) -> None:
        """Read some blocks and check them; `n_bytes`: how much may be sent for them."""
        before = self.server.n_sent
        size = self.manifest.spec.block_size_bytes(0)
        for layer, experts in ((0, (1, 2, 3)), (1, (5,))):
            for expert, block in await model.read_blocks(layer, experts):
                verify_block(self.manifest, layer, expert, block)
        assert self.server.n_sent - before == (4 * size if n_bytes is None else n_bytes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_moe(
        tmp_path_factory.mktemp("web") / "m.gguf", n_layers=2, n_expert=6, n_expert_used=2, n_embd=256, n_ff_exp=256
    )


@pytest_asyncio.fixture
async def stage(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(web_model, "FIRST_BYTES", 400)  # so that a small model's header takes several requests
    monkeypatch.setattr(web_model, "STEP_BYTES", 1000)
    with GgufFile(made) as file:
        manifest = build_manifest(file)
    whole = await asyncio.to_thread(made.read_bytes)
    async with serving(FileServer({"/m.gguf": whole})) as server, Web() as web:
        yield Stage(server, manifest, whole, made, tmp_path, web)


async def test_a_header_is_fetched_in_pieces_and_blocks_are_the_models(stage: Stage) -> None:
    model = await stage.open()
    assert model.is_part_of(stage.manifest)
    assert model.experts == stage.manifest.spec.all_experts
    assert model.size_bytes == len(stage.whole)
    n_header = stage.server.n_sent
    assert len(stage.server.asked) > 2, "in pieces"
    ends = [span.end for span in stage.server.asked]
    assert [span.start for span in stage.server.asked] == [0, *ends[:-1]], "none of it twice"
    assert n_header < len(stage.whole) / 10
    await stage.check(model)
    n_ranges = len(stage.server.asked) - len(ends)
    assert n_ranges == 2 * len(stage.manifest.spec.expert_tensors(0)), "neighbours are one range of each tensor"


async def test_a_header_is_kept_for_the_same_version_of_the_file(stage: Stage) -> None:
    await stage.open()
    first = stage.server.n_sent
    await stage.check(await stage.open())
    assert stage.server.n_sent == first + 400 + 4 * stage.manifest.spec.block_size_bytes(0)
    stage.server.etag = '"two"'
    await stage.open()
    assert stage.server.n_sent > first + 400 + 4 * stage.manifest.spec.block_size_bytes(0) + 400


async def test_a_kept_header_that_was_cut_is_fetched_anew(stage: Stage) -> None:
    await stage.open()
    [kept] = (stage.folder / "cache" / "headers").glob("*/*.gguf")
    kept.write_bytes(kept.read_bytes()[:500])
    await stage.check(await stage.open())


async def test_a_kept_header_that_was_damaged_is_fetched_anew(stage: Stage) -> None:
    await stage.open()
    [kept] = (stage.folder / "cache" / "headers").glob("*/*.gguf")
    data = kept.read_bytes()
    kept.write_bytes(data[:400] + bytes(len(data) - 400))
    await stage.check(await stage.open())


async def test_without_an_etag_nothing_is_kept(stage: Stage) -> None:
    stage.server.etag = ""
    await stage.open()
    first = stage.server.n_sent
    await stage.open()
    assert stage.server.n_sent == 2 * first


async def test_shards_are_one_model(stage: Stage, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, stage.path, 3)
    stage.server.files = {f"/{path.name}": path.read_bytes() for path in paths}
    model = await stage.open(paths[0].name)
    assert model.is_part_of(stage.manifest)
    assert model.size_bytes == sum(path.stat().st_size for path in paths)
    assert model.has_ranges
    await stage.check(model)
    with pytest.raises(RemoteProtocolError, match="give the first"):
        await stage.open(paths[1].name)


async def test_a_missing_shard_is_said(stage: Stage, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, stage.path, 3)
    stage.server.files = {f"/{path.name}": path.read_bytes() for path in paths[:2]}
    with pytest.raises(SourceUnusable, match=r"model-00003-of-00003\.gguf: the server answers 404"):
        await stage.open(paths[0].name)


async def test_a_slice_on_the_web_says_what_it_is_of(stage: Stage, tmp_path: Path) -> None:
    held = ExpertSet.of([0, 1], [1, 5])
    with GgufFile(stage.path) as file:
        write_slice(file, stage.manifest, held, tmp_path / "slice.gguf")
        write_backbone(file, stage.manifest, tmp_path / "backbone.gguf")
    stage.server.files |= {f"/{name}": (tmp_path / name).read_bytes() for name in ("slice.gguf", "backbone.gguf")}
    model = await stage.open("slice.gguf")
    assert model.is_part_of(stage.manifest)
    assert model.experts == held
    [(_, block)] = await model.read_blocks(1, [5])
    verify_block(stage.manifest, 1, 5, block)
    with pytest.raises(SourceUnusable, match="does not hold layer 1, expert 4"):
        await model.read_blocks(1, [4])
    with pytest.raises(RemoteProtocolError, match="is a backbone written by swarm split"):
        await stage.open("backbone.gguf")


async def test_a_slice_whose_blocks_have_other_sizes_is_no_part(stage: Stage, tmp_path: Path) -> None:
    """It says which model it is of; read would be as much as it says, before any hash is looked at."""
    other = write_synthetic_moe(tmp_path / "o.gguf", n_layers=3, n_expert=6, n_expert_used=2, n_embd=256, n_ff_exp=512)
    with GgufFile(other) as file:
        manifest = build_manifest(file)
        for name, layer in (("larger", 0), ("of-no-layer", 2)):
            write_slice(file, manifest, ExpertSet.of([layer], [1, 5]), tmp_path / name)
            data = (tmp_path / name).read_bytes()
            lying = data.replace(str(manifest.model_id).encode(), str(stage.manifest.model_id).encode())
            stage.server.files[f"/{name}.gguf"] = lying
    for name in ("larger", "of-no-layer"):
        model = await stage.open(f"{name}.gguf")
        assert model.source.model_id == stage.manifest.model_id
        assert not model.is_part_of(stage.manifest)


async def test_another_model_is_no_part(stage: Stage, tmp_path: Path) -> None:
    other = write_synthetic_moe(tmp_path / "o.gguf", n_layers=2, n_expert=6, n_expert_used=2, n_embd=256, n_ff_exp=128)
    stage.server.files["/o.gguf"] = other.read_bytes()
    assert not (await stage.open("o.gguf")).is_part_of(stage.manifest)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<html>not here</html>" * 50, "wrong magic"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 1 << 40) + bytes(2000), "length of a metadata key"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 60) + bytes(2000), "is cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0) + bytes(2000), "too many tensors"),
    ],
)
async def test_what_is_no_gguf_file_is_refused_after_its_first_bytes(stage: Stage, data: bytes, message: str) -> None:
    stage.server.files["/m.gguf"] = data
    with pytest.raises(RemoteProtocolError, match=message):
        await stage.open()
    assert stage.server.n_sent <= 400


async def test_a_header_without_an_end_is_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_model, "MAX_HEADER_BYTES", 3000)
    endless = (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1000)
        + b"".join(struct.pack("<Q", 4) + f"{n:04}".encode() + struct.pack("<II", 4, 0) for n in range(900))
    )
    stage.server.files["/m.gguf"] = endless
    with pytest.raises(RemoteProtocolError, match=r"does not end within 3\d* bytes|is cut short"):
        await stage.open()
    assert stage.server.n_sent <= 3000


# Servers without ranges


async def test_without_ranges_one_reading_brings_all_blocks(stage: Stage) -> None:
    stage.server.ignores_ranges = True
    model = await stage.open()
    assert not model.has_ranges
    assert model.why_no_stream(WANTED) == ""
    stage.server.asked.clear()
    seen = []
    async for (layer, expert), block in model.stream_blocks(WANTED):
        verify_block(stage.manifest, layer, expert, block)
        seen.append((layer, expert))
    assert sorted(seen) == WANTED
    assert len(stage.server.asked) == 1, "read once"


async def test_without_ranges_too_large_a_file_is_refused_in_words(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.server.ignores_ranges = True
    model = await stage.open()
    monkeypatch.setattr(web_model, "MAX_HELD_BYTES", 1000)
    assert "would have to wait" in model.why_no_stream(WANTED)
    monkeypatch.setattr(web_model, "MAX_STREAM_BYTES", 1000)
    assert f"all of it is too much: got {len(stage.whole)} bytes, expected at most 1000" in model.why_no_stream(WANTED)


async def test_shards_without_ranges_are_read_one_after_the_other(stage: Stage, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, stage.path, 3)
    stage.server.files = {f"/{path.name}": path.read_bytes() for path in paths}
    stage.server.ignores_ranges = True
    model = await stage.open(paths[0].name)
    seen = {
        pair async for pair, block in model.stream_blocks(WANTED) if verify_block(stage.manifest, *pair, block) is None
    }
    assert seen == set(WANTED)
