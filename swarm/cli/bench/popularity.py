"""`swarm bench popularity`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from swarm.bench.popularity import PopularityOptions, measure_popularity
from swarm.bench.synthetic import NAMED_MODELS
from swarm.cli.bench.options import (
    JitterOption,
    LossOption,
    ModelOption,
    PathSeedOption,
    RateOption,
    RecordOption,
    RttOption,
    WireOption,
    model_file,
    path_options,
    synthetic_file,
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async, tame_openmp
from swarm.errors import UserError
from swarm.wire.rows import parse_wire


def popularity(
    model: ModelOption = "synth16",
    skew: Annotated[
        float, typer.Option("--skew", min=0, help="Exponent of Zipf's law that a random model's routers follow.")
    ] = 1.0,
    peers: Annotated[int, typer.Option("--peers", min=1, help="Peers, each with its share of every layer.")] = 4,
    local: Annotated[
        int, typer.Option("--local", min=1, help="Experts a layer that the backbone's memory takes.")
    ] = 32,
    extra: Annotated[int, typer.Option("--extra", min=1, help="Peers more for the replicas.")] = 2,
    rtt: RttOption = "20ms",
    jitter: JitterOption = "0ms",
    loss: LossOption = 0.0,
    rate: RateOption = None,
    seed: PathSeedOption = 0,
    wire: WireOption = "q8/f16",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to decode in each repetition.")] = 24,
    prefill: Annotated[int, typer.Option("--prefill", min=1, max=512, help="Tokens of a prompt.")] = 128,
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Of each of the three ways.")] = 5,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Skewed routing: popular experts kept at the backbone, or held by more peers, beside neither."""
    if model in NAMED_MODELS:
        shape = replace(NAMED_MODELS[model], router_skew=skew)
        path = synthetic_file(replace(shape, name=f"{shape.name}-zipf{skew:g}") if skew else shape)
    else:
        path = model_file(model)
        if skew != 1.0:
            raise UserError("--skew goes with a random model; a file's routers are as they are")
    options = PopularityOptions(
        model=path,
        n_peers=peers,
        n_local=local,
        n_extra=extra,
        wire=parse_wire(wire),
        paths=path_options(rtt, jitter, loss, rate, seed),
        n_tokens=tokens,
        n_prefill=prefill,
        n_repetitions=repetitions,
        seed=seed,
    )
    tame_openmp()
    with ProgressBars() as bars:
        figures = run_async(measure_popularity(options, lambda *each: bars.update("repetitions", *each)))
    columns = {  # what fits into 80 characters; the JSON has more
        "mode": "way",
        "tokens_per_s": "tok/s",
        "speedup": "times",
        "choices_kept_share": "choices",
        "rows_kept_share": "rows",
        "skipped_trips_share": "trips",
        "max_over_mean_load": "load",
        "prefill_tokens_per_s": "prefill",
    }
    finish(figures, as_json, record, tables={"modes": columns})
