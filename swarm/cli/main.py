"""The `swarm` command: its subcommands, its configuration file, and the one place where errors end."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm import __version__
from swarm.cli.demo import demo
from swarm.cli.join import join
from swarm.cli.peers import peers
from swarm.cli.relay import relay
from swarm.cli.runtime import err, set_up_logging
from swarm.cli.serve import serve
from swarm.cli.split import split
from swarm.cli.verify import verify
from swarm.errors import SwarmError, UserError
from swarm.files import Folders

app = typer.Typer(
    name="swarm",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve Mixture-of-Experts models on volunteers' machines.",
)
app.command()(demo)
app.command()(join)
app.command()(serve)
app.command()(relay)
app.command()(peers)
app.command()(split)
app.command()(verify)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"swarm {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more; twice for all.")] = 0,
    config: Annotated[
        Path | None,
        typer.Option("--config", envvar="SWARM_CONFIG", metavar="FILE", help="Defaults for options, in TOML."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Set up what every command shares."""
    set_up_logging(verbose)
    context.default_map = _defaults(config)


def _defaults(path: Path | None) -> dict[str, Any]:
    """Return option defaults from config.toml: top-level keys for every command, a table of a command's name for it."""
    file = path or Folders.from_environment().config / "config.toml"
    if not file.exists():
        if path is not None:
            raise UserError(f"no such configuration file: {path}")
        return {}
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    shared = {key.replace("-", "_"): value for key, value in content.items() if not isinstance(value, dict)}
    names = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    unknown = [key for key, value in content.items() if isinstance(value, dict) and key not in names]
    if unknown:
        raise UserError(f"{file} has a table for an unknown command: {unknown[0]}; known are {', '.join(names)}")
    return {
        name: shared | {key.replace("-", "_"): value for key, value in content.get(name, {}).items()} for name in names
    }


def run(*prefix: str) -> None:
    """Run the command line; `prefix` stands before the arguments given (`python -m relay` is `swarm relay`).

    Exit codes: 0 done, 1 failed, 2 the user's mistake.
    """
    try:
        app(args=[*prefix, *sys.argv[1:]], prog_name="swarm")
    except UserError as error:
        err.print(f"swarm: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)
    except SwarmError as error:
        err.print(f"swarm: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
