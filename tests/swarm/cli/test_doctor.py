"""What `swarm doctor` says: every result names its cause, and what to do about it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from swarm.cli.doctor import Finding, RelayFinding, Report
from swarm.cli.main import app
from swarm.net.reachability import Reach, Verdict
from swarm.wire.messages import Mapping

RELAY = RelayFinding(address="192.0.2.1:7440", seen_at="203.0.113.9:4", rtt_s=0.02, is_by_websocket=False, error="")
DEAD = RelayFinding(address="192.0.2.1:7440", seen_at=None, rtt_s=None, is_by_websocket=False, error="no answer in 4 s")


def report(reach: Reach, mapping: Mapping, verdict: Verdict, relay: RelayFinding = RELAY) -> Report:
    finding = Finding(version=4, own_host="10.0.0.2", mapping=mapping, verdict=verdict)
    return Report(reach=reach, port=7441, relays=(relay,), findings=(finding,))


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (report(Reach.PUBLIC, Mapping.NONE, Verdict.PUBLIC), ["Result: public", "203.0.113.9:4", "20 ms"]),
        (
            report(Reach.PUNCHABLE, Mapping.SAME, Verdict.CLOSED),
            ["hole-punchable", "Forward UDP port 7441", "10.0.0.2"],
        ),
        (report(Reach.PUNCHABLE, Mapping.NONE, Verdict.CLOSED), ["Open UDP port 7441", "firewall"]),
        (report(Reach.RELAYED, Mapping.VARYING, Verdict.CLOSED), ["Result: relayed", "symmetric NAT"]),
        (report(Reach.RELAYED, Mapping.BLOCKED, Verdict.UNKNOWN), ["Let UDP out"]),
        (report(Reach.UNKNOWN, Mapping.UNKNOWN, Verdict.UNKNOWN, DEAD), ["no answer in 4 s", "--registry"]),
    ],
)
def test_every_result_says_why_and_what_to_do(of: Report, words: list[str]) -> None:
    text = "\n".join(of.lines())
    for word in words:
        assert word in text
    assert json.loads(json.dumps(of.as_json()))["reach"] == of.reach.value


def test_a_public_machine_needs_no_advice() -> None:
    assert report(Reach.PUBLIC, Mapping.NONE, Verdict.PUBLIC).advice() == []


def test_without_a_relay_it_fails_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def examine(registry: str, port: int) -> Report:
        return report(Reach.UNKNOWN, Mapping.UNKNOWN, Verdict.UNKNOWN, DEAD)

    monkeypatch.setattr("swarm.cli.doctor._examine", examine)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["relays"][0]["seen_at"] is None
