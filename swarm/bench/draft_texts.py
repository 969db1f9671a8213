"""Texts for the benchmark of drafts. Pure; a text is (prompt, what follows), and what follows is given or the model's own.

copy         the prompt is a text, the answer the same text with an edit here and there: given, so that no model's mistakes count
novel        a stretch of a text that the model was not trained on, in its true context, and what the model itself says next: a
             few tokens, before it can begin to repeat itself
adversarial  tokens that prompt lookup always has a draft for and which are never what it drafts; then the text turns into a
             copy of its own beginning
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarm.errors import UserError
from swarm.speculation.ngram import NgramDrafter

KINDS = ("copy", "novel", "adversarial")
EDIT_EVERY = 40  # tokens of a copy between two edits; guessed
N_ALPHABET = 10  # tokens of an adversarial text: few, so that every pair was seen before
COPY_TOKENS = 120
NOVEL_PROMPT = 120
NOVEL_TOKENS = 24
ADVERSARIAL_PROMPT = 200
ADVERSARIAL_TOKENS = 80
TURN_TOKENS = 80  # of the copy that an adversarial text ends with
TURN_SETTLED = 40  # of these, what drafts may take to begin; the figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One thing to write.

    Attributes:
        prompt: tokens.
        target: the tokens that follow, whatever the model says; None: what it says, `n_tokens` of it.
        n_turn: tokens at the end of these that are judged apart from the rest.
    """

    prompt: tuple[int, ...]
    target: tuple[int, ...] | None
    n_tokens: int
    n_turn: int = 0


def copy_pieces(text: Sequence[int], n_pieces: int, seed: int = 0, *, n_tokens: int = COPY_TOKENS) -> list[Piece]:
    """Return texts of `n_tokens` to be copied with edits, from all over `text`.

    Raises:
        UserError: the text is too short.
    """
    rng = np.random.default_rng(seed)
    pieces = []
    for start in _starts(len(text), n_pieces, n_tokens):
        source = list(text[start : start + n_tokens])
        target = list(source)
        for at in range(EDIT_EVERY // 2, len(target), EDIT_EVERY):
            target[at] = int(text[int(rng.integers(len(text)))])
        pieces.append(Piece(prompt=tuple(source), target=tuple(target), n_tokens=len(target)))
    return pieces


def novel_pieces(text: Sequence[int], n_pieces: int, *, n_tokens: int = NOVEL_TOKENS) -> list[Piece]:
    """Return contexts from all over `text`; raises UserError where it is too short."""
    return [
        Piece(prompt=tuple(text[start : start + NOVEL_PROMPT]), target=None, n_tokens=n_tokens)
        for start in _starts(len(text), n_pieces, NOVEL_PROMPT)
    ]


def adversarial_pieces(
    vocabulary: Sequence[int], n_pieces: int, seed: int = 0, *, n_tokens: int = ADVERSARIAL_TOKENS
) -> list[Piece]:
    """Return texts that drafts fail at, and that go on into a copy of their beginning."""
    pieces = []
    for number in range(n_pieces):
        rng = np.random.default_rng((seed, number))
        alphabet = rng.choice(np.asarray(vocabulary), N_ALPHABET, replace=False)
        drafter = NgramDrafter()
        tokens: list[int] = []
        while len(tokens) < ADVERSARIAL_PROMPT + n_tokens:
            drafted = drafter.draft(1)
            token = int(rng.choice(alphabet[~np.isin(alphabet, drafted)]))
            tokens.append(token)
            drafter.extend([token])
        own = np.setdiff1d(np.asarray(vocabulary), alphabet)  # so that it can be found again
        begin = tuple(int(each) for each in rng.choice(own, TURN_TOKENS, replace=False))
        target = (*tokens[ADVERSARIAL_PROMPT:], *begin)
        prompt = (*begin, *tokens[:ADVERSARIAL_PROMPT])
        pieces.append(Piece(prompt=prompt, target=target, n_tokens=len(target), n_turn=TURN_TOKENS))
    return pieces


def _starts(n_text: int, n_pieces: int, n_each: int) -> list[int]:
    if n_text < n_pieces * n_each:
        raise UserError(f"the text is too short: got {n_text} tokens, expected {n_pieces * n_each}")
    return [int(start) for start in np.linspace(0, n_text - n_each, n_pieces)]


def distinct_4gram_share(texts: Sequence[Sequence[int]]) -> float:
    """Return the share of 4-grams that occur once at most in their own text: low where a text loops; 1 where there are none."""
    n_distinct = n_all = 0
    for text in texts:
        grams = [tuple(text[at : at + 4]) for at in range(len(text) - 3)]
        n_distinct += len(set(grams))
        n_all += len(grams)
    return n_distinct / n_all if n_all else 1.0
