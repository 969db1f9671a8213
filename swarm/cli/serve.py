"""`swarm serve`: a backbone with an OpenAI-compatible gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from aiohttp import web

from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.engine import EngineConfig
from swarm.backbone.local_keeper import Fetch, LocalBudget
from swarm.backbone.prepared import prepare_model
from swarm.cli.gateway_options import (
    DEFAULT_MAX_BODY,
    AllowHostOption,
    ApiKeyFileOption,
    CorsOriginOption,
    GatewayOption,
    GatewaySettings,
    MaxBodyOption,
    TlsCertOption,
    TlsKeyOption,
    settle_gateway,
)
from swarm.cli.live import LiveLines
from swarm.cli.options import (
    AdvertiseOption,
    DeviceOption,
    DraftOption,
    ExactKernelsOption,
    HostOption,
    JsonOption,
    LocationOption,
    PortOption,
    ReceiptsFromOption,
    RegistryOption,
    ThreadsOption,
    UntilEofOption,
    settle_advertise,
    settle_device,
    settle_nodes,
    settle_place,
)
from swarm.cli.registries import settle_registries
from swarm.cli.runtime import ProgressBars, err, give_memory_back, out, print_json, run_daemon, tame_openmp
from swarm.cli.serve_status import reporter
from swarm.cli.serve_status import shown as status_shown
from swarm.cli.serving_options import (
    DEFAULT_DRAIN,
    DEFAULT_PREFIX_CACHE,
    DEFAULT_QUEUE,
    DEFAULT_SLOTS,
    CtxOption,
    DrainOption,
    FillWaitOption,
    KvTypeOption,
    LanesOption,
    PrefixCacheOption,
    QueueOption,
    ReproducibleOption,
    RequestTimeoutOption,
    SlotsOption,
    settle_serving,
)
from swarm.dispatch.audit import DEFAULT_SHARE, parse_share
from swarm.errors import UserError
from swarm.files import Folders
from swarm.gate.stored import WireChoice, asked_wire, audit_tolerance, choose_wire, engine_name, load_result
from swarm.gateway.app import create_app
from swarm.gateway.metrics import backbone_metrics
from swarm.identity import Identity
from swarm.ids import ModelId, NodeId, format_index_set
from swarm.interruptible import run_interruptibly
from swarm.model.block_store import BlockStore
from swarm.net.addresses import format_address, is_loopback, parse_address
from swarm.net.pool import Pool
from swarm.registry.client import DEFAULT_REGISTRY, RegistryClient
from swarm.sources.locations import is_web_name, is_worth_telling, locate, public_sources
from swarm.units import parse_size_bytes
from swarm.web.backbone_map import BackboneMap
from swarm.wire.rows import Wire, WireForm, parse_wire

logger = logging.getLogger(__name__)

DEFAULT_GATEWAY = "127.0.0.1:8080"
DEFAULT_AUDIT = f"{DEFAULT_SHARE:.0%}"
IDLE_TIMEOUT_S = 75.0  # nginx's: after which a connection closes on which no request is, or whose headers never end
SHUTDOWN_TIMEOUT_S = 3.0  # for the last bytes of answers, once all are drained or their time is up


def serve(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="FILE|URL",
            help="GGUF file, or a backbone.gguf with its manifest.json; https://host/file.gguf or hf://owner/repo/file.gguf "
            "is fetched whole first.",
        ),
    ],
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            metavar="URL",
            help="Where the same model is on the web, https:// or hf://: volunteers fetch their experts there. Repeatable.",
            show_default="--model, if it is such a name; those that backbone.gguf carries",
        ),
    ] = None,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    wire: Annotated[
        str | None,
        typer.Option(
            "--wire",
            metavar="OUT/BACK",
            help="How rows travel: exact, f32, bf16, f16, q8, fp8, or two of them.",
            show_default="the cheapest that passed this model's gate (`swarm verify --save`), else f32",
        ),
    ] = None,
    slots: SlotsOption = DEFAULT_SLOTS,
    lanes: LanesOption = None,
    ctx: CtxOption = 0,
    kv_type: KvTypeOption = "f16",
    prefix_cache: PrefixCacheOption = DEFAULT_PREFIX_CACHE,
    queue: QueueOption = DEFAULT_QUEUE,
    fill_wait: FillWaitOption = "0ms",
    request_timeout: RequestTimeoutOption = None,
    drain: DrainOption = DEFAULT_DRAIN,
    draft: DraftOption = 0,
    draft_model: Annotated[
        Path | None,
        typer.Option(
            "--draft-model",
            metavar="FILE",
            help="A smaller GGUF model with the same vocabulary, which drafts too; goes with --draft.",
        ),
    ] = None,
    registry: RegistryOption = DEFAULT_REGISTRY,
    threads: ThreadsOption = 1,
    device: DeviceOption = "cpu",
    host: HostOption = "0.0.0.0",
    port: PortOption = 0,
    advertise: AdvertiseOption = None,
    exact_kernels: ExactKernelsOption = False,
    reproducible: ReproducibleOption = False,
    peers_allow: Annotated[
        str | None,
        typer.Option(
            "--peers-allow",
            metavar="NODEID[,NODEID...]",
            help="Use these peers alone, by the node ids that they print: what peers compute reveals much of the text.",
            show_default="anybody's",
        ),
    ] = None,
    last_resort: Annotated[
        bool,
        typer.Option(
            "--last-resort",
            help="Compute experts here, from the model file, while no peer answers for them: slow, but no error.",
        ),
    ] = False,
    local_experts: Annotated[
        str,
        typer.Option(
            "--local-experts",
            metavar="auto|SIZE|none",
            help="Keep the most used experts in this process's memory, so much of it (auto: half of what is free), "
            "and never ask peers for them.",
        ),
    ] = "none",
    audit: Annotated[
        str,
        typer.Option(
            "--audit",
            metavar="SHARE",
            help="Share of each peer's answers that is asked of another peer as well, so that wrong numbers are found; 0: none.",
        ),
    ] = DEFAULT_AUDIT,
    tls_links: Annotated[
        bool,
        typer.Option(
            "--tls-links/--no-tls-links",
            help="Reach peers over TCP too, on the number of their UDP port, where a path is short, direct and clean enough: "
            "less delay.",
        ),
    ] = True,
    histogram: Annotated[
        bool,
        typer.Option(
            help="Tell the registry how often each expert is chosen (counts, no text), so that volunteers hold what is wanted.",
        ),
    ] = True,
    allow_host: AllowHostOption = None,
    api_key_file: ApiKeyFileOption = None,
    cors_origin: CorsOriginOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    max_body: MaxBodyOption = DEFAULT_MAX_BODY,
    location: LocationOption = None,
    receipts_from: ReceiptsFromOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no status on the terminal while serving.")] = False,
    as_json: JsonOption = False,
    until_eof: UntilEofOption = False,
) -> None:
    """Serve a model: run everything but its experts here, and answer OpenAI-compatible requests."""
    folders = Folders.from_environment()
    identity = Identity.claim(folders.config, "serve")
    asked = parse_wire(wire) if wire else None
    if reproducible:
        exact_kernels, asked = True, settle_exact(asked)
    allowed_peers = (
        None if peers_allow is None else frozenset(NodeId.parse(each.strip()) for each in peers_allow.split(","))
    )
    if asked is not None and asked.back is WireForm.EXACT and not exact_kernels:
        raise UserError("the wire form exact needs --exact-kernels here and at the peers")
    place = settle_place(location)
    counted = settle_nodes(receipts_from)
    settings = settle_gateway(
        parse_address(gateway, allow_any_port=True),
        allow_hosts=allow_host,
        api_key_file=api_key_file,
        cors_origins=cors_origin,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_body=max_body,
    )
    serving = settle_serving(
        slots=slots,
        lanes=lanes,
        kv_type=kv_type,
        prefix_cache=prefix_cache,
        queue=queue,
        fill_wait=fill_wait,
        request_timeout=request_timeout,
        drain=drain,
        reproducible=reproducible,
    )
    budget = parse_local_experts(local_experts)
    if draft_model is not None and not (draft and draft_model.is_file()):
        raise UserError("--draft-model needs a GGUF file, and --draft N, for example --draft 8")
    audit_share = parse_share(audit)
    advertised = settle_advertise(advertise)
    tame_openmp()
    give_memory_back()

    told = public_sources(source or ())

    async def main() -> None:
        registries = await settle_registries(registry, folders)
        shown = replace(settings, registry=registries, place=place)
        with ProgressBars() as bars:

            def progress(n_done: int, n_total: int) -> None:
                bars.update("hashing the model", n_done, n_total, is_bytes=True)

            path = await _model_here(model, folders, bars)
            with await run_interruptibly(lambda check: prepare_model(path, folders, progress, check)) as prepared:
                if last_resort and prepared.file is None:
                    raise UserError("--last-resort needs the whole model file: this one has no experts")
                choice, tolerance = await asyncio.to_thread(_choose_wire, asked, prepared.manifest.model_id, folders)
                config = BackboneConfig(
                    registry=registries,
                    folders=folders,
                    model_file=path,
                    sources=_sources_to_tell(model, told, prepared.sources),
                    wire=choice.wire,
                    host=host,
                    port=port,
                    advertise=advertised,
                    engine=EngineConfig(
                        n_ctx=ctx,
                        n_threads=threads,
                        device=settle_device(device, exact_kernels=exact_kernels),
                        exact_kernels=exact_kernels,
                        kv_types=serving.kv_types,
                    ),
                    n_slots=serving.n_slots,
                    n_lanes=serving.n_lanes,
                    serving=serving.config,
                    n_draft=draft,
                    draft_model=draft_model,
                    last_resort=last_resort,
                    allowed_peers=allowed_peers,
                    shares_histogram=histogram,
                    audit_share=audit_share,
                    audit_tolerance=tolerance,
                    tls_links=tls_links,
                    receipts_from=counted,
                    local_experts=budget,
                    fetcher=_fetcher,
                )
                async with open_backbone(config, identity, prepared=prepared) as running:
                    report = reporter(running)
                    is_quiet = quiet or as_json or not err.is_terminal
                    live = LiveLines(lambda: status_shown(report()), is_quiet=is_quiet)
                    await _serve_http(running, shown, as_json, bars, choice, ready.set, serving.drain_s, live)

    ready = asyncio.Event()
    run_daemon(main(), until_eof=until_eof, is_ready=ready.is_set)


def settle_exact(asked: Wire | None) -> Wire:
    """Return the wire form of reproducible answers. Raises UserError: another was asked for."""
    exact = parse_wire("exact")
    if asked not in (None, exact):
        raise UserError(f"--reproducible needs the wire form exact: got {asked}; leave --wire out")
    return exact


async def _model_here(model: str, folders: Folders, bars: ProgressBars) -> Path:
    """Return the path of `--model`, fetched where it is on the web. Raises as `fetch_model`."""
    if not is_web_name(model):
        return Path(model)
    from swarm.sources.web import Web
    from swarm.sources.whole_file import fetch_model

    location = locate(model, is_asked=True)

    def progress(n_done: int, n_total: int) -> None:
        bars.update("fetching the model", n_done, n_total, is_bytes=True)

    async with Web() as web:
        return await fetch_model(web, location, folders.cache, progress)


def _sources_to_tell(model: str, given: tuple[str, ...], carried: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sources of a model's record: those given, else where it was fetched, and those that its file carries."""
    own = (model,) if not given and is_web_name(model) and is_worth_telling(model) else ()
    try:
        return public_sources([*given, *own, *carried])
    except UserError as error:
        logger.warning("backbone.gguf carries a source that cannot be told: %s", error)
        return given or own


def parse_local_experts(text: str) -> LocalBudget | None:
    """Return what `--local-experts` says; None: no experts are kept. Raises UserError."""
    if text == "none":
        return None
    return LocalBudget(None if text == "auto" else parse_size_bytes(text, "--local-experts"))


def _fetcher(registry: RegistryClient, pool: Pool, store: BlockStore) -> Fetch:
    """Return what gets blocks from whoever offers the model, as a peer does."""
    from peer.fetch import SliceFetcher

    return SliceFetcher(registry, pool, store, lambda n_done, n_total: None).fetch


def _choose_wire(asked: Wire | None, model: ModelId, folders: Folders) -> tuple[WireChoice, float]:
    """Return the form asked for, else what the model's stored gate result allows; and the audits' tolerance in it."""
    result = load_result(folders.cache, model)
    choice = asked_wire(asked, result) if asked is not None else choose_wire(result, engine_name())
    return choice, audit_tolerance(result, choice.wire)


async def _serve_http(
    running: RunningBackbone,
    settings: GatewaySettings,
    as_json: bool,
    bars: ProgressBars,
    choice: WireChoice,
    on_ready: Callable[[], None],
    drain_s: float,
    live: LiveLines,
) -> None:
    runner = await start_gateway(running, settings)
    try:
        bars.__exit__()
        on_ready()
        url = f"{settings.scheme}://{format_address(runner.addresses[0][:2])}/v1"
        if as_json:
            print_json(
                {
                    "event": "ready",
                    "model": running.backbone.model_name,
                    "url": url,
                    "node": str(running.endpoint.identity.node_id),
                    "wire": str(choice.wire),
                    "wire_because": choice.reason,
                }
            )
        else:
            out.print(f"Serving {running.backbone.model_name} at {url}", highlight=False)
            out.print(f"Rows travel as {choice.wire}: {choice.reason}.", markup=False, highlight=False)
            _tell_missing(running)
        with contextlib.suppress(OSError):  # a terminal that is gone
            await live.run()
        await asyncio.Event().wait()
    finally:
        try:
            if not await running.backbone.drain(drain_s):
                logger.warning("answers under way were ended after %g s", drain_s)
        finally:
            await runner.cleanup()


async def start_gateway(running: RunningBackbone, settings: GatewaySettings) -> web.AppRunner:
    """Start the HTTP gateway; the caller cleans the runner up. Raises UserError: the port is taken."""
    access = settings.access
    if not is_loopback(settings.address[0]):
        access = replace(access, allowed_hosts=None)
    app = create_app(
        running.backbone,
        status=lambda: gateway_status(running),
        access=access,
        peer_map=BackboneMap(running, settings.registry, settings.place),
        metrics=backbone_metrics(running),
    )
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        keepalive_timeout=IDLE_TIMEOUT_S,
        handler_cancellation=True,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, *settings.address, ssl_context=settings.tls).start()
    except OSError as error:
        await runner.cleanup()
        where = format_address(settings.address)
        raise UserError(f"cannot listen on {where}: {error.strerror}; choose another --gateway") from error
    return runner


def gateway_status(running: RunningBackbone) -> dict[str, Any]:
    """Return what `/health` shows."""
    missing = running.holders.missing()
    stats = running.dispatcher.stats
    return {
        "model": running.backbone.model_name,
        "n_peers": len(running.holders.placement.destinations),
        "accept_length": round(running.backbone.drafts.accept_length, 3),
        "sequence_stickiness": round(running.dispatcher.replicas.sequence_stickiness, 3),
        "n_local_experts": len(running.local.experts) if running.local is not None else 0,
        "local_share": round(stats.n_local_assignments / max(1, stats.n_assignments), 4),
        "n_skipped_trips": stats.n_skipped_trips,
        "audits": None
        if (audits := running.dispatcher.audits) is None
        else {"share": audits.share, "tolerance": audits.tolerance, **asdict(audits.stats)},
        "reasons": [
            f"layer {layer}: no peer holds experts {format_index_set(experts)}" for layer, experts in missing.items()
        ],
    }


def _tell_missing(running: RunningBackbone) -> None:
    missing = running.holders.missing()
    if missing:
        n_missing = sum(map(len, missing.values()))
        spec = running.manifest.spec
        n_all = len(spec.moe_layers) * spec.n_expert
        out.print(f"{n_missing} of {n_all} experts have no peer yet. Peers join with:", highlight=False)
        out.print(f"  swarm join --experts 0-{spec.n_expert - 1}", highlight=False)
