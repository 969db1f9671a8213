"""`swarm bench prefill`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from swarm.bench.in_process import (
    InProcessOptions,
    measure_prefill_in_process,
)
from swarm.bench.prefill import SWEEP_REPETITIONS, SWEEP_TOKENS, PrefillOptions, measure_prefill
from swarm.cli.bench.options import (
    InProcessThreadsOption,
    JitterOption,
    LossOption,
    ModelOption,
    PathSeedOption,
    PeersOption,
    RateOption,
    RecordOption,
    RttOption,
    WireOption,
    finish_in_process,
    in_process_threads,
    model_file,
    path_options,
    refuse_threads,
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.units import parse_rate_bit_s, parse_size_bytes
from swarm.wire.rows import parse_wire


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
            model=model_file(model),
            n_threads=in_process_threads(threads),
            n_tokens=tokens,
            n_repetitions=repetitions,
        )
        finish_in_process(partial(measure_prefill_in_process, in_process), as_json, record)
        return
    refuse_threads(threads)
    options = PrefillOptions(
        model=model_file(model),
        n_peers=peers,
        wire=parse_wire(wire),
        paths=path_options(rtt, jitter, loss, rate, seed),
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
