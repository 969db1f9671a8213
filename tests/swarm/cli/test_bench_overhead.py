"""`swarm bench overhead`: options become what is measured, and what cannot be measured is refused. Nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from swarm.bench.overhead import OverheadOptions
from swarm.cli.bench.commands import app
from swarm.errors import UserError
from swarm.wire.rows import parse_wire

POINT = {
    "model": "m",
    "n_streams": 1,
    "n_rows": 4,
    "layer_s": 0.001,
    "experts_s": 0.0005,
    "extra_s": 0.0004,
    "overhead": 0.29,
    "overlapped_overhead": None,
    "tokens_per_s": 700.0,
    "in_process_tokens_per_s": 1000.0,
}
CURVE = {
    "model": "m",
    "n_streams": 1,
    "is_overlapped": False,
    "hop_s": 0.0004,
    "row_s": 0.0,
    "under_from_s": 0.033,
    "how": "extrapolated",
}
FIGURES = {"link": "tls", "points": [POINT], "curves": [CURVE]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[OverheadOptions]:
    options: list[OverheadOptions] = []

    async def measure(asked: OverheadOptions, progress: Any) -> dict[str, Any]:
        options.append(asked)
        progress(1, 1)
        return FIGURES

    monkeypatch.setattr("swarm.cli.bench.overhead.measure_overhead", measure)
    return options


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"x")
    return str(path)


def run(*options: str) -> Result:
    result = CliRunner().invoke(app, ["overhead", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_options_become_what_is_measured(asked: list[OverheadOptions], model: str) -> None:
    told = ("--streams", "4,1", "--rows", "64,4,1", "--peers", "3", "--link", "quic", "--chunk", "64KiB")
    result = run(
        "--models", f"{model},{model}", "--turn", "50ms", "--repetitions", "7", "--wire", "f32", *told, "--json"
    )
    assert json.loads(result.stdout) == FIGURES
    assert asked == [
        OverheadOptions(
            models=(Path(model), Path(model)),
            wire=parse_wire("f32"),
            n_peers=3,
            link="quic",
            n_streams=(1, 4),
            n_rows=(1, 4, 64),
            n_repetitions=7,
            turn_s=0.05,
            chunk_bytes=65536,
        )
    ]


def test_chunks_are_as_served_unless_asked_for(asked: list[OverheadOptions], model: str) -> None:
    run("--models", model)
    run("--models", model, "--chunk", "0")
    assert [each.chunk_bytes for each in asked] == [None, 0]
    assert (asked[0].link, asked[0].n_peers) == ("tls", 1)


def test_the_table_tells_the_limit_and_how_it_is_known(asked: list[OverheadOptions], model: str) -> None:
    shown = run("--models", model).stdout
    assert "extrapolated" in shown
    assert "0.033" in shown


@pytest.mark.parametrize(
    "wrong", [("--streams", "3"), ("--streams", "0"), ("--streams", "65"), ("--rows", "0"), ("--rows", "513")]
)
def test_what_cannot_be_measured_is_refused(asked: list[OverheadOptions], model: str, wrong: tuple[str, str]) -> None:
    with pytest.raises(UserError):
        run("--models", model, "--rows", "4", *wrong)
    assert asked == []
