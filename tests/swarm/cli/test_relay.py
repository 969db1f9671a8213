"""What `swarm relay` tells its operator, and how it settles `--advertise`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import relay.daemon
import swarm.cli.relay as relay_command
from relay.daemon import RelayReady
from swarm.cli.main import app
from swarm.errors import UserError
from swarm.identity import Identity

NODE = "n" * 52


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))


class Daemon:
    """Stands in for the relay's daemon: it is ready at once, as told."""

    ready: RelayReady
    config: relay.daemon.RelayConfig

    def __init__(self, config: relay.daemon.RelayConfig, identity: object) -> None:
        type(self).config = config

    async def run(self, on_ready: Callable[[RelayReady], None]) -> None:
        on_ready(self.ready)


def relay_says(monkeypatch: pytest.MonkeyPatch, *options: str, address: str, public: str | None, is_local: bool) -> str:
    public = None if public is None else f"swarm://{NODE}@{public}"
    ready = RelayReady(
        node=NODE, address=address, registry=f"swarm://{NODE}@{address}", public=public, is_local=is_local
    )
    monkeypatch.setattr(Daemon, "ready", ready, raising=False)
    monkeypatch.setattr(relay.daemon, "RelayDaemon", Daemon)
    monkeypatch.setattr(relay_command, "run_daemon", _run)
    result = CliRunner().invoke(app, ["relay", *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def _run(main: Coroutine[Any, Any, None], **options: object) -> None:
    asyncio.run(main)


def test_others_are_told_the_public_address_and_the_loopback_one_is_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = relay_says(monkeypatch, address="127.0.0.1:7440", public="10.1.2.3:7440", is_local=False)
    others, here = said.split("On this machine")
    assert f"--registry swarm://{NODE}@10.1.2.3:7440\n" in others, "whole, however narrow the terminal"
    assert "127.0.0.1" not in others
    assert "127.0.0.1:7440" in here
    assert "--advertise" in here


def test_an_unknown_address_is_left_for_the_operator_to_fill_in(monkeypatch: pytest.MonkeyPatch) -> None:
    said = relay_says(monkeypatch, address="[::1]:9", public=None, is_local=False)
    assert f"--registry swarm://{NODE}@<this machine's address>:9\n" in said
    assert "On this machine [::1]:9 does too" in said


def test_a_relay_for_this_machine_only_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = relay_says(monkeypatch, address="127.0.0.1:7440", public=None, is_local=True)
    assert "this machine only" in said
    assert f"--registry swarm://{NODE}@127.0.0.1:7440\n" in said
    assert "Others" not in said


def test_json_has_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    said = relay_says(monkeypatch, "--json", address="127.0.0.1:7440", public="10.1.2.3:7440", is_local=False)
    assert json.loads(said) == {
        "event": "ready",
        "node": NODE,
        "address": "127.0.0.1:7440",
        "registry": f"swarm://{NODE}@127.0.0.1:7440",
        "public": f"swarm://{NODE}@10.1.2.3:7440",
    }


@pytest.mark.parametrize("where", ["relay.example.org:7440", "192.0.2.1:9", "[2001:db8::1]:9"])
def test_advertise_reaches_the_daemon_as_it_is_given(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    relay_says(monkeypatch, "--advertise", where, address="127.0.0.1:7440", public=where, is_local=False)
    assert Daemon.config.advertise == where


def test_ring_store_and_publishers_reach_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (Identity.from_seed(bytes([n]) * 32).node_id for n in (1, 2))
    options = ["--ring", f"swarm://{a}@192.0.2.1:7440,127.0.0.1:7441", "--store", "never", "--publishers", f"{a}, {b}"]
    relay_says(monkeypatch, *options, address="127.0.0.1:7440", public=None, is_local=True)
    assert [(each.address, each.node) for each in Daemon.config.ring] == [
        (("192.0.2.1", 7440), a),
        (("127.0.0.1", 7441), None),
    ]
    assert Daemon.config.store is relay.daemon.Store.NEVER
    assert Daemon.config.publishers == {a, b}
    relay_says(monkeypatch, address="127.0.0.1:7440", public=None, is_local=True)
    assert (Daemon.config.ring, Daemon.config.publishers) == ((), None)


@pytest.mark.parametrize("option", [("--store", "sometimes"), ("--publishers", "me"), ("--ring", "nowhere")])
def test_what_cannot_be_read_is_the_users_mistake(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["relay", *option])
    assert isinstance(result.exception, UserError)
