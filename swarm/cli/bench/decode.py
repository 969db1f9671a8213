"""`swarm bench decode`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from swarm.bench.decode import N_PROMPT, DecodeOptions, measure_decode
from swarm.bench.in_process import (
    InProcessOptions,
    measure_decode_in_process,
)
from swarm.cli.bench.options import (
    InProcessThreadsOption,
    JitterOption,
    LinkKind,
    LinkOption,
    LossOption,
    ModelOption,
    PathSeedOption,
    PeersOption,
    RateOption,
    RecordOption,
    RttOption,
    WireOption,
    finish_in_process,
    in_process_threads,
    model_file,
    path_options,
    refuse_threads,
    text_file,
)
from swarm.cli.options import DraftOption, JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.errors import UserError
from swarm.wire.rows import parse_wire


def decode(
    rtt: RttOption = "30ms",
    jitter: JitterOption = "0ms",
    loss: LossOption = 0.0,
    rate: RateOption = None,
    seed: PathSeedOption = 0,
    peers: PeersOption = 3,
    wire: WireOption = "q8/f16",
    model: ModelOption = "synth16",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to decode in each repetition.")] = 32,
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Interleaved with stock llama.cpp.")] = 5,
    draft: DraftOption = 0,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="Text whose first tokens are the prompt.", show_default="random tokens"
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of the prompt.")] = N_PROMPT,
    compare_overlap: Annotated[
        bool,
        typer.Option("--compare-overlap", help="Decode in turn without running the shared expert during round trips."),
    ] = False,
    link: LinkOption = LinkKind.QUIC,
    threads: InProcessThreadsOption = None,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second over emulated paths, how close to the bound of round trips, next to stock llama.cpp."""
    if peers == 0:
        if draft or text is not None or compare_overlap:
            raise UserError(
                "--peers 0 decodes random tokens one at a time: leave out --draft, --text, --compare-overlap"
            )
        in_process = InProcessOptions(
            model=model_file(model),
            n_threads=in_process_threads(threads),
            n_tokens=tokens,
            n_repetitions=repetitions,
            n_prompt=prompt_tokens,
        )
        finish_in_process(partial(measure_decode_in_process, in_process), as_json, record)
        return
    refuse_threads(threads)
    options = DecodeOptions(
        model=model_file(model),
        n_peers=peers,
        wire=parse_wire(wire),
        paths=path_options(rtt, jitter, loss, rate, seed),
        n_tokens=tokens,
        n_repetitions=repetitions,
        n_draft=draft,
        n_prompt=prompt_tokens,
        text=text_file(text) if text is not None else None,
        compares_overlap=compare_overlap,
        link=link.value,
    )
    with ProgressBars() as bars:
        figures = run_async(measure_decode(options, lambda done, total: bars.update("repetitions", done, total)))
    finish(figures, as_json, record)
