"""`swarm bench audit`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from swarm.bench.audit import AuditOptions, measure_audit
from swarm.bench.cheating_peer import CheatKind
from swarm.cli.bench.options import RecordOption, WireOption
from swarm.cli.demo import embedded_model
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async, tame_openmp
from swarm.dispatch.audit import DEFAULT_SHARE, parse_share
from swarm.wire.rows import parse_wire


class Kind(StrEnum):
    """How the peer lies, if it does."""

    ORTHOGONAL = "orthogonal"
    NOISE = "noise"
    SLY = "sly"
    NONE = "none"


def audit(
    kind: Annotated[
        Kind,
        typer.Option(
            "--kind",
            help="orthogonal: cosine 0; noise: 5 %, anew each time; sly: 5 %, the same for the same row; none: all are honest.",
        ),
    ] = Kind.ORTHOGONAL,
    runs: Annotated[
        int, typer.Option("--runs", min=1, help="In each, a random peer begins to lie at a random token.")
    ] = 20,
    share: Annotated[
        str, typer.Option("--audit", metavar="SHARE", help="Share of each peer's answers that is audited.")
    ] = f"{DEFAULT_SHARE:.0%}",
    wire: WireOption = "exact",
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", help="GGUF file.", show_default="the embedded tiny model"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=20, help="Tokens of each answer.")] = 100,
    seed: Annotated[
        int, typer.Option("--seed", help="Of peers and tokens; audits themselves are not to be foreseen.")
    ] = 1,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Three peers, every expert on two: how soon a peer that returns wrong numbers is caught, and what its answers become."""
    options = AuditOptions(
        model=model or embedded_model(),
        kind=None if kind is Kind.NONE else CheatKind(kind.value),
        wire=parse_wire(wire),
        share=parse_share(share),
        n_runs=runs,
        n_tokens=tokens,
        seed=seed,
    )
    tame_openmp()
    with ProgressBars() as bars:
        figures = run_async(measure_audit(options, lambda done, total: bars.update("runs", done, total)))
    finish(figures, as_json, record)
