"""What the serving options say, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.cli.serve import settle_exact
from swarm.cli.serving_options import ServingSettings, parse_kv_types, settle_serving
from swarm.errors import UserError
from swarm.wire.rows import parse_wire


def settled(**given: Any) -> ServingSettings:
    defaults: dict[str, Any] = {
        "slots": 4,
        "lanes": 1,
        "kv_type": "f16",
        "prefix_cache": "1MiB",
        "queue": 7,
        "fill_wait": "0ms",
        "request_timeout": None,
        "drain": "10s",
    }
    return settle_serving(**(defaults | given))


def test_options_reach_the_backbone() -> None:
    made = settled(lanes=2, kv_type="q8_0/q4_0", fill_wait="5ms", request_timeout="2min", drain="30s")
    assert (made.n_slots, made.n_lanes, made.kv_types, made.drain_s) == (4, 2, ("q8_0", "q4_0"), 30.0)
    assert (made.config.fill_wait_s, made.config.request_timeout_s) == (0.005, 120.0)
    assert (made.config.cache_bytes, made.config.max_line) == (1 << 20, 7)
    assert settled().config.request_timeout_s is None
    assert settled(prefix_cache="0B").config.cache_bytes == 0


@pytest.mark.parametrize(("slots", "lanes"), [(1, 1), (2, 2), (8, 2)])
def test_unless_it_is_said_there_are_two_lanes_where_there_are_two_slots(slots: int, lanes: int) -> None:
    assert settled(slots=slots, lanes=None).n_lanes == lanes


def test_reproducible_answers_have_a_lane_for_each_slot() -> None:
    for lanes in (None, 4):
        made = settled(lanes=lanes, reproducible=True)
        assert (made.n_slots, made.n_lanes, made.config.is_reproducible) == (4, 4, True)
    assert settled().config.is_reproducible is False


def test_reproducible_answers_travel_exactly() -> None:
    assert settle_exact(None) == settle_exact(parse_wire("exact")) == parse_wire("exact")
    with pytest.raises(UserError, match="needs the wire form exact: got q8/f16"):
        settle_exact(parse_wire("q8/f16"))


def test_one_name_stands_for_k_and_v() -> None:
    assert parse_kv_types("q8_0") == ("q8_0", "q8_0")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lanes": 5}, "more lanes than slots: got 5, expected at most 4"),
        ({"slots": 257}, "too many slots: got 257, expected at most 256 for each lane"),
        ({"reproducible": True, "lanes": 2}, "a lane for each slot: got 2 lanes for 4 slots"),
        ({"kv_type": "q9"}, "no such type of KV cache: got 'q9'"),
        ({"kv_type": "f16/f16/f16"}, "no such type of KV cache"),
        ({"prefix_cache": "12"}, "--prefix-cache"),
        ({"drain": "soon"}, "--drain"),
    ],
)
def test_what_cannot_be_is_the_users_mistake(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settled(**given)
