"""`swarm cache`: what lies in the cache folder, and how to get its space back. All of it can be fetched or made again."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from swarm.cli.options import JsonOption
from swarm.cli.runtime import out, print_json
from swarm.errors import UserError
from swarm.files import Folders
from swarm.units import parse_duration_s

app = typer.Typer(
    name="cache", no_args_is_help=True, add_completion=False, help="Fetched experts, prepared models, and their space."
)

WHAT = {
    "blocks": "experts that were fetched",
    "headers": "headers of models on the web",
    "models": "models that were fetched whole",
    "backbones": "models without their experts, for serve",
    "manifests": "hashes of models",
    "backbone_hashes": "hashes of models",
    "synthetic": "random models of benchmarks",
    "gate": "results of swarm verify",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in the cache: a file, or a folder of a model's blocks."""

    kind: str
    path: Path
    size_bytes: int
    used_at: float


@app.callback()
def cache() -> None:
    """Set nothing up: it makes the commands subcommands."""


@app.command("ls")
def list_entries(as_json: JsonOption = False) -> None:
    """List what lies there, the largest first."""
    folder = Folders.from_environment().cache
    entries = sorted(entries_of(folder), key=lambda each: -each.size_bytes)
    now = time.time()
    if as_json:
        print_json({"folder": str(folder), "entries": [_as_json(each, folder, now) for each in entries]})
        return
    table = Table(box=None, title=str(folder), title_justify="left")
    for heading in ("what", "name", "size", "last used"):
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    for each in entries:
        days = (now - each.used_at) / 86_400
        table.add_row(WHAT.get(each.kind, each.kind), each.path.name, decimal(each.size_bytes), f"{days:.0f} days ago")
    out.print(table)
    out.print(f"{decimal(sum(each.size_bytes for each in entries))} in all", highlight=False)


@app.command()
def prune(
    unused_for: Annotated[
        str, typer.Option("--unused-for", metavar="TIME", help="Remove what nobody used for so long: 30d, 12h.")
    ] = "30d",
    everything: Annotated[bool, typer.Option("--all", help="Remove everything.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what was not used for a while. A peer or backbone that runs meanwhile may have to fetch again."""
    folder = Folders.from_environment().cache
    before = time.time() - (0 if everything else parse_duration_s(unused_for, "--unused-for"))
    # A gate's result is a few kilobytes and minutes of work, and without it `serve` sends four times the bytes.
    gone = [each for each in entries_of(folder) if everything or (each.used_at < before and each.kind != "gate")]
    for each in gone if not dry_run else ():
        try:
            shutil.rmtree(each.path) if each.path.is_dir() else each.path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot remove {each.path}: {error.strerror}") from error
    size = sum(each.size_bytes for each in gone)
    if as_json:
        print_json({"n_removed": len(gone), "bytes": size, "is_dry_run": dry_run})
    else:
        out.print(f"{'would remove' if dry_run else 'removed'} {len(gone)} things, {decimal(size)}", highlight=False)


def entries_of(folder: Path) -> list[Entry]:
    """Return what lies in a cache folder. What vanishes meanwhile is left out."""
    found: list[Entry] = []
    for kind in sorted(folder.iterdir()) if folder.is_dir() else []:
        for path in sorted(kind.iterdir()) if kind.is_dir() else [kind]:
            files = (
                [Path(root) / name for root, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
            )
            sizes, used = [0], [0.0]
            for file in files or [path]:  # an empty folder: a fetch has just begun
                try:
                    stat = file.stat()
                except OSError:
                    continue
                sizes.append(stat.st_size if files else 0)
                used.append(max(stat.st_atime, stat.st_mtime))
            found.append(Entry(kind.name if kind.is_dir() else "registry", path, sum(sizes), max(used)))
    return found


def _as_json(each: Entry, folder: Path, now: float) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "path": str(each.path.relative_to(folder)),
        "size_bytes": each.size_bytes,
        "unused_for_s": round(now - each.used_at),
    }
