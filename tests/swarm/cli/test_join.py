"""`swarm join` turns its options into a peer's configuration, or says in one line what is wrong with them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import peer.daemon
import swarm.cli.join as join_module
from peer.auto import AutoExperts
from peer.config import PeerConfig, PeerReady
from swarm import identity
from swarm.cli.join import join
from swarm.errors import UserError
from swarm.ids import ExpertSet, ModelId

app = typer.Typer()
app.command()(join)


class _Daemon:
    """Stands in for the peer's daemon: remembers its configuration, and is ready at once."""

    config: PeerConfig

    def __init__(self, config: PeerConfig, identity: Any, progress: Any, *, agree: Any) -> None:
        type(self).config = config
        self._node = str(identity.node_id)

    async def run(self, on_ready: Any) -> None:
        on_ready(
            PeerReady(
                node=self._node, model="tiny@0011", experts="experts 1-2 of layers 0-3", address="x:1", reach="relayed"
            )
        )


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_to_its_end(main: Coroutine[Any, Any, None], *, until_eof: bool, is_ready: Callable[[], bool]) -> None:
        assert not is_ready()
        asyncio.run(main)
        assert is_ready()

    monkeypatch.setattr(peer.daemon, "PeerDaemon", _Daemon)
    monkeypatch.setattr(join_module, "run_daemon", run_to_its_end)
    monkeypatch.setattr(join_module, "tame_openmp", lambda: None)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    for name in ("SWARM_REGISTRY", "SWARM_HOST"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def config_of(*arguments: str) -> PeerConfig:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return _Daemon.config


def test_experts_alone_are_enough() -> None:
    config = config_of("--experts", "12-14,40")
    assert config.experts == {12, 13, 14, 40}
    assert (config.layers, config.model_file, config.model) == (None, None, None)
    assert [(each.address, each.node) for each in config.registry] == [(("127.0.0.1", 7440), None)]
    assert (config.host, config.port, config.n_threads, config.exact_kernels) == ("0.0.0.0", 0, 1, False)
    assert config.fault is None


def test_layers_are_a_set_like_experts() -> None:
    assert config_of("--experts", "0", "--layers", "3,5-8").layers == frozenset({3, 5, 6, 7, 8})


def test_a_slice_file_names_experts_layer_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "slice.json"
    path.write_text('{"0": "3,17", "2": "0-1"}')
    config = config_of("--slice", str(path))
    assert config.experts == ExpertSet({0: frozenset({3, 17}), 2: frozenset({0, 1})})
    assert config.layers is None


def test_a_model_is_a_file_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"GGUF")
    for text in ("no/such/model.gguf", str(tmp_path / "weights")):
        config = config_of("--experts", "0", "--model", text)
        assert (config.model_file, config.model) == (Path(text), None)
    for text in ("tiny", "d8d357d1", str(ModelId(b"m" * 32))):
        config = config_of("--experts", "0", "--model", text)
        assert (config.model_file, config.model) == (None, text)


def test_a_file_may_say_by_itself_what_to_hold() -> None:
    config = config_of("--model", "out/experts-0-7.gguf", "--layers", "1")
    assert (config.experts, config.layers, config.model_file) == (None, {1}, Path("out/experts-0-7.gguf"))
    assert isinstance(run("--model", "tiny").exception, UserError), "a name does not"


def test_auto_takes_what_fits_a_budget() -> None:
    assert config_of("--experts", "auto").experts == AutoExperts()
    config = config_of("--experts", "auto", "--memory", "8GB", "--disk", "500MB", "--layers", "1-2")
    assert config.experts == AutoExperts(memory_bytes=8 * 10**9, disk_bytes=500 * 10**6)
    assert config.layers == {1, 2}


def test_an_advertised_host_is_resolved() -> None:
    assert config_of("--experts", "0", "--advertise", "localhost:4000").advertise == "127.0.0.1:4000"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--layers", "0"],
        ["--slice", "none.json"],
        ["--slice", "none.json", "--experts", "0"],
        ["--slice", "none.json", "--layers", "0"],
        ["--experts", "nine"],
        ["--experts", "9-3"],
        ["--experts", "auto", "--memory", "8"],
        ["--experts", "auto", "--slice", "none.json"],
        ["--experts", "0-3", "--memory", "8"],
        ["--experts", "0-3", "--disk", "much"],
        ["--experts", "0", "--layers", "x"],
        ["--experts", "0", "--advertise", "192.0.2.1"],
        ["--experts", "0", "--registry", "nowhere"],
        ["--experts", "0", "--plant-fault", "3"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_a_mistake_is_said_before_anything_starts(arguments: list[str]) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, UserError)
    assert result.stdout == ""


def test_ready_is_said_to_people_or_as_json() -> None:
    ready = json.loads(run("--experts", "0", "--json").stdout)
    assert len(ready.pop("node")) == 52
    experts = "experts 1-2 of layers 0-3"
    expected = {"event": "ready", "model": "tiny@0011", "experts": experts, "address": "x:1", "reach": "relayed"}
    assert ready == expected
    told = run("--experts", "0").stdout
    assert "with experts 1-2 of layers 0-3 of tiny@0011" in told
    assert "relayed" in told


def test_memory_and_disk_bound_named_experts_too() -> None:
    config = config_of("--experts", "0", "--memory", "1GB", "--disk", "2GB")
    assert (config.memory_bytes, config.disk_bytes) == (10**9, 2 * 10**9)
    config = config_of("--experts", "0")
    assert (config.memory_bytes, config.disk_bytes) == (None, None)


def test_a_status_is_watched_unless_it_is_quiet() -> None:
    assert config_of("--experts", "0").is_watched
    assert not config_of("--experts", "0", "--quiet").is_watched


def test_the_same_key_is_used_again_and_is_this_roles_own(tmp_path: Path) -> None:
    nodes = set()
    for _ in range(2):
        nodes.add(json.loads(run("--experts", "0", "--json").stdout)["node"])
        identity._locks.pop().close()  # as the end of the process would
    assert len(nodes) == 1
    assert (tmp_path / "config" / "join.key").stat().st_mode & 0o777 == 0o600


WITHOUT_ENGINE = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("xllamacpp", "llama_cpp") else found(name, *more)
sys.argv = ["swarm", "join", "--experts", "0", "--registry", "127.0.0.1:1"]
from swarm.cli.main import run
run()
"""


def test_without_an_engine_library_a_volunteer_is_told_the_next_step_before_anything_else(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "SWARM_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ENGINE], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.returncode == 2
    line = " ".join(done.stderr.split())
    assert line.startswith("swarm: no llama.cpp library is installed: run `pip install ")
    assert "docs/volunteer.md" in line
    assert "Traceback" not in line
