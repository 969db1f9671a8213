"""`swarm bench`: options become what is measured, figures become JSON, a table and files. Nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from swarm.bench.decode import DecodeOptions
from swarm.bench.fanout import Fanout, FanoutOptions
from swarm.cli import bench
from swarm.cli.slice_file import read_slice_file
from swarm.errors import UserError
from swarm.ids import ExpertSet

SHARES = [ExpertSet({0: frozenset({0, 3}), 1: frozenset({1})}), ExpertSet({0: frozenset({1}), 1: frozenset({0, 3})})]
FIGURES = {
    "model": "m.gguf",
    "n_expert_used": 4,
    "n_tokens_learned": 512,
    "n_tokens_judged": 1024,
    "destinations_per_token": [
        {
            "n_peers": 2,
            "uniform": 2.82,
            "contiguous": 2.75,
            "clustered": 2.31,
            "contiguous_imbalance": 1.18,
            "clustered_imbalance": 1.25,
        }
    ],
}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Return the names of a model and of a text."""
    for name in ("m.gguf", "t.txt"):
        (tmp_path / name).write_bytes(b"x")
    return str(tmp_path / "m.gguf"), str(tmp_path / "t.txt")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the options of each measurement, in the order they were asked for."""
    options: list[Any] = []

    def fanout(asked: FanoutOptions, progress: Any) -> Fanout:
        options.append(asked)
        progress(1, 1)
        return Fanout(figures=FIGURES, shares={2: SHARES})

    async def decode(asked: DecodeOptions, progress: Any) -> dict[str, Any]:
        options.append(asked)
        return {"tokens_per_s": 3.0}

    monkeypatch.setattr(bench, "measure_fanout", fanout)
    monkeypatch.setattr(bench, "measure_decode", decode)
    monkeypatch.setattr(bench, "tame_openmp", lambda: None)
    return options


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench.app, arguments)


def test_fanout_reads_four_and_sixteen_peers_by_default(asked: list[Any], files: tuple[str, str]) -> None:
    model, text = files
    assert run("fanout", "--model", model, "--text", text).exit_code == 0
    assert run("fanout", "--model", model, "--text", text, "--peers", "8,2", "--tokens", "2000").exit_code == 0
    assert asked[0] == FanoutOptions(model=Path(model), text=Path(text), n_peers=(4, 16), n_tokens=20_480)
    assert (asked[1].n_peers, asked[1].n_tokens) == ((2, 8), 2000)


def test_fanout_prints_json_or_a_table(asked: list[Any], files: tuple[str, str]) -> None:
    arguments = ("fanout", "--model", files[0], "--text", files[1])
    assert json.loads(run(*arguments, "--json").stdout) == FIGURES
    table = run(*arguments).stdout
    for cell in ("2.82", "2.75", "2.31", "1.18", "1.25", "512", "1024"):
        assert cell in table


def test_saved_slices_are_what_join_reads(asked: list[Any], files: tuple[str, str], tmp_path: Path) -> None:
    result = run("fanout", "--model", files[0], "--text", files[1], "--save", str(tmp_path / "s"), "--json")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "s" / "2-peers"
    assert [read_slice_file(folder / f"slice-{i}.json") for i in range(2)] == SHARES
    assert len(list(folder.iterdir())) == 2


def test_decode_drafts_only_when_asked(asked: list[Any], files: tuple[str, str]) -> None:
    model, text = files
    assert run("decode", "--model", model, "--json").exit_code == 0
    assert run("decode", "--model", model, "--draft", "8", "--text", text, "--prompt-tokens", "99").exit_code == 0
    assert (asked[0].n_draft, asked[0].text, asked[0].n_prompt) == (0, None, 16)
    assert (asked[1].n_draft, asked[1].text, asked[1].n_prompt) == (8, Path(text), 99)


@pytest.mark.parametrize(
    "arguments",
    [
        ("decode", "--model", "none.gguf"),
        ("decode", "--model", "{model}", "--text", "none.txt"),
        ("fanout", "--model", "none.gguf", "--text", "{text}"),
        ("fanout", "--model", "{model}", "--text", "none.txt"),
        ("fanout", "--model", "{model}", "--text", "{text}", "--peers", "four"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_said_before_anything_is_measured(
    asked: list[Any], files: tuple[str, str], arguments: tuple[str, ...]
) -> None:
    model, text = files
    result = run(*(argument.format(model=model, text=text) for argument in arguments))
    assert isinstance(result.exception, UserError)
    assert asked == []
