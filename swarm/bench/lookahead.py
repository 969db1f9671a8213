"""Lookahead decoding, for the benchmark alone: a window of guesses that every step computes anew, and n-grams found on the way.

All guesses stand in one row after the last token, so one step computes them all; what the model says after each is the next
step's guess for the place after it (a Jacobi iterate):

    rows      last  g1   g2   g3         said   y0  y1  y2  y3        y0 stands; if it is g1, so does y1, and so on
    guesses         y1   y2   y3   random        of the next step, if nothing was right

Tokens that followed each other over several steps (g1, then y1 after it, then what is said after y1, ...) are kept as n-grams,
and one that begins with the last token takes the first places of the window. This is the simple form, without a tree: guesses
behind a wrong one are computed after wrong tokens. Greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

N_GRAM = 5  # tokens of an n-gram, the first of which is looked up; the paper (arXiv:2402.02057) takes 4 to 7
MAX_NGRAMS = 4096  # the oldest are forgotten first; a benchmark's texts never have so many


class LookaheadDrafter:
    """A `Drafter` and an `Observer` of one sequence."""

    def __init__(self, said: Callable[[int], int], vocabulary: Sequence[int], rng: np.random.Generator) -> None:
        """`said`: what the model says after a row of the latest step; `vocabulary`: what guesses begin with."""
        self._said = said
        self._vocabulary = np.asarray(vocabulary)
        self._rng = rng
        self._chains: list[tuple[int, ...]] = []  # of each guess: what it followed over the steps, and itself
        self._next: list[tuple[int, ...]] = []  # of each place after the latest step's rows
        self._n_text = 0
        self._ngrams: dict[int, tuple[int, ...]] = {}

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return `n` guesses."""
        n_new = len(tokens) - self._n_text
        window = self._next[n_new:] if self._next and n_new > 0 else []
        self._n_text = len(tokens)
        found = self._ngrams.get(tokens[-1], ())
        chains = [(tokens[-1], *found[: at + 1]) for at in range(len(found))]
        chains += window[len(chains) :]
        while len(chains) < n:
            chains.append((int(self._rng.choice(self._vocabulary)),))
        self._chains = [(tokens[-1],), *chains[:n]]
        return [chain[-1] for chain in chains[:n]]

    def observe(self, n_rows: int, seconds: float, n_beside: int = 0) -> None:
        """Take what the model says after each guess."""
        self._next = []
        for row, chain in enumerate(self._chains[:n_rows]):
            longer = (*chain, self._said(row))[-N_GRAM:]
            self._next.append(longer)
            if len(longer) > 2:  # pairs would be drafted after every token that was ever guessed
                self._ngrams.pop(longer[0], None)
                self._ngrams[longer[0]] = longer[1:]
        while len(self._ngrams) > MAX_NGRAMS:
            del self._ngrams[next(iter(self._ngrams))]
