"""`swarm bench overhead`."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.bench.overhead import MAX_ROWS, OverheadOptions, measure_overhead
from swarm.bench.overhead_curve import LIMIT
from swarm.bench.synthetic import QWEN3_30B_4L, SYNTH16_4L
from swarm.cli.bench.options import LinkKind, LinkOption, RecordOption, WireOption, model_file
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.errors import UserError
from swarm.ids import parse_index_set
from swarm.units import parse_duration_s, parse_size_bytes
from swarm.wire.rows import parse_wire

MAX_STREAMS = 64
CURVE_COLUMNS = {
    "model": "model",
    "n_streams": "streams",
    "is_overlapped": "overlapped",
    "hop_s": "a hop, s",
    "row_s": "each row, s",
    "under_from_s": f"under {LIMIT:.1%} from, s",
    "how": "",
}
POINT_COLUMNS = {
    "model": "model",
    "n_streams": "streams",
    "n_rows": "rows",
    "layer_s": "a layer, s",
    "experts_s": "its experts, s",
    "extra_s": "more, s",
    "overhead": "overhead",
    "overlapped_overhead": "overlapped",
    "tokens_per_s": "tokens/s",
    "in_process_tokens_per_s": "in process",
}


def overhead(
    models: Annotated[
        str,
        typer.Option("--models", metavar="NAME|FILE[,...]", help="Random models by name, or GGUF files."),
    ] = f"{SYNTH16_4L.name},{QWEN3_30B_4L.name}",
    streams: Annotated[str, typer.Option("--streams", metavar="N[,N...]", help="Sequences in a step.")] = "1,4",
    rows: Annotated[
        str, typer.Option("--rows", metavar="N[,N...]", help="Rows of a step, all sequences together.")
    ] = "1,4,16,64,256,512",
    peers: Annotated[
        int, typer.Option("--peers", min=1, help="Peer processes to start; one has a core for itself.")
    ] = 1,
    link: LinkOption = LinkKind.TLS,
    wire: WireOption = "q8/f16",
    chunk: Annotated[
        str | None,
        typer.Option("--chunk", metavar="SIZE|0", help="First chunk of a batch; 0: whole.", show_default="as served"),
    ] = None,
    turn: Annotated[
        str, typer.Option("--turn", metavar="TIME", help="How long each side computes at a time.")
    ] = "200ms",
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Turns of each side.")] = 5,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Experts at peers against the same in one executor in this process, by the time that a layer computes.

    One thread each, no emulated path. `layer_s`: a layer in process, all of it; `experts_s`: of it the experts; `extra_s`:
    what it takes more with its experts at peers; `overhead`: share of tokens/s lost; `overlapped_*`: with the shared expert
    computed meanwhile on another core, as it is served (elsewhere it waits). `hop_s` + `row_s` * rows is the line through
    `extra_s`; `under_from_s` the layer time from which the overhead stays under 1.2 %: measured, extrapolated, or never.
    """
    n_streams, n_rows = parse_index_set(streams, "numbers of sequences"), parse_index_set(rows, "numbers of rows")
    if not 1 <= min(n_streams) <= max(n_streams) <= MAX_STREAMS:
        raise UserError(f"bad number of sequences: got {streams!r}, expected 1 to {MAX_STREAMS}")
    if not 1 <= min(n_rows) <= max(n_rows) <= MAX_ROWS:
        raise UserError(f"bad number of rows: got {rows!r}, expected 1 to {MAX_ROWS}")
    for n in sorted(n_streams):
        if not any(each % n == 0 for each in n_rows):
            raise UserError(f"no number of rows is a multiple of {n} sequences: got {rows!r}")
    options = OverheadOptions(
        models=tuple(model_file(each) for each in models.split(",")),
        wire=parse_wire(wire),
        n_peers=peers,
        link=link.value,
        n_streams=tuple(sorted(n_streams)),
        n_rows=tuple(sorted(n_rows)),
        n_repetitions=repetitions,
        turn_s=parse_duration_s(turn, "the turn"),
        chunk_bytes=None if chunk is None else 0 if chunk == "0" else parse_size_bytes(chunk, "the chunk"),
    )
    with ProgressBars() as bars:
        figures = run_async(measure_overhead(options, lambda done, total: bars.update("points", done, total)))
    finish(figures, as_json, record, tables={"curves": CURVE_COLUMNS, "points": POINT_COLUMNS})
