"""`swarm bench registry`: the figures that scripts rely on."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from swarm.cli.main import app

SMALL = ["--nodes", "8", "--peers", "20", "--models", "1", "--duration", "20s"]


def test_json_has_what_scripts_rely_on() -> None:
    result = CliRunner().invoke(app, ["bench", "registry", *SMALL, "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["lookup_success"] == 1
    assert figures["median_round_trips"] == 1
    assert figures["bytes_per_s_per_node"] > 0
    assert (figures["n_nodes"], figures["n_peers"], figures["seed"]) == (8, 20, 1)


def test_options_reach_the_simulation() -> None:
    result = CliRunner().invoke(app, ["bench", "registry", *SMALL, "--withholding", "1", "--seed", "2", "--json"])
    figures = json.loads(result.stdout)
    assert figures["lookup_success"] < 0.5
    assert figures["seed"] == 2
