"""Events of a map: what changed, within a budget."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from swarm.web.map_feed import BUDGET_BYTES_S, MapFeed


def peer(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"{number:04d}", "state": "in use", "rtt_ms": 10.0, "experts": [["0-5", str(number)]]} | fields


def a_map(*peers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    model = {"model_id": "m", "servable": True, "replicas": {"0": "11"}}
    return {"at": 0, "servable": True, "n_used": len(peers), "models": [model], "peers": list(peers)} | fields


def test_nothing_changed_is_nothing_told() -> None:
    feed = MapFeed(a_map(peer(1)))
    assert feed.advance(a_map(peer(1), at=5), 1) is None


def test_only_what_changed_is_told() -> None:
    feed = MapFeed(a_map(peer(1), peer(2)))
    now = a_map(peer(1, state="quarantined"), peer(3), n_used=2)
    assert feed.advance(now, 1) == {
        "at": 0,
        "peers": {"0003": peer(3), "0001": {"state": "quarantined"}},
        "gone": ["0002"],
    }
    assert feed.advance(now, 1) is None
    now["models"][0]["replicas"] = {"0": "10"}
    now["models"][0]["servable"] = now["servable"] = False
    event = feed.advance(now, 1)
    assert event == {"at": 0, "top": {"servable": False}, "models": {"m": {"servable": False, "replicas": {"0": "10"}}}}


def test_a_model_that_nobody_offers_any_more_is_forgotten() -> None:
    feed = MapFeed(a_map())
    now = a_map() | {"models": []}
    assert feed.advance(now, 1) == {"at": 0, "gone_models": ["m"]}
    assert feed.advance(now, 1) is None


def test_a_round_trip_that_wavers_is_not_told() -> None:
    feed = MapFeed(a_map(peer(1)))
    assert feed.advance(a_map(peer(1, rtt_ms=11.4)), 1) is None
    assert feed.advance(a_map(peer(1, rtt_ms=11.6)), 1) == {"at": 0, "peers": {"0001": {"rtt_ms": 11.6}}}
    assert feed.advance(a_map(peer(1, rtt_ms=None)), 1) == {"at": 0, "peers": {"0001": {"rtt_ms": None}}}


def test_two_thousand_restless_peers_stay_within_the_budget_and_arrivals_come_first() -> None:
    random_ = random.Random(3)
    peers = {number: peer(number) for number in range(2000)}
    feed = MapFeed(a_map(*peers.values()))
    seen = {each["id"]: copy.deepcopy(each) for each in peers.values()}
    n_bytes = 0
    for second in range(120):
        for each in peers.values():
            each["rtt_ms"] = random_.uniform(5, 200)
        peers[5000 + second] = peer(5000 + second)
        event = feed.advance(a_map(*peers.values()), 1)
        assert event is not None
        assert f"{5000 + second:04d}" in event["peers"], "who joins is shown within a tick"
        n_bytes += len(json.dumps(event, separators=(",", ":")))
        for id_, fields in event["peers"].items():
            seen.setdefault(id_, {}).update(fields)
    assert n_bytes / 120 <= BUDGET_BYTES_S * 1.2
    # Once it is quiet the rest follows, and the onlooker knows what is so.
    for _ in range(200):
        event = feed.advance(a_map(*peers.values()), 1)
        for id_, fields in (event or {}).get("peers", {}).items():
            seen[id_].update(fields)
    assert event is None
    for each in peers.values():
        known = seen[each["id"]]["rtt_ms"]
        assert abs(known - each["rtt_ms"]) < max(1, 0.16 * known)
