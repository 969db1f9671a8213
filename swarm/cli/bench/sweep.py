"""`swarm bench sweep`."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.bench.sweep import SweepOptions, measure_sweep
from swarm.cli.bench.options import (
    JitterOption,
    LossOption,
    ModelOption,
    PathSeedOption,
    PeersOption,
    RecordOption,
    WireOption,
    durations,
    model_file,
    path_options,
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.units import parse_rate_bit_s
from swarm.wire.rows import parse_wire

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
        model=model_file(model),
        n_peers=peers,
        wire=parse_wire(wire),
        rtts_s=durations(rtts),
        rates_bit_s=tuple(
            sorted((parse_rate_bit_s(each, "a rate of the sweep") for each in rates.split(",")), reverse=True)
        ),
        paths=path_options(rtt, jitter, loss, None, seed),
        n_steps=tokens,
        n_repetitions=repetitions,
    )
    with ProgressBars() as bars:
        figures = run_async(measure_sweep(options, lambda *each: bars.update("points", *each)))
    finish(figures, as_json, record, tables={"points": SWEEP_COLUMNS, "rates": RATE_COLUMNS})
