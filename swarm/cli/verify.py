"""`swarm verify`: is what the swarm computes what stock llama.cpp computes, and which wire forms keep it so?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from swarm.cli.options import JsonOption
from swarm.cli.runtime import ProgressBars, out, print_json, run_async
from swarm.errors import UserError
from swarm.files import Folders, write_atomically
from swarm.gate.form_table import all_wires
from swarm.gate.outcome import EXACT, Outcome, VerifyConfig
from swarm.gate.stored import save_result
from swarm.gate.verdict import DEFAULT_THRESHOLDS, MIN_TEXT_TOKENS, Thresholds
from swarm.gate.verification import verify_model
from swarm.ids import parse_index_set
from swarm.native.library import use_exact_kernels
from swarm.wire.rows import Wire, WireForm, parse_wire

if TYPE_CHECKING:
    from swarm.gate.architecture_sweep import SweepReport

HELDOUT_NAME = "heldout.txt"


def verify(
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", help="GGUF file of the whole model.", show_default="none; or --arch"),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            metavar="NAMES",
            help="Instead of a model: compare small random models of these architectures, all or a comma list.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="With --arch: architectures at a time.", show_default="one for each core"),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option("--docs", metavar="FILE", help="With --arch: write the table into this document."),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(
            "--wire",
            metavar="FORMS",
            help="Wire forms: all, or a comma list like exact,q8/f16.",
            show_default="exact; all with --save",
        ),
    ] = None,
    peers: Annotated[int, typer.Option("--peers", min=1, help="Peer processes to start.")] = 3,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to decode after each prompt.")] = 200,
    control: Annotated[
        bool, typer.Option("--control", help="Change one byte of one expert at a peer, and expect to notice.")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Held-out text to measure forms on.",
            show_default=f"{HELDOUT_NAME} beside the model",
        ),
    ] = None,
    text_tokens: Annotated[
        int | None,
        typer.Option("--text-tokens", min=1, help="Tokens of the text to use.", show_default="20000; 512 by layers"),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="SET",
            help="Compare layer by layer, with one layer in memory at a time: auto, or layers like 0,8-11.",
            show_default="only if the model does not fit in memory",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="Compute the experts of the forms there (auto, cuda, ...) and compare with stock on the CPU; nothing is saved.",
            show_default="the CPU, with exact kernels, as peers do",
        ),
    ] = None,
    min_mean_cosine: Annotated[
        float, typer.Option("--min-mean-cosine", help="Least mean cosine of logits.")
    ] = DEFAULT_THRESHOLDS.min_mean_cosine,
    min_clear_agreement: Annotated[
        float, typer.Option("--min-clear-agreement", help="Least share of clear positions with stock's token.")
    ] = DEFAULT_THRESHOLDS.min_clear_agreement,
    max_perplexity_change: Annotated[
        float, typer.Option("--max-perplexity-change", help="Most that the perplexity may change, as a share.")
    ] = DEFAULT_THRESHOLDS.max_perplexity_change,
    min_layer_cosine: Annotated[
        float, typer.Option("--min-layer-cosine", help="Layer by layer: least mean cosine of a layer's expert output.")
    ] = DEFAULT_THRESHOLDS.min_layer_cosine,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the result; serve then uses the cheapest form that passed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a swarm on this machine and compare it with stock llama.cpp on the whole file.

    The form `exact` must be bit-identical. Other forms are measured on a text: agreement, cosine and perplexity.

    With --arch, no model is needed: each architecture of llama.cpp is tried with small random models, in processes of their own.

    Exit code 1: a form named in --wire failed (with `all`: exact or f32); with --control, the planted fault stayed unseen; with
    --arch, something was computed and differs, or one of those named could not be compared.
    """
    if (model is None) == (arch is None):
        raise UserError("give either --model FILE or --arch NAMES")
    if model is None:
        assert arch is not None
        _verify_architectures(arch, jobs, docs, as_json=as_json)
        return
    wires, required = parse_wires(wire or ("all" if save else "exact"))
    config = VerifyConfig(
        path=model,
        folders=Folders.from_environment(),
        wires=wires,
        required=required,
        n_peers=peers,
        n_tokens=tokens,
        control=control,
        text=text or _beside(model),
        n_text_tokens=text_tokens,
        device=device,
        layers=_parse_layers(layers),
        thresholds=Thresholds(
            min_mean_cosine=min_mean_cosine,
            min_clear_agreement=min_clear_agreement,
            max_perplexity_change=max_perplexity_change,
            min_layer_cosine=min_layer_cosine,
        ),
    )
    if device is not None:
        _require_device_forms(config, save=save)
    if save:
        _require_savable(config)
    if config.layers is not None and wires == (EXACT,):
        raise UserError("--layers compares forms with f32: name some with --wire, or all of them")
    use_exact_kernels()
    with ProgressBars() as bars:
        outcome = run_async(verify_model(config, bars.update))
    saved = None
    if save and outcome.gate is not None and outcome.is_shortcut_honest:
        saved = str(save_result(config.folders.cache, outcome.gate))
    result = outcome.to_json() | {"saved": saved}
    if as_json:
        print_json(result)
    else:
        _print(outcome, result)
    if not (outcome.fault_found if control else outcome.passed):
        raise typer.Exit(1)


def _verify_architectures(names: str, n_jobs: int | None, docs: Path | None, *, as_json: bool) -> None:
    from swarm.gate.architecture_docs import replace_table
    from swarm.gate.architecture_sweep import chosen_recipes, sweep

    recipes = chosen_recipes(names)
    text = _read_document(docs) if docs is not None else ""
    with ProgressBars() as bars:
        report = run_async(
            sweep(recipes, lambda _, done, total: bars.update("architectures", done, total), n_jobs=n_jobs)
        )
    if docs is not None:
        write_atomically(docs, replace_table(text, report).encode())
    if as_json:
        print_json(report.to_json())
    else:
        _print_architectures(report)
    if report.is_silently_wrong or (names != "all" and report.n_identical < len(recipes)):
        raise typer.Exit(1)


def _read_document(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _print_architectures(report: SweepReport) -> None:
    table = Table(title=f"Architectures against stock llama.cpp, {report.to_json()['engine']}", title_justify="left")
    for column in ("architecture", "status", "min cos", "variants", "reason"):
        table.add_column(column)
    for each in report.architectures:
        cosine = "-" if each.min_cosine is None else f"{each.min_cosine:.6f}"
        table.add_row(each.name, each.status, cosine, str(len(each.variants)), each.reason)
    out.print(table)
    out.print(f"{report.n_identical} of {len(report.architectures)} identical, bit for bit.")


def parse_wires(text: str) -> tuple[tuple[Wire, ...], frozenset[Wire]]:
    """Return the forms that `--wire` names, each once, and which of them must pass; raises UserError."""
    if text == "all":
        return all_wires(), frozenset({EXACT, Wire(WireForm.F32, WireForm.F32)})
    wires = tuple(dict.fromkeys(parse_wire(part.strip()) for part in text.split(",")))
    if EXACT in wires:  # first: it is the one that the real swarm is compared in
        wires = (EXACT, *(wire for wire in wires if wire != EXACT))
    return wires, frozenset(wires)


def _parse_layers(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    return frozenset() if text == "auto" else parse_index_set(text, "layers")


def _beside(model: Path) -> Path | None:
    path = model.with_name(HELDOUT_NAME)
    return path if path.is_file() else None


def _require_device_forms(config: VerifyConfig, *, save: bool) -> None:
    if EXACT in config.wires or config.control or config.layers is not None or save:
        raise UserError(
            "--device compares forms other than exact on a text: name some with --wire, such as f32,q8, "
            "and leave --control, --layers and --save out"
        )


def _require_savable(config: VerifyConfig) -> None:
    if not config.needs_table:
        raise UserError(
            "nothing to save: --save needs forms that are measured on a text; leave --control and --wire out"
        )
    if config.layers is None and config.n_text_tokens is not None and config.n_text_tokens < MIN_TEXT_TOKENS:
        raise UserError(
            f"too few tokens to save a result: got --text-tokens {config.n_text_tokens}, expected {MIN_TEXT_TOKENS} or more"
        )


def _print(outcome: Outcome, result: dict[str, Any]) -> None:
    first = outcome.config.wires[0]
    if outcome.prompts is not None:
        table = Table(title=f"{result['model']} over {first}, {result['engine']}", title_justify="left")
        for column in ("prompt tokens", "positions", "different", "largest difference"):
            table.add_column(column, justify="right")
        for prompt in outcome.prompts.prompts:
            table.add_row(
                str(prompt.n_prompt), str(prompt.n_positions), str(prompt.n_different), f"{prompt.max_difference:.3g}"
            )
        out.print(table)
        verdict = "identical, bit for bit" if outcome.prompts.identical else "not identical"
        out.print(f"Against stock llama.cpp: {verdict}; same likeliest token in {result['argmax_agreement']:.2%}.")
        out.print(
            f"Peers computed {result['n_assignments']} (token, expert) pairs, "
            f"expected {result['n_assignments_expected']}."
        )
    if outcome.config.control:
        out.print("The planted fault was found." if outcome.fault_found else "The planted fault was NOT found.")
    if outcome.gate is None and outcome.forms and outcome.config.device is not None:
        out.print(_form_table(outcome))
    if outcome.gate is None:
        return
    out.print(_form_table(outcome))
    if outcome.n_shortcut_differences:
        verdict = "identical, bit for bit" if outcome.is_shortcut_honest else "NOT identical: do not trust the table"
        out.print(f"Simulated and real peers, in each form: {verdict}.")
    for form in outcome.forms:
        for reason in form.reasons:
            out.print(f"{form.wire} failed: {reason}.", markup=False)
    out.print(f"serve would use {result['chosen']}: {result['chosen_because']}.", markup=False)
    if result["saved"]:
        out.print(f"Saved in {result['saved']}.", markup=False)


def _form_table(outcome: Outcome) -> Table:
    against = "stock llama.cpp" if outcome.method == "logits" else "f32, worst sampled layer"
    table = Table(title=f"Forms against {against}, {outcome.n_text_tokens} tokens of text", title_justify="left")
    table.add_column("form")
    for column in ("bytes", "argmax", "clear", "min cos", "mean cos", "ppl"):
        table.add_column(column, justify="right")
    table.add_column("")
    for form in outcome.forms:
        table.add_row(
            str(form.wire),
            str(form.bytes_per_row),
            _share(form.argmax_agreement),
            _share(form.clear_agreement),
            "-" if form.min_cosine is None else f"{form.min_cosine:.5f}",
            "-" if form.mean_cosine is None else f"{form.mean_cosine:.6f}",
            "-" if form.perplexity_ratio is None else f"x{form.perplexity_ratio:.4f}",
            "passed" if form.passed else "failed",
        )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
