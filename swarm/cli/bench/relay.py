"""`swarm bench relay`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.bench.relay import RelayOptions, measure_relay
from swarm.bench.relayed_decode import RelayedDecodeOptions, measure_relayed_decode
from swarm.cli.bench.options import ModelOption, RecordOption, model_file
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.errors import UserError
from swarm.units import parse_duration_s, parse_size_bytes


def relay(
    duration: Annotated[str, typer.Option("--duration", metavar="TIME", help="Of each kind of packets.")] = "3s",
    channels: Annotated[int, typer.Option("--channels", min=1, max=1000, help="Active ones, single packets.")] = 200,
    reservations: Annotated[
        int, typer.Option("--reservations", min=0, help="Idle ones, for memory; 0: not measured.")
    ] = 1000,
    dispatches: Annotated[int, typer.Option("--dispatches", min=1, help="Direct and relayed, in turn.")] = 300,
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help="Of a dispatch and of its answer.")] = "12KiB",
    model: ModelOption = "synth16",
    rtt: Annotated[
        str, typer.Option("--rtt", metavar="TIME", help="Round trip of the decode; 0ms: no decode.")
    ] = "20ms",
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a relay costs: packets a second, processor time for each, and how much longer a dispatch takes."""
    if not Path("/proc/self/schedstat").exists():
        raise UserError("bench relay reads the relay's processor time from /proc, which this system lacks: use Linux")
    options = RelayOptions(
        seconds=parse_duration_s(duration, "the duration"),
        n_channels=channels,
        n_reservations=reservations,
        n_dispatches=dispatches,
        size_bytes=parse_size_bytes(size, "the size"),
    )

    rtt_s = parse_duration_s(rtt, "the round trip")

    async def measure(bars: ProgressBars) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
            figures = await measure_relay(options, Path(folder), lambda *each: bars.update("parts", *each))
            if rtt_s:
                decode = await measure_relayed_decode(
                    RelayedDecodeOptions(model=model_file(model), rtt_s=rtt_s),
                    Path(folder),
                    lambda *each: bars.update("decode", *each),
                )
                figures |= {
                    "decode_direct_tokens_per_s": decode["direct_tokens_per_s"],
                    "decode_relayed_tokens_per_s": decode["relayed_tokens_per_s"],
                    "decode": decode,
                }
            return figures

    with ProgressBars() as bars:
        figures = run_async(measure(bars))
    finish(figures, as_json, record)
