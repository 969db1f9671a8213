"""A record has what is needed to judge and repeat a run, and nothing of where things lie on the machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from swarm.cli import run_record
from swarm.cli.run_record import finish, write_run_record

FIGURES = {"p50_s": 0.25, "stages_s": {"plan": 0.5}, "rows": [{"wire": "q8", "bytes": 6749.04, "more": [1]}]}


def test_a_record_has_the_figures_the_command_and_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_record.sys, "argv", ["swarm", "bench", "x", "--model", str(tmp_path / "m.gguf"), f"--text={tmp_path}/t.txt"]
    )
    path = tmp_path / "new" / "r.json"
    write_run_record(path, FIGURES)
    record = json.loads(path.read_text())
    assert record["figures"] == FIGURES
    assert record["command"] == "swarm bench x --model m.gguf --text=t.txt"
    assert record["machine"]["n_cores"] >= 1
    assert record["versions"]["python"]
    assert str(tmp_path) not in path.read_text()


def test_a_record_of_changed_code_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    code, path = tmp_path / "code.py", tmp_path.parent / f"{tmp_path.name}-record.json"
    monkeypatch.setattr(run_record, "__file__", str(code))
    code.write_text("x = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "--short", "HEAD")
    for text, expected in (("x = 1\n", commit), ("x = 2\n", f"{commit}-dirty")):
        code.write_text(text)
        write_run_record(path, {})
        assert json.loads(path.read_text())["commit"] == expected


def test_relative_paths_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record.sys, "argv", ["swarm", "--record", "docs/bench/x.json", "--rate=1Gbit"])
    write_run_record(tmp_path / "r.json", {})
    assert json.loads((tmp_path / "r.json").read_text())["command"] == "swarm --record docs/bench/x.json --rate=1Gbit"


def test_lists_are_shown_as_tables_of_the_columns_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    finish(FIGURES, False, None, tables={"rows": {"wire": "form", "bytes": "all"}})
    shown = capsys.readouterr().out
    for text in ("p50_s", "0.25", "stages_s.plan", "0.5", "form", "q8", "all", "6749"):
        assert text in shown
    assert "more" not in shown


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    finish(FIGURES, True, None, tables={"rows": {"wire": "form"}})
    assert json.loads(capsys.readouterr().out) == FIGURES
