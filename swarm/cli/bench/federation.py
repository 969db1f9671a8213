"""`swarm bench federation`."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.bench.federation import N_BACKBONES, FederationOptions, Phase, Pooling, measure_federation
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
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.errors import UserError
from swarm.units import parse_duration_s, parse_size_bytes
from swarm.wire.rows import parse_wire


def federation(
    phase: Annotated[
        str,
        typer.Option("--phase", metavar="decode|prefill[,...]", help="What the backbones do, both or each its own."),
    ] = "decode",
    streams: Annotated[
        str, typer.Option("--streams", metavar="N[,N]", help="Sequences at once, of both backbones or of each.")
    ] = "1",
    rtt: RttOption = "20ms",
    jitter: JitterOption = "0ms",
    loss: LossOption = 0.0,
    rate: RateOption = None,
    seed: PathSeedOption = 0,
    peers: Annotated[int, typer.Option("--peers", min=1, help="Peers of the pool, one process each.")] = 2,
    wire: WireOption = "q8/f16",
    model: ModelOption = "synth16",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Tokens of each prompt of a prefill.")
    ] = 256,
    turn: Annotated[
        str, typer.Option("--turn", metavar="TIME", help="How long each works, alone and together.")
    ] = "6s",
    repetitions: Annotated[
        int, typer.Option("--repetitions", min=1, help="The first alone, both, the second alone; in turn.")
    ] = 3,
    pooling: Annotated[
        Pooling,
        typer.Option(
            "--pooling",
            help="parts: each expert has one peer; shared: all hold everything; disjoint: so, and each backbone uses its own.",
        ),
    ] = Pooling.PARTS,
    slow_disk: Annotated[
        str | None,
        typer.Option(
            "--slow-disk",
            metavar="SIZE",
            help="Peers take as long as with experts on a disk of so many bytes a second: the pool binds, not this machine.",
        ),
    ] = None,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Two backbones on one pool of peers: tokens per second and share of each, alone and together."""
    phases = _of_each(phase, "phases")
    if any(each not in list(Phase) for each in phases):
        raise UserError(f"no such phase: got {phase!r}, expected decode or prefill, or one for each backbone")
    n_streams = _of_each(streams, "streams")
    if any(not each.isdecimal() or not 1 <= int(each) <= 64 for each in n_streams):
        raise UserError(f"bad number of streams: got {streams!r}, expected 1 to 64, or such a number for each backbone")
    if slow_disk is not None:
        parse_size_bytes(slow_disk, "--slow-disk")
    options = FederationOptions(
        model=model_file(model),
        n_peers=peers,
        wire=parse_wire(wire),
        paths=path_options(rtt, jitter, loss, rate, seed),
        phases=(Phase(phases[0]), Phase(phases[1])),
        n_streams=(int(n_streams[0]), int(n_streams[1])),
        n_prompt_tokens=prompt_tokens,
        turn_s=parse_duration_s(turn, "the turn"),
        n_repetitions=repetitions,
        pooling=pooling,
        disk_rate=slow_disk,
    )
    with ProgressBars() as bars:
        figures = run_async(measure_federation(options, lambda *each: bars.update("repetitions", *each)))
    finish(figures, as_json, record)


def _of_each(text: str, what: str) -> list[str]:
    values = [each.strip() for each in text.split(",")]
    if len(values) == 1:
        values *= N_BACKBONES
    if len(values) != N_BACKBONES:
        raise UserError(f"wrong number of {what}: got {len(values)}, expected one, or one for each of two backbones")
    return values
