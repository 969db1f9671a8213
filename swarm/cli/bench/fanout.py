"""`swarm bench fanout`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from swarm.bench.fanout import FanoutOptions, measure_fanout
from swarm.cli.bench.options import (
    RecordOption,
    model_file,
    text_file,
)
from swarm.cli.options import JsonOption, ModelFileArgument, ThreadsOption
from swarm.cli.run_record import write_run_record
from swarm.cli.runtime import ProgressBars, err, out, print_json, tame_openmp
from swarm.cli.slice_file import write_slice_file
from swarm.ids import parse_index_set


def fanout(
    model: ModelFileArgument,
    text: Annotated[
        Path,
        typer.Option("--text", metavar="FILE", help="Text of the kind the model will write; half is learned from."),
    ],
    peers: Annotated[str, typer.Option("--peers", metavar="N[,N...]", help="Numbers of peers.")] = "4,16",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens of the text to read.")] = 20_480,
    threads: ThreadsOption = 1,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Write the clustered slices there, for `swarm join --slice`."),
    ] = None,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Peers that a token meets, for contiguous slices and for slices clustered by which experts are chosen together."""
    options = FanoutOptions(
        model=model_file(str(model)),
        text=text_file(text),
        n_peers=tuple(sorted(parse_index_set(peers, "numbers of peers"))),
        n_tokens=tokens,
        n_threads=threads,
    )
    tame_openmp()
    with ProgressBars() as bars:
        found = measure_fanout(options, lambda done, total: bars.update("reading the text", done, total))
    if save is not None:
        for n_peers, shares in found.shares.items():
            folder = save / f"{n_peers}-peers"
            folder.mkdir(parents=True, exist_ok=True)
            for index, share in enumerate(shares):
                write_slice_file(folder / f"slice-{index}.json", share)
            err.print(f"wrote {n_peers} slices to {folder}", style="dim", highlight=False, markup=False)
    if record is not None:
        write_run_record(record, found.figures)
    if as_json:
        print_json(found.figures)
    else:
        _print_fanout(found.figures)


def _print_fanout(figures: dict[str, Any]) -> None:
    title = f"{figures['model']}: peers that a token meets in a layer, {figures['n_expert_used']} experts used"
    table = Table(title=title, title_justify="left")
    for column in ("peers", "uniform router", "contiguous", "clustered", "load, contiguous", "load, clustered"):
        table.add_column(column, justify="right")
    for row in figures["destinations_per_token"]:
        cells = [row[name] for name in ("uniform", "contiguous", "clustered")]
        cells += [row["contiguous_imbalance"], row["clustered_imbalance"]]
        table.add_row(str(row["n_peers"]), *(f"{cell:.2f}" for cell in cells))
    out.print(table)
    out.print(
        f"Clustered on {figures['n_tokens_learned']} tokens, all judged on the next {figures['n_tokens_judged']}. "
        "Load is the busiest peer's over the mean, in a layer.",
        style="dim",
        highlight=False,
    )
