"""`swarm bench experts`."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.bench.experts import ExpertsOptions, measure_experts
from swarm.cli.bench.options import (
    RecordOption,
    synthetic_file,
)
from swarm.cli.options import JsonOption, ThreadsOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.errors import UserError
from swarm.ids import parse_index_set
from swarm.interruptible import run_interruptibly

EXPERTS_COLUMNS = {
    "n_rows": "rows per expert",
    "grouped_s": "one call, s",
    "single_s": "one each, s",
    "grouped_speedup": "ratio",
    "flop_per_byte": "FLOP/byte",
    "flops_per_s": "FLOP/s",
    "weight_bytes_per_s": "weights, B/s",
}
SKEW_COLUMNS = {
    "skew": "skew",
    "n_experts_met": "experts met",
    "max_over_mean": "max / mean rows",
    "s": "time, s",
    "over_even": "over even",
}


def experts(
    d_model: Annotated[int, typer.Option("--d-model", min=256, help="Values of a row.")] = 2048,
    n_experts: Annotated[int, typer.Option("--n-experts", min=1, help="Experts of the layer.")] = 128,
    experts_used: Annotated[int, typer.Option("--experts-used", min=1, help="Experts of each row.")] = 8,
    ff: Annotated[int, typer.Option("--ff", min=32, help="Width of an expert.")] = 768,
    weights: Annotated[str, typer.Option("--weights", metavar="TYPE", help="F32, F16, Q8_0 or Q4_K.")] = "Q4_K",
    rows: Annotated[str, typer.Option("--rows", metavar="N[,N...]", help="Rows per expert.")] = "1,8,64,1024",
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=4096, help="Rows of a call under skew.")] = 512,
    skews: Annotated[str, typer.Option("--skews", metavar="Z[,Z...]", help="Exponents of Zipf's law.")] = "0,0.5,1,1.5",
    threads: ThreadsOption = 1,
    plain: Annotated[
        bool, typer.Option("--plain", help="Keep the weights as they are stored: do not interleave.")
    ] = False,
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Grouped and single calls in turn.")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Of rows and choices.")] = 0,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """One layer's experts: grouped against one call per expert, time under skew, FLOP per byte and where its knee is."""
    try:
        exponents = tuple(float(each) for each in skews.split(","))
    except ValueError:
        raise UserError(f"bad exponents: got {skews!r}, expected numbers such as 0,0.5,1") from None
    options = ExpertsOptions(
        d_model=d_model,
        n_expert=n_experts,
        n_expert_used=experts_used,
        n_ff_exp=ff,
        weight_type=weights,
        n_rows=tuple(sorted(parse_index_set(rows, "rows per expert"))),
        skews=exponents,
        n_tokens=tokens,
        n_threads=threads,
        n_repetitions=repetitions,
        repacks=not plain,
        seed=seed,
    )
    file = synthetic_file(options.model)
    with ProgressBars() as bars:
        figures = run_async(
            run_interruptibly(
                lambda check: measure_experts(options, file, lambda *each: bars.update("measurements", *each), check)
            )
        )
    finish(figures, as_json, record, tables={"rows_per_expert": EXPERTS_COLUMNS, "skew": SKEW_COLUMNS})
