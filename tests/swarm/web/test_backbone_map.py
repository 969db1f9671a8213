"""The map as JSON and as a page, from what the holders say."""

from __future__ import annotations

import html.parser
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from swarm.backbone.assembly import RunningBackbone
from swarm.dispatch.contributions import Contributions
from swarm.dispatch.peer_states import PeerState, PeerView
from swarm.dispatch.placement import Placement
from swarm.gateway.access import Access
from swarm.gateway.app import create_app
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.registry.leaderboard import Ledger
from swarm.web.backbone_map import KEPT_S, BackboneMap, build_map
from swarm.web.plain_page import page
from swarm.web.registry_map import digits
from swarm.wire.receipts import DAY_S
from tests.sample_records import sample_announcement
from tests.swarm.gateway.test_app import ScriptedGenerator

A, B = NodeId(b"a" * 32), NodeId(b"b" * 32)
US = Identity.from_seed(b"u" * 32)


def view(node: NodeId, state: PeerState, *, state_since: float = 90.0, experts: ExpertSet | None = None) -> PeerView:
    record = sample_announcement(
        node,
        model=ModelId(b"m" * 32),
        experts=experts or ExpertSet.of([1, 2], [0, 1]),
        addresses=("198.51.100.77:4242",),
    )
    return PeerView(record=record, state=state, state_since=state_since, seen_since=40.0)


def shown(**fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_name": "tiny@1a2b3c4d",
        "model_id": "1a" * 32,
        "layers": (1, 2),
        "n_holders": np.array([[2, 1, 1], [1, 1, 0]]),
        "missing": {2: (2,)},
        "peers": [view(A, PeerState.IN_USE), view(B, PeerState.QUARANTINED)],
        "rtt_s": {A: 0.0123}.get,
        "now": 100.0,
        "wall_now": 1_800_000_000.0,
    }
    return build_map(**values | fields)


def test_it_says_who_is_there_since_when_and_what_is_covered() -> None:
    assert shown() == {
        "at": 1_800_000_000,
        "source": "backbone",
        "servable": False,
        "models": [
            {
                "model": "tiny@1a2b3c4d",
                "model_id": "1a" * 32,
                "servable": False,
                "missing": {"2": "2"},
                "replicas": {"1": "211", "2": "110"},
            }
        ],
        "n_used": 1,
        "tokens_per_s": None,
        "place": None,
        "join": "",
        "leaderboard": None,
        "peers": [
            {
                "id": str(A),
                "short": A.short,
                "name": "",
                "place": None,
                "models": ["1a" * 32],
                "state": "in use",
                "state_since": 1_799_999_990,
                "seen_since": 1_799_999_940,
                "experts": [["1-2", "0-1"]],
                "n_blocks": 4,
                "exact": True,
                "path": "direct",
                "rtt_ms": 12.3,
            },
            {
                "id": str(B),
                "short": B.short,
                "name": "",
                "place": None,
                "models": ["1a" * 32],
                "state": "quarantined",
                "state_since": 1_799_999_990,
                "seen_since": 1_799_999_940,
                "experts": [["1-2", "0-1"]],
                "n_blocks": 4,
                "exact": True,
                "path": None,
                "rtt_ms": None,
            },
        ],
    }


def test_counts_are_one_character_each() -> None:
    assert digits([0, 9, 10, 35, 36, 500]) == "09azzz"


def test_what_is_missing_decides_what_is_servable_not_who_holds_it() -> None:
    assert shown(missing={})["servable"] is True, "the operator's own file may have what no peer holds"


class Parser(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def parse(text: str) -> Parser:
    parser = Parser()
    parser.feed(text)
    return parser


BOARD = {
    "days": 7,
    "counted_by": [str(B)],
    "rows": [
        {"id": str(A), "short": A.short, "name": "<i>Ann</i>", "points": 12_345, "rows": 20_000, "pairs": 30_000},
        {"id": str(B), "short": B.short, "name": "\u05d0\u05d1", "points": 1, "rows": 1, "pairs": 1},
    ],
}


def test_the_leaderboard_is_on_the_plain_page_and_names_are_text() -> None:
    parsed = parse(page(shown(leaderboard=BOARD)))
    assert "i" not in parsed.tags
    assert "<i>Ann</i>" in parsed.text
    assert "12,345" in parsed.text
    assert f"Counted by {B.short}" in parsed.text
    for board in (None, BOARD | {"rows": []}):
        assert "Contributions" not in page(shown(leaderboard=board))


def test_a_name_is_shown_without_what_steers_text() -> None:
    named = view(A, PeerState.IN_USE)
    named = replace(named, record=replace(named.record, name="Zoe\u0308"))
    (peer,) = shown(peers=[named])["peers"]
    assert peer["name"] == "Zo\u00eb"
    assert "Zo\u00eb" in page(shown(peers=[named]))


# The map of a running backbone


class Running:
    """As much of a RunningBackbone as its map reads, and a clock."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.time = 100.0
        self.lacks: dict[int, tuple[int, ...]] = {}
        self.views = [view(A, PeerState.IN_USE), view(B, PeerState.IN_USE)]
        self.placement = Placement(ModelId(b"m" * 32), [1, 2], 2, require_exact=False)
        self.placement.update(each.record for each in self.views)
        counts = Contributions(self.placement, wall=lambda: 20_000.0 * DAY_S, random=lambda n: bytes(n))
        counts.count(A, 1, 1, np.array([0, 1], np.uint16))
        holders = SimpleNamespace(
            placement=self.placement,
            peers=lambda: list(self.views),
            missing=lambda: dict(self.lacks),
            rtt_s=lambda node: None,
            now=lambda: self.time,
        )
        running = SimpleNamespace(
            holders=holders,
            backbone=SimpleNamespace(model_name="tiny@1", stats=SimpleNamespace(n_completion_tokens=0)),
            manifest=SimpleNamespace(model_id=ModelId(b"m" * 32)),
            pool=SimpleNamespace(report=lambda node: None),
            dispatcher=SimpleNamespace(audits=None),
            endpoint=SimpleNamespace(identity=US),
            contributions=counts,
            ledger=ledger,
        )
        self.map = BackboneMap(
            cast(RunningBackbone, running), (), now=lambda: self.time, wall=lambda: 20_000.0 * DAY_S + self.time
        )


def test_a_map_is_kept_for_a_moment() -> None:
    it = Running()
    first = it.map()
    it.time += KEPT_S - 0.01
    assert it.map() is first
    it.time += 0.02
    assert it.map() is not first
    assert it.map()["leaderboard"] is None


def test_what_can_be_served_is_never_an_old_answer() -> None:
    it = Running()
    assert it.map()["servable"] is True
    it.lacks = {1: (0,)}
    assert it.map()["servable"] is False
    it.lacks = {}
    assert it.map()["servable"] is True
    it.views[1] = view(B, PeerState.QUARANTINED)
    assert [peer["state"] for peer in it.map()["peers"]] == ["in use", "quarantined"]
    it.placement.update([it.views[0].record])
    assert it.map()["models"][0]["replicas"] == {"1": "11", "2": "11"}


def test_what_the_backbone_counts_is_on_its_own_leaderboard_at_once() -> None:
    it = Running(Ledger([US.node_id]))
    it.views[0] = replace(it.views[0], record=replace(it.views[0].record, name="Ann"))
    board = it.map()["leaderboard"]
    assert board["counted_by"] == [str(US.node_id)]
    assert [(row["name"], row["pairs"], row["points"]) for row in board["rows"]] == [("Ann", 2, 1)], (
        "two hold each expert"
    )


def test_the_page_says_the_same_without_scripts_or_anything_from_elsewhere() -> None:
    parsed = parse(page(shown()))
    assert parsed.links == ["/map.json"]
    assert "script" not in parsed.tags
    assert "Cannot be served now" in parsed.text
    assert "layer 2: 2" in parsed.text
    assert "1 of 2 peers in use" in parsed.text
    assert A.short in parsed.text
    assert "12.3 ms" in parsed.text
    assert "10 s" in parsed.text
    assert "Can be served" in parse(page(shown(missing={}))).text


def test_a_model_name_is_text_whatever_it_holds() -> None:
    name = '</title><script>alert("x")</script>&amp;'
    text = page(shown(model_name=name))
    parsed = parse(text)
    assert "script" not in parsed.tags
    assert name in parsed.text


def test_a_ragged_slice_and_a_long_list_of_what_is_missing_stay_short() -> None:
    experts = ExpertSet({layer: frozenset({layer, layer + 2}) for layer in range(50)})
    many = shown(peers=[view(A, PeerState.IN_USE, experts=experts)], missing=dict.fromkeys(range(50), (1,)))
    text = page(many)
    assert "100 blocks" in text
    assert len(text) < 8000
    assert len(many["peers"][0]["experts"]) == 50, "the JSON has it all"


def test_nobodys_address_is_shown() -> None:
    assert "198.51.100" not in str(shown()) + page(shown())


@pytest.mark.parametrize(
    ("ago_s", "expected"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (200_000, "2 d"), (-3, "0 s")]
)
def test_time_spans_are_for_people(ago_s: int, expected: str) -> None:
    peer = replace(view(A, PeerState.IN_USE), state_since=100.0 - ago_s, seen_since=100.0)
    assert f">{expected}<" in page(shown(peers=[peer]))


async def test_the_gateway_serves_both_and_neither_without_a_map() -> None:
    for peer_map in (shown, None):
        runner = web.AppRunner(create_app(ScriptedGenerator(), access=Access(allowed_hosts=()), peer_map=peer_map))
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
                async with client.get("/map.json") as answer:
                    assert answer.status == (404 if peer_map is None else 200)
                    if peer_map is not None:
                        assert await answer.json() == shown()
                        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
                for path in ("/map", "/map/plain"):
                    async with client.get(path) as answer:
                        assert answer.status == (404 if peer_map is None else 200)
                        assert (answer.content_type == "text/html") == (peer_map is not None)
                async with client.get("/map.json", headers={"Host": "evil.example"}) as answer:
                    assert answer.status == 403
        finally:
            await runner.cleanup()
