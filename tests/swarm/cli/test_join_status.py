"""What a volunteer sees of a running peer: standing, path, traffic, scarcity, contribution; for people and for scripts."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.cli.join_status import Rates, duration, scarcity_text, shown
from swarm.peer_report import BackboneView, PeerReport, Scarcity, Standing

DIRECT = BackboneView(node="a" * 52, path="direct 192.0.2.1:7440", is_relayed=False, rtt_s=0.0123)
RELAYED = BackboneView(node="b" * 52, path="relay 192.0.2.2:7440", is_relayed=True, rtt_s=None)


def report(**fields: Any) -> PeerReport:
    values: dict[str, Any] = {
        "standing": Standing.SERVING,
        "why": "",
        "uptime_s": 7380.0,
        "reach": "hole-punchable",
        "why_reach": "same",
        "backbones": (DIRECT, RELAYED),
        "n_rows": 12_345,
        "n_pairs": 20_000,
        "n_in_line": 2,
        "bytes_by_path": {"direct": (4_000_000, 5_000_000), "tls": (1_000_000, 1_000_000)},
        "scarcity": Scarcity(n_blocks=48, n_alone=12, n_others_least=0, n_others_most=3),
        "points": 7.25,
    }
    return PeerReport(**values | fields)


def test_the_lines_say_standing_path_traffic_scarcity_and_contribution() -> None:
    assert shown(report(), (23.4, 1_200_000.0, 900.0)).lines == [
        "serving for 2 h 03 min: 12,345 rows (23/s), 2 in line, 2 backbones, 1 by relay",
        "traffic   1.2 MB/s up, 900 bytes/s down; 5.0 MB and 6.0 MB in all",
        "path      others reach you through a relay at first, then directly: "
        "your NAT keeps one port for all destinations, so holes can be punched",
        "backbones aaaaaaaa direct 12 ms, bbbbbbbb relay",
        "scarcity  nobody else holds 12 of your 48 blocks, 3 others the most common one",
        "today     7.2 points, signed by backbones",
    ]


def test_what_is_not_known_is_left_out() -> None:
    lines = shown(report(scarcity=None, points=None, backbones=()), (0.0, 0.0, 0.0)).lines
    assert len(lines) == 3
    assert lines[0].endswith("0 backbones")
    assert "backbones" not in "".join(lines[1:])


def test_where_nobody_knows_how_others_reach_it_no_reason_is_made_up() -> None:
    (path,) = [line for line in shown(report(reach="unknown"), (0.0, 0.0, 0.0)).lines if line.startswith("path")]
    assert path == "path      too few others were there to try how they reach you"
    (path,) = [line for line in shown(report(why_reach="unknown"), (0.0, 0.0, 0.0)).lines if line.startswith("path")]
    assert path.endswith("then directly")


def test_a_rest_says_why() -> None:
    resting = shown(report(standing=Standing.RESTING, why="it is outside its hours"), (0.0, 0.0, 0.0))
    assert resting.lines[0].startswith("resting (it is outside its hours) for 2 h 03 min")
    assert (resting.state["standing"], resting.state["why"]) == ("resting", "it is outside its hours")


def test_many_backbones_are_counted() -> None:
    views = tuple(BackboneView(node=f"{i}" * 52, path="direct", is_relayed=False, rtt_s=0.01) for i in range(7))
    path = shown(report(backbones=views), (0.0, 0.0, 0.0)).lines[3]
    assert path.count("direct 10 ms") == 4
    assert path.endswith("3 more")


def test_the_log_has_one_line_with_the_traffic_in_it() -> None:
    line = shown(report(), (23.4, 1_200_000.0, 900.0)).line
    assert line.startswith("serving for 2 h 03 min")
    assert line.endswith("1.2 MB/s up, 900 bytes/s down")


def test_figures_are_no_news_and_a_path_is() -> None:
    first, later = shown(report(), (1.0, 2.0, 3.0)), shown(report(n_rows=99_999, uptime_s=9999.0), (4.0, 5.0, 6.0))
    assert first.state == later.state
    assert first.figures != later.figures
    assert shown(report(backbones=(RELAYED,)), (1.0, 2.0, 3.0)).state != first.state
    assert not set(first.state) & set(first.figures)
    assert first.figures["rtt_ms"] == {DIRECT.node: 12.3}


def test_rates_are_of_the_last_seconds() -> None:
    rates = Rates()
    found = [
        rates.update(report(uptime_s=float(s), n_rows=10 * s, bytes_by_path={"direct": (1000 * min(s, 20), 0)}))
        for s in range(31)
    ]
    assert found[0] == (0.0, 0.0, 0.0)
    assert found[10] == (10.0, 1000.0, 0.0)
    assert found[30] == (10.0, 0.0, 0.0), "what went before is forgotten"


def test_a_look_a_minute_gives_the_rate_of_that_minute() -> None:
    rates = Rates()
    rates.update(report(uptime_s=60.0, n_rows=0, bytes_by_path={}))
    rates.update(report(uptime_s=120.0, n_rows=600, bytes_by_path={}))
    assert rates.update(report(uptime_s=180.0, n_rows=1800, bytes_by_path={}))[0] == 20.0


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((4, 4, 0, 0), "nobody else holds what you hold"),
        ((4, 0, 1, 1), "each of your blocks is held by 1 other"),
        ((4, 0, 2, 2), "each of your blocks is held by 2 others"),
        ((4, 0, 1, 3), "each of your blocks is held by 1 to 3 others"),
    ],
)
def test_scarcity_in_words(counts: tuple[int, int, int, int], expected: str) -> None:
    names = ("n_blocks", "n_alone", "n_others_least", "n_others_most")
    assert scarcity_text(Scarcity(**dict(zip(names, counts, strict=True)))) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h 00 min"), (172_800, "2 d 0 h")],
)
def test_a_time_as_people_say_it(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
