"""`swarm bench transport`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swarm.bench.latency import LatencyOptions, measure_latency
from swarm.bench.transport import measure_star
from swarm.cli.bench.options import (
    PathSeedOption,
    RecordOption,
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.units import parse_duration_s, parse_size_bytes

LATENCY_COLUMNS = {"size_bytes": "bytes", "what": "dispatch", "n": "n", "p50_rtt": "p50, RTT", "p99_rtt": "p99, RTT"}


def transport(
    rtt: Annotated[str, typer.Option("--rtt", metavar="TIME", help="Round trip of the path.")] = "80ms",
    loss: Annotated[float, typer.Option("--loss", min=0, max=1, help="Share of packets lost in the last part.")] = 0.01,
    sizes: Annotated[str, typer.Option("--size", metavar="SIZE[,SIZE...]", help="Bytes each way.")] = "12KB,49KB",
    silence: Annotated[str, typer.Option("--silence", metavar="TIME", help="Between two dispatches.")] = "5s",
    fresh: Annotated[
        int, typer.Option("--fresh", min=1, help="New connections: first dispatch, and after silence.")
    ] = 9,
    dispatches: Annotated[int, typer.Option("--dispatches", min=0, help="How many at --loss.")] = 1000,
    connections: Annotated[int, typer.Option("--connections", min=1, help="That share them, all at once.")] = 2,
    seed: PathSeedOption = 0,
    members: Annotated[int, typer.Option("--members", min=0, help="Of the stars on loopback; 0: no stars.")] = 3,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """What the transport costs: messages over an emulated path, and stars on loopback, ours and bare."""
    rtt_s, silence_s = parse_duration_s(rtt, "the round trip"), parse_duration_s(silence, "the silence")

    async def measure(bars: ProgressBars) -> dict[str, Any]:
        figures: dict[str, Any] = {"rtt_s": rtt_s, "loss": loss}
        reports = []
        for text in sizes.split(","):
            options = LatencyOptions(
                size_bytes=parse_size_bytes(text, "the size"),
                rtt_s=rtt_s,
                loss=loss,
                silence_s=silence_s,
                n_fresh=fresh,
                n_lossy=dispatches,
                n_connections=connections,
                seed=seed,
            )
            reports.append(await measure_latency(options, lambda *each, text=text: bars.update(text, *each)))
        figures["latency"] = [report.as_json() for report in reports]
        if members:
            figures["star"] = (await measure_star(n_members=members)).as_json()
        return figures

    with ProgressBars() as bars:
        figures = run_async(measure(bars))
    figures["rows"] = [row for each in figures["latency"] for row in _latency_rows(each)]
    finish(figures, as_json, record, tables={"rows": LATENCY_COLUMNS})


def _latency_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what people read of one size: round trips."""
    rows = [
        {
            "size_bytes": report["size_bytes"],
            "what": what,
            "n": report["n_fresh"],
            "p50_rtt": report[name],
            "p99_rtt": None,
        }
        for what, name in (("first", "first_rtt"), ("after silence", "after_silence_rtt"))
    ]
    for name in ("control", "lossy"):
        if (tail := report[name]) is not None:
            values = {key: tail[key] for key in ("n", "p50_rtt", "p99_rtt")}
            rows.append({"size_bytes": report["size_bytes"], "what": name} | values)
    return rows
