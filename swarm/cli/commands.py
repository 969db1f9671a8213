"""The subcommands by name, each imported only when it is asked for.

A volunteer's process needs neither the gateway nor the benchmarks: importing all commands took 17 MB and 0.4 s more than
`swarm join` alone (measured, Python 3.11 on x86-64).
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

# In the order of `swarm --help`: name -> module and, in it, the command's function or the Typer of a group of commands.
COMMANDS = {
    "demo": ("swarm.cli.demo", "demo"),
    "join": ("swarm.cli.join", "join"),
    "serve": ("swarm.cli.serve", "serve"),
    "relay": ("swarm.cli.relay", "relay"),
    "peers": ("swarm.cli.peers", "peers"),
    "plan": ("swarm.cli.plan", "plan"),
    "split": ("swarm.cli.split", "split"),
    "bench": ("swarm.cli.bench", "app"),
    "verify": ("swarm.cli.verify", "verify"),
}


class LazyCommands(TyperGroup):
    """A group whose commands are those of the table."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands' names."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None where there is none of that name."""
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            self.commands[cmd_name] = load_command(cmd_name)
        return super().get_command(ctx, cmd_name)


def load_command(name: str) -> Any:
    """Return the command of the table, with its module imported."""
    module, attribute = COMMANDS[name]
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, rich_markup_mode="rich")
        found.command(name)(function)
    return typer.main.get_command(found)
