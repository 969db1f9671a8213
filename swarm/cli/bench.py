"""`swarm bench`: speed, measured. Figures are medians of interleaved repetitions; compare ratios within one run."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from swarm.bench.decode import N_PROMPT, DecodeOptions, measure_decode
from swarm.bench.dispatch import DispatchOptions, measure_dispatch
from swarm.bench.experts import ExpertsOptions, measure_experts
from swarm.bench.failover import FailoverOptions, Kind, measure_failover
from swarm.bench.fanout import FanoutOptions, measure_fanout
from swarm.bench.in_process import (
    InProcessOptions,
    measure_decode_in_process,
    measure_dispatch_in_process,
    measure_prefill_in_process,
)
from swarm.bench.latency import LatencyOptions, measure_latency
from swarm.bench.prefill import SWEEP_REPETITIONS, SWEEP_TOKENS, PrefillOptions, measure_prefill
from swarm.bench.registry import simulate_registry
from swarm.bench.registry_hosts import RegistryOptions
from swarm.bench.registry_processes import ProcessOptions, measure_processes
from swarm.bench.sweep import SweepOptions, measure_sweep
from swarm.bench.synthetic import NAMED_MODELS, SyntheticModel, write_synthetic
from swarm.bench.testbed import PathOptions
from swarm.bench.transport import measure_star
from swarm.bench.wire_bytes import SLICES, WireBytesOptions, measure_wire_bytes
from swarm.cli.demo import embedded_model
from swarm.cli.options import DraftOption, JsonOption, ModelFileArgument, ThreadsOption
from swarm.cli.run_record import finish, write_run_record
from swarm.cli.runtime import ProgressBars, err, out, print_json, run_async, tame_openmp
from swarm.cli.slice_file import write_slice_file
from swarm.errors import UserError
from swarm.files import Folders
from swarm.ids import parse_index_set
from swarm.interruptible import Check, run_interruptibly
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
    typer.Option("--rate", metavar="RATE", help="Each host's access link per direction; no limit without a rate."),
]
PathSeedOption = Annotated[int, typer.Option("--seed", help="Of loss and jitter.")]
PeersOption = Annotated[
    int, typer.Option("--peers", min=0, help="Peer processes to start; 0: all experts in this process, no network.")
]
InProcessThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=1024,
        help="Threads of llama.cpp and of the experts; only with --peers 0.",
        show_default="all cores with --peers 0, else 1",
    ),
]
WireOption = Annotated[str, typer.Option("--wire", metavar="OUT/BACK", help="How rows travel.")]
ModelOption = Annotated[
    str, typer.Option("--model", metavar=f"FILE|{'|'.join(NAMED_MODELS)}", help="GGUF file, or a random model by name.")
]
RecordOption = Annotated[
    Path | None, typer.Option("--record", metavar="FILE", help="Write a run record: figures, command, commit, machine.")
]


# What people read of lists, and its headings; the JSON has more.
BYTES_COLUMNS = {
    "n_peers": "peers",
    "slices": "slices",
    "wire": "form",
    "destinations_per_token": "met",
    "bytes_out_per_token_layer": "out",
    "bytes_back_per_token_layer": "back",
    "bytes_all_destinations": "all peers",
    "over_payload_share": "overhead",
    "reduction_per_destination": "1 / exact",
    "reduction_all_destinations": "all",
}
SWEEP_COLUMNS = {
    "rtt_s": "RTT, s",
    "measured_step_s": "step, s",
    "predicted_step_s": "planned, s",
    "error_share": "off",
    "left_out_error_share": "off, unseen",
    "drawn_share": "share of bound",
}
RATE_COLUMNS = {
    "rate_bit_s": "bit/s",
    "measured_step_s": "step, s",
    "predicted_step_s": "planned, s",
    "lengthens_by_s": "longer by, s",
    "predicted_lengthens_by_s": "planned, s",
    "miss_share": "off, of a step",
}
EXPERTS_COLUMNS = {
    "n_rows": "rows per expert",
    "grouped_s": "one call, s",
    "single_s": "one each, s",
    "grouped_speedup": "ratio",
    "flop_per_byte": "FLOP/byte",
    "flops_per_s": "FLOP/s",
    "weight_bytes_per_s": "weights, B/s",
}
SKEW_COLUMNS = {
    "skew": "skew",
    "n_experts_met": "experts met",
    "max_over_mean": "max / mean rows",
    "s": "time, s",
    "over_even": "over even",
}
LATENCY_COLUMNS = {"size_bytes": "bytes", "what": "dispatch", "n": "n", "p50_rtt": "p50, RTT", "p99_rtt": "p99, RTT"}


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
    compare_overlap: Annotated[
        bool,
        typer.Option("--compare-overlap", help="Decode in turn without running the shared expert during round trips."),
    ] = False,
    threads: InProcessThreadsOption = None,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second over emulated paths, how close to the bound of round trips, next to stock llama.cpp."""
    if peers == 0:
        if draft or text is not None or compare_overlap:
            raise UserError(
                "--peers 0 decodes random tokens one at a time: leave out --draft, --text, --compare-overlap"
            )
        in_process = InProcessOptions(
            model=_model_file(model),
            n_threads=_in_process_threads(threads),
            n_tokens=tokens,
            n_repetitions=repetitions,
            n_prompt=prompt_tokens,
        )
        _finish_in_process(partial(measure_decode_in_process, in_process), as_json, record)
        return
    _refuse_threads(threads)
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
        compares_overlap=compare_overlap,
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
    serial: Annotated[
        bool,
        typer.Option("--serial", help="Ask the peers one after the other too; only tokens that need every peer."),
    ] = False,
    threads: InProcessThreadsOption = None,
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
        compares_serial=serial,
    )
    model = synthetic_file(options.model)
    if peers == 0:
        measure = partial(measure_dispatch_in_process, options, model, _in_process_threads(threads))
        _finish_in_process(measure, as_json, record)
        return
    _refuse_threads(threads)
    with ProgressBars() as bars:
        figures = run_async(
            measure_dispatch(options, model, lambda done, total: bars.update("dispatches", done, total))
        )
    finish(figures, as_json, record)


@app.command()
def experts(
    d_model: Annotated[int, typer.Option("--d-model", min=256, help="Values of a row.")] = 2048,
    n_experts: Annotated[int, typer.Option("--n-experts", min=1, help="Experts of the layer.")] = 128,
    experts_used: Annotated[int, typer.Option("--experts-used", min=1, help="Experts of each row.")] = 8,
    ff: Annotated[int, typer.Option("--ff", min=32, help="Width of an expert.")] = 768,
    weights: Annotated[str, typer.Option("--weights", metavar="TYPE", help="F32, F16, Q8_0 or Q4_K.")] = "Q4_K",
    rows: Annotated[str, typer.Option("--rows", metavar="N[,N...]", help="Rows per expert.")] = "1,8,64,1024",
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=4096, help="Rows of a call under skew.")] = 512,
    skews: Annotated[str, typer.Option("--skews", metavar="Z[,Z...]", help="Exponents of Zipf's law.")] = "0,0.5,1,1.5",
    threads: ThreadsOption = 1,
    plain: Annotated[
        bool, typer.Option("--plain", help="Keep the weights as they are stored: do not interleave.")
    ] = False,
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Grouped and single calls in turn.")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Of rows and choices.")] = 0,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """One layer's experts: grouped against one call per expert, time under skew, FLOP per byte and where its knee is."""
    try:
        exponents = tuple(float(each) for each in skews.split(","))
    except ValueError:
        raise UserError(f"bad exponents: got {skews!r}, expected numbers such as 0,0.5,1") from None
    options = ExpertsOptions(
        d_model=d_model,
        n_expert=n_experts,
        n_expert_used=experts_used,
        n_ff_exp=ff,
        weight_type=weights,
        n_rows=tuple(sorted(parse_index_set(rows, "rows per expert"))),
        skews=exponents,
        n_tokens=tokens,
        n_threads=threads,
        n_repetitions=repetitions,
        repacks=not plain,
        seed=seed,
    )
    file = synthetic_file(options.model)
    with ProgressBars() as bars:
        figures = run_async(
            run_interruptibly(
                lambda check: measure_experts(options, file, lambda *each: bars.update("measurements", *each), check)
            )
        )
    finish(figures, as_json, record, tables={"rows_per_expert": EXPERTS_COLUMNS, "skew": SKEW_COLUMNS})


@app.command(name="bytes")
def wire_bytes(
    peers: Annotated[str, typer.Option("--peers", metavar="N[,N...]", help="Numbers of peers.")] = "1,4,16",
    slices: Annotated[
        str, typer.Option("--slices", metavar="KIND[,KIND]", help="Which experts live together: " + ", ".join(SLICES))
    ] = ",".join(SLICES),
    wires: Annotated[
        str, typer.Option("--wire", metavar="OUT/BACK[,...]", help="Forms to measure beside `exact`.")
    ] = "q8/q8,q8/f16",
    d_model: Annotated[int, typer.Option("--d-model", min=64, help="Values of a row; a multiple of 64.")] = 3072,
    n_experts: Annotated[int, typer.Option("--n-experts", min=1, help="Experts of the layer.")] = 128,
    experts_used: Annotated[int, typer.Option("--experts-used", min=1, help="Experts of each row.")] = 8,
    ff: Annotated[int, typer.Option("--ff", min=32, help="Width of an expert; changes no bytes.")] = 32,
    dispatches: Annotated[int, typer.Option("--dispatches", min=1, help="One-token dispatches of each form.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Of the router and its tokens.")] = 0,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bytes of one token and MoE layer, form by form, beside raw f32 rows: over several peers, slices of both kinds."""
    options = WireBytesOptions(
        wires=tuple(parse_wire(each) for each in wires.split(",")),
        d_model=d_model,
        n_expert=n_experts,
        n_expert_used=experts_used,
        n_ff_exp=ff,
        n_peers=tuple(sorted(parse_index_set(peers, "numbers of peers"))),
        slices=tuple(dict.fromkeys(slices.split(","))),
        n_dispatches=dispatches,
        seed=seed,
    )
    model = synthetic_file(options.model)
    with ProgressBars() as bars:
        figures = run_async(measure_wire_bytes(options, model, lambda *each: bars.update("swarms", *each)))
    finish(figures, as_json, record, tables={"rows": BYTES_COLUMNS})


@app.command()
def sweep(
    rtts: Annotated[
        str, typer.Option("--rtts", metavar="TIME[,TIME...]", help="Round trips to measure at the first rate.")
    ] = "1ms,5ms,20ms,50ms,100ms",
    rates: Annotated[
        str, typer.Option("--rates", metavar="RATE[,RATE...]", help="Access links to measure at --rtt.")
    ] = "1Gbit,100Mbit,10Mbit",
    rtt: Annotated[str, typer.Option("--rtt", metavar="TIME", help="Round trip of the rates.")] = "30ms",
    jitter: JitterOption = "0ms",
    loss: LossOption = 0.0,
    seed: PathSeedOption = 0,
    peers: PeersOption = 3,
    wire: WireOption = "q8/f16",
    model: ModelOption = "synth16",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens of a point in each repetition.")] = 24,
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="All points in turn.")] = 5,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decode steps at several round trips and rates beside the plan's prediction; --record calibrates `swarm plan`."""
    options = SweepOptions(
        model=_model_file(model),
        n_peers=peers,
        wire=parse_wire(wire),
        rtts_s=_durations(rtts),
        rates_bit_s=tuple(
            sorted((parse_rate_bit_s(each, "a rate of the sweep") for each in rates.split(",")), reverse=True)
        ),
        paths=_paths(rtt, jitter, loss, None, seed),
        n_steps=tokens,
        n_repetitions=repetitions,
    )
    with ProgressBars() as bars:
        figures = run_async(measure_sweep(options, lambda *each: bars.update("points", *each)))
    finish(figures, as_json, record, tables={"points": SWEEP_COLUMNS, "rates": RATE_COLUMNS})


@app.command()
def transport(
    rtt: Annotated[str, typer.Option("--rtt", metavar="TIME", help="Round trip of the path.")] = "80ms",
    loss: Annotated[float, typer.Option("--loss", min=0, max=1, help="Share of packets lost in the last part.")] = 0.01,
    sizes: Annotated[str, typer.Option("--size", metavar="SIZE[,SIZE...]", help="Bytes each way.")] = "12KB,49KB",
    silence: Annotated[str, typer.Option("--silence", metavar="TIME", help="Between two dispatches.")] = "5s",
    fresh: Annotated[
        int, typer.Option("--fresh", min=1, help="New connections: first dispatch, and after silence.")
    ] = 9,
    dispatches: Annotated[int, typer.Option("--dispatches", min=0, help="How many at --loss.")] = 1000,
    connections: Annotated[int, typer.Option("--connections", min=1, help="That share them, all at once.")] = 2,
    seed: PathSeedOption = 0,
    members: Annotated[int, typer.Option("--members", min=0, help="Of the stars on loopback; 0: no stars.")] = 3,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """What the transport costs: messages over an emulated path, and stars on loopback, ours and bare."""
    rtt_s, silence_s = parse_duration_s(rtt, "the round trip"), parse_duration_s(silence, "the silence")

    async def measure(bars: ProgressBars) -> dict[str, Any]:
        figures: dict[str, Any] = {"rtt_s": rtt_s, "loss": loss}
        reports = []
        for text in sizes.split(","):
            options = LatencyOptions(
                size_bytes=parse_size_bytes(text, "the size"),
                rtt_s=rtt_s,
                loss=loss,
                silence_s=silence_s,
                n_fresh=fresh,
                n_lossy=dispatches,
                n_connections=connections,
                seed=seed,
            )
            reports.append(await measure_latency(options, lambda *each, text=text: bars.update(text, *each)))
        figures["latency"] = [report.as_json() for report in reports]
        if members:
            figures["star"] = (await measure_star(n_members=members)).as_json()
        return figures

    with ProgressBars() as bars:
        figures = run_async(measure(bars))
    figures["rows"] = [row for each in figures["latency"] for row in _latency_rows(each)]
    finish(figures, as_json, record, tables={"rows": LATENCY_COLUMNS})


def _latency_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what people read of one size: round trips."""
    rows = [
        {
            "size_bytes": report["size_bytes"],
            "what": what,
            "n": report["n_fresh"],
            "p50_rtt": report[name],
            "p99_rtt": None,
        }
        for what, name in (("first", "first_rtt"), ("after silence", "after_silence_rtt"))
    ]
    for name in ("control", "lossy"):
        if (tail := report[name]) is not None:
            values = {key: tail[key] for key in ("n", "p50_rtt", "p99_rtt")}
            rows.append({"size_bytes": report["size_bytes"], "what": name} | values)
    return rows


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
            help=f"Further rates, {SWEEP_REPETITIONS} times each, with --tokens and with {SWEEP_TOKENS}.",
        ),
    ] = "10Mbit,100Mbit,1Gbit",
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Whole and cut batches in turn.")] = 5,
    threads: InProcessThreadsOption = None,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prompt tokens per second over emulated paths: batches cut into chunks, and whole; where bandwidth begins to bind."""
    if peers == 0:
        in_process = InProcessOptions(
            model=_model_file(model),
            n_threads=_in_process_threads(threads),
            n_tokens=tokens,
            n_repetitions=repetitions,
        )
        _finish_in_process(partial(measure_prefill_in_process, in_process), as_json, record)
        return
    _refuse_threads(threads)
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


@app.command()
def failover(
    kind: Annotated[
        Kind, typer.Option("--kind", help="kill: SIGKILL; stop: SIGSTOP; cut: no network; drain: SIGTERM.")
    ] = Kind.KILL,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Each strikes a random peer at a random token.")] = 20,
    twice: Annotated[
        bool, typer.Option("--twice", help="Strike a second peer in the same run, once the first is back.")
    ] = False,
    wire: WireOption = "exact",
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", help="GGUF file.", show_default="the embedded tiny model"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=40, help="Tokens of each run.")] = 200,
    seed: Annotated[int, typer.Option("--seed", help="Of peers, tokens and moments.")] = 1,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Three peers, every expert on two: what a peer's death changes in the text, and how long the text stalls."""
    options = FailoverOptions(
        model=model or embedded_model(),
        kind=kind,
        wire=parse_wire(wire),
        n_runs=runs,
        n_tokens=tokens,
        is_twice=twice,
        seed=seed,
    )
    tame_openmp()
    with ProgressBars() as bars:
        figures = run_async(measure_failover(options, lambda done, total: bars.update("runs", done, total)))
    finish(figures, as_json, record)


def _durations(text: str) -> tuple[float, ...]:
    return tuple(parse_duration_s(each, "the round trip") for each in text.split(","))


@app.command()
def registry(
    nodes: Annotated[int, typer.Option("--nodes", min=2, help="Registry nodes.")] = 200,
    peers: Annotated[int, typer.Option("--peers", min=1, help="Peers that announce themselves.")] = 10_000,
    models: Annotated[int, typer.Option("--models", min=1, help="Models that they hold experts of.")] = 40,
    churn: Annotated[
        float, typer.Option("--churn", min=0, help="Share of nodes and of peers that leave in an hour, each replaced.")
    ] = 0.2,
    loss: Annotated[
        float, typer.Option("--loss", min=0, max=0.5, help="Share of messages lost, and sent again.")
    ] = 0.05,
    withholding: Annotated[
        float, typer.Option("--withholding", min=0, max=1, help="Share of registry nodes that tell no records.")
    ] = 0.1,
    duration: Annotated[str, typer.Option("--duration", metavar="TIME", help="Simulated time.")] = "600s",
    seed: Annotated[int, typer.Option("--seed", help="Of everything that is left to chance.")] = 1,
    processes: Annotated[
        int,
        typer.Option("--processes", min=0, help="Instead: a ring of so many real relay processes on this machine."),
    ] = 0,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look-ups in the registry's ring: simulated with churn, loss and nodes that withhold; or with real processes."""
    if processes:
        real = ProcessOptions(n_nodes=processes, n_peers=min(peers, 32), seed=seed)
        finish(run_async(measure_processes(real)), as_json, record)
        return
    options = RegistryOptions(
        n_nodes=nodes,
        n_peers=peers,
        n_models=models,
        churn_per_hour=churn,
        loss=loss,
        withholding=withholding,
        duration_s=parse_duration_s(duration, "the duration"),
        seed=seed,
    )
    with ProgressBars() as bars:
        figures = simulate_registry(options, lambda done, total: bars.update("simulating", done, total))
    finish(figures, as_json, record)


def _paths(rtt: str, jitter: str, loss: float, rate: str | None, seed: int) -> PathOptions:
    return PathOptions(
        rtts_s=_durations(rtt),
        jitter_s=parse_duration_s(jitter, "the jitter"),
        loss=loss,
        rate_bit_s=parse_rate_bit_s(rate, "the rate") if rate else None,
        seed=seed,
    )


def _model_file(text: str) -> Path:
    if text in NAMED_MODELS:
        return synthetic_file(NAMED_MODELS[text])
    path = Path(text)
    if not path.exists():
        raise UserError(f"no such model: {text}; give a GGUF file or {' or '.join(NAMED_MODELS)}")
    return path


def _in_process_threads(threads: int | None) -> int:
    if threads is not None:
        return threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _refuse_threads(threads: int | None) -> None:
    if threads is not None:
        raise UserError("--threads goes with --peers 0; with peers on this machine every process has one thread")


def _finish_in_process(
    measure: Callable[[Callable[[int, int], None], Check], dict[str, Any]], as_json: bool, record: Path | None
) -> None:
    with ProgressBars() as bars:
        figures = run_async(
            run_interruptibly(lambda check: measure(lambda *each: bars.update("repetitions", *each), check))
        )
    finish(figures, as_json, record)


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
