"""`swarm bench soak`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.bench.soak import SoakOptions, measure_soak
from swarm.cli.bench.options import RecordOption
from swarm.cli.demo import embedded_model
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.units import parse_duration_s


def soak(
    duration: Annotated[str, typer.Option("--duration", metavar="TIME", help="How long clients ask.")] = "30min",
    clients: Annotated[int, typer.Option("--clients", min=1, help="Clients at once.")] = 8,
    think: Annotated[
        str,
        typer.Option("--think", metavar="TIME", help="A client's mean time between an answer and the next question."),
    ] = "3s",
    kill_every: Annotated[
        str, typer.Option("--kill-every", metavar="TIME", help="Once in it a peer is killed and started again.")
    ] = "60s",
    warm_up: Annotated[
        str,
        typer.Option(
            "--warm-up", metavar="TIME", help="Of each process's life, in which its memory may grow: caches fill."
        ),
    ] = "10min",
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", help="GGUF file.", show_default="the embedded tiny model"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of questions, manners and victims.")] = 20,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Clients that come and go for a long time while peers are killed: what fails, what grows, what is not idle afterwards."""
    options = SoakOptions(
        model=model or embedded_model(),
        duration_s=parse_duration_s(duration, "--duration"),
        n_clients=clients,
        warm_up_s=parse_duration_s(warm_up, "--warm-up"),
        kill_every_s=parse_duration_s(kill_every, "--kill-every"),
        think_s=parse_duration_s(think, "--think"),
        seed=seed,
    )
    with ProgressBars() as bars:
        figures = run_async(measure_soak(options, lambda *each: bars.update("seconds", *each)))
    finish(figures, as_json, record)
