"""`swarm bench dispatch`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from swarm.bench.dispatch import DispatchOptions, measure_dispatch
from swarm.bench.in_process import (
    measure_dispatch_in_process,
)
from swarm.cli.bench.options import (
    InProcessThreadsOption,
    JitterOption,
    LinkKind,
    LinkOption,
    LossOption,
    PeersOption,
    RateOption,
    RecordOption,
    RttOption,
    WireOption,
    finish_in_process,
    in_process_threads,
    path_options,
    refuse_threads,
    synthetic_file,
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.wire.rows import parse_wire


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
    link: LinkOption = LinkKind.QUIC,
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
        paths=path_options(rtt, jitter, loss, rate, seed),
        n_dispatches=dispatches,
        seed=seed,
        compares_serial=serial,
        link=link.value,
    )
    model = synthetic_file(options.model)
    if peers == 0:
        measure = partial(measure_dispatch_in_process, options, model, in_process_threads(threads))
        finish_in_process(measure, as_json, record)
        return
    refuse_threads(threads)
    with ProgressBars() as bars:
        figures = run_async(
            measure_dispatch(options, model, lambda done, total: bars.update("dispatches", done, total))
        )
    finish(figures, as_json, record)
