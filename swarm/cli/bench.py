"""`swarm bench`: speed, measured. Figures are medians of interleaved repetitions; compare ratios within one run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from swarm import __version__
from swarm.bench.decode import N_PROMPT, DecodeOptions, measure_decode
from swarm.bench.fanout import FanoutOptions, measure_fanout
from swarm.bench.prefill import SWEEP_TOKENS, PrefillOptions, measure_prefill
from swarm.bench.synthetic import SYNTH16, SyntheticModel, write_synthetic
from swarm.bench.testbed import PathOptions
from swarm.cli.options import DraftOption, JsonOption, ModelFileArgument, ThreadsOption
from swarm.cli.runtime import ProgressBars, err, out, print_json, run_async, tame_openmp
from swarm.cli.slice_file import write_slice_file
from swarm.errors import UserError
from swarm.files import Folders, write_atomically
from swarm.ids import parse_index_set
from swarm.native.library import load_library
from swarm.units import parse_duration_s, parse_rate_bit_s, parse_size_bytes
from swarm.wire.rows import parse_wire

app = typer.Typer(name="bench", no_args_is_help=True, help="Measure speed over emulated paths, on random models.")

RttOption = Annotated[
    str, typer.Option("--rtt", metavar="TIME[,TIME...]", help="Round trip to the peers; a list gives each its own.")
]
JitterOption = Annotated[str, typer.Option("--jitter", metavar="TIME", help="Round trips vary by +- this.")]
LossOption = Annotated[float, typer.Option("--loss", min=0, max=1, help="Share of packets lost.")]
RateOption = Annotated[
    str | None,
    typer.Option("--rate", metavar="RATE", help="Each host's access link per direction.", show_default="no limit"),
]
RecordOption = Annotated[
    Path | None, typer.Option("--record", metavar="FILE", help="Write a run record: figures, command, commit, machine.")
]


@app.callback()
def bench() -> None:
    """Set nothing up: it makes the commands below subcommands."""


@app.command()
def decode(
    rtt: RttOption = "30ms",
    jitter: JitterOption = "0ms",
    loss: LossOption = 0.0,
    rate: RateOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of loss and jitter.")] = 0,
    peers: Annotated[int, typer.Option("--peers", min=1, help="Peer processes to start.")] = 3,
    wire: Annotated[str, typer.Option("--wire", metavar="OUT/BACK", help="How rows travel.")] = "q8/f16",
    model: Annotated[
        str, typer.Option("--model", metavar="FILE|synth16", help="GGUF file, or the standard random model.")
    ] = "synth16",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to decode in each repetition.")] = 32,
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Interleaved with stock llama.cpp.")] = 5,
    draft: DraftOption = 0,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="Text whose first tokens are the prompt.", show_default="random tokens"
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of the prompt.")] = N_PROMPT,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second over emulated paths, how close to the bound of round trips, next to stock llama.cpp."""
    options = DecodeOptions(
        model=_model_file(model),
        n_peers=peers,
        wire=parse_wire(wire),
        paths=_paths(rtt, jitter, loss, rate, seed),
        n_tokens=tokens,
        n_repetitions=repetitions,
        n_draft=draft,
        n_prompt=prompt_tokens,
        text=_text_file(text) if text is not None else None,
    )
    with ProgressBars() as bars:
        figures = run_async(measure_decode(options, lambda done, total: bars.update("repetitions", done, total)))
    _finish(figures, as_json, record)


@app.command()
def fanout(
    model: ModelFileArgument,
    text: Annotated[
        Path,
        typer.Option("--text", metavar="FILE", help="Text of the kind the model will write; half is learned from."),
    ],
    peers: Annotated[str, typer.Option("--peers", metavar="N[,N...]", help="Numbers of peers.")] = "4,16",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens of the text to read.")] = 20_480,
    threads: ThreadsOption = 1,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Write the clustered slices there, for `swarm join --slice`."),
    ] = None,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Peers that a token meets, for contiguous slices and for slices clustered by which experts are chosen together."""
    options = FanoutOptions(
        model=_model_file(str(model)),
        text=_text_file(text),
        n_peers=tuple(sorted(parse_index_set(peers, "numbers of peers"))),
        n_tokens=tokens,
        n_threads=threads,
    )
    tame_openmp()
    with ProgressBars() as bars:
        found = measure_fanout(options, lambda done, total: bars.update("reading the text", done, total))
    if save is not None:
        for n_peers, shares in found.shares.items():
            folder = save / f"{n_peers}-peers"
            folder.mkdir(parents=True, exist_ok=True)
            for index, share in enumerate(shares):
                write_slice_file(folder / f"slice-{index}.json", share)
            err.print(f"wrote {n_peers} slices to {folder}", style="dim", highlight=False, markup=False)
    if record is not None:
        write_run_record(record, found.figures)
    if as_json:
        print_json(found.figures)
    else:
        _print_fanout(found.figures)


def _print_fanout(figures: dict[str, Any]) -> None:
    title = f"{figures['model']}: peers that a token meets in a layer, {figures['n_expert_used']} experts used"
    table = Table(title=title, title_justify="left")
    for column in ("peers", "uniform router", "contiguous", "clustered", "load, contiguous", "load, clustered"):
        table.add_column(column, justify="right")
    for row in figures["destinations_per_token"]:
        cells = [row[name] for name in ("uniform", "contiguous", "clustered")]
        cells += [row["contiguous_imbalance"], row["clustered_imbalance"]]
        table.add_row(str(row["n_peers"]), *(f"{cell:.2f}" for cell in cells))
    out.print(table)
    out.print(
        f"Clustered on {figures['n_tokens_learned']} tokens, all judged on the next {figures['n_tokens_judged']}. "
        "Load is the busiest peer's over the mean, in a layer.",
        style="dim",
        highlight=False,
    )


@app.command()
def prefill(
    rtt: RttOption = "20ms",
    jitter: JitterOption = "0ms",
    loss: LossOption = 0.0,
    rate: RateOption = "100Mbit",
    seed: Annotated[int, typer.Option("--seed", help="Of loss and jitter.")] = 0,
    peers: Annotated[int, typer.Option("--peers", min=1, help="Peer processes to start.")] = 3,
    wire: Annotated[str, typer.Option("--wire", metavar="OUT/BACK", help="How rows travel.")] = "q8/f16",
    model: Annotated[
        str, typer.Option("--model", metavar="FILE|synth16", help="GGUF file, or the standard random model.")
    ] = "synth16",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of the prompt, computed in one step.")] = 512,
    chunk: Annotated[
        str, typer.Option("--chunk", metavar="SIZE|0", help="First chunk of a batch; 0 measures whole batches alone.")
    ] = "32KiB",
    sweep: Annotated[
        str,
        typer.Option(
            "--sweep",
            metavar="RATE[,RATE...]|none",
            help=f"Further rates, once each, with --tokens and with {SWEEP_TOKENS}.",
        ),
    ] = "10Mbit,100Mbit,1Gbit",
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Whole and cut batches in turn.")] = 5,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prompt tokens per second over emulated paths: batches cut into chunks, and whole; where bandwidth begins to bind."""
    options = PrefillOptions(
        model=_model_file(model),
        n_peers=peers,
        wire=parse_wire(wire),
        paths=_paths(rtt, jitter, loss, rate, seed),
        n_tokens=tokens,
        n_repetitions=repetitions,
        chunk_bytes=0 if chunk == "0" else parse_size_bytes(chunk, "the chunk"),
        sweep_bit_s=()
        if sweep == "none"
        else tuple(parse_rate_bit_s(each, "a rate of the sweep") for each in sweep.split(",")),
    )
    with ProgressBars() as bars:
        figures = run_async(measure_prefill(options, lambda done, total: bars.update("repetitions", done, total)))
    _finish(figures, as_json, record)


def _paths(rtt: str, jitter: str, loss: float, rate: str | None, seed: int) -> PathOptions:
    return PathOptions(
        rtts_s=tuple(parse_duration_s(each, "the round trip") for each in rtt.split(",")),
        jitter_s=parse_duration_s(jitter, "the jitter"),
        loss=loss,
        rate_bit_s=parse_rate_bit_s(rate, "the rate") if rate else None,
        seed=seed,
    )


def _model_file(text: str) -> Path:
    if text != SYNTH16.name:
        path = Path(text)
        if not path.exists():
            raise UserError(f"no such model: {text}; give a GGUF file or {SYNTH16.name}")
        return path
    return synthetic_file(SYNTH16)


def _text_file(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"no such text file: {path}")
    return path


def synthetic_file(model: SyntheticModel) -> Path:
    """Return the cached file of a random model, written at the first call."""
    folder = Folders.from_environment().cache / "synthetic"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model.name}-{model.seed}.gguf"
    if not path.exists():
        err.print(f"writing the random model {model.name} to {path}", style="dim", highlight=False, markup=False)
        write_synthetic(path, model)
    return path


def _finish(figures: dict[str, Any], as_json: bool, record: Path | None) -> None:
    if record is not None:
        write_run_record(record, figures)
    if as_json:
        print_json(figures)
        return
    table = Table(show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        if isinstance(value, dict):
            for inner, each in value.items():
                table.add_row(f"{name}.{inner}", _shown(each))
        elif not isinstance(value, list):
            table.add_row(name, _shown(value))
    out.print(table)


def _shown(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def write_run_record(path: Path, figures: dict[str, Any]) -> None:
    """Write what was measured, and everything needed to judge or repeat it."""
    library = load_library()
    record = {
        "command": shlex.join(["swarm", *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "n_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "versions": {"swarm": __version__, "python": platform.python_version(), library.name: library.version},
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(record, indent=1).encode() + b"\n")


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
