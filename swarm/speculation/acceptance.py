"""How likely a drafted token is accepted, given that those before it were; fading with each look. Pure.

Whether a token is right is known once the text has it, drafted for real or only in the shadow: a proposal that was never computed
counts as well as one that was. So a drafter that is off costs no rows to be watched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What older looks still count, for each new one: about the last ten. Guessed: a text that turns into copying, or stops doing it,
# must show within a few tokens; with ten looks a share of 0.5 scatters by 0.16.
FADE = 0.9
# Looks without success that are assumed before any: drafts start where something was right twice, not on a guess.
N_ASSUMED = 1.0
POSITION_WEIGHT = 4.0  # looks at a position that count as much as those at all positions together; guessed
PARENT_WEIGHT = 2.0  # looks at proposals of one kind that count as much as those at all kinds together; guessed


@dataclass(slots=True)
class _Share:
    n_right: float = 0.0
    n_looks: float = 0.0

    def count(self, is_right: bool) -> None:
        self.n_right = FADE * self.n_right + is_right
        self.n_looks = FADE * self.n_looks + 1.0


class Acceptance:
    """Of one drafter, in one text or in many; or of one kind of its proposals."""

    def __init__(
        self, *, parent: Acceptance | None = None, prior: Acceptance | None = None, prior_looks: float = 0.0
    ) -> None:
        """Begin with nothing, or with what is known.

        Args:
            parent: of all kinds of proposals, of which this one is of one kind; it is counted too.
            prior: what is known from other texts; it counts as so many looks.
        """
        self._parent = parent
        self._all = _Share()
        self._by_position: list[_Share] = []
        if prior is not None and prior._all.n_looks > 0:
            weight = min(prior_looks, prior._all.n_looks)
            self._all = _Share(prior._all.n_right / prior._all.n_looks * weight, weight)

    @property
    def is_known(self) -> bool:
        """Whether anything was looked at."""
        return self._all.n_looks > 0

    @property
    def hope(self) -> float:
        """How likely a token may still be, with few looks: a look that was right and one that was not are added."""
        return (self._all.n_right + 1.0) / (self._all.n_looks + 2.0)

    def count(self, position: int, is_right: bool) -> None:
        """One drafted token, number `position` of its draft, was looked at."""
        while len(self._by_position) <= position:
            self._by_position.append(_Share())
        if self._parent is not None:
            self._parent.count(position, is_right)
        self._all.count(is_right)
        self._by_position[position].count(is_right)

    def probability(self, position: int) -> float:
        """Return how likely the token is right if those before it are."""
        if self._parent is None:
            overall = self._all.n_right / (self._all.n_looks + N_ASSUMED)
        else:
            expected = self._parent.probability(position)
            overall = (self._all.n_right + PARENT_WEIGHT * expected) / (self._all.n_looks + PARENT_WEIGHT)
        if position >= len(self._by_position):
            return overall
        here = self._by_position[position]
        return (here.n_right + POSITION_WEIGHT * overall) / (here.n_looks + POSITION_WEIGHT)

    def expected_lengths(self, n: int) -> list[float]:
        """Return the expected number of accepted tokens for drafts of 1 to n."""
        found, reached, total = [], 1.0, 0.0
        for position in range(n):
            reached *= self.probability(position)
            total += reached
            found.append(total)
        return found


@dataclass(slots=True)
class Watched:
    """A proposal that the text will judge.

    Attributes:
        start: how many tokens the text had when it was made.
        n_judged: of its tokens.
    """

    start: int
    tokens: Sequence[int]
    acceptance: Acceptance
    n_judged: int = 0
    is_over: bool = False

    def judge(self, text: Sequence[int]) -> list[bool]:
        """Return what the text says by now of tokens not judged before; after the first wrong one the proposal is over."""
        outcomes: list[bool] = []
        while not self.is_over and self.start + self.n_judged < len(text):
            is_right = text[self.start + self.n_judged] == self.tokens[self.n_judged]
            self.acceptance.count(self.n_judged, is_right)
            outcomes.append(is_right)
            self.n_judged += 1
            self.is_over = not is_right or self.n_judged == len(self.tokens)
        return outcomes
