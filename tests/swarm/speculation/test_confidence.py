"""What a drafter's probabilities are worth is learned from what became of its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.speculation.confidence import FIRST_EXPONENT, Confidence


@pytest.mark.parametrize("true_exponent", [0.1, 0.5, 1.5])
def test_the_exponent_is_found_whatever_the_probabilities(true_exponent: float) -> None:
    rng = np.random.default_rng(0)
    confidence = Confidence()
    found = []
    for _ in range(4000):
        probability = float(rng.uniform(0.02, 0.98))
        confidence.learn(probability, bool(rng.random() < probability**true_exponent))
        found.append(confidence.exponent)
    assert np.median(found[1000:]) == pytest.approx(true_exponent, rel=0.3)


def test_a_few_looks_change_little() -> None:
    confidence = Confidence()
    for _ in range(3):
        confidence.learn(0.5, False)
    assert confidence.exponent == pytest.approx(FIRST_EXPONENT, rel=0.2)
    assert confidence.exponent > FIRST_EXPONENT


@pytest.mark.parametrize("is_right", [True, False])
def test_it_stays_within_bounds(is_right: bool) -> None:
    confidence = Confidence()
    for _ in range(10_000):
        confidence.learn(0.3, is_right)
    assert 0 < confidence.acceptance(0.0) < confidence.acceptance(0.3) < 1
    assert confidence.acceptance(1.0) == 1
