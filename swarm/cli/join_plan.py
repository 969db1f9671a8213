"""What joining will take, as a volunteer reads it, and the consent to it.

A person at a terminal is asked, once for each model and size; `--yes` is the answer beforehand. Where nobody can be asked, a
service or a script, the command itself is the consent, as with other tools that run unattended: what it takes is told, and it
goes on. Whose models are trusted is another question, which no silence answers (`swarm.registry.publishers`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.filesize import decimal

from swarm.cli.question import ask, is_person_there
from swarm.cli.runtime import err, print_json
from swarm.errors import UserError
from swarm.files import Folders, read_lines, write_atomically
from swarm.plan.prospect import Prospect

logger = logging.getLogger(__name__)

FIRST_LINES = """\
# Defaults of swarm's options on this machine; a flag or a SWARM_... variable goes before. Written by the first
# `swarm join`, yours to change. `swarm join --help` lists the options; a name here is a long option without its dashes.
"""


def plan_lines(plan: Prospect) -> list[str]:
    """Return the plan for people, a line for each thing."""
    publisher = f", published by node {plan.publisher[:8]}" if plan.publisher else ", from your file"
    lines = [f"model     {plan.model}{publisher}", f"experts   {_cut(plan.experts)} ({plan.n_blocks} blocks)"]
    if plan.n_fetch:
        there = "" if plan.n_fetch == plan.n_blocks else f", the other {plan.n_blocks - plan.n_fetch} blocks are here"
        lines.append(f"download  {decimal(plan.fetch_bytes)}, each block checked against the manifest{there}")
    else:
        lines.append("download  nothing, all blocks are here")
    free = "" if plan.free_memory_bytes is None else f", {decimal(plan.free_memory_bytes)} are free"
    lines.append(f"memory    {decimal(plan.memory_bytes)}{free}")
    if plan.free_disk_bytes is not None:
        lines.append(f"disk      {decimal(plan.slice_bytes)}, {decimal(plan.free_disk_bytes)} are free")
    up, down = round(plan.up_bytes_per_token), round(plan.down_bytes_per_token)
    lines.append(f"traffic   up to {decimal(up)} sent and {decimal(down)} received for each token of text")
    per_day = plan.up_bytes_per_day, plan.down_bytes_per_day
    if plan.tokens_per_s is not None and per_day[0] is not None and per_day[1] is not None:
        day = f"{decimal(round(per_day[0]))} and {decimal(round(per_day[1]))} a day"
        lines.append(f"          at the present {plan.tokens_per_s:.3g} tokens/s: {day}")
    caps = [
        f"{decimal(round(cap))}/s {way}"
        for cap, way in ((plan.max_upload_bytes_s, "sent"), (plan.max_download_bytes_s, "received"))
        if cap is not None
    ]
    lines.append(f"at most   {', '.join(caps) or 'no caps: --max-upload and --max-download set them'}")
    return lines + [f"warning   {each}" for each in shortages(plan)]


def shortages(plan: Prospect) -> list[str]:
    """Return what is not there for the plan."""
    found = []
    if plan.free_memory_bytes is not None and plan.memory_bytes > plan.free_memory_bytes:
        found.append("more memory than is free: take fewer --experts or --layers")
    if plan.free_disk_bytes is not None and plan.fetch_bytes > plan.free_disk_bytes:
        found.append("more disk than is free: take fewer experts, or set SWARM_HOME to a larger disk")
    return found


class Consent:
    """Shows plans and knows which have been agreed to; call it with one."""

    def __init__(
        self,
        folders: Folders,
        *,
        is_given: bool,
        as_json: bool,
        on_ask: Callable[[], None] = lambda: None,
        is_person_there: Callable[[], bool] = is_person_there,
        ask: Callable[[str], Awaitable[bool]] = ask,
    ) -> None:
        """`is_given`: by `--yes`; `on_ask` is called before anything is written, as progress bars may stand there."""
        self._path = folders.state / "agreed_plans"
        self._is_given = is_given
        self._as_json = as_json
        self._on_ask = on_ask
        self._is_person_there = is_person_there
        self._ask = ask
        self.is_first_agreed = False
        """Whether somebody has said yes, now, to what was not agreed to before."""

    async def __call__(self, plan: Prospect) -> bool:
        """Return whether the volunteer wants that; remembered for plans of the same model that are not larger."""
        self._on_ask()
        if self._as_json:
            print_json({"event": "plan", **plan.as_json()})
        is_known = self._is_known(plan)
        if not self._as_json and not is_known:
            err.print("This is what joining takes:", highlight=False)
            for line in plan_lines(plan):
                err.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        if is_known or not (self._is_given or self._is_person_there()):
            return True
        if not self._is_given and not await self._ask("Join?"):
            return False
        self._remember(plan)
        self.is_first_agreed = True
        return True

    def _is_known(self, plan: Prospect) -> bool:
        return plan.slice_bytes <= self._agreed().get(plan.model, -1)

    def _agreed(self) -> dict[str, int]:
        found = {}
        for line in read_lines(self._path):
            model, _, size = line.rpartition(" ")
            if size.isascii() and size.isdigit() and len(size) < 20:
                found[model] = int(size)
        return found

    def _remember(self, plan: Prospect) -> None:
        agreed = self._agreed() | {plan.model: plan.slice_bytes}
        _write(self._path, "".join(f"{model} {size}\n" for model, size in sorted(agreed.items())))


def write_first_config(folders: Folders, *, registry: str | None) -> None:
    """Write a config.toml where there is none: the registry to use from now on, None: the default, and how to say more."""
    path = folders.config / "config.toml"
    if path.exists():
        return
    line = '# registry = "swarm://NODEID@host:7440"\n' if registry is None else f"registry = {_toml(registry)}\n"
    example = (
        '\n[join]\n# experts = "12-19"\n# max-upload = "2MB"\n# schedule = "22:00-07:00"\n# pause-when-busy = true\n'
    )
    _write(path, FIRST_LINES + line + example)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _toml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _cut(text: str, n_most: int = 200) -> str:
    return text if len(text) <= n_most else f"{text[: n_most - 1]}…"
