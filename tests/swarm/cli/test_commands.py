"""A command brings in its own module and not those of others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from swarm.cli.commands import COMMANDS, lazy_group, load_command

HEAVY = ("swarm.gateway.app", "swarm.bench.decode", "swarm.cli.serve", "aiohttp", "jinja2")


def modules_after(command: str) -> set[str]:
    """Return what is imported once the command line and this command's daemon are there, in a fresh process."""
    code = f"""
import sys
from swarm.cli import main
from swarm.cli.commands import load_command
load_command({command!r})
import {"peer" if command == "join" else command}.daemon
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("command", ["join", "relay"])
def test_a_volunteers_process_has_no_gateway_and_no_benchmarks(command: str) -> None:
    assert modules_after(command).isdisjoint(HEAVY)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_there_under_its_name(name: str) -> None:
    command = load_command(name)
    assert command.name == name
    assert command.help


def test_the_group_lists_the_table_and_knows_no_other_command() -> None:
    group = lazy_group(COMMANDS)()
    assert group.list_commands(None) == list(COMMANDS)
    assert group.get_command(None, "join") is group.get_command(None, "join")
    assert group.get_command(None, "nothing") is None


@pytest.mark.parametrize("command", ["serve", "join"])
def test_tls_links_are_on_unless_a_person_says_otherwise(command: str) -> None:
    option = next(each for each in load_command(command).params if each.name == "tls_links")
    assert (option.default, option.opts, option.secondary_opts) == (True, ["--tls-links"], ["--no-tls-links"])
