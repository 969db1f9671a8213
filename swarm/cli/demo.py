"""`swarm demo`: the whole system on this machine, doing its real job once."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import swarm as package
from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.engine import EngineConfig
from swarm.backbone.requests import GenerationRequest, SamplingParams
from swarm.backbone.stock import StockModel
from swarm.cli.gateway_options import GatewaySettings
from swarm.cli.options import DraftOption, JsonOption
from swarm.cli.runtime import ProgressBars, err, out, print_json, run_async, tame_openmp
from swarm.cli.serve import DEFAULT_GATEWAY, start_gateway
from swarm.emulation.processes import LocalSwarm
from swarm.errors import UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from swarm.net.addresses import format_address, parse_address
from swarm.registry.client import parse_registry
from swarm.wire.rows import Wire, WireForm, parse_wire

DEFAULT_PROMPT = "The :mod:`json` module provides"
EMBEDDED_MODEL = Path("examples") / "tiny_moe" / "model-Q4_K_M.gguf"
COVER_TIMEOUT_S = 30.0


def demo(
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")] = DEFAULT_PROMPT,
    peers: Annotated[int, typer.Option("--peers", min=1, help="Peer processes to start.")] = 3,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens to generate.")] = 120,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", help="GGUF file.", show_default="the embedded tiny model"),
    ] = None,
    wire: Annotated[
        str,
        typer.Option(
            "--wire", metavar="OUT/BACK", help="How rows travel: exact, f32, bf16, f16, q8, fp8, or two of them."
        ),
    ] = "f32",
    draft: DraftOption = 0,
    gateway: Annotated[
        str, typer.Option("--gateway", metavar="HOST:PORT", help="Where the HTTP API listens, without --once.")
    ] = DEFAULT_GATEWAY,
    once: Annotated[bool, typer.Option("--once", help="Leave after one answer instead of serving on.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a relay, some peers and a backbone on this machine, and let them write a text together."""
    path = model or embedded_model()
    forms = parse_wire(wire)
    tame_openmp()
    serve_at = None if once or as_json else parse_address(gateway, allow_any_port=True)
    run_async(_demo(path, prompt, peers, tokens, forms, draft, as_json, serve_at))


def embedded_model() -> Path:
    for root in (Path(package.__file__).parent.parent, Path.cwd()):
        if (root / EMBEDDED_MODEL).exists():
            return root / EMBEDDED_MODEL
    raise UserError(
        f"the embedded model {EMBEDDED_MODEL} is not here; run this in the repository, or give --model FILE"
    )


async def _demo(
    path: Path,
    prompt: str,
    n_peers: int,
    n_tokens: int,
    wire: Wire,
    n_draft: int,
    as_json: bool,
    serve_at: tuple[str, int] | None,
) -> None:
    with GgufFile(path) as file:
        spec = read_spec(file)
    if n_peers > spec.n_expert:
        raise UserError(f"more peers than experts: got {n_peers}, expected at most {spec.n_expert}")
    exact = wire.back is WireForm.EXACT
    # One thread for each process: several processes share this machine's cores, and OpenMP's idle threads spin.
    engine = EngineConfig(n_threads=1, exact_kernels=exact)
    with tempfile.TemporaryDirectory(prefix="swarm-demo-") as folder:
        home = Path(folder)
        async with LocalSwarm(home) as swarm:
            _say(f"relay and registry: {swarm.registry[:16]}...@{swarm.registry.rpartition('@')[2]}")
            config = BackboneConfig(
                registry=parse_registry(swarm.registry),
                folders=Folders.below(home),
                model_file=path,
                wire=wire,
                host="127.0.0.1",
                engine=engine,
                n_draft=n_draft,
                tls_links=True,
            )
            with ProgressBars() as bars:
                opening = open_backbone(
                    config,
                    Identity.generate(),
                    lambda done, total: bars.update("hashing the model", done, total, is_bytes=True),
                )
                async with opening as running:
                    bars.__exit__()
                    _say(f"backbone: {running.backbone.model_name}, without its {spec.n_expert} experts a layer")
                    started = time.monotonic()
                    await swarm.add_peers(n_peers, spec.n_expert, *(["--exact-kernels"] if exact else []))
                    await running.holders.wait_complete(COVER_TIMEOUT_S)
                    _say(
                        f"{n_peers} peers fetched their experts from the backbone, checked and loaded them "
                        f"in {time.monotonic() - started:.1f} s"
                    )
                    report = await _generate(running, path, engine, prompt, n_tokens, as_json)
                    if as_json:
                        print_json(report)
                    else:
                        _print(report, running)
                    if serve_at is not None:
                        await _serve_on(running, serve_at)


def _say(text: str) -> None:
    err.print(text, style="dim", highlight=False, markup=False)


async def _generate(
    running: RunningBackbone, path: Path, engine: EngineConfig, prompt: str, n_tokens: int, as_json: bool
) -> dict[str, Any]:
    request = GenerationRequest(
        prompt=prompt, max_tokens=n_tokens, sampling=SamplingParams(temperature=0.7, top_k=40, seed=1)
    )
    prompt_tokens = running.backbone.tokenize(request)
    stats, counts = running.dispatcher.stats, running.endpoint.counts
    text: list[str] = []
    first_token_s = 0.0
    first_token_at = started = time.perf_counter()
    # Decode alone is measured: from the first token on, the prompt's prefill left out.
    n_first = rounds = 0
    before = counts.now()
    n_completion = 0
    if not as_json:
        print(prompt, end="", flush=True)
    async for delta in running.backbone.generate(request):
        if not text:
            first_token_at = time.perf_counter()
            first_token_s = first_token_at - started
            n_first, rounds = delta.n_completion_tokens, stats.n_round_trips
            before = counts.now()
        text.append(delta.text)
        n_completion = delta.n_completion_tokens
        if not as_json:
            print(delta.text, end="", flush=True)
    seconds = time.perf_counter() - first_token_at
    if not as_json:
        print("\n", flush=True)
    moved, n_decoded = counts.now() - before, n_completion - n_first
    n_token_layers = max(n_decoded, 1) * len(running.manifest.spec.moe_layers)  # refused drafts are part of the price
    stock_tokens_per_s = await asyncio.to_thread(_stock_speed, path, engine, prompt_tokens, max(n_decoded, 1))
    return {
        "model": running.backbone.model_name,
        "wire": str(running.dispatcher.wire),
        "prompt": prompt,
        "text": "".join(text),
        "n_prompt_tokens": len(prompt_tokens),
        "n_tokens": n_completion,
        "first_token_s": first_token_s,
        "tokens_per_s": n_decoded / seconds,
        "round_trips_per_token": (stats.n_round_trips - rounds) / max(n_decoded, 1),
        "accept_length": running.backbone.drafts.accept_length,
        "bytes_out_per_token_layer": moved.total.sent / n_token_layers,
        "bytes_back_per_token_layer": moved.total.received / n_token_layers,
        "bytes_by_path": moved.shares(n_token_layers),
        "stock_tokens_per_s": stock_tokens_per_s,
        "peers": [_peer_report(running, node) for node in running.holders.placement.destinations],
    }


def _peer_report(running: RunningBackbone, node: NodeId) -> dict[str, Any]:
    record = running.holders.placement.announcement(node)
    layers = record.experts.grouped() if record is not None else []
    return {
        "node": str(node),
        "experts": [{"layers": layer_text, "experts": expert_text} for layer_text, expert_text in layers],
        "assignments": running.dispatcher.stats.assignments.get(node, 0),
    }


def _stock_speed(path: Path, engine: EngineConfig, prompt: list[int], n_tokens: int) -> float:
    with StockModel(path, engine) as stock:
        return stock.tokens_per_s(prompt, n_tokens)


def _print(report: dict[str, Any], running: RunningBackbone) -> None:
    spec = running.manifest.spec
    table = Table(
        title=f"{report['model']} over {len(report['peers'])} peers, wire form {report['wire']}", title_justify="left"
    )
    table.add_column("")
    table.add_column("swarm", justify="right")
    table.add_column("stock llama.cpp", justify="right")
    table.add_row("tokens/s, decoding", f"{report['tokens_per_s']:.1f}", f"{report['stock_tokens_per_s']:.1f}")
    table.add_row("first token", f"{report['first_token_s'] * 1000:.0f} ms", "")
    table.add_row(
        f"round trips per token ({len(spec.moe_layers)} MoE layers)", f"{report['round_trips_per_token']:.2f}", "0"
    )
    table.add_row("tokens added by a step", f"{report['accept_length']:.2f}", "1")
    table.add_row("bytes per token and layer, out", f"{report['bytes_out_per_token_layer']:.0f}", "0")
    table.add_row("bytes per token and layer, back", f"{report['bytes_back_per_token_layer']:.0f}", "0")
    out.print(table)
    peers = Table(title="Who computed what", title_justify="left")
    for column in ("peer", "experts", "of layers"):
        peers.add_column(column)
    peers.add_column("(token, expert) pairs", justify="right")
    for peer in report["peers"]:
        held = peer["experts"][0] if peer["experts"] else {"experts": "", "layers": ""}
        peers.add_row(peer["node"][:8], held["experts"], held["layers"], str(peer["assignments"]))
    out.print(peers)
    out.print(
        "Bytes are the payload of UDP and of TLS links, all peers together, QUIC, TLS and acknowledgements included. One "
        "thread for each process. A model this small fits into any machine, so a swarm can only lose; it pays where the model "
        "does not fit.",
        style="dim",
        highlight=False,
    )


async def _serve_on(running: RunningBackbone, address: tuple[str, int]) -> None:
    runner = await start_gateway(running, GatewaySettings(address=address))
    try:
        where = format_address(runner.addresses[0][:2])
        out.print(f"\nThe swarm goes on serving at http://{where}/v1 until Ctrl-C. Try:", highlight=False)
        out.print(
            f"""  curl http://{where}/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"prompt": "To create a new thread", "max_tokens": 60}}'""",
            highlight=False,
            markup=False,
        )
        sys.stdout.flush()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
