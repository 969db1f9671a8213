"""The `swarm` command: its subcommands, its configuration file, and the one place where errors end."""

from __future__ import annotations

import asyncio
import logging
import sys
import tomllib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from swarm import __version__
from swarm.cli.commands import COMMANDS, lazy_group, load_command
from swarm.cli.runtime import err, set_up_logging
from swarm.errors import SwarmError, UserError
from swarm.files import Folders

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="swarm",
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve Mixture-of-Experts models on volunteers' machines.",
)


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
    """Return option defaults from config.toml: top-level keys for every command, a table of a command's name for it.

    Keys are the long options without their dashes: `registry`, `exact-kernels` or `exact_kernels`.

    Raises:
        UserError: a file that cannot be read, or that names an unknown command or option.
    """
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
    options = _options_of_commands()
    unknown = [key for key, value in content.items() if isinstance(value, dict) and key not in options]
    if unknown:
        raise UserError(f"{file} has a table for an unknown command: {unknown[0]}; known are {', '.join(options)}")
    defaults: dict[str, Any] = {}
    for name, known in options.items():
        own = {key.replace("-", "_"): value for key, value in content.get(name, {}).items()}
        _require_known(own, known, f"table {name} of {file}")
        defaults[name] = {known[key]: value for key, value in (shared | own).items() if key in known}
    _require_known(shared, {key for known in options.values() for key in known}, str(file))
    return defaults


def _options_of_commands() -> dict[str, dict[str, str]]:
    """Return, for each command, what its long options are called in a file and in its signature."""
    return {
        name: {
            text.lstrip("-").replace("-", "_"): parameter.name or ""
            for parameter in load_command(name).params
            for text in parameter.opts
            if not text.startswith("-") or text.startswith("--")
        }
        for name in COMMANDS
    }


def _require_known(given: Iterable[str], known: Container[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise UserError(f"{where} sets an unknown option: {key}; see `swarm COMMAND --help`")


def run(*prefix: str) -> None:
    """Run the command line; `prefix` stands before the arguments given (`python -m relay` is `swarm relay`).

    Exit codes: 0 done, 1 failed, 2 the user's mistake, 130 and 143 ended by Ctrl-C and SIGTERM before it was done.
    """
    try:
        app(args=[*prefix, *sys.argv[1:]], prog_name="swarm")
    except (SwarmError, OSError) as error:
        _fail(error)
    except ExceptionGroup as group:  # of a task group whose task or body failed
        _, others = group.split((SwarmError, OSError))
        if others is not None:
            raise
        _fail(_first_leaf(group))
    except asyncio.CancelledError:
        sys.exit(128 + 15)  # SIGTERM, as run_async passes it on
    except KeyboardInterrupt:
        sys.exit(128 + 2)


def _fail(error: Exception) -> NoReturn:
    text = str(error)
    if isinstance(error, OSError):  # the last net: whoever knows what was tried says so in a UserError
        logger.debug("this error was expected nowhere", exc_info=error)
        text = ": ".join(str(part) for part in (error.strerror or error, error.filename) if part is not None)
    line = "".join(character if character.isprintable() else " " for character in text)  # some of it is untrusted
    err.print(f"swarm: {line}", style="red", markup=False, highlight=False)
    sys.exit(2 if isinstance(error, UserError) else 1)


def _first_leaf(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
