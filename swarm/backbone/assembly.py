"""Puts a backbone together: model file, endpoint, registry, holders, dispatcher, engine. Used by serve, demo and verify."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swarm import __version__
from swarm.backbone.drafting import Drafting
from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.generate import Backbone, ServingConfig
from swarm.backbone.histogram import HistogramPublisher
from swarm.backbone.local_experts import LocalExperts
from swarm.backbone.local_keeper import Fetch, LocalBudget, LocalKeeper
from swarm.backbone.model_drafts import DraftModel
from swarm.backbone.own_experts import OwnExperts
from swarm.backbone.prepared import PreparedModel, ProgressCallback, prepare_model
from swarm.backbone.row_budget import most_rows
from swarm.backbone.share import SERVES
from swarm.backbone.tracing import Tracer
from swarm.dispatch.audit import DEFAULT_TOLERANCE
from swarm.dispatch.auditor import Auditor
from swarm.dispatch.contributions import Contributions
from swarm.dispatch.dispatcher import Dispatcher
from swarm.dispatch.holders import Holders
from swarm.dispatch.placement import Placement
from swarm.errors import UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId, format_index_set
from swarm.interruptible import run_interruptibly
from swarm.model.block_store import BlockStore
from swarm.model.manifest import Manifest
from swarm.model.source import BlockSource, GgufSource
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.fast_links import FastLinks
from swarm.net.path_finder import Face, PathFinder
from swarm.net.pool import Pool
from swarm.net.readiness import Readiness, is_worthwhile
from swarm.net.relay_client import RelayAddress
from swarm.registry.announcer import TTL_S, Announcer, SequenceNumbers
from swarm.registry.cache import RegistryCache
from swarm.registry.client import RegistryAddress, RegistryClient
from swarm.registry.gatherer import Gatherer
from swarm.registry.leaderboard import Ledger
from swarm.registry.records import ModelOffer
from swarm.registry.relays import relays_of
from swarm.wire import messages as m
from swarm.wire.rows import Wire, WireForm

# Local experts have a pool of OpenMP threads of their own, beside the engine's, whose idle threads spin. Measured on two cores,
# synth16, all experts local: two threads each 37 to 43 tokens/s, one each 60 to 68. That half of the engine's is right: guessed.
LOCAL_THREADS_SHARE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneConfig:
    """What an operator asked for.

    Attributes:
        model_file: a whole GGUF file, or a `backbone.gguf` with its manifest.json beside it.
        n_slots: requests at once, over all lanes; n_lanes: contexts that they share, each with a thread and a KV cache.
        engine: of each lane; its number of sequences is worked out.
        serving: how requests share the lanes, but for `n_draft` and `n_prompt_rows`.
        n_draft: most tokens that a step drafts; 0: no drafts.
        draft_model: a smaller model with the same vocabulary to draft with.
        last_resort: compute experts here, from a whole `model_file`, while no peer answers for them.
        allowed_peers: the only peers to use; None: anybody's.
        shares_histogram: tell the registry how often each expert is chosen.
        local_experts: how much memory the popular experts may take that are computed here; None: none are.
        fetcher: gets the local experts' blocks from others, where `model_file` is not the whole model.
        audit_share: of each peer's answers that are asked of others as well; 0: none.
        audit_tolerance: from which relative difference on two answers are not the same.
        sources: names on the web of the whole model, for those who would rather not load this node.
        tls_links: reach peers on short, clean paths over TLS links too, where they accept them.
        receipts_from: other backbones whose receipts count for the leaderboard, beside its own.
    """

    registry: tuple[RegistryAddress, ...]
    folders: Folders
    model_file: Path
    wire: Wire = field(default_factory=lambda: Wire(WireForm.F32, WireForm.F32))
    host: str = "0.0.0.0"
    port: int = 0
    advertise: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    n_slots: int = 1
    n_lanes: int = 1
    serving: ServingConfig = field(default_factory=ServingConfig)
    n_draft: int = 0
    draft_model: Path | None = None
    last_resort: bool = False
    allowed_peers: frozenset[NodeId] | None = None
    shares_histogram: bool = True
    local_experts: LocalBudget | None = None
    fetcher: Callable[[RegistryClient, Pool, BlockStore], Fetch] | None = None
    sources: tuple[str, ...] = ()
    audit_share: float = 0.0
    audit_tolerance: float = DEFAULT_TOLERANCE
    tls_links: bool = False
    receipts_from: frozenset[NodeId] = frozenset()


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
    local: LocalExperts | None = None
    keeper: LocalKeeper | None = None
    drafting: Drafting | None = None
    contributions: Contributions | None = None
    ledger: Ledger | None = None


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
    audits: Auditor | None = None
    contributions: Contributions | None = None

    async def handle(connection: Connection, request: m.Request) -> m.Response:
        if isinstance(request, m.GetStatus):
            given = _receipts(contributions, audits, connection.remote, identity)
            return m.Status(data=json.dumps(_status(manifest, audits, given)).encode())
        return await share.answer(request)

    serves = (*SERVES, m.GetStatus)
    endpoint = Endpoint(identity, host=config.host, port=config.port, handler=handle, serves=serves)
    async with endpoint, contextlib.AsyncExitStack() as stack:
        finder = await stack.enter_async_context(PathFinder(endpoint, takes_calls=True))
        pool = Pool(endpoint, finder)
        stack.push_async_callback(pool.close)
        kept = RegistryCache(config.folders.cache / f"registry-{identity.node_id.short}.json")
        registry = RegistryClient(finder, config.registry, cache=kept)
        stack.push_async_callback(registry.close)
        placement = Placement(
            manifest.model_id,
            manifest.spec.moe_layers,
            manifest.spec.n_expert,
            require_exact=config.wire.back is WireForm.EXACT,
        )
        own: OwnExperts | None = None
        local: LocalExperts | None = None
        keeper: LocalKeeper | None = None
        if config.local_experts is not None:
            local = LocalExperts(manifest.spec, n_threads=max(1, config.engine.n_threads // LOCAL_THREADS_SHARE))
            stack.callback(local.close)
        last_resort = config.model_file if config.last_resort and prepared.file is not None else None
        if last_resort is not None or local is not None:
            own = OwnExperts(last_resort, manifest.spec, local=local, n_threads=config.engine.n_threads)
            stack.push_async_callback(own.close)
        holders = Holders(registry, pool, placement, manifest.model_id, own=own, allowed=config.allowed_peers)
        dispatcher = Dispatcher(manifest.model_id, manifest.spec, holders, config.wire, home=identity.node_id.raw)
        dispatcher.contributions = contributions = Contributions(placement, wall=time.time, random=os.urandom)
        if config.audit_share:
            dispatcher.audits = audits = Auditor(
                holders,
                dispatcher.replicas,
                dispatcher.opinion,
                share=config.audit_share,
                tolerance=config.audit_tolerance,
                records=config.folders.state / f"audits-{identity.node_id.short}.json",
            )
        stack.push_async_callback(dispatcher.close)
        if config.tls_links:
            dispatcher.links = FastLinks(identity, counts=endpoint.counts)
            stack.push_async_callback(dispatcher.links.close)
        if is_worthwhile():
            dispatcher.readiness = Readiness(endpoint, also=dispatcher.rehearse)
            stack.callback(dispatcher.readiness.close)
        n_slots = -(-config.n_slots // config.n_lanes)  # of a lane
        lanes = _lanes(prepared, replace(config.engine, n_sequences=n_slots), config.n_lanes, dispatcher, local)
        numbers = SequenceNumbers(config.folders.state / f"{identity.node_id}.seq")
        announcer = Announcer(
            registry,
            identity,
            numbers,
            lambda seq, address: _offer(config, identity, prepared, seq, _face(config, finder, address)),
        )
        async with _cancelled_at_exit() as tasks:
            tasks.create_task(announcer.run())
            relays = [RelayAddress(address=each.address, node=each.node) for each in config.registry]
            reachable = finder.keep_reachable(
                relays,
                announcer.announce_soon,
                others=lambda: relays_of(registry.members_known(), identity.node_id),
            )
            tasks.create_task(reachable)
            tasks.create_task(holders.run())
            ledger = Ledger({identity.node_id, *config.receipts_from})
            tasks.create_task(Gatherer(ledger, holders.named_connections).run())
            if config.shares_histogram:
                publisher = HistogramPublisher(
                    registry, identity, numbers, dispatcher.popularity, manifest.model_id, now=dispatcher.now
                )
                tasks.create_task(publisher.run())
            tasks.create_task(registry.watch(manifest.model_id, lambda news: holders.look_soon()))
            async with _running(lanes):
                if local is not None:
                    keeper = _keeper(config, prepared, local, dispatcher, registry, pool)
                    stack.push_async_callback(keeper.close)
                    tasks.create_task(keeper.run())
                drafting: Drafting | None = None
                if config.n_draft:
                    model = await asyncio.to_thread(_draft_model, config, lanes[0], n_slots)
                    if model is not None:
                        stack.callback(model.close)
                    drafting = Drafting(config.n_draft, local=local, model=model)
                backbone = Backbone(
                    lanes,
                    holders,
                    f"{prepared.name}@{manifest.model_id.short}",
                    n_slots=n_slots,
                    config=replace(
                        config.serving,
                        n_draft=config.n_draft,
                        n_prompt_rows=most_rows(config.wire, config.engine.n_batch),
                    ),
                    proposer=drafting,
                    audits=dispatcher.audits,
                    tracer=Tracer(dispatcher),
                )
                if dispatcher.audits is not None:
                    dispatcher.audits.on_taint = backbone.taint
                async with backbone:
                    yield RunningBackbone(
                        manifest=manifest,
                        name=prepared.name,
                        backbone=backbone,
                        engine=lanes[0],
                        holders=holders,
                        dispatcher=dispatcher,
                        registry=registry,
                        pool=pool,
                        endpoint=endpoint,
                        local=local,
                        keeper=keeper,
                        drafting=drafting,
                        contributions=contributions,
                        ledger=ledger,
                    )


def _receipts(
    contributions: Contributions | None, audits: Auditor | None, asker: NodeId, identity: Identity
) -> list[str] | None:
    """Return the receipts for a peer that asks; None: there is nothing to be had, or it was caught."""
    if contributions is None or asker not in contributions or (audits is not None and audits.is_caught(asker)):
        return None
    return [receipt.text for receipt in contributions.receipts(asker, identity)]


def _status(manifest: Manifest, audits: Auditor | None, receipts: list[str] | None) -> dict[str, Any]:
    """Return what this backbone tells anybody who asks; a peer that fetches its receipts, and only them, now and then."""
    status: dict[str, Any] = {"role": "backbone", "version": __version__, "model": str(manifest.model_id)}
    if receipts is not None:
        return status | {"receipts": receipts}
    return status | {"audits": None if audits is None else audits.report()}


def _draft_model(config: BackboneConfig, engine: Engine, n_slots: int) -> DraftModel | None:
    """Return the smaller model that was asked for, loaded; raises UserError where its vocabulary is another."""
    if config.draft_model is None:
        return None
    model = DraftModel(config.draft_model, n_threads=config.engine.n_threads, n_sequences=n_slots)
    try:
        model.require_same_vocabulary(engine.model)
    except BaseException:
        model.close()
        raise
    return model


def _lanes(
    prepared: PreparedModel, config: EngineConfig, n_lanes: int, dispatcher: Dispatcher, local: LocalExperts | None
) -> list[Engine]:
    """Return an engine for each lane; all use the first one's weights."""
    path, spec = prepared.backbone_path, prepared.manifest.spec
    kept = None if local is None else local.kept
    first = Engine(path, spec, config, dispatcher, kept=kept)
    return [first, *(Engine(path, spec, config, dispatcher, shares=first, kept=kept) for _ in range(n_lanes - 1))]


@contextlib.asynccontextmanager
async def _running(lanes: Sequence[Engine]) -> AsyncIterator[None]:
    """Start engines, the first of which the others share, and close them in the other order."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in lanes:
            await engine.start()
            stack.push_async_callback(engine.close)
        yield


def _keeper(
    config: BackboneConfig,
    prepared: PreparedModel,
    local: LocalExperts,
    dispatcher: Dispatcher,
    registry: RegistryClient,
    pool: Pool,
) -> LocalKeeper:
    """Return what keeps the local experts; raises UserError where none can be kept. How much is free is asked now."""
    assert config.local_experts is not None
    fetch: Fetch | None = None
    source: BlockSource
    if prepared.file is not None:
        source = GgufSource(prepared.file)
    elif config.fetcher is not None:
        source = store = BlockStore(config.folders.cache, prepared.manifest)
        fetch = config.fetcher(registry, pool, store)
    else:
        raise UserError("--local-experts needs the whole model file, or peers to fetch from")
    return LocalKeeper(
        local,
        dispatcher.popularity,
        prepared.manifest,
        source,
        budget_bytes=config.local_experts.settle(prepared.manifest.spec),
        state=config.folders.state,
        now=dispatcher.now,
        fetch=fetch,
    )


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
                ending = end()
                try:
                    tasks.create_task(ending)
                except RuntimeError:  # a task has failed, so the group is ending by itself: its error is what to tell
                    ending.close()
    except* _Done:
        pass
    if failure is not None:
        raise failure


def _face(config: BackboneConfig, finder: PathFinder, address: str) -> Face:
    return finder.face(config.advertise or address, is_advertised=config.advertise is not None)


def _offer(config: BackboneConfig, identity: Identity, prepared: PreparedModel, seq: int, face: Face) -> ModelOffer:
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
        addresses=face.addresses,
        is_public=face.is_public,
        vouchers=face.vouchers,
        offers_blocks=prepared.offers_blocks,
        sources=config.sources,
    )
