"""What the benchmarks' commands share: options, models, and how a measurement in this process is shown."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.bench.synthetic import NAMED_MODELS, SyntheticModel, write_synthetic
from swarm.bench.testbed import PathOptions
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, err, run_async
from swarm.errors import UserError
from swarm.files import Folders
from swarm.interruptible import Check, run_interruptibly
from swarm.units import parse_duration_s, parse_rate_bit_s

RttOption = Annotated[
    str, typer.Option("--rtt", metavar="TIME[,TIME...]", help="Round trip to the peers; a list gives each its own.")
]
JitterOption = Annotated[str, typer.Option("--jitter", metavar="TIME", help="Round trips vary by +- this.")]
LossOption = Annotated[float, typer.Option("--loss", min=0, max=1, help="Share of packets lost.")]
RateOption = Annotated[
    str | None,
    typer.Option("--rate", metavar="RATE", help="Each host's access link per direction; no limit without a rate."),
]
PathSeedOption = Annotated[int, typer.Option("--seed", help="Of loss and jitter.")]
PeersOption = Annotated[
    int, typer.Option("--peers", min=0, help="Peer processes to start; 0: all experts in this process, no network.")
]
InProcessThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=1024,
        help="Threads of llama.cpp and of the experts; only with --peers 0.",
        show_default="all cores with --peers 0, else 1",
    ),
]


class LinkKind(StrEnum):
    """What carries dispatches."""

    QUIC = "quic"
    TLS = "tls"
    AUTO = "auto"


LinkOption = Annotated[
    LinkKind,
    typer.Option("--link", help="quic, tls, or auto: TLS links beside it on short, clean paths; with --rtt 0ms."),
]
WireOption = Annotated[str, typer.Option("--wire", metavar="OUT/BACK", help="How rows travel.")]
ModelOption = Annotated[
    str, typer.Option("--model", metavar=f"FILE|{'|'.join(NAMED_MODELS)}", help="GGUF file, or a random model by name.")
]
RecordOption = Annotated[
    Path | None, typer.Option("--record", metavar="FILE", help="Write a run record: figures, command, commit, machine.")
]


def durations(text: str) -> tuple[float, ...]:
    return tuple(parse_duration_s(each, "the round trip") for each in text.split(","))


def path_options(rtt: str, jitter: str, loss: float, rate: str | None, seed: int) -> PathOptions:
    return PathOptions(
        rtts_s=durations(rtt),
        jitter_s=parse_duration_s(jitter, "the jitter"),
        loss=loss,
        rate_bit_s=parse_rate_bit_s(rate, "the rate") if rate else None,
        seed=seed,
    )


def model_file(text: str) -> Path:
    if text in NAMED_MODELS:
        return synthetic_file(NAMED_MODELS[text])
    path = Path(text)
    if not path.exists():
        raise UserError(f"no such model: {text}; give a GGUF file or {' or '.join(NAMED_MODELS)}")
    return path


def text_file(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"no such text file: {path}")
    return path


def in_process_threads(threads: int | None) -> int:
    if threads is not None:
        return threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_threads(threads: int | None) -> None:
    if threads is not None:
        raise UserError("--threads goes with --peers 0; with peers on this machine every process has one thread")


def finish_in_process(
    measure: Callable[[Callable[[int, int], None], Check], dict[str, Any]], as_json: bool, record: Path | None
) -> None:
    with ProgressBars() as bars:
        figures = run_async(
            run_interruptibly(lambda check: measure(lambda *each: bars.update("repetitions", *each), check))
        )
    finish(figures, as_json, record)


def synthetic_file(model: SyntheticModel) -> Path:
    """Return the cached file of a random model, written at the first call."""
    folder = Folders.from_environment().cache / "synthetic"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model.name}-{model.seed}.gguf"
    if not path.exists():
        err.print(f"writing the random model {model.name} to {path}", style="dim", highlight=False, markup=False)
        write_synthetic(path, model)
    return path
