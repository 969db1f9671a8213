"""A backbone's files, and its parts put together without a socket."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from swarm.backbone import assembly
from swarm.backbone.assembly import MANIFEST_NAME, BackboneConfig, open_backbone, prepare_model
from swarm.backbone.engine import EngineConfig
from swarm.backbone.requests import GenerationRequest
from swarm.errors import EngineError, ExpertUnavailable, UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest
from swarm.model.slices import write_slice
from swarm.net.addresses import parse_address
from swarm.registry.client import RegistryAddress
from swarm.registry.records import ExpertAnnouncement, ModelOffer, SignedRecord, Withdrawal, verify
from swarm.wire import messages as m
from tests.swarm.backbone.local_experts import SplitModel

IDENTITY = Identity.from_seed(bytes(range(32)))


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "config", tmp_path / "state", tmp_path / "cache")


def lay_out(model: SplitModel, folder: Path, manifest: bytes | None = None) -> Path:
    """Put a backbone file and its manifest side by side, as `swarm split` does; return the file's path."""
    folder.mkdir()
    shutil.copy(model.backbone, folder / "backbone.gguf")
    (folder / MANIFEST_NAME).write_bytes(model.manifest.to_bytes() if manifest is None else manifest)
    return folder / "backbone.gguf"


# Files


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


# All parts together


class FakeEndpoint:
    """An endpoint that nobody can reach."""

    def __init__(self, identity: Identity, **options: Any) -> None:
        self.identity = identity
        self.handler = options["handler"]
        self.serves = options["serves"]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class FakeRegistry:
    """Keeps what is published; knows no holders."""

    published: list[Any]

    def __init__(self, *_: object) -> None:
        type(self).published = []

    async def publish(self, signed: SignedRecord) -> int:
        record = verify(signed)
        self.published.append(record)
        return record.seq

    async def holders(self, _model: object) -> list[ExpertAnnouncement]:
        return []

    async def observed_address(self) -> str:
        return "192.0.2.7:4000"


@pytest.fixture
def config(tiny: SplitModel, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> BackboneConfig:
    monkeypatch.setattr(assembly, "Endpoint", FakeEndpoint)
    monkeypatch.setattr(assembly, "RegistryClient", FakeRegistry)
    return BackboneConfig(
        registry=(RegistryAddress(address=parse_address("127.0.0.1:7440"), node=None),),
        folders=folders,
        model_file=tiny.file,
        engine=EngineConfig(n_ctx=64, n_batch=32, n_ubatch=32),
    )


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_running_backbone_is_announced_and_withdrawn_at_its_end(
    config: BackboneConfig, tiny: SplitModel
) -> None:
    async with open_backbone(config, IDENTITY) as running:
        await wait_until(lambda: bool(FakeRegistry.published))
        (offer,) = FakeRegistry.published
        assert isinstance(offer, ModelOffer)
        assert (offer.node, offer.model) == (IDENTITY.node_id, tiny.manifest.model_id)
        assert (offer.moe_layers, offer.n_expert, offer.n_expert_used, offer.n_embd) == ("0-5", 32, 4, 256)
        assert (offer.addresses, offer.offers_blocks) == (("192.0.2.7:4000",), True)
        assert running.backbone.model_name == f"model-Q8_0@{tiny.manifest.model_id.short}"
        endpoint: Any = running.endpoint
        answer = await endpoint.handler(None, m.GetManifest(model_id=tiny.manifest.model_id))
        assert Manifest.from_bytes(answer.data) == tiny.manifest
    assert isinstance(FakeRegistry.published[-1], Withdrawal)
    with pytest.raises(EngineError):
        _ = running.engine.context


async def test_without_peers_a_request_ends_by_name(config: BackboneConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.backbone.generate.COVER_WAIT_S", 0.01)
    async with open_backbone(config, IDENTITY) as running:
        with pytest.raises(ExpertUnavailable) as caught:
            await anext(running.backbone.generate(GenerationRequest(prompt="x")))
    assert (caught.value.layer, caught.value.experts) == (0, tuple(range(32)))


@pytest.mark.parametrize("error", [UserError("port taken"), ExpertUnavailable(1, (2,), "gone"), KeyError("bug")])
async def test_an_error_inside_comes_out_as_it_is(config: BackboneConfig, error: Exception) -> None:
    """Not wrapped in a group: the command line shows a UserError as one line, and a group as a traceback."""
    with pytest.raises(type(error)) as caught:
        async with open_backbone(config, IDENTITY):
            raise error
    assert caught.value is error


async def test_an_engine_that_does_not_start_is_its_own_error(config: BackboneConfig, tiny: SplitModel) -> None:
    cut = config.folders.cache / "backbones" / f"{tiny.manifest.model_id}.gguf"
    cut.parent.mkdir(parents=True)
    cut.write_bytes(b"GGUF")
    with pytest.raises(EngineError, match=str(tiny.manifest.model_id)):
        async with open_backbone(config, IDENTITY):
            pytest.fail("it must not open")


async def test_a_cancelled_backbone_stays_cancelled(config: BackboneConfig) -> None:
    is_open = asyncio.Event()

    async def serve() -> None:
        async with open_backbone(config, IDENTITY):
            is_open.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.wait_for(is_open.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
