"""`swarm verify`: is what the swarm computes what stock llama.cpp computes?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from swarm.backbone.assembly import BackboneConfig, open_backbone
from swarm.backbone.engine import EngineConfig
from swarm.backbone.stock import StockModel
from swarm.cli.options import JsonOption
from swarm.cli.runtime import ProgressBars, out, print_json, run_async
from swarm.emulation.processes import LocalSwarm
from swarm.errors import UserError
from swarm.files import Folders
from swarm.gate.verify import PROMPT_LENGTHS, VerifyReport, compare
from swarm.identity import Identity
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from swarm.native.library import load_library, use_exact_kernels
from swarm.registry.client import parse_registry
from swarm.wire.rows import Wire, WireForm, parse_wire

PROMPT_SEED = 1
COVER_TIMEOUT_S = 30.0


def verify(
    model: Annotated[Path, typer.Option("--model", metavar="FILE", help="GGUF file of the whole model.")],
    wire: Annotated[str, typer.Option("--wire", metavar="OUT/BACK", help="Wire form: exact or f32.")] = "exact",
    peers: Annotated[int, typer.Option("--peers", min=1, help="Peer processes to start.")] = 3,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to decode after each prompt.")] = 200,
    control: Annotated[
        bool, typer.Option("--control", help="Change one byte of one expert at a peer, and expect to notice.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a swarm on this machine and compare every logit with stock llama.cpp on the whole file.

    Exit code 0: the form `exact` is bit-identical (another form: done); with --control, the planted fault was found.
    """
    forms = parse_wire(wire)
    use_exact_kernels()
    result = run_async(_verify(model, forms, peers, tokens, control))
    if as_json:
        print_json(result)
    else:
        _print(result)
    passed = result["fault_found"] if control else result["passed"]
    if not passed:
        raise typer.Exit(1)


async def _verify(path: Path, wire: Wire, n_peers: int, n_tokens: int, control: bool) -> dict[str, Any]:
    with GgufFile(path) as file:
        spec = read_spec(file)
    if n_peers > spec.n_expert:
        raise UserError(f"more peers than experts: got {n_peers}, expected at most {spec.n_expert}")
    config = EngineConfig(
        n_ctx=max(PROMPT_LENGTHS) + n_tokens, n_batch=512, n_ubatch=512, n_threads=1, exact_kernels=True
    )
    with tempfile.TemporaryDirectory(prefix="swarm-verify-") as folder, ProgressBars() as bars:
        home = Path(folder)
        async with LocalSwarm(home) as swarm:
            backbone_config = BackboneConfig(
                registry=parse_registry(swarm.registry),
                folders=Folders(home / "config", home / "state", home / "cache"),
                model_file=path,
                wire=wire,
                host="127.0.0.1",
                engine=config,
            )
            async with open_backbone(backbone_config, Identity.generate()) as running:
                # The fault goes into the first MoE layer, where every later value feels it; any expert is used often.
                fault = ("--plant-fault", f"{spec.moe_layers[0]}:0") if control else ()
                await swarm.add_peers(n_peers, spec.n_expert, "--exact-kernels", faulty=fault)
                await running.holders.wait_complete(COVER_TIMEOUT_S)
                with StockModel(path, config) as stock:
                    report = await compare(
                        running,
                        stock,
                        n_tokens=n_tokens,
                        prompt_tokens=_prompt(stock.n_vocab),
                        progress=lambda done, total: bars.update("comparing", done, total),
                    )
    return _result(report, path, wire, control)


def _prompt(n_vocab: int) -> list[int]:
    """Return the prompts' tokens: random ones, so that the experts' use is broad and any vocabulary will do."""
    rng = np.random.default_rng(PROMPT_SEED)
    return [int(token) for token in rng.integers(1, n_vocab, max(PROMPT_LENGTHS))]


def _result(report: VerifyReport, path: Path, wire: Wire, control: bool) -> dict[str, Any]:
    library = load_library()
    n_positions = sum(prompt.n_positions for prompt in report.prompts)
    argmax_agreement = sum(prompt.n_same_argmax for prompt in report.prompts) / n_positions
    is_required = wire.back is WireForm.EXACT
    return {
        "model": path.name,
        "engine": f"{library.name} {library.version}",
        "wire": str(wire),
        "identical": report.identical,
        "passed": report.assignments_add_up and (report.identical or not is_required),
        "control": control,
        "fault_found": control and not report.identical,
        "n_assignments": report.n_assignments,
        "n_assignments_expected": report.n_assignments_expected,
        "assignments_add_up": report.assignments_add_up,
        "assignments_by_peer": report.assignments_by_peer,
        "argmax_agreement": argmax_agreement,
        "prompts": [
            {
                "n_prompt": prompt.n_prompt,
                "n_positions": prompt.n_positions,
                "n_different": prompt.n_different,
                "first_difference": prompt.first_difference,
                "max_difference": prompt.max_difference,
            }
            for prompt in report.prompts
        ],
    }


def _print(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['model']} over {result['wire']}, {result['engine']}", title_justify="left")
    for column in ("prompt tokens", "positions", "different", "largest difference"):
        table.add_column(column, justify="right")
    for prompt in result["prompts"]:
        table.add_row(
            str(prompt["n_prompt"]),
            str(prompt["n_positions"]),
            str(prompt["n_different"]),
            f"{prompt['max_difference']:.3g}",
        )
    out.print(table)
    verdict = "identical, bit for bit" if result["identical"] else "not identical"
    out.print(f"Against stock llama.cpp: {verdict}; same likeliest token in {result['argmax_agreement']:.2%}.")
    out.print(
        f"Peers computed {result['n_assignments']} (token, expert) pairs, expected {result['n_assignments_expected']}."
    )
    if result["control"]:
        out.print("The planted fault was found." if result["fault_found"] else "The planted fault was NOT found.")
