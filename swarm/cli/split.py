"""`swarm split`: writes a model's backbone, manifest and expert slices into a folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

from swarm.cli.options import ThreadsOption
from swarm.cli.runtime import tame_openmp
from swarm.cli.slice_file import read_slice_file, write_slice_file
from swarm.errors import UserError
from swarm.files import Folders, write_atomically
from swarm.ids import ExpertSet, format_index_set, parse_index_set
from swarm.model.gguf_file import GgufFile, Progress
from swarm.model.manifest import Manifest, manifest_of
from swarm.model.slices import FilePlan, plan_backbone, plan_slice, write_plan
from swarm.model.spec import ModelSpec
from swarm.sources.locations import public_sources

MAX_NAME = 80  # characters of a slice's file name before its set is shortened to a hash; file systems allow 255
N_CLUSTER_TOKENS = 20_480  # of the text: what docs/fanout.md was measured with
PLAIN_LINE_EVERY_S = 2.0  # chosen: a log stays readable


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """What to split, and into what.

    Attributes:
        experts, layers: index sets as typed; None takes all.
        parts: slice files to cut the chosen experts into; 0 writes none.
        cluster: a text; each part holds experts that the model often chooses together on it.
        slices: files of sets to cut, as `swarm bench fanout --save` writes them.
        sources: names on the web of the whole model, for backbone.gguf to carry.
    """

    model: Path
    out: Path
    experts: str | None = None
    layers: str | None = None
    parts: int = 1
    cluster: Path | None = None
    slices: tuple[Path, ...] = ()
    n_threads: int = 1
    force: bool = False
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFile:
    """One file that was written."""

    path: Path
    kind: str
    size_bytes: int
    experts: ExpertSet


def split(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The whole model, a GGUF file.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write into; made if missing.")],
    experts: Annotated[
        str | None,
        typer.Option("--experts", metavar="SET", help="Experts to cut out, like 12-19,40.", show_default="all"),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="SET", help="MoE layers to cut them from, like 3,5-8.", show_default="all"),
    ] = None,
    parts: Annotated[
        int,
        typer.Option("--parts", metavar="N", min=0, help="Slice files to cut the experts into; 0: no slices."),
    ] = 1,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="TEXT",
            help="Cut so that experts often chosen together share a slice, learned from this text: the whole model runs here.",
            show_default="ranges of experts",
        ),
    ] = None,
    slices: Annotated[
        list[Path] | None,
        typer.Option(
            "--slice",
            metavar="FILE",
            help="Cut the sets of this file instead, as `swarm bench fanout --save` writes them. Repeatable.",
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            metavar="URL",
            help="Where the whole model is on the web, https:// or hf://, for backbone.gguf to carry: volunteers fetch their "
            "experts there. Repeatable.",
            show_default=False,
        ),
    ] = None,
    threads: ThreadsOption = 1,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files of an earlier split.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Cut a model into backbone.gguf (all but the experts), manifest.json (hashes) and expert slice files."""
    config = SplitConfig(
        model=model,
        out=out,
        experts=experts,
        layers=layers,
        parts=parts,
        cluster=cluster,
        slices=tuple(slices or ()),
        n_threads=threads,
        force=force,
        sources=public_sources(source or ()),
    )
    manifest, files = run_split(config, Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(_as_json(manifest, files)))
        return
    table = Table(title=f"model {manifest.model_id.short} in {out}", title_justify="left")
    table.add_column("file")
    table.add_column("size", justify="right")
    table.add_column("holds")
    for file in files:
        table.add_row(file.path.name, decimal(file.size_bytes), _holds(file))
    Console().print(table)
    typer.echo(f"Serve it with: swarm serve --model {out / 'backbone.gguf'}")
    kinds = {file.kind: file.path for file in reversed(files)}
    if "slice" in kinds:
        typer.echo(f"A peer holds a slice with: swarm join --model {kinds['slice']}")
    if "set" in kinds:
        typer.echo(f"or fetches it from whoever serves the whole model: swarm join --slice {kinds['set']}")


def run_split(config: SplitConfig, console: Console) -> tuple[Manifest, list[SplitFile]]:
    """Write the files and return the model's manifest and what was written; progress goes to `console`.

    Raises:
        UserError: the model cannot be served, a set names what the model lacks, a file is already there,
            or the folder cannot hold or take the files.
        IntegrityError: the model file changed meanwhile.
    """
    try:
        with _shown(console, f"hashing {config.model.name}") as progress:
            manifest = manifest_of(config.model, Folders.from_environment().cache, progress)
        with GgufFile(config.model) as file:
            return manifest, _write(config, manifest, file, console)
    except OSError as error:
        raise UserError(f"cannot write to {config.out}: {error.strerror or error}") from error


def _write(config: SplitConfig, manifest: Manifest, file: GgufFile, console: Console) -> list[SplitFile]:
    spec = manifest.spec
    nothing = ExpertSet({})
    plans = [("backbone.gguf", "backbone", nothing, plan_backbone(file, manifest, config.sources))]
    parts = _parts(config, spec, console)
    for name, part in parts:
        plans.append((name, "slice", part, plan_slice(file, manifest, part)))
    sets = [(config.out / name).with_suffix(".json") for name, _ in parts] if config.cluster else []

    manifest_path = config.out / "manifest.json"
    whole = set() if config.force else _kept(config.out, plans, manifest_path, manifest)
    for path in (*(config.out / name for name, *_ in plans), *sets, manifest_path):
        if not path.exists():
            continue
        if path.samefile(config.model):
            raise UserError(f"refusing to overwrite the model itself: {path}; choose another --out")
        if not config.force and path not in whole:
            raise UserError(f"file is already there: {path}; give --force to overwrite it, or another --out")
    config.out.mkdir(parents=True, exist_ok=True)
    needed = sum(plan.disk_bytes for name, *_, plan in plans if config.out / name not in whole) + len(
        manifest.to_bytes()
    )
    free = shutil.disk_usage(config.out).free
    if needed > free:
        raise UserError(f"not enough space in {config.out}: got {decimal(free)} free, expected {decimal(needed)}")

    files = []
    for name, kind, experts, plan in plans:
        if config.out / name in whole:
            console.print(f"keeping {name}, which is whole", highlight=False, soft_wrap=True)
        else:
            with _shown(console, f"writing {name}") as progress:
                write_plan(plan, file, manifest, config.out / name, progress)
        files.append(SplitFile(path=config.out / name, kind=kind, size_bytes=plan.size_bytes, experts=experts))
    for path, (_, part) in zip(sets, parts, strict=False):  # none, or one for each part
        write_slice_file(path, part)
        files.append(SplitFile(path=path, kind="set", size_bytes=path.stat().st_size, experts=part))
    write_atomically(manifest_path, manifest.to_bytes())  # last: where it is, the rest is whole
    size = len(manifest.to_bytes())
    files.append(SplitFile(path=manifest_path, kind="manifest", size_bytes=size, experts=nothing))
    return files


def _kept(
    out: Path, plans: list[tuple[str, str, ExpertSet, FilePlan]], manifest_path: Path, manifest: Manifest
) -> set[Path]:
    """Return the files that an earlier run, perhaps one that was cut, has written: they appear only when whole."""
    whole = {out / name for name, *_, plan in plans if plan.is_whole_at(out / name)}
    try:
        if manifest_path.read_bytes() == manifest.to_bytes():
            whole.add(manifest_path)
    except OSError:
        pass  # not there, which is for whoever writes it to see
    return whole


def _parts(config: SplitConfig, spec: ModelSpec, console: Console) -> list[tuple[str, ExpertSet]]:
    """Return the slices to write, with the names of their files."""
    if (config.cluster or config.slices) and (config.experts or config.layers):
        raise UserError("--experts and --layers cut ranges: leave them out with --cluster and --slice")
    if config.slices:
        if config.cluster or config.parts != 1:
            raise UserError("--slice says what to cut: leave --parts and --cluster out")
        named = {f"{path.stem}.gguf": read_slice_file(path) for path in config.slices}
        if len(named) < len(config.slices):
            raise UserError("two --slice files have the same name; their slices would too")
        for part in named.values():
            spec.require_experts(part)
        return list(named.items())
    if config.cluster is not None:
        width = len(str(config.parts - 1))
        parts = _clustered(config, spec, config.cluster, console)
        return [(f"cluster-{index:0{width}}.gguf", part) for index, part in enumerate(parts)]
    parts = cut(choose(spec, config.experts, config.layers), config.parts)
    return [(slice_name(spec, part), part) for part in parts]


def _clustered(config: SplitConfig, spec: ModelSpec, text: Path, console: Console) -> list[ExpertSet]:
    """Return parts whose experts are often chosen together on the text."""
    from swarm.bench.fanout import FanoutOptions, record_choices
    from swarm.dispatch.fanout import clustered_shares, co_activation

    if not 2 <= config.parts <= spec.n_expert:
        raise UserError(
            f"--cluster needs --parts N, one for each peer: got {config.parts}, expected 2 to {spec.n_expert}"
        )
    if not text.is_file():
        raise UserError(f"no such text file: {text}")
    tame_openmp()
    options = FanoutOptions(
        model=config.model, text=text, n_peers=(config.parts,), n_tokens=N_CLUSTER_TOKENS, n_threads=config.n_threads
    )
    with _shown(console, f"reading {text.name}", "{} windows".format) as progress:
        choices = record_choices(options, spec.moe_layers, progress)  # [L, T, K]
    counts = np.stack([co_activation(topk_ids, spec.n_expert) for topk_ids in choices])  # [L, E, E]
    return clustered_shares(counts, config.parts, spec.moe_layers)


def choose(spec: ModelSpec, experts: str | None, layers: str | None) -> ExpertSet:
    """Return the experts that two index sets name; raises UserError for one the model lacks."""
    chosen_layers = spec.moe_layers if layers is None else parse_index_set(layers, "layers")
    chosen = range(spec.n_expert) if experts is None else parse_index_set(experts, "experts")
    expert_set = ExpertSet.of(chosen_layers, chosen)
    spec.require_experts(expert_set)
    return expert_set


def cut(experts: ExpertSet, n_parts: int) -> list[ExpertSet]:
    """Return the set (the same experts in every layer) cut into contiguous parts whose sizes differ by at most one."""
    ids = sorted(frozenset().union(*experts.by_layer.values()))
    if n_parts > len(ids):
        raise UserError(f"too many parts: got {n_parts}, expected at most one for each of the {len(ids)} experts")
    return [
        ExpertSet.of(experts.by_layer, ids[i * len(ids) // n_parts : (i + 1) * len(ids) // n_parts])
        for i in range(n_parts)
    ]


def slice_name(spec: ModelSpec, experts: ExpertSet) -> str:
    """Return the file name for a slice: `experts-12-19_40.gguf`, with `-layers-...` unless it has them all."""
    [(layers, ids)] = experts.grouped()
    name = f"experts-{ids}"
    if layers != format_index_set(spec.moe_layers):
        name += f"-layers-{layers}"
    name = name.replace(",", "_")
    if len(name) > MAX_NAME:
        name = name[: MAX_NAME - 9] + "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
    return name + ".gguf"


def _holds(file: SplitFile) -> str:
    if not len(file.experts):
        return file.kind
    groups = file.experts.grouped()
    return str(file.experts) if len(groups) == 1 else f"{len(file.experts)} experts, others in each layer"


def _as_json(manifest: Manifest, files: list[SplitFile]) -> dict[str, Any]:
    return {
        "model_id": str(manifest.model_id),
        "files": [
            {
                "path": str(file.path),
                "kind": file.kind,
                "size_bytes": file.size_bytes,
                "experts": [{"layers": layers, "experts": ids} for layers, ids in file.experts.grouped()],
            }
            for file in files
        ],
    }


@contextlib.contextmanager
def _shown(console: Console, what: str, shown: Callable[[int], str] = decimal) -> Iterator[Progress]:
    """Yield a progress callback that draws a bar, or prints a line now and then where there is no terminal.

    `shown` writes a number of what is counted; by default bytes.
    """
    if not console.is_terminal:
        next_line_s = time.monotonic() + PLAIN_LINE_EVERY_S

        def print_line(done: int, total: int) -> None:
            nonlocal next_line_s
            if done == total or time.monotonic() >= next_line_s:
                next_line_s = time.monotonic() + PLAIN_LINE_EVERY_S
                console.print(f"{what}: {shown(done)} of {shown(total)}", highlight=False, soft_wrap=True)

        yield print_line
        return
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
    columns += [DownloadColumn(), TransferSpeedColumn()] if shown is decimal else [MofNCompleteColumn()]
    with Bar(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
