"""Runs the comparison of many architectures, each in a process of its own, and keeps what each of them says or dies of."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.architectures.recipes import RECIPES, Recipe
from swarm.errors import UserError
from swarm.gate.architecture_check import STAGE, ArchitectureReport
from swarm.gate.stored import engine_name
from swarm.native.library import TILED_VARIABLE

TIMEOUT_S = 240.0  # of one architecture; the longest takes 15 s on one core (measured)
MAX_OUTPUT_BYTES = 4 << 20
MODULE = "swarm.gate.architecture_check"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What all of them say, in the order of the table."""

    architectures: tuple[ArchitectureReport, ...]

    @property
    def n_identical(self) -> int:
        """How many are identical in everything that was compared."""
        return sum(report.identical for report in self.architectures)

    @property
    def is_silently_wrong(self) -> bool:
        """Whether anything was computed and differs from stock: worse than a refusal."""
        return any(report.status == "differs" for report in self.architectures)

    def to_json(self) -> dict[str, Any]:
        """Return a plain object."""
        return {
            "engine": engine_name(),
            "n_identical": self.n_identical,
            "n_architectures": len(self.architectures),
            "architectures": [report.to_json() for report in self.architectures],
        }


def chosen_recipes(names: str) -> tuple[Recipe, ...]:
    """Return the recipes of `all` or of a comma list of names; raises UserError for one that there is not."""
    if names == "all":
        return RECIPES
    known = {recipe.architecture: recipe for recipe in RECIPES}
    chosen = [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise UserError(f"unknown architecture: got {unknown[0]}, expected all or some of {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(chosen))


async def sweep(recipes: Sequence[Recipe], progress: Progress, *, n_jobs: int | None = None) -> SweepReport:
    """Return the reports of these architectures, `n_jobs` at a time (None: one for each core)."""
    gate = asyncio.Semaphore(n_jobs or os.cpu_count() or 1)
    n_done = 0

    async def one(recipe: Recipe) -> ArchitectureReport:
        nonlocal n_done
        async with gate:
            report = await _in_a_process(recipe)
        n_done += 1
        progress(recipe.architecture, n_done, len(recipes))
        return report

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(recipe)) for recipe in recipes]
    return SweepReport(architectures=tuple(task.result() for task in running))


async def _in_a_process(recipe: Recipe) -> ArchitectureReport:
    environment = os.environ | {"OMP_NUM_THREADS": "1", TILED_VARIABLE: "0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        MODULE,
        recipe.architecture,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_OUTPUT_BYTES,
        env=environment,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        return _failed(recipe, f"not done after {TIMEOUT_S:.0f} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = [line for line in err.decode("utf-8", "replace").splitlines() if line.strip()]
    try:
        return ArchitectureReport.from_json(json.loads(out.decode().splitlines()[-1]))
    except (ValueError, KeyError, IndexError, TypeError):
        return _failed(recipe, explain_crash(lines, process.returncode or 0))


def explain_crash(lines: Sequence[str], code: int) -> str:
    """Return why a comparison's process died, from the lines it left: what it was at, and what it died of."""
    asserts = [line.rsplit("/", 1)[-1] for line in lines if "ASSERT" in line or "Error" in line]
    stages = [line for line in lines if line.startswith(STAGE)]
    reason = asserts[-1] if asserts else lines[-1] if lines else "no message"
    stage = f"{stages[-1].split(': ', 1)[1]}: " if stages else ""
    return f"{stage}the process ended with {code}: {reason}"


def _failed(recipe: Recipe, reason: str) -> ArchitectureReport:
    return ArchitectureReport(name=recipe.architecture, source=recipe.source, status="failed", reason=reason)
