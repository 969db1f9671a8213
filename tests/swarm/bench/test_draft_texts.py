"""Texts are what they are said to be: copies with edits, true contexts, and text that prompt lookup never gets right."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.bench.draft_texts import (
    COPY_TOKENS,
    EDIT_EVERY,
    TURN_TOKENS,
    adversarial_pieces,
    copy_pieces,
    distinct_4gram_share,
    novel_pieces,
)
from swarm.errors import UserError
from swarm.speculation.ngram import NgramDrafter

TEXT = np.random.default_rng(0).integers(0, 500, 3000).tolist()


def accepted(prompt: tuple[int, ...], target: tuple[int, ...]) -> list[int]:
    """Return how many of the drafts before each token of `target` are right."""
    drafter = NgramDrafter()
    found = []
    for at in range(len(target)):
        drafts = drafter.propose([*prompt, *target[:at]], 8)
        n = 0
        while n < len(drafts) and at + n < len(target) and drafts[n] == target[at + n]:
            n += 1
        found.append(n)
    return found


def test_a_copy_is_its_source_but_for_an_edit_here_and_there() -> None:
    for piece in copy_pieces(TEXT, 5):
        assert piece.target is not None
        assert len(piece.prompt) == len(piece.target) == piece.n_tokens == COPY_TOKENS
        n_edits = sum(a != b for a, b in zip(piece.prompt, piece.target, strict=True))
        assert 0 < n_edits <= COPY_TOKENS // EDIT_EVERY
        assert np.mean(accepted(piece.prompt, piece.target)) > 5


def test_novel_text_stands_in_its_true_context() -> None:
    pieces = novel_pieces(TEXT, 6)
    assert len({piece.prompt for piece in pieces}) == 6
    for piece in pieces:
        assert piece.target is None
        assert any(TEXT[at : at + len(piece.prompt)] == list(piece.prompt) for at in range(len(TEXT)))


def test_an_adversarial_text_always_has_a_draft_and_never_the_right_one() -> None:
    for piece in adversarial_pieces(range(300), 4):
        assert piece.target is not None
        hostile, turned = piece.target[:-TURN_TOKENS], piece.target[-TURN_TOKENS:]
        drafter = NgramDrafter()
        n_drafted = [len(drafter.propose([*piece.prompt, *hostile[:at]], 8)) for at in range(len(hostile))]
        assert np.mean([n > 0 for n in n_drafted]) > 0.8
        assert set(accepted(piece.prompt, hostile)) == {0}
        assert piece.prompt[:TURN_TOKENS] == turned
        assert np.mean(accepted((*piece.prompt, *hostile), turned)) > 5


def test_a_seed_fixes_the_texts() -> None:
    assert copy_pieces(TEXT, 3, 1) == copy_pieces(TEXT, 3, 1) != copy_pieces(TEXT, 3, 2)
    assert adversarial_pieces(range(300), 2, 1) == adversarial_pieces(range(300), 2, 1)
    assert adversarial_pieces(range(300), 2, 1) != adversarial_pieces(range(300), 2, 2)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(UserError, match="too short"):
        novel_pieces(TEXT[:200], 2)


def test_the_share_of_distinct_4grams_is_low_where_a_text_loops() -> None:
    assert distinct_4gram_share([list(range(50))]) == 1
    assert distinct_4gram_share([[1, 2, 3, 4] * 25]) == pytest.approx(4 / 97)
    assert distinct_4gram_share([[1, 2]]) == 1
