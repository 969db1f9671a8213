"""`swarm bench ablation`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.bench.ablation import AblationOptions, measure_ablation
from swarm.cli.bench.options import (
    JitterOption,
    LossOption,
    ModelOption,
    PathSeedOption,
    RateOption,
    RecordOption,
    RttOption,
    model_file,
    path_options,
    text_file,
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async, tame_openmp


def ablation(
    model: ModelOption,
    source: Annotated[Path, typer.Option("--source", metavar="FILE", help="Text that the model was not trained on.")],
    rtt: RttOption = "80ms",
    jitter: JitterOption = "0ms",
    loss: LossOption = 0.0,
    rate: RateOption = None,
    seed: PathSeedOption = 0,
    peers: Annotated[int, typer.Option("--peers", min=1, help="Peer processes to start.")] = 3,
    pieces: Annotated[int, typer.Option("--pieces", min=1, help="Stretches of text, written by each variant.")] = 3,
    tokens: Annotated[int, typer.Option("--tokens", min=4, max=64, help="Of each.")] = 24,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Each lever switched off alone: round trips and milliseconds that it saves of each token."""
    options = AblationOptions(
        model=model_file(model),
        source=text_file(source),
        paths=path_options(rtt, jitter, loss, rate, seed),
        n_peers=peers,
        n_pieces=pieces,
        n_tokens=tokens,
    )
    tame_openmp()
    with ProgressBars() as bars:
        figures = run_async(measure_ablation(options, lambda *each: bars.update("variants", *each)))
    columns = {
        "lever": "without",
        "saved_s_per_token": "s a token more",
        "saved_trips_per_token": "round trips a token more",
        "slower_without": "times as long",
    }
    finish(figures, as_json, record, tables={"levers": columns})
