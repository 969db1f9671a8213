"""Puts a backbone together: model file, endpoint, registry, holders, dispatcher, engine. Used by serve, demo and verify."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.generate import Backbone
from swarm.backbone.share import SERVES, ModelShare
from swarm.dispatch.dispatcher import Dispatcher
from swarm.dispatch.holders import Holders
from swarm.dispatch.placement import Placement
from swarm.errors import RemoteProtocolError, UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import format_index_set
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import MAX_MANIFEST_BYTES, MODEL_ID_KEY, Manifest, manifest_of
from swarm.model.slices import write_backbone
from swarm.model.source import GgufSource
from swarm.model.spec import FILE_KEY
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.pool import Pool
from swarm.registry.announcer import TTL_S, Announcer, SequenceNumbers
from swarm.registry.client import RegistryAddress, RegistryClient
from swarm.registry.records import ModelOffer, printable_name
from swarm.wire import messages as m
from swarm.wire.rows import Wire, WireForm

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneConfig:
    """What an operator asked for.

    Attributes:
        model_file: a whole GGUF file, or a `backbone.gguf` with its manifest.json beside it.
    """

    registry: tuple[RegistryAddress, ...]
    folders: Folders
    model_file: Path
    wire: Wire = field(default_factory=lambda: Wire(WireForm.F32, WireForm.F32))
    host: str = "0.0.0.0"
    port: int = 0
    advertise: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model's files, ready to run."""

    manifest: Manifest
    name: str
    backbone_path: Path
    share: ModelShare
    size_bytes: int
    offers_blocks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningBackbone:
    """The parts of a backbone that callers need."""

    manifest: Manifest
    name: str
    backbone: Backbone
    engine: Engine
    holders: Holders
    dispatcher: Dispatcher
    registry: RegistryClient
    pool: Pool
    endpoint: Endpoint


def prepare_model(path: Path, folders: Folders, progress: ProgressCallback | None = None) -> PreparedModel:
    """Return the model's manifest and backbone file; a whole file's backbone is written to the cache once.

    Raises:
        UserError: not a model that can be served, or no manifest beside a backbone file.
    """
    name = printable_name(path.stem)
    with GgufFile(path) as file:
        kind, said = file.text(FILE_KEY), file.text(MODEL_ID_KEY)
    if kind == "slice":
        raise UserError(f"{path} is an expert slice; serve needs the whole model or its backbone.gguf")
    if kind == "backbone":
        manifest = _manifest_beside(path)
        if said != str(manifest.model_id):
            raise UserError(f"{path} does not belong to the {MANIFEST_NAME} beside it: got model {said}")
        return PreparedModel(
            manifest=manifest,
            name=name,
            backbone_path=path,
            share=ModelShare(manifest, None),
            size_bytes=path.stat().st_size,
            offers_blocks=False,
        )
    manifest = manifest_of(path, folders.cache, progress)
    file = GgufFile(path)  # stays open: the share reads from it
    backbone_path = folders.cache / "backbones" / f"{manifest.model_id}.gguf"
    if not backbone_path.exists():  # written whole or not at all, and named for its content
        backbone_path.parent.mkdir(parents=True, exist_ok=True)
        write_backbone(file, manifest, backbone_path)
    return PreparedModel(
        manifest=manifest,
        name=name,
        backbone_path=backbone_path,
        share=ModelShare(manifest, GgufSource(file)),
        size_bytes=path.stat().st_size,
        offers_blocks=True,
    )


@contextlib.asynccontextmanager
async def open_backbone(
    config: BackboneConfig, identity: Identity, progress: ProgressCallback | None = None
) -> AsyncIterator[RunningBackbone]:
    """Yield a running backbone that is announced and watches for holders; they need not be there yet.

    Raises:
        UserError, EngineError: the model or the port cannot be used.
    """
    prepared = await asyncio.to_thread(prepare_model, config.model_file, config.folders, progress)
    manifest = prepared.manifest

    async def handle(connection: Connection, request: m.Request) -> m.Response:
        return await prepared.share.answer(request)

    endpoint = Endpoint(identity, host=config.host, port=config.port, handler=handle, serves=SERVES)
    async with endpoint, contextlib.AsyncExitStack() as stack:
        pool = Pool(endpoint)
        stack.push_async_callback(pool.close)
        registry = RegistryClient(endpoint, config.registry)
        placement = Placement(
            manifest.model_id,
            manifest.spec.moe_layers,
            manifest.spec.n_expert,
            require_exact=config.wire.back is WireForm.EXACT,
        )
        holders = Holders(registry, pool, placement, manifest.model_id)
        dispatcher = Dispatcher(manifest.model_id, manifest.spec, holders, config.wire)
        engine = Engine(prepared.backbone_path, manifest.spec, config.engine, dispatcher)
        announcer = Announcer(
            registry,
            identity,
            SequenceNumbers(config.folders.state / "serve.seq"),
            lambda seq, address: _offer(config, identity, prepared, seq, address),
        )
        async with _cancelled_at_exit() as tasks:
            tasks.create_task(announcer.run())
            tasks.create_task(holders.run())
            await engine.start()
            try:
                yield RunningBackbone(
                    manifest=manifest,
                    name=prepared.name,
                    backbone=Backbone(
                        engine,
                        holders,
                        f"{prepared.name}@{manifest.model_id.short}",
                        n_batch=config.engine.n_batch,
                    ),
                    engine=engine,
                    holders=holders,
                    dispatcher=dispatcher,
                    registry=registry,
                    pool=pool,
                    endpoint=endpoint,
                )
            finally:
                await engine.close()


@contextlib.asynccontextmanager
async def _cancelled_at_exit() -> AsyncIterator[asyncio.TaskGroup]:
    """Yield a task group whose tasks run for ever and are cancelled, then awaited, when the block ends."""

    class _Done(Exception):
        pass

    async def end() -> None:
        raise _Done

    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                yield tasks
            except Exception as error:
                failure = error  # raised below, as it is: the task group would wrap it
            finally:
                tasks.create_task(end())
    except* _Done:
        pass
    if failure is not None:
        raise failure


def _offer(config: BackboneConfig, identity: Identity, prepared: PreparedModel, seq: int, address: str) -> ModelOffer:
    spec = prepared.manifest.spec
    return ModelOffer(
        node=identity.node_id,
        seq=seq,
        ttl_s=TTL_S,
        model=prepared.manifest.model_id,
        model_name=prepared.name,
        n_expert=spec.n_expert,
        n_expert_used=spec.n_expert_used,
        moe_layers=format_index_set(spec.moe_layers),
        n_embd=spec.n_embd,
        size_bytes=prepared.size_bytes,
        addresses=(config.advertise or address,),
        offers_blocks=prepared.offers_blocks,
    )


def _manifest_beside(path: Path) -> Manifest:
    beside = path.with_name(MANIFEST_NAME)
    try:
        if beside.stat().st_size > MAX_MANIFEST_BYTES:
            raise UserError(f"{beside} is too large for a manifest: expected at most {MAX_MANIFEST_BYTES} bytes")
        return Manifest.from_bytes(beside.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {beside}, which belongs to {path.name}: {error.strerror}") from error
    except RemoteProtocolError as error:
        raise UserError(f"{beside} is damaged: {error}") from error
