"""What proposes tokens that may follow a text. Whether they do is the backbone's to say (`accept`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class Drafter(Protocol):
    """One sequence's drafter. Called once before each of its steps, on the thread that computes it."""

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return up to `n` tokens that may follow; none where there is nothing to say.

        Args:
            tokens: prompt and answer so far, at least one. They begin with those of the last call, unless a step was rolled
                back: then with some of those.
        """
        ...


@runtime_checkable
class Doubtful(Protocol):
    """A drafter that knows how likely its tokens are, and ends a draft that is not worth its costs.

    Attributes:
        least_reach: how likely all tokens of a draft together must be, at least.
    """

    least_reach: float
