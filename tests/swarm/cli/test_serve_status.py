"""What an operator sees of a running backbone: speed, requests, peers and their paths, coverage, audits."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.cli.serve_status import ServeReport, TokenRate, shown


def lines(**fields: Any) -> list[str]:
    values: dict[str, Any] = {
        "tokens_per_s": 12.34,
        "n_tokens": 45_678,
        "n_active": 3,
        "n_waiting": 1,
        "n_slots": 4,
        "n_direct": 2,
        "n_relayed": 1,
        "n_by_tls": 0,
        "n_missing": 0,
        "n_experts": 192,
        "n_audits": 1200,
    }
    return list(shown(ServeReport(**(values | fields))).lines)


def test_the_lines_say_speed_requests_peers_coverage_and_audits() -> None:
    assert lines() == [
        "12.3 tokens/s, 45,678 in all; 3 of 4 slots busy, 1 waiting",
        "3 peers (1 by relay); every expert has a holder; 1,200 audits",
    ]


def test_missing_experts_are_counted() -> None:
    assert "75.0% of experts have a holder, 48 have none" in lines(n_missing=48)[1]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"n_audits": None}, "; no audits"),
        ({"n_disagreed": 2, "n_caught": 1}, "; 1,200 audits, 2 disagreed, 1 peer caught"),
        ({"n_disagreed": 5, "n_caught": 2}, "; 1,200 audits, 5 disagreed, 2 peers caught"),
    ],
)
def test_alarms_of_audits_are_named(fields: dict[str, Any], end: str) -> None:
    assert lines(**fields)[1].endswith(end)


def test_peers_that_dispatches_reach_over_tls_are_counted() -> None:
    assert lines(n_by_tls=2)[1].startswith("3 peers (2 by TLS, 1 by relay); ")
    assert lines(n_by_tls=1, n_relayed=0)[1].startswith("2 peers (1 by TLS); ")


def test_one_peer_that_is_reached_directly() -> None:
    assert lines(n_direct=1, n_relayed=0)[1].startswith("1 peer; ")


def test_the_rate_is_of_the_last_seconds() -> None:
    rate = TokenRate()
    assert rate.update(100, 0.0) == 0.0
    assert rate.update(110, 1.0) == pytest.approx(10.0)
    assert rate.update(110, 6.0) == 0.0, "ten tokens came more than five seconds ago"
    for second in range(7, 30):
        found = rate.update(110 + 20 * (second - 6), float(second))
    assert found == pytest.approx(20.0)
