"""The drafter against a plain search through all the tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.speculation.ngram import N_MAX, N_MIN, NgramDrafter


def drafter(*tokens: int, **options: int) -> NgramDrafter:
    made = NgramDrafter(**options)
    made.extend(tokens)
    return made


def searched(tokens: list[int], n_draft: int) -> list[int]:
    """What the drafter should say, by looking everywhere."""
    for n in range(N_MAX, N_MIN - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                text = list(tokens)
                for i in range(n_draft):  # what is drafted may itself be copied from: a loop
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


def test_what_followed_the_suffix_before_is_drafted() -> None:
    assert drafter(7, 3, 9, 4, 1, 5, 7, 3, 9).draft(3) == [4, 1, 5]


def test_a_draft_is_never_longer_than_asked_for() -> None:
    tokens = drafter(7, 3, 9, 4, 1, 5, 7, 3, 9)
    assert tokens.draft(1) == [4]
    assert tokens.draft(0) == []
    assert tokens.draft(-1) == []


def test_the_longest_suffix_decides_and_of_equal_ones_the_latest() -> None:
    assert drafter(1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3).draft(1) == [50]  # three tokens agree; the later match has two
    assert drafter(2, 3, 50, 2, 3, 60, 2, 3).draft(1) == [60]


def test_a_loop_is_gone_round() -> None:
    assert drafter(8, 1, 2, 1, 2).draft(5) == [1, 2, 1, 2, 1]
    assert drafter(4, 4, 4).draft(4) == [4, 4, 4, 4]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 3]])
def test_text_that_does_not_repeat_has_no_draft(tokens: list[int]) -> None:
    assert drafter(*tokens).draft(8) == []


@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    cut=st.integers(0, 40),
    n_draft=st.integers(1, 10),
)
def test_the_index_finds_what_a_search_finds(tokens: list[int], cut: int, n_draft: int) -> None:
    made = drafter(*tokens[:cut])
    made.draft(n_draft)  # asking changes nothing
    made.extend(tokens[cut:])
    assert made.draft(n_draft) == searched(tokens, n_draft)


def test_memory_is_bounded_and_the_least_recently_seen_is_forgotten() -> None:
    made = drafter(1, 2, 9, 8, 7, n_max=2, n_min=2, max_ngrams=5)
    made.extend([1, 2, 5])  # (1, 2) is seen again, before (2, 9) and (9, 8) in age
    made.extend([6, 4, 1, 2])
    assert made.n_ngrams == 5
    assert made.draft(1) == [5]
    made.extend(range(300, 320))
    made.extend([1, 2])
    assert made.n_ngrams == 5
    assert made.draft(1) == []


@pytest.mark.parametrize(("n_max", "n_min"), [(0, 0), (2, 3), (1, 0)])
def test_lengths_that_make_no_sense_are_refused(n_max: int, n_min: int) -> None:
    with pytest.raises(ValueError, match="n-gram lengths out of range"):
        NgramDrafter(n_max=n_max, n_min=n_min)
