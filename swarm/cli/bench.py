"""`swarm bench`: speed, measured. Figures are medians of interleaved repetitions; compare ratios within one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from swarm.bench.decode import N_PROMPT, DecodeOptions, measure_decode
from swarm.bench.dispatch import DispatchOptions, measure_dispatch
from swarm.bench.fanout import FanoutOptions, measure_fanout
from swarm.bench.prefill import SWEEP_TOKENS, PrefillOptions, measure_prefill
from swarm.bench.synthetic import SYNTH16, SyntheticModel, write_synthetic
from swarm.bench.testbed import PathOptions
from swarm.bench.transport import measure_latency, measure_star
from swarm.cli.options import DraftOption, JsonOption, ModelFileArgument, ThreadsOption
from swarm.cli.run_record import finish, write_run_record
from swarm.cli.runtime import ProgressBars, err, out, print_json, run_async, tame_openmp
from swarm.cli.slice_file import write_slice_file
from swarm.emulation.path import PathSpec
from swarm.errors import UserError
from swarm.files import Folders
from swarm.ids import parse_index_set
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
PathSeedOption = Annotated[int, typer.Option("--seed", help="Of loss and jitter.")]
PeersOption = Annotated[int, typer.Option("--peers", min=1, help="Peer processes to start.")]
WireOption = Annotated[str, typer.Option("--wire", metavar="OUT/BACK", help="How rows travel.")]
ModelOption = Annotated[
    str, typer.Option("--model", metavar="FILE|synth16", help="GGUF file, or the standard random model.")
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
    seed: PathSeedOption = 0,
    peers: PeersOption = 3,
    wire: WireOption = "q8/f16",
    model: ModelOption = "synth16",
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
    finish(figures, as_json, record)


@app.command()
def dispatch(
    rtt: RttOption = "0ms",
    jitter: JitterOption = "0ms",
    loss: LossOption = 0.0,
    rate: RateOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of loss, jitter and the choice of experts.")] = 0,
    peers: PeersOption = 3,
    wire: WireOption = "q8/f16",
    d_model: Annotated[int, typer.Option("--d-model", min=64, help="Values of a row; a multiple of 64.")] = 2048,
    n_experts: Annotated[int, typer.Option("--n-experts", min=1, help="Experts of the layer.")] = 64,
    experts_used: Annotated[int, typer.Option("--experts-used", min=1, help="Experts of each row.")] = 8,
    ff: Annotated[int, typer.Option("--ff", min=32, help="Width of an expert; a multiple of 32.")] = 256,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=4096, help="Rows of one dispatch.")] = 1,
    skew: Annotated[float, typer.Option("--skew", min=0, help="Exponent of Zipf's law over the experts.")] = 0.0,
    dispatches: Annotated[int, typer.Option("--dispatches", min=1, help="How many to measure.")] = 200,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bytes and time of one MoE layer's dispatch, beside bare stars of the same bytes."""
    options = DispatchOptions(
        d_model=d_model,
        n_expert=n_experts,
        n_expert_used=experts_used,
        n_ff_exp=ff,
        n_tokens=tokens,
        skew=skew,
        n_peers=peers,
        wire=parse_wire(wire),
        paths=_paths(rtt, jitter, loss, rate, seed),
        n_dispatches=dispatches,
        seed=seed,
    )
    model = synthetic_file(options.model)
    with ProgressBars() as bars:
        figures = run_async(
            measure_dispatch(options, model, lambda done, total: bars.update("dispatches", done, total))
        )
    finish(figures, as_json, record)


@app.command()
def transport(
    rtt: Annotated[str, typer.Option("--rtt", metavar="TIME", help="Round trip of the path.")] = "80ms",
    loss: LossOption = 0.0,
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help="Bytes each way.")] = "12KB",
    members: Annotated[int, typer.Option("--members", min=1, help="Members of the stars on loopback.")] = 3,
    dispatches: Annotated[int, typer.Option("--dispatches", min=1, help="How many over the path.")] = 20,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """What the transport costs: messages over an emulated path, and stars on loopback, ours and bare."""
    n_bytes = parse_size_bytes(size, "the size")
    spec = PathSpec(delay_s=parse_duration_s(rtt, "the round trip") / 2, loss=loss)

    async def measure() -> dict[str, Any]:
        latency = await measure_latency(size_out=n_bytes, size_back=n_bytes, spec=spec, n=dispatches)
        star = await measure_star(n_members=members)
        return {"latency": latency.as_json(), "star": star.as_json()}

    finish(run_async(measure()), as_json, record)


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
    seed: PathSeedOption = 0,
    peers: PeersOption = 3,
    wire: WireOption = "q8/f16",
    model: ModelOption = "synth16",
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
    finish(figures, as_json, record)


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
