"""Puts a backbone together: model file, endpoint, registry, holders, dispatcher, engine. Used by serve, demo and verify."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.generate import Backbone
from swarm.backbone.histogram import HistogramPublisher
from swarm.backbone.own_experts import OwnExperts
from swarm.backbone.prepared import PreparedModel, ProgressCallback, prepare_model
from swarm.backbone.share import SERVES
from swarm.dispatch.dispatcher import Dispatcher
from swarm.dispatch.holders import Holders
from swarm.dispatch.placement import Placement
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import format_index_set
from swarm.interruptible import run_interruptibly
from swarm.model.manifest import Manifest
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.pool import Pool
from swarm.registry.announcer import TTL_S, Announcer, SequenceNumbers
from swarm.registry.cache import RegistryCache
from swarm.registry.client import RegistryAddress, RegistryClient
from swarm.registry.records import ModelOffer
from swarm.wire import messages as m
from swarm.wire.rows import Wire, WireForm


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneConfig:
    """What an operator asked for.

    Attributes:
        model_file: a whole GGUF file, or a `backbone.gguf` with its manifest.json beside it.
        n_draft: most tokens that a step drafts by prompt lookup; 0: no drafts.
        last_resort: compute experts here, from a whole `model_file`, while no peer answers for them.
        shares_histogram: tell the registry how often each expert is chosen.
    """

    registry: tuple[RegistryAddress, ...]
    folders: Folders
    model_file: Path
    wire: Wire = field(default_factory=lambda: Wire(WireForm.F32, WireForm.F32))
    host: str = "0.0.0.0"
    port: int = 0
    advertise: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    n_draft: int = 0
    last_resort: bool = False
    shares_histogram: bool = True


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


@contextlib.asynccontextmanager
async def open_backbone(
    config: BackboneConfig,
    identity: Identity,
    progress: ProgressCallback | None = None,
    *,
    prepared: PreparedModel | None = None,
) -> AsyncIterator[RunningBackbone]:
    """Yield a running backbone that is announced and watches for holders; they need not be there yet.

    `prepared`: what `prepare_model` made of `config.model_file`, if the caller has it already; it stays the caller's to close.

    Raises:
        UserError, EngineError, IntegrityError: the model or the port cannot be used.
    """
    if prepared is None:
        prepared = await run_interruptibly(
            lambda check: prepare_model(config.model_file, config.folders, progress, check)
        )
        with prepared:
            async with open_backbone(config, identity, prepared=prepared) as running:
                yield running
        return
    manifest, share = prepared.manifest, prepared.share

    async def handle(connection: Connection, request: m.Request) -> m.Response:
        return await share.answer(request)

    endpoint = Endpoint(identity, host=config.host, port=config.port, handler=handle, serves=SERVES)
    async with endpoint, contextlib.AsyncExitStack() as stack:
        pool = Pool(endpoint)
        stack.push_async_callback(pool.close)
        kept = RegistryCache(config.folders.cache / f"registry-{identity.node_id.short}.json")
        registry = RegistryClient(endpoint, config.registry, cache=kept)
        stack.push_async_callback(registry.close)
        placement = Placement(
            manifest.model_id,
            manifest.spec.moe_layers,
            manifest.spec.n_expert,
            require_exact=config.wire.back is WireForm.EXACT,
        )
        own: OwnExperts | None = None
        if config.last_resort and prepared.file is not None:
            own = OwnExperts(config.model_file, manifest.spec, n_threads=config.engine.n_threads)
            stack.callback(own.close)
        holders = Holders(registry, pool, placement, manifest.model_id, own=own)
        dispatcher = Dispatcher(manifest.model_id, manifest.spec, holders, config.wire, home=identity.node_id.raw)
        stack.push_async_callback(dispatcher.close)
        engine = Engine(prepared.backbone_path, manifest.spec, config.engine, dispatcher)
        numbers = SequenceNumbers(config.folders.state / f"{identity.node_id}.seq")
        announcer = Announcer(
            registry,
            identity,
            numbers,
            lambda seq, address: _offer(config, identity, prepared, seq, address),
        )
        async with _cancelled_at_exit() as tasks:
            tasks.create_task(announcer.run())
            tasks.create_task(holders.run())
            if config.shares_histogram:
                publisher = HistogramPublisher(
                    registry, identity, numbers, dispatcher.popularity, manifest.model_id, now=dispatcher.now
                )
                tasks.create_task(publisher.run())
            tasks.create_task(registry.watch(manifest.model_id, lambda news: holders.look_soon()))
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
                        n_draft=config.n_draft,
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
