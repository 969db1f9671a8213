"""What is found, and what goes when there is no room, over hand-made texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.backbone.prefix_cache import Entry, PrefixCache, as_tokens, common_length

SYSTEM = list(range(100, 200))


def cache(max_bytes: int = 10_000) -> PrefixCache:
    return PrefixCache(max_bytes)


def add(kept: PrefixCache, tokens: list[int], origin: int = 1) -> bool:
    """Add a text that takes one byte for each token."""
    return kept.add(as_tokens(tokens), origin, f"state of {origin}", len(tokens))


def found(kept: PrefixCache, prompt: list[int]) -> tuple[int, int]:
    """Return the origin of the entry found and how much of it the prompt shares."""
    entry, n = kept.longest(as_tokens(prompt))
    return (entry.origin if entry else 0), n


def test_the_longest_common_beginning_is_found() -> None:
    kept = cache()
    add(kept, [*SYSTEM, 1, 2, 3], 1)
    add(kept, [*SYSTEM, 1, 9], 2)
    add(kept, [7, 8], 3)
    assert found(kept, [*SYSTEM, 1, 2, 5]) == (1, 102)
    assert found(kept, [*SYSTEM, 1, 9, 9, 9]) == (2, 102)
    assert found(kept, [7, 7]) == (3, 1)
    assert found(kept, [50]) == (0, 0)


texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=12)


@given(texts, st.lists(st.integers(0, 3), max_size=6))
def test_the_longest_is_what_a_search_through_all_finds(entries: list[list[int]], prompt: list[int]) -> None:
    kept = cache()
    for origin, tokens in enumerate(entries, 1):
        add(kept, tokens, origin)
    best = max((common_length(as_tokens(tokens), as_tokens(prompt)) for tokens in entries), default=0)
    assert found(kept, prompt)[1] == best


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_the_common_length_is_pythons(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_length(as_tokens(a), as_tokens(b)) == expected


def test_a_text_that_went_on_replaces_itself_and_a_shorter_one_is_not_taken() -> None:
    dropped: list[Entry] = []
    kept = PrefixCache(1000, on_drop=dropped.append)
    assert add(kept, [1, 2, 3], 1)
    assert add(kept, [1, 2, 3, 4], 2)
    assert not add(kept, [1, 2], 3)
    assert not add(kept, [1, 2, 3, 4], 4)
    assert [entry.origin for entry in dropped] == [1]
    assert (len(kept), kept.size_bytes) == (1, 4)


def test_what_is_too_large_or_empty_is_not_taken() -> None:
    kept = cache(10)
    assert not add(kept, list(range(11)))
    assert not add(kept, [])
    assert not PrefixCache(0).add(as_tokens([1]), 1, None, 1)
    assert len(kept) == 0


def test_the_one_unused_longest_goes_first() -> None:
    kept = cache(30)
    for origin in range(1, 4):
        add(kept, [origin] * 10, origin)
    kept.used(kept.longest(as_tokens([1]))[0])  # type: ignore[arg-type]
    add(kept, [4] * 10, 4)
    assert [found(kept, [origin])[1] for origin in range(1, 5)] == [1, 0, 1, 1]


def test_what_others_hold_too_goes_before_what_nobody_else_has() -> None:
    kept = cache(330)
    add(kept, [*SYSTEM, 1], 1)
    add(kept, [*SYSTEM, 2], 2)
    add(kept, [5] * 100, 3)
    add(kept, [6] * 100, 4)
    assert found(kept, [5]) == (3, 1)
    assert found(kept, SYSTEM)[1] == 100, "the system prompt stays: one that begins with it is enough"
    assert len(kept) == 3


def test_a_newcomer_that_is_worth_less_than_all_others_is_not_taken_and_nobody_is_told() -> None:
    dropped: list[Entry] = []
    kept = PrefixCache(310, on_drop=dropped.append)
    for origin in range(1, 4):
        add(kept, [origin] * 100, origin)
    assert not add(kept, [*[1] * 95, 9, 9, 9, 9, 9, 9], 4), "all but its last tokens are another's"
    assert dropped == []
    assert (len(kept), kept.size_bytes) == (3, 300)


def test_use_counts_for_a_time_but_not_for_ever() -> None:
    kept = cache(100)
    add(kept, [1] * 50, 1)
    for _ in range(3):
        kept.used(kept.longest(as_tokens([1]))[0])  # type: ignore[arg-type]
    origins = range(2, 20)
    survived = []
    for origin in origins:
        add(kept, [origin] * 50, origin)
        survived.append(found(kept, [1])[1] == 1)
    assert survived[0], "it was used more than the newcomers"
    assert not survived[-1], "but it does not hold its place for ever"


def test_what_is_dropped_is_told_and_never_found_again() -> None:
    dropped: list[Entry] = []
    kept = PrefixCache(1000, on_drop=dropped.append)
    add(kept, [1, 2], 1)
    add(kept, [1, 3], 2)
    add(kept, [4], 3)
    assert kept.drop(lambda entry: entry.origin != 3) == 2
    assert sorted(entry.origin for entry in dropped) == [1, 2]
    assert found(kept, [1, 2]) == (0, 0)
    assert kept.size_bytes == 1


def test_an_entry_keeps_its_own_tokens() -> None:
    kept = cache()
    tokens = as_tokens([1, 2, 3])
    kept.add(tokens, 1, None, 3)
    tokens[0] = 9
    assert found(kept, [1, 2, 3]) == (1, 3)


@pytest.mark.parametrize("max_bytes", [50, 200])
def test_the_bytes_are_bounded_and_counted(max_bytes: int) -> None:
    rng = np.random.default_rng(3)
    kept = cache(max_bytes)
    for origin in range(1, 300):
        add(kept, rng.integers(0, 3, rng.integers(1, 40)).tolist(), origin)
        assert kept.size_bytes <= max_bytes
    assert kept.n_evicted > 0
    kept.drop(lambda entry: True)
    assert kept.size_bytes == 0
