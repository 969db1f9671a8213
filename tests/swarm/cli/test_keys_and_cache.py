"""`swarm key`, `swarm cache`, `swarm join --service`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swarm.cli.main import app
from swarm.cli.service import join_unit
from swarm.errors import UserError
from swarm.identity import Identity


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def make_key(home: Path, role: str = "join") -> Identity:
    return Identity.load_or_create(home / "config" / f"{role}.key")


def test_a_key_that_was_backed_up_is_the_same_node_again(home: Path, tmp_path: Path) -> None:
    first = make_key(home)
    copy = tmp_path / "copy"
    assert run("key", "backup", "join", str(copy)).exit_code == 0
    assert copy.stat().st_mode & 0o777 == 0o600
    assert isinstance(run("key", "backup", "join", str(copy)).exception, UserError), "it would be overwritten"
    assert run("key", "rotate", "join").exit_code == 0
    assert make_key(home).node_id != first.node_id
    assert run("key", "restore", "join", str(copy)).exit_code == 0
    assert make_key(home).node_id == first.node_id
    assert len(list((home / "config").glob("join.old-*"))) >= 1


def test_a_key_set_aside_is_never_overwritten(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = {make_key(home).private_key.private_bytes_raw()}
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    for _ in range(3):
        assert run("key", "rotate", "join").exit_code == 0
        seeds.add(make_key(home).private_key.private_bytes_raw())
    assert {path.read_bytes() for path in (home / "config").glob("join.*") if path.suffix != ".lock"} == seeds


def test_a_key_in_use_is_not_taken_away(home: Path) -> None:
    make_key(home)
    claim = "import sys; from pathlib import Path; from swarm.identity import Identity; "
    claim += "Identity.claim(Path(sys.argv[1]), 'join'); print('claimed', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", claim, str(home / "config")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert json.loads(run("key", "ls", "--json").stdout)["keys"][0]["in_use"] is True
        assert isinstance(run("key", "rotate", "join").exception, UserError)
        process.communicate("")
    assert json.loads(run("key", "ls", "--json").stdout)["keys"][0]["in_use"] is False
    assert run("key", "rotate", "join").exit_code == 0


@pytest.mark.parametrize("role", ["peer", "join-x", "../join", ""])
def test_only_roles_have_keys(role: str, tmp_path: Path) -> None:
    assert isinstance(run("key", "backup", role, str(tmp_path / "x")).exception, UserError)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_what_is_no_key_is_not_restored(home: Path, tmp_path: Path, content: bytes) -> None:
    first = make_key(home)
    (tmp_path / "bad").write_bytes(content)
    assert isinstance(run("key", "restore", "join", str(tmp_path / "bad")).exception, UserError)
    assert make_key(home).node_id == first.node_id


def test_the_cache_tells_what_it_holds_and_forgets_what_is_old(home: Path) -> None:
    old, new = home / "cache" / "blocks" / "aa", home / "cache" / "backbones" / "bb.gguf"
    for path, size in ((old / "blk.0.1", 100), (old / "blk.0.2", 50), (new, 30)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    long_ago = time.time() - 40 * 86_400
    for file in old.iterdir():
        os.utime(file, (long_ago, long_ago))
    begun = home / "cache" / "blocks" / "cc"
    begun.mkdir()
    entries = json.loads(run("cache", "ls", "--json").stdout)["entries"]
    assert entries.pop()["path"] == "blocks/cc"
    assert [(each["path"], each["size_bytes"]) for each in entries] == [("blocks/aa", 150), ("backbones/bb.gguf", 30)]
    assert "180 bytes in all" in run("cache", "ls").stdout
    told = json.loads(run("cache", "prune", "--dry-run", "--json").stdout)
    assert told == {"n_removed": 1, "bytes": 150, "is_dry_run": True}
    assert old.exists()
    assert run("cache", "prune").exit_code == 0
    assert not old.exists()
    assert new.exists()
    assert begun.exists(), "a fetch has just begun"
    run("cache", "prune", "--all")
    assert not new.exists()
    assert json.loads(run("cache", "ls", "--json").stdout)["entries"] == []


def test_a_unit_joins_with_the_same_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_REGISTRY", "swarm://abc@192.0.2.1:7440")
    unit = join_unit(["--experts", "auto", "--name", 'Ann\'s "box" 5%'], [tmp_path])
    assert f'ExecStart={sys.executable} -m swarm join --experts auto --name "Ann\'s \\"box\\" 5%%"' in unit
    assert "Environment=SWARM_REGISTRY=swarm://abc@192.0.2.1:7440" in unit
    assert f"\nWorkingDirectory={os.getcwd()}\n" in unit, "paths may be relative"
    assert '--name "$$5"' in join_unit(["--name", "$5"], [tmp_path])
    assert f'ReadWritePaths="{tmp_path / "$x"}"' in join_unit([], [tmp_path / "$x"])
    if (verify := shutil.which("systemd-analyze")) is not None:
        file = tmp_path / "swarm-join.service"
        file.write_text(unit)
        done = subprocess.run([verify, "verify", "--user", str(file)], capture_output=True, text=True, check=False)
        assert "swarm-join.service" not in done.stderr, done.stderr


def test_join_prints_and_installs_the_unit(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    arguments = ["join", "--experts", "auto", "--service", "print", "--max-upload", "2MB"]
    monkeypatch.setattr(sys, "argv", ["swarm", *arguments])
    shown = run(*arguments)
    assert "-m swarm join --experts auto --max-upload 2MB\n" in shown.stdout
    monkeypatch.setattr(sys, "argv", ["swarm", "-v", "--config", "my.toml", *arguments])
    assert "-m swarm -v --config my.toml join --experts auto --max-upload 2MB\n" in run(*arguments).stdout
    arguments[4] = "install"
    monkeypatch.setattr(sys, "argv", ["swarm", *arguments])
    assert run(*arguments).exit_code == 0
    assert (tmp_path / "systemd" / "user" / "swarm-join.service").read_text() == shown.stdout[:-1]
    assert all((home / each).is_dir() for each in ("config", "state", "cache")), "systemd needs all that is writable"
    assert isinstance(run("join", "--service", "start").exception, UserError)
