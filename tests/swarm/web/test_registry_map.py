"""The map from announcements alone."""

from __future__ import annotations

from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.web.plain_page import page
from swarm.web.registry_map import map_of_records
from tests.sample_records import sample_announcement, sample_offer

A, B, C = (NodeId(bytes([letter]) * 32) for letter in b"abc")
ONE, TWO = ModelId(b"1" * 32), ModelId(b"2" * 32)
ADDRESSES = ("192.0.2.1:5",)


def holder(node: NodeId, model: ModelId = ONE, layers: range = range(4), experts: range = range(8), **fields: object):  # type: ignore[no-untyped-def]
    given = {"model": model, "addresses": ADDRESSES, "experts": ExpertSet.of(layers, experts)}
    return sample_announcement(node, **given | fields)


def test_models_are_covered_by_what_their_peers_say() -> None:
    offer = sample_offer(C, model=ONE, addresses=ADDRESSES)
    shown = map_of_records([offer, holder(A), holder(B, experts=range(4))], wall_now=7.4, join="swarm join")
    (model,) = shown["models"]
    assert model["servable"] is shown["servable"] is True
    assert model["replicas"] == dict.fromkeys("0123", "22221111")
    assert (shown["at"], shown["n_used"], shown["join"]) == (7, 2, "swarm join")
    assert [each["id"] for each in shown["peers"]] == [str(A), str(B)]


def test_what_loads_or_lacks_is_not_servable() -> None:
    offer = sample_offer(C, model=ONE, addresses=ADDRESSES)
    shown = map_of_records([offer, holder(A, experts=range(7)), holder(B, is_loading=True)], wall_now=0)
    (model,) = shown["models"]
    assert model["missing"] == dict.fromkeys("0123", "7")
    assert not model["servable"]
    assert [each["state"] for each in shown["peers"]] == ["announced", "loading"]
    assert not map_of_records([holder(A)], wall_now=0)["servable"], "nobody offers the model"
    assert not map_of_records([], wall_now=0)["servable"]


def test_a_peer_of_two_models_is_one_peer() -> None:
    shown = map_of_records([holder(A), holder(A, TWO)], wall_now=0)
    (peer,) = shown["peers"]
    assert peer["models"] == [str(ONE), str(TWO)]
    assert peer["n_blocks"] == 64


def test_who_is_called_through_relays_is_shown_so_and_places_are_told_as_given() -> None:
    hidden = holder(A, is_public=False, vouchers=("abcd",), name="Ann", place=(48, -3))
    (peer,) = map_of_records([hidden], wall_now=0)["peers"]
    assert (peer["path"], peer["name"], peer["place"]) == ("relay", "Ann", [48, -3])
    assert "192.0.2" not in str(map_of_records([hidden], wall_now=0))


def test_experts_beyond_the_models_own_count_for_nothing() -> None:
    offer = sample_offer(C, model=ONE, addresses=ADDRESSES)
    shown = map_of_records([offer, holder(A, layers=range(9), experts=range(200))], wall_now=0)
    assert shown["models"][0]["replicas"] == dict.fromkeys("0123", "1" * 8)


def test_it_is_shown_without_scripts_too() -> None:
    text = page(map_of_records([sample_offer(C, model=ONE, addresses=ADDRESSES), holder(A)], wall_now=7))
    assert A.short in text
    assert "1 of 1 peers in use" in text
