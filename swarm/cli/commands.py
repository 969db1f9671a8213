"""The subcommands by name, each imported only when it is asked for.

A volunteer's process needs neither the gateway nor the benchmarks: importing all commands took 17 MB and 0.4 s more than
`swarm join` alone (measured, Python 3.11 on x86-64).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

# In the order of `swarm --help`: name -> module and, in it, the command's function or the Typer of a group of commands.
COMMANDS = {
    "demo": ("swarm.cli.demo", "demo"),
    "join": ("swarm.cli.join", "join"),
    "serve": ("swarm.cli.serve", "serve"),
    "chat": ("swarm.cli.chat", "chat"),
    "trace": ("swarm.cli.trace", "trace"),
    "relay": ("swarm.cli.relay", "relay"),
    "peers": ("swarm.cli.peers", "peers"),
    "receipts": ("swarm.cli.receipts", "app"),
    "doctor": ("swarm.cli.doctor", "doctor"),
    "cache": ("swarm.cli.cache", "app"),
    "key": ("swarm.cli.key", "app"),
    "plan": ("swarm.cli.plan", "plan"),
    "split": ("swarm.cli.split", "split"),
    "bench": ("swarm.cli.bench.commands", "app"),
    "verify": ("swarm.cli.verify", "verify"),
}


def lazy_group(table: Mapping[str, tuple[str, str]]) -> type[TyperGroup]:
    """Return a kind of group whose commands are those of `table`, in its form."""

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(table)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in self.commands and cmd_name in table:
                self.commands[cmd_name] = load_command(cmd_name, table)
            return super().get_command(ctx, cmd_name)

    return LazyGroup


def load_command(name: str, table: Mapping[str, tuple[str, str]] = COMMANDS) -> Any:
    """Return the command of the table, with its module imported."""
    module, attribute = table[name]
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, rich_markup_mode="rich")
        found.command(name)(function)
    return typer.main.get_command(found)
