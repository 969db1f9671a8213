"""`swarm bench federation`: one value stands for both backbones, two are each one's. Nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm.bench.federation import FederationOptions, Phase, Pooling
from swarm.cli.bench.commands import app
from swarm.errors import UserError

FIGURES = {"shares": [0.5, 0.5], "least_share": 0.5}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[FederationOptions]:
    options: list[FederationOptions] = []

    async def measure(asked: FederationOptions, progress: Any) -> dict[str, Any]:
        options.append(asked)
        progress(1, 1)
        return FIGURES

    monkeypatch.setattr("swarm.cli.bench.federation.measure_federation", measure)
    return options


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"x")
    return str(path)


def run(*options: str) -> Any:
    result = CliRunner().invoke(app, ["federation", "--json", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def test_options_become_what_is_measured(asked: list[FederationOptions], model: str) -> None:
    told = ("--phase", "decode,prefill", "--streams", "1,8", "--pooling", "disjoint", "--slow-disk", "200MB")
    assert run("--model", model, "--rate", "100Mbit", "--turn", "2s", *told) == FIGURES
    [options] = asked
    assert (options.phases, options.n_streams) == ((Phase.DECODE, Phase.PREFILL), (1, 8))
    assert (options.pooling, options.disk_rate, options.turn_s) == (Pooling.DISJOINT, "200MB", 2.0)
    assert options.paths.rate_bit_s == 100e6


def test_one_value_stands_for_both(asked: list[FederationOptions], model: str) -> None:
    run("--model", model, "--phase", "prefill", "--streams", "3")
    assert asked[0].phases == (Phase.PREFILL, Phase.PREFILL)
    assert asked[0].n_streams == (3, 3)
    assert asked[0].pooling is Pooling.PARTS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--phase", "sleep"), "no such phase"),
        (("--phase", "decode,decode,decode"), "wrong number of phases"),
        (("--streams", "1,2,3"), "wrong number of streams"),
        (("--streams", "0"), "bad number of streams"),
        (("--streams", "many"), "bad number of streams"),
        (("--slow-disk", "200"), "--slow-disk"),
    ],
)
def test_mistakes_are_said_before_anything_starts(
    asked: list[FederationOptions], model: str, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run("--model", model, *options)
    assert asked == []
