"""`swarm bench gateway`."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.bench.gateway import GatewayOptions, measure_gateway
from swarm.cli.bench.options import (
    JitterOption,
    LossOption,
    ModelOption,
    PathSeedOption,
    PeersOption,
    RateOption,
    RecordOption,
    RttOption,
    WireOption,
    model_file,
    path_options,
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.cli.serving_options import DEFAULT_LANES, FillWaitOption, LanesOption, ReproducibleOption
from swarm.errors import UserError
from swarm.units import parse_duration_s
from swarm.wire.rows import parse_wire


def gateway(
    streams: Annotated[int, typer.Option("--streams", min=1, help="Requests at once.")] = 4,
    rtt: RttOption = "30ms",
    jitter: JitterOption = "0ms",
    loss: LossOption = 0.0,
    rate: RateOption = None,
    seed: PathSeedOption = 0,
    peers: PeersOption = 3,
    wire: WireOption = "q8/f16",
    model: ModelOption = "synth16",
    lanes: LanesOption = None,
    slots: Annotated[
        int | None,
        typer.Option("--slots", min=1, help="Requests that can run at once.", show_default="as many as streams"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each stream.")] = 24,
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Of one stream and of all, in turn.")] = 3,
    prefix_tokens: Annotated[
        int,
        typer.Option("--prefix-tokens", min=0, help="Prompt whose first token is timed cold and warm; 0: none."),
    ] = 1000,
    compare: Annotated[
        int, typer.Option("--compare", min=0, help="Tokens of answers to compare with each request's alone; 0: none.")
    ] = 0,
    ctx: Annotated[int, typer.Option("--ctx", min=64, help="Tokens of context of each slot.")] = 4096,
    fill_wait: FillWaitOption = "0ms",
    reproducible: ReproducibleOption = False,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Many streams at once: tokens per second of all and of one alone, and how soon a first token comes, cold and warm."""
    if peers == 0:
        raise UserError("the streams are served by peers: give --peers 1 or more")
    if reproducible:  # the wire form is this option's own
        wire, lanes = "exact", slots or streams
    options = GatewayOptions(
        model=model_file(model),
        n_peers=peers,
        wire=parse_wire(wire),
        paths=path_options(rtt, jitter, loss, rate, seed),
        n_streams=streams,
        n_lanes=lanes or min(DEFAULT_LANES, slots or streams),
        n_slots=slots or streams,
        n_tokens=tokens,
        n_repetitions=repetitions,
        n_prefix=prefix_tokens,
        n_compared=compare,
        n_ctx=ctx,
        fill_wait_s=parse_duration_s(fill_wait, "--fill-wait"),
        is_reproducible=reproducible,
    )
    with ProgressBars() as bars:
        figures = run_async(measure_gateway(options, lambda *each: bars.update("repetitions", *each)))
    finish(figures, as_json, record)
