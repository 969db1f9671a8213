"""`swarm bench failover`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.bench.failover import FailoverOptions, Kind, measure_failover
from swarm.cli.bench.options import (
    RecordOption,
    WireOption,
)
from swarm.cli.demo import embedded_model
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async, tame_openmp
from swarm.wire.rows import parse_wire


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
