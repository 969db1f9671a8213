"""Drafts by prompt lookup: what followed these tokens the last time they stood here, will follow them again.

Costs no model and no network. Pays on text that copies (code, quotations, lists, loops); on novel text nearly every draft
is refused. Knows nothing of models, and whether a draft is right is the backbone's to say (`accept`).

    tokens   ... 7 3 9 4 1 ... 7 3 9          the last three, 7 3 9, stood here before
    draft                             4 1 ... what followed them then
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Longest and shortest suffix that is looked up. Measured with 8 drafted on the embedded model's greedy answers to 12 held-out
# prompts, and on held-out text itself (docs/drafts.md): 4 and 5 bring nothing over 3; a shortest of 1 makes 12 and 8 % fewer
# steps than 2 but drafts twice as many tokens, 3 makes 10 % more steps.
N_MAX = 3
N_MIN = 2
# N-grams that are remembered, of all lengths together; the least recently seen are forgotten first. Guessed: the last
# 65,000 tokens or more, about 20 MB at its fullest.
MAX_NGRAMS = 131_072


class NgramDrafter:
    """A `Drafter`: the tokens of one sequence, prompt and answer, and where each n-gram of them stood last.

    Attributes:
        n_matched: length of the suffix that the latest draft was found by; 0: none.
    """

    def __init__(self, *, n_max: int = N_MAX, n_min: int = N_MIN, max_ngrams: int = MAX_NGRAMS) -> None:
        """Look up suffixes of `n_max` down to `n_min` tokens."""
        if not 1 <= n_min <= n_max:
            raise ValueError(f"n-gram lengths out of range: got {n_min} to {n_max}, expected 1 or more, ascending")
        self.n_matched = 0
        self._lengths = range(n_max, n_min - 1, -1)
        self._max_ngrams = max_ngrams
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it, by last sight

    @property
    def n_ngrams(self) -> int:
        """N-grams remembered."""
        return len(self._next)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens; constant time for each."""
        for token in tokens:
            # The n-grams that end before this token are known from here on, with this token as what follows. The suffix
            # itself is never in the index: else it would be found as its own earlier occurrence.
            for n in self._lengths:
                if n <= len(self._tokens):
                    ngram = tuple(self._tokens[-n:])
                    self._next.pop(ngram, None)  # to the end: a dict is in order of insertion
                    self._next[ngram] = len(self._tokens)
            self._tokens.append(token)
        while len(self._next) > self._max_ngrams:
            del self._next[next(iter(self._next))]

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return the draft that follows `tokens`; constant time for each that is new since the last call."""
        n_known = len(self._tokens)
        if len(tokens) < n_known or (n_known and tokens[n_known - 1] != self._tokens[-1]):  # rolled back
            self._tokens.clear()
            self._next.clear()
            n_known = 0
        self.extend(tokens[n_known:])
        return self.draft(n)

    def draft(self, n_draft: int) -> list[int]:
        """Return up to `n_draft` tokens that may follow; none where no suffix was seen before.

        Where the earlier occurrence overlaps the suffix, the text loops: the draft goes round the loop.
        """
        self.n_matched = 0
        if n_draft < 1:
            return []
        for n in self._lengths:
            start = self._next.get(tuple(self._tokens[-n:])) if n <= len(self._tokens) else None
            if start is not None:
                self.n_matched = n
                followed = self._tokens[start : start + n_draft]
                n_rounds = -(-n_draft // len(followed))
                return (followed * n_rounds)[:n_draft]
        return []
