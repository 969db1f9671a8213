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
FILES = ("relay.service", "Dockerfile.relay")


def test_the_relays_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    program = shutil.which("true")
    if analyze is None or program is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "relay.service"
    unit.write_text((EXAMPLES / "relay.service").read_text().replace("/opt/swarm/bin/swarm", program))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_options_that_examples_name_exist(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    known = CliRunner().invoke(app, ["relay", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    named = set(re.findall(r"(?:swarm relay|swarm-relay|\"relay\",)(.*)", text))
    options = {option for line in named for option in re.findall(r"--[a-z][a-z-]+", line)} - {"--help"}
    assert options, "the example names none at all"
    for option in options:
        assert option in known, option


def test_the_container_is_made_of_files_that_are_there() -> None:
    root = EXAMPLES.parent
    for line in (EXAMPLES / "Dockerfile.relay").read_text().splitlines():
        words = line.split()
        if words[:1] == ["COPY"] and not words[1].startswith("--"):
            for name in words[1:-1]:
                assert (root / name).exists(), name
