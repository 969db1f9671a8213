"""Names of nodes and models, and sets of experts: one spelling each, and nothing else is read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.ids import MAX_INDEX, ExpertSet, ModelId, NodeId, format_index_set, parse_index_set

COUNT = bytes(range(32))
COUNT_BASE32 = "aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dypq"


def test_a_node_id_is_base32_in_lower_case_without_padding() -> None:
    assert str(NodeId(COUNT)) == COUNT_BASE32
    assert NodeId(COUNT).short == "aaaqeaye"
    assert NodeId.parse(COUNT_BASE32) == NodeId(COUNT)
    assert NodeId.parse(COUNT_BASE32.upper()) == NodeId(COUNT)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.binary(min_size=32, max_size=32))
def test_ids_read_back(raw: bytes) -> None:
    assert NodeId.parse(str(NodeId(raw))) == NodeId(raw)
    assert ModelId.parse(str(ModelId(raw))) == ModelId(raw)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 51,
        "a" * 53,
        COUNT_BASE32 + "====",
        COUNT_BASE32[:-1] + "r",  # the same 32 bytes: only a spare bit differs
        "ı" + COUNT_BASE32[1:],  # its upper case is an ASCII I
        "1" * 52,
        " " + COUNT_BASE32,
    ],
)
def test_nothing_else_is_a_node_id(text: str) -> None:
    with pytest.raises(UserError):
        NodeId.parse(text)


@pytest.mark.parametrize("text", ["", "ab", "g" * 64, "ab" * 33])
def test_nothing_else_is_a_model_id(text: str) -> None:
    with pytest.raises(UserError):
        ModelId.parse(text)


def test_a_model_id_is_hex() -> None:
    assert str(ModelId(COUNT)).startswith("00010203")
    assert ModelId(COUNT).short == "00010203"


@pytest.mark.parametrize("kind", [NodeId, ModelId])
def test_an_id_of_another_length_cannot_be_made(kind: type[NodeId] | type[ModelId]) -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        kind(bytes(31))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0", {0}),
        ("12-19,40", {*range(12, 20), 40}),
        (" 3 , 1-2 ", {1, 2, 3}),
        ("5-5,5", {5}),
        (f"{MAX_INDEX}", {MAX_INDEX}),
    ],
)
def test_ranges_are_inclusive_and_0_based(text: str, numbers: set[int]) -> None:
    assert parse_index_set(text) == numbers


@pytest.mark.parametrize(
    "text", ["", ",", "1,", "a", "-1", "1-", "3-1", "1--2", "²", "１", f"{MAX_INDEX + 1}", "0-99999999", "9" * 5000]
)
def test_a_bad_range_is_the_users_mistake_and_the_message_shows_it(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_index_set(text, "layers")
    assert "layers" in str(caught.value)
    assert len(str(caught.value)) < 250


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sets(st.integers(0, 300) | st.integers(MAX_INDEX - 5, MAX_INDEX), min_size=1))
def test_an_index_set_reads_back(numbers: set[int]) -> None:
    assert parse_index_set(format_index_set(numbers)) == numbers


def test_an_index_set_is_written_in_the_shortest_way() -> None:
    assert format_index_set([3, 1, 2, 2, 7, 9, 10]) == "1-3,7,9-10"
    assert format_index_set([]) == ""


def test_an_expert_set_counts_iterates_and_contains_pairs() -> None:
    experts = ExpertSet({4: frozenset({9, 2}), 1: frozenset({0}), 2: frozenset()})
    assert list(experts) == [(1, 0), (4, 2), (4, 9)]
    assert len(experts) == 3
    assert (4, 9) in experts
    assert (4, 0) not in experts
    assert (2, 0) not in experts
    assert 4 not in experts
    assert 2 not in experts.by_layer


def test_equal_expert_sets_are_equal_however_they_were_made() -> None:
    left = ExpertSet({1: frozenset({0, 1}), 0: frozenset({0, 1})})
    right = ExpertSet.of([0, 1], [1, 0])
    assert left == right
    assert hash(left) == hash(right)
    assert left != ExpertSet.of([0], [0, 1])


def test_layers_with_the_same_experts_share_a_group() -> None:
    experts = ExpertSet({0: frozenset({1, 2}), 1: frozenset({7}), 2: frozenset({1, 2})})
    assert experts.grouped() == [("0,2", "1-2"), ("1", "7")]
    assert str(experts) == "experts 1-2 of layers 0,2; experts 7 of layers 1"
    assert str(ExpertSet({})) == "nothing"
