"""`swarm bench links`."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.bench.links import LinkOptions, measure_links
from swarm.cli.bench.options import RecordOption
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.errors import UserError
from swarm.units import parse_duration_s


def links(
    rtt: Annotated[
        str, typer.Option("--rtt", metavar="TIME[,TIME...]", help="Round trips of the paths.")
    ] = "0.2ms,1ms,3ms,10ms,30ms",
    loss: Annotated[
        str,
        typer.Option("--loss", metavar="SHARE[,SHARE...]", help="Shares of packets lost; each with each round trip."),
    ] = "0,0.001,0.01",
    dispatches: Annotated[int, typer.Option("--dispatches", min=20, help="Of each kind on each path.")] = 1000,
    warm_up: Annotated[int, typer.Option("--warm-up", min=1, help="Of each kind before them.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Of the losses.")] = 0,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Dispatches over QUIC alone, over TLS alone and as the policy chooses, in turn, on emulated paths (needs root)."""
    options = LinkOptions(
        rtts_s=tuple(parse_duration_s(each, "a round trip") for each in rtt.split(",")),
        losses=tuple(_share(each) for each in loss.split(",")),
        n=dispatches,
        n_warm_up=warm_up,
        seed=seed,
    )
    with ProgressBars() as bars:
        figures = run_async(measure_links(options, lambda done, total: bars.update("paths", done, total)))
    finish(figures, as_json, record)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UserError(f"a bad share of lost packets: got {text!r}, expected 0 to 1, such as 0.001")
    return share
