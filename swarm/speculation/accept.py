"""Which drafted tokens stand: those that the sampler itself draws, in order, until it draws another.

The backbone computes the last token and the drafts in one step and gets logits after each of them. Row i is what the model
says after i accepted drafts, so a draw from it is the draw that would have been made without drafts:

    rows      after last   after draft 0   after draft 1   after draft 2
    drawn     = draft 0    = draft 1       a correction    not drawn: its row follows a token that is not there

The sampler draws as often, in the same order and from the same logits as without drafts, and its generator moves as far: the
text is the same token for token, greedy or seeded, and at any temperature the distribution is the model's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


def accept(draft_tokens: Sequence[int], draw: Callable[[int], int]) -> list[int]:
    """Return the tokens drawn, `n_accepted` drafts and one more: a correction, or what follows the last draft.

    Args:
        draw: draws from row i, 0 to len(draft_tokens); called for 0, 1, ... and never past a correction.
    """
    drawn: list[int] = []
    for index in range(len(draft_tokens) + 1):
        drawn.append(draw(index))
        if index < len(draft_tokens) and drawn[-1] != draft_tokens[index]:
            break
    return drawn


@dataclass(slots=True)
class DraftStats:
    """What drafts brought so far.

    Attributes:
        n_steps: decode steps after prefill, with drafts or without.
        n_drafted, n_accepted: tokens.
        lengths: accept_length -> steps that had it.
    """

    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def count(self, n_drafted: int, accept_length: int) -> None:
        """Add one step."""
        self.n_steps += 1
        self.n_drafted += n_drafted
        self.n_accepted += accept_length - 1
        self.lengths[accept_length] += 1

    @property
    def accept_length(self) -> float:
        """Mean tokens that a step added: n_accepted + 1; 1 before any step."""
        return 1 + self.n_accepted / self.n_steps if self.n_steps else 1.0
