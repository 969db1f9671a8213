"""The examples that this machine cannot run are at least well-formed, and name only options that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = {"relay.service": "relay", "Dockerfile.relay": "relay", "Dockerfile.join": "join"}  # and the command they run
OF_OTHER_PROGRAMS = {"--help", "--network", "--restart", "--name", "--memory"}  # docker's, or of both


def test_the_relays_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    program = shutil.which("true")
    if analyze is None or program is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "relay.service"
    unit.write_text((EXAMPLES / "relay.service").read_text().replace("/opt/swarm/bin/swarm", program))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("name", "command"), FILES.items())
def test_options_that_examples_name_exist(name: str, command: str) -> None:
    text = (EXAMPLES / name).read_text()
    known = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    named = set(re.findall(rf"(?:swarm {command}|swarm-{command}|\"{command}\",)(.*)", text))
    options = {option for line in named for option in re.findall(r"--[a-z][a-z-]+", line)} - OF_OTHER_PROGRAMS
    assert options, "the example names none at all"
    for option in options:
        assert option in known, option


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("Dockerfile")])
def test_a_container_is_made_of_files_that_are_there(name: str) -> None:
    root = EXAMPLES.parent
    for line in (EXAMPLES / name).read_text().splitlines():
        words = line.split()
        if words[:1] == ["COPY"] and not words[1].startswith("--"):
            for name in words[1:-1]:
                assert (root / name).exists(), name


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("Dockerfile")])
def test_a_container_keeps_its_key_drains_and_runs_as_nobody_special(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    words = {line.split()[0]: line.split()[1:] for line in lines if line and not line.startswith(("#", " "))}
    assert words["USER"] == ["swarm"]
    assert words["STOPSIGNAL"] == ["SIGTERM"]
    (home,) = [each.partition("=")[2] for each in words["ENV"] if each.startswith("SWARM_HOME=")]
    assert words["VOLUME"] == [home], "the volume is where the key is"
    assert words["ENTRYPOINT"][1].strip('",]') == FILES[name]
