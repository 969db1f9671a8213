"""`swarm bench speculation`, `popularity` and `ablation`: options become what is measured. Nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from swarm.cli.bench.commands import app
from swarm.errors import UserError
from swarm.wire.rows import parse_wire

MODES = [
    dict.fromkeys(
        (
            "n_peers",
            "tokens_per_s",
            "speedup",
            "choices_kept_share",
            "rows_kept_share",
            "skipped_trips_share",
            "max_over_mean_load",
            "prefill_tokens_per_s",
            "prefill_max_over_mean_load",
        ),
        1.5,
    )
    | {"mode": mode}
    for mode in ("none", "local", "replicas")
]
LEVERS = [{"lever": "drafts", "saved_s_per_token": 0.3, "saved_trips_per_token": 4.5, "slower_without": 3.0}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the options of each measurement, in the order they were asked for."""
    options: list[Any] = []

    def measure(figures: dict[str, Any]) -> Any:
        async def measured(asked: Any, progress: Any) -> dict[str, Any]:
            options.append(asked)
            progress(1, 1)
            return figures

        return measured

    for name, figures in (
        ("speculation", {"accept_length": 3.2}),
        ("popularity", {"modes": MODES}),
        ("ablation", {"levers": LEVERS}),
    ):
        monkeypatch.setattr(f"swarm.cli.bench.{name}.measure_{name}", measure(figures))
        monkeypatch.setattr(f"swarm.cli.bench.{name}.tame_openmp", lambda: None)
    return options


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    paths = tmp_path / "m.gguf", tmp_path / "t.txt"
    for path in paths:
        path.write_text("x")
    return str(paths[0]), str(paths[1])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_speculation_asks_for_what_the_options_say(asked: list[Any], files: tuple[str, str]) -> None:
    given = ("speculation", "--model", files[0], "--source", files[1])
    assert json.loads(run(*given, "--json").stdout) == {"accept_length": 3.2}
    assert (asked[0].text, asked[0].drafter, asked[0].paths.rtts_s, asked[0].n_draft) == ("novel", "auto", (0.08,), 8)
    more = ("--text", "copy", "--drafter", "local", "--local-share", "0.5", "--rtt", "30ms", "--draft", "4")
    assert run(*given, *more, "--pieces", "3", "--tokens", "40").exit_code == 0
    found = asked[1]
    assert (found.text, found.drafter, found.local_share, found.paths.rtts_s) == ("copy", "local", 0.5, (0.03,))
    assert (found.n_draft, found.n_pieces, found.n_tokens) == (4, 3, 40)
    assert run(*given, "--forced-acceptance", "0.25", "--text", "copy").exit_code == 0
    assert asked[2].forced_acceptance == 0.25


@pytest.mark.parametrize(
    "wrong",
    [("--text", "poems"), ("--drafter", "oracle"), ("--drafter", "local"), ("--drafter", "model")],
    ids=" ".join,
)
def test_what_cannot_be_drafted_is_refused(asked: list[Any], files: tuple[str, str], wrong: tuple[str, ...]) -> None:
    found = run("speculation", "--model", files[0], "--source", files[1], *wrong)
    assert isinstance(found.exception, UserError)
    assert asked == []


def test_popularity_makes_a_model_of_the_skew(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def synthetic_file(shape: Any) -> Path:
        made.append(shape)
        return Path("synthetic.gguf")

    monkeypatch.setattr("swarm.cli.bench.popularity.synthetic_file", synthetic_file)
    found = run("popularity", "--skew", "1.5", "--local", "16", "--extra", "3", "--wire", "f32")
    assert found.exit_code == 0, found.output
    assert "replicas" in found.stdout
    assert (made[0].router_skew, made[0].name) == (1.5, "synth16-zipf1.5")
    assert (asked[0].n_local, asked[0].n_extra, asked[0].wire) == (16, 3, parse_wire("f32"))
    assert run("popularity", "--skew", "0").exit_code == 0
    assert (made[1].router_skew, made[1].name) == (0.0, "synth16")


def test_a_files_routers_are_as_they_are(asked: list[Any], files: tuple[str, str]) -> None:
    assert run("popularity", "--model", files[0]).exit_code == 0
    assert isinstance(run("popularity", "--model", files[0], "--skew", "2").exception, UserError)


def test_ablation_ranks_levers_in_a_table(asked: list[Any], files: tuple[str, str]) -> None:
    found = run("ablation", "--model", files[0], "--source", files[1], "--rtt", "30ms", "--pieces", "2")
    assert found.exit_code == 0, found.output
    assert "drafts" in found.stdout
    assert (asked[0].paths.rtts_s, asked[0].n_pieces, asked[0].n_tokens) == ((0.03,), 2, 24)
