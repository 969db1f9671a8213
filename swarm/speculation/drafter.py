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
        reaches: of the latest draft, how likely each token and all before it are accepted.
    """

    least_reach: float
    reaches: Sequence[float]


@runtime_checkable
class Observer(Protocol):
    """A drafter that is told what steps cost."""

    def observe(self, n_rows: int, seconds: float, n_beside: int = 0) -> None:
        """A step was made, before anything is drawn of it.

        Args:
            n_rows: of all its sequences, drafts included; the drafter's own come in order.
            n_beside: sequences beside the drafter's own.
        """
        ...
