"""`swarm bench speculation`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.bench.draft_texts import KINDS
from swarm.bench.speculation import DRAFTERS, SpeculationOptions, measure_speculation
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
    text_file,
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async, tame_openmp
from swarm.wire.rows import parse_wire


def speculation(
    model: ModelOption,
    source: Annotated[Path, typer.Option("--source", metavar="FILE", help="Text that the model was not trained on.")],
    text: Annotated[str, typer.Option("--text", metavar="|".join(KINDS), help="What is written.")] = "novel",
    drafter: Annotated[
        str, typer.Option("--drafter", metavar="|".join(DRAFTERS), help="Who drafts; auto: whoever pays.")
    ] = "auto",
    local_share: Annotated[
        float, typer.Option("--local-share", min=0, max=1, help="Share of the experts that the backbone keeps.")
    ] = 0.0,
    draft_model: Annotated[
        Path | None, typer.Option("--draft-model", metavar="FILE", help="A smaller model with the same vocabulary.")
    ] = None,
    forced_acceptance: Annotated[
        float | None,
        typer.Option("--forced-acceptance", min=0, max=1, help="Draft by knowing the text, right so often."),
    ] = None,
    draft: Annotated[int, typer.Option("--draft", min=1, max=64, help="Most tokens of a draft.")] = 8,
    pieces: Annotated[int, typer.Option("--pieces", min=1, help="Texts, each with drafts and without.")] = 8,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=2, max=120, help="Of each text.", show_default="24 of novel text, else 80 to 120"),
    ] = None,
    peers: Annotated[int, typer.Option("--peers", min=1, help="Peer processes to start.")] = 3,
    rtt: RttOption = "80ms",
    jitter: JitterOption = "0ms",
    loss: LossOption = 0.0,
    rate: RateOption = None,
    seed: PathSeedOption = 0,
    wire: WireOption = "q8/f16",
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Several tokens in each round trip: drafts against none, by drafter and kind of text."""
    options = SpeculationOptions(
        model=model_file(model),
        source=text_file(source),
        wire=parse_wire(wire),
        paths=path_options(rtt, jitter, loss, rate, seed),
        drafter=drafter,
        text=text,
        n_draft=draft,
        local_share=local_share,
        draft_model=draft_model,
        forced_acceptance=forced_acceptance,
        n_pieces=pieces,
        n_tokens=tokens,
        n_peers=peers,
        seed=seed,
    )
    tame_openmp()
    with ProgressBars() as bars:
        figures = run_async(measure_speculation(options, lambda *each: bars.update("texts", *each)))
    finish(figures, as_json, record)
