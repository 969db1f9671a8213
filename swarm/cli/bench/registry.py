"""`swarm bench registry`."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.bench.registry import simulate_registry
from swarm.bench.registry_hosts import RegistryOptions
from swarm.bench.registry_processes import ProcessOptions, measure_processes
from swarm.cli.bench.options import (
    RecordOption,
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.units import parse_duration_s


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
