"""How a benchmark ends: a table or JSON, and a run record to compare with later."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from swarm import __version__
from swarm.cli.runtime import out, print_json
from swarm.files import write_atomically
from swarm.native.library import load_library


def finish(
    figures: dict[str, Any],
    as_json: bool,
    record: Path | None,
    *,
    tables: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Show the figures, and write them to `record` if given.

    `tables`: lists of objects to show beneath, by name, and which of their values under which heading; the JSON has all.
    """
    if record is not None:
        write_run_record(record, figures)
    if as_json:
        print_json(figures)
        return
    table = Table(show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        if isinstance(value, dict):
            for inner, each in value.items():
                table.add_row(f"{name}.{inner}", _shown(each))
        elif not isinstance(value, list):
            table.add_row(name, _shown(value))
    out.print(table)
    for name, columns in (tables or {}).items():
        _print_rows(name, columns, figures[name])


def _print_rows(name: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=name, title_justify="left", box=None, padding=(0, 1))
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_shown(row[column]) for column in columns))
    out.print(table)


def _shown(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def write_run_record(path: Path, figures: dict[str, Any]) -> None:
    """Write what was measured, and everything needed to judge or repeat it."""
    library = load_library()
    record = {
        "command": shlex.join(["swarm", *map(_without_folder, sys.argv[1:])]),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "n_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "versions": {"swarm": __version__, "python": platform.python_version(), library.name: library.version},
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(record, indent=1).encode() + b"\n")


def _without_folder(argument: str) -> str:
    """Return an argument as it was, but of an absolute path its name alone: where things lie is this machine's business."""
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={_without_folder(value)}"
    return Path(argument).name if Path(argument).is_absolute() else argument


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")


def _commit() -> str | None:
    """Return the commit that this code is of, with `-dirty` where a tracked file differs from it; None outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
