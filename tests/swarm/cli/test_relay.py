"""What `swarm relay` tells its operator, and how it settles `--advertise`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import relay.daemon
import swarm.cli.relay as relay_command
from relay.daemon import RelayReady
from relay.quotas import Limits
from swarm.cli.main import app
from swarm.cli.runtime import log_as_json
from swarm.errors import UserError
from swarm.identity import Identity
from swarm.net.addresses import SocketAddress

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
        "http": None,
    }


@pytest.mark.parametrize(
    ("where", "literals"),
    [
        ("relay.example.org:7440", ("192.0.2.7:7440",)),
        ("nobody.example.org:7440", ()),
        ("192.0.2.1:9", ("192.0.2.1:9",)),
        ("[2001:db8::1]:9", ("[2001:db8::1]:9",)),
    ],
)
def test_advertise_reaches_the_daemon_as_it_is_given_and_as_a_literal_for_vouchers(
    monkeypatch: pytest.MonkeyPatch, where: str, literals: tuple[str, ...]
) -> None:
    def resolve(address: SocketAddress) -> SocketAddress:
        if address[0].startswith("nobody"):
            raise UserError("cannot find host")
        return ("192.0.2.7", address[1]) if address[0].startswith("relay") else address

    monkeypatch.setattr(relay_command, "resolve", resolve)
    relay_says(monkeypatch, "--advertise", where, address="127.0.0.1:7440", public=where, is_local=False)
    assert (Daemon.config.advertise, Daemon.config.addresses) == (where, literals)


def test_limits_reach_the_daemon_by_flag_variable_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def limits(*options: str) -> Limits:
        relay_says(monkeypatch, *options, address="127.0.0.1:7440", public=None, is_local=True)
        return Daemon.config.limits

    assert limits() == Limits(), "the defaults that are shown are those that hold"
    assert (Daemon.config.drain_s, Daemon.config.http_port) == (5.0, 7440)
    (tmp_path / "config" / "config.toml").write_text(
        '[relay]\nchannel-rate = "1Mbit"\nnode-rate = "2Mbit"\nidle = "9s"\n'
    )
    assert (limits().channel_bit_s, limits().node_bit_s, limits().idle_s) == (1_000_000, 2_000_000, 9.0)
    monkeypatch.setenv("SWARM_RELAY_CHANNEL_RATE", "3Mbit")
    monkeypatch.setenv("SWARM_RELAY_NODE_RATE", "4Mbit")
    found = limits(
        "--channel-rate", "5Mbit", "--channels-per-node", "7", "--reservations", "8", "--total-rate", "9Mbit"
    )
    assert found == Limits(
        channel_bit_s=5_000_000,
        node_bit_s=4_000_000,
        total_bit_s=9_000_000,
        n_channels_per_node=7,
        n_reservations=8,
        idle_s=9.0,
    )


@pytest.mark.parametrize(
    ("options", "port"),
    [(("--http", "off"), None), (("--http", "81"), 81), (("--port", "0"), 0), (("--port", "5000"), 5000)],
)
def test_http_has_a_port_of_its_own_or_the_same_number(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], port: int | None
) -> None:
    relay_says(monkeypatch, *options, address="127.0.0.1:7440", public=None, is_local=True)
    assert Daemon.config.http_port == port


def test_where_the_web_pages_are_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = RelayReady(node=NODE, address="a:1", registry="r", public=None, is_local=True, http="http://127.0.0.1:81")
    monkeypatch.setattr(Daemon, "ready", ready, raising=False)
    monkeypatch.setattr(relay.daemon, "RelayDaemon", Daemon)
    monkeypatch.setattr(relay_command, "run_daemon", _run)
    assert "http://127.0.0.1:81/map" in CliRunner().invoke(app, ["relay"]).stdout


def test_json_logs_are_lines_of_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers, root.level
    try:
        log_as_json()
        logging.getLogger("relay.test").info("a %s", "message")
    finally:
        root.handlers, root.level = before[0], before[1]
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"], line["message"]) == ("INFO", "relay.test", "a message")


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
    assert Daemon.config.receipts_from == {a, b}, "who may publish is trusted to count"
    options += ["--receipts-from", str(a)]
    relay_says(monkeypatch, *options, address="127.0.0.1:7440", public=None, is_local=True)
    assert (Daemon.config.publishers, Daemon.config.receipts_from) == ({a, b}, {a})
    relay_says(monkeypatch, address="127.0.0.1:7440", public=None, is_local=True)
    assert (Daemon.config.ring, Daemon.config.publishers) == ((), None)
    assert Daemon.config.receipts_from == frozenset(), "nobody's count unless somebody is named"


@pytest.mark.parametrize(
    "option",
    [
        ("--store", "sometimes"),
        ("--publishers", "me"),
        ("--ring", "nowhere"),
        ("--http", "maybe"),
        ("--http", "65536"),
        ("--channel-rate", "50"),
        ("--drain", "5"),
    ],
)
def test_what_cannot_be_read_is_the_users_mistake(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["relay", *option])
    assert isinstance(result.exception, UserError)
