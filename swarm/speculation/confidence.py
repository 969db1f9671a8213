"""What a drafter's own probability of a token says of its acceptance: learned from what became of earlier ones. Pure.

A drafter is asked for the most likely token, and mostly the real model's most likely token is the same even where both are far
from sure: so acceptance is far above the probability. It is taken as

    acceptance = probability ** exponent

with one exponent for all, moved after each look until on average as many are accepted as were expected.
"""

from __future__ import annotations

import math

# Guessed from what was measured on the embedded model, held-out text, half of the experts (docs/speculation.md): of 8 drafted
# tokens 2.5 are accepted, where their probabilities alone promise fewer than 1.
FIRST_EXPONENT = 0.3
STEP = 0.05  # how far one look moves the exponent's logarithm; guessed: twenty that all say the same change it e-fold
LEAST_EXPONENT, MOST_EXPONENT = 0.02, 4.0


class Confidence:
    """Of one kind of drafter, over all texts."""

    def __init__(self) -> None:
        self.exponent = FIRST_EXPONENT

    def acceptance(self, probability: float) -> float:
        """Return how likely a token is accepted that the drafter gives this probability."""
        return math.pow(max(probability, 1e-9), self.exponent)

    def learn(self, probability: float, is_right: bool) -> None:
        """A token with this probability was looked at."""
        surplus = self.acceptance(probability) - is_right
        exponent = self.exponent * math.exp(STEP * surplus)
        self.exponent = min(max(exponent, LEAST_EXPONENT), MOST_EXPONENT)
