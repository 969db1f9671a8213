"""`swarm serve`: a backbone with an OpenAI-compatible gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from aiohttp import web

from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.engine import EngineConfig
from swarm.backbone.prepared import prepare_model
from swarm.cli.options import (
    AdvertiseOption,
    DraftOption,
    ExactKernelsOption,
    HostOption,
    JsonOption,
    PortOption,
    RegistryOption,
    ThreadsOption,
    UntilEofOption,
    settle_advertise,
)
from swarm.cli.registries import settle_registries
from swarm.cli.runtime import ProgressBars, give_memory_back, out, print_json, run_daemon, tame_openmp
from swarm.errors import UserError
from swarm.files import Folders
from swarm.gate.stored import WireChoice, asked_wire, choose_wire, engine_name, load_result
from swarm.gateway.app import create_app
from swarm.gateway.peer_map import map_of
from swarm.identity import Identity
from swarm.ids import ModelId, format_index_set
from swarm.interruptible import run_interruptibly
from swarm.net.addresses import format_address, is_loopback, parse_address
from swarm.registry.client import DEFAULT_REGISTRY
from swarm.wire.rows import Wire, WireForm, parse_wire

DEFAULT_GATEWAY = "127.0.0.1:8080"
SHUTDOWN_TIMEOUT_S = 3.0  # for answers under way at Ctrl-C


def serve(
    model: Annotated[
        Path, typer.Option("--model", metavar="FILE", help="GGUF file, or a backbone.gguf with its manifest.json.")
    ],
    gateway: Annotated[
        str,
        typer.Option("--gateway", envvar="SWARM_GATEWAY", metavar="HOST:PORT", help="Where the HTTP API listens."),
    ] = DEFAULT_GATEWAY,
    wire: Annotated[
        str | None,
        typer.Option(
            "--wire",
            metavar="OUT/BACK",
            help="How rows travel: exact, f32, bf16, f16, q8, fp8, or two of them.",
            show_default="the cheapest that passed this model's gate (`swarm verify --save`), else f32",
        ),
    ] = None,
    ctx: Annotated[
        int, typer.Option("--ctx", min=0, help="Tokens of context; 0 takes the model's own, up to 4096.")
    ] = 0,
    draft: DraftOption = 0,
    registry: RegistryOption = DEFAULT_REGISTRY,
    threads: ThreadsOption = 1,
    host: HostOption = "0.0.0.0",
    port: PortOption = 0,
    advertise: AdvertiseOption = None,
    exact_kernels: ExactKernelsOption = False,
    last_resort: Annotated[
        bool,
        typer.Option(
            "--last-resort",
            help="Compute experts here, from the model file, while no peer answers for them: slow, but no error.",
        ),
    ] = False,
    histogram: Annotated[
        bool,
        typer.Option(
            help="Tell the registry how often each expert is chosen (counts, no text), so that volunteers hold what is wanted.",
        ),
    ] = True,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A name, besides localhost, by which requests may call a gateway on loopback: behind a proxy. Repeatable.",
        ),
    ] = None,
    as_json: JsonOption = False,
    until_eof: UntilEofOption = False,
) -> None:
    """Serve a model: run everything but its experts here, and answer OpenAI-compatible requests."""
    folders = Folders.from_environment()
    identity = Identity.claim(folders.config, "serve")
    asked = parse_wire(wire) if wire else None
    if asked is not None and asked.back is WireForm.EXACT and not exact_kernels:
        raise UserError("the wire form exact needs --exact-kernels here and at the peers")
    gateway_address = parse_address(gateway, allow_any_port=True)
    advertised = settle_advertise(advertise)
    tame_openmp()
    give_memory_back()

    async def main() -> None:
        registries = await settle_registries(registry, folders)
        with ProgressBars() as bars:

            def progress(n_done: int, n_total: int) -> None:
                bars.update("hashing the model", n_done, n_total, is_bytes=True)

            with await run_interruptibly(lambda check: prepare_model(model, folders, progress, check)) as prepared:
                if last_resort and prepared.file is None:
                    raise UserError("--last-resort needs the whole model file: this one has no experts")
                choice = await asyncio.to_thread(_choose_wire, asked, prepared.manifest.model_id, folders)
                config = BackboneConfig(
                    registry=registries,
                    folders=folders,
                    model_file=model,
                    wire=choice.wire,
                    host=host,
                    port=port,
                    advertise=advertised,
                    engine=EngineConfig(n_ctx=ctx, n_threads=threads, exact_kernels=exact_kernels),
                    n_draft=draft,
                    last_resort=last_resort,
                    shares_histogram=histogram,
                )
                async with open_backbone(config, identity, prepared=prepared) as running:
                    await _serve_http(running, gateway_address, as_json, bars, choice, ready.set, allow_host or ())

    ready = asyncio.Event()
    run_daemon(main(), until_eof=until_eof, is_ready=ready.is_set)


def _choose_wire(asked: Wire | None, model: ModelId, folders: Folders) -> WireChoice:
    """Return the form asked for, else what the model's stored gate result allows."""
    result = load_result(folders.cache, model)
    return asked_wire(asked, result) if asked is not None else choose_wire(result, engine_name())


async def _serve_http(
    running: RunningBackbone,
    address: tuple[str, int],
    as_json: bool,
    bars: ProgressBars,
    choice: WireChoice,
    on_ready: Callable[[], None],
    allow_hosts: Collection[str],
) -> None:
    runner = await start_gateway(running, address, allow_hosts)
    try:
        bars.__exit__()
        on_ready()
        where = format_address(runner.addresses[0][:2])
        if as_json:
            print_json(
                {
                    "event": "ready",
                    "model": running.backbone.model_name,
                    "url": f"http://{where}/v1",
                    "node": str(running.endpoint.identity.node_id),
                    "wire": str(choice.wire),
                    "wire_because": choice.reason,
                }
            )
        else:
            out.print(f"Serving {running.backbone.model_name} at http://{where}/v1", highlight=False)
            out.print(f"Rows travel as {choice.wire}: {choice.reason}.", markup=False, highlight=False)
            _tell_missing(running)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def start_gateway(
    running: RunningBackbone, address: tuple[str, int], allow_hosts: Collection[str] = ()
) -> web.AppRunner:
    """Start the HTTP gateway; the caller cleans the runner up.

    Args:
        allow_hosts: names, besides this machine's own, by which requests may call a gateway that listens on loopback.

    Raises:
        UserError: the port is taken.
    """
    allowed = allow_hosts if is_loopback(address[0]) else None
    app = create_app(
        running.backbone,
        status=lambda: gateway_status(running),
        allowed_hosts=allowed,
        peer_map=lambda: map_of(running),
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, address[0], address[1]).start()
    except OSError as error:
        await runner.cleanup()
        where = format_address(address)
        raise UserError(f"cannot listen on {where}: {error.strerror}; choose another --gateway") from error
    return runner


def gateway_status(running: RunningBackbone) -> dict[str, Any]:
    """Return what `/health` shows."""
    missing = running.holders.missing()
    return {
        "model": running.backbone.model_name,
        "n_peers": len(running.holders.placement.destinations),
        "accept_length": round(running.backbone.drafts.accept_length, 3),
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
