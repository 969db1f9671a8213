"""Guesses become right where a model says the same again, and what is accepted is what the model says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from swarm.bench.lookahead import MAX_NGRAMS, LookaheadDrafter
from swarm.speculation.accept import accept
from swarm.speculation.drafter import Observer


class Model:
    """What follows depends on the last token alone, so that whatever is said of a guess may come true."""

    def __init__(self, n_vocab: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        order = rng.permutation(n_vocab)
        self.after = {int(a): int(b) for a, b in zip(order, np.roll(order, 1), strict=True)}

    def write(self, n: int, n_draft: int, seed: int) -> tuple[list[int], int]:
        """Return the text and how many steps it took."""
        rows: list[int] = []
        drafter = LookaheadDrafter(lambda row: self.after[rows[row]], list(self.after), np.random.default_rng(seed))
        assert isinstance(drafter, Observer)
        tokens, n_steps = [0], 0
        while len(tokens) < n:
            drafts = drafter.propose(tokens, n_draft)
            assert len(drafts) == n_draft
            rows[:] = [tokens[-1], *drafts]
            drafter.observe(len(rows), 0.1)
            tokens += accept(drafts, lambda row: self.after[rows[row]])
            n_steps += 1
        return tokens, n_steps


@pytest.mark.parametrize("seed", range(3))
def test_what_was_found_on_the_way_is_accepted_later(seed: int) -> None:
    model = Model(60, seed)
    tokens, n_steps = model.write(200, 6, seed)
    assert all(model.after[a] == b for a, b in itertools.pairwise(tokens))
    assert len(tokens) / n_steps > 2


def test_without_guesses_it_is_plain_decoding() -> None:
    tokens, n_steps = Model(60, 1).write(50, 0, 1)
    assert n_steps == len(tokens) - 1


def test_what_is_remembered_is_bounded() -> None:
    drafter = LookaheadDrafter(lambda row: row, range(10), np.random.default_rng(0))
    for token in range(3 * MAX_NGRAMS):
        drafter.propose([*range(token % 7), token], 4)
        drafter.observe(5, 0.1)
    assert len(drafter._ngrams) <= MAX_NGRAMS
