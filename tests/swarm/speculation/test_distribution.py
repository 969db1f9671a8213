"""With drafts a sampled text has the model's own distribution: a chi-square test, which a biased rule must fail.

Two tokens are drawn after a fixed text, in one step or two, with a draft that is mostly likely and sometimes not. Their joint
counts are compared with the exact joint probabilities; so a fault in the rule shows whether it favours drafts, draws too often or
draws from the wrong row.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from swarm.speculation.accept import accept

N_DRAWS = 20_000
N_VOCAB = 6
# Of the chi-square distribution with 35 degrees of freedom, the value that is exceeded once in a million
# (Abramowitz and Stegun 26.4.17: 35 (1 - 2/315 + 4.753 sqrt(2/315))^3).
LIMIT = 35 * (1 - 2 / (9 * 35) + 4.753 * (2 / (9 * 35)) ** 0.5) ** 3

Draw = Callable[[int], int]
Rule = Callable[[Sequence[int], Draw], list[int]]


def softmax(logits: npt.NDArray[np.float64], temperature: float) -> npt.NDArray[np.float64]:
    weights: npt.NDArray[np.float64] = np.exp((logits - logits.max()) / temperature)
    chances: npt.NDArray[np.float64] = weights / weights.sum()
    return chances


def chi_square(rule: Rule, temperature: float, *, penalty: float = 0.0, seed: int = 0) -> float:
    """Return the statistic of N_DRAWS pairs of tokens. `penalty` is taken from the logit of a token that was drawn before."""
    model = np.random.default_rng(11)
    first = model.standard_normal(N_VOCAB)
    second = model.standard_normal((N_VOCAB, N_VOCAB))  # after each first token

    second[np.arange(N_VOCAB), np.arange(N_VOCAB)] -= penalty
    begin = softmax(first, temperature)
    after = np.stack([softmax(logits, temperature) for logits in second])  # [V, V]
    joint = begin[:, np.newaxis] * after
    # What an inverse of the cumulative distribution draws: row 0 at the beginning, row 1 + t after token t.
    cumulative = np.cumsum(np.vstack([begin, after]), axis=1)
    cumulative[:, -1] = 1.0
    table = cumulative.tolist()
    rng = np.random.default_rng(seed)
    chances = iter(rng.random(8 * N_DRAWS).tolist())
    counts = np.zeros((N_VOCAB, N_VOCAB))
    for _ in range(N_DRAWS):
        drawn: list[int] = []
        while len(drawn) < 2:
            chance = next(chances)
            draft = int(begin.argmax()) if chance < 0.8 else int(chance * 1000) % N_VOCAB
            drafts = [draft] if not drawn else []  # no step drafts past the end
            context = [*drawn, *drafts]

            def draw(index: int, n: int = len(drawn), context: list[int] = context) -> int:
                at = n + index
                return bisect.bisect_right(table[1 + context[at - 1] if at else 0], next(chances))

            drawn += rule(drafts, draw)
        counts[drawn[0], drawn[1]] += 1
    expected = N_DRAWS * joint
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_drafts_leave_the_distribution_as_it_is(temperature: float, penalty: float) -> None:
    assert chi_square(accept, temperature, penalty=penalty) < LIMIT


def keen(drafts: Sequence[int], draw: Draw) -> list[int]:
    """Accept a draft although it was not drawn, one time in twenty."""
    drawn = accept(drafts, draw)
    if len(drawn) <= len(drafts) and drafts and (sum(drawn) + len(drawn)) % 20 < 3:
        return [*drawn[:-1], drafts[len(drawn) - 1]]
    return drawn


def twice(drafts: Sequence[int], draw: Draw) -> list[int]:
    """Draw once more where the draft was refused: what is accepted is then too often the draft."""
    drawn = accept(drafts, draw)
    return accept(drafts, draw) if len(drawn) <= len(drafts) else drawn


def shifted(drafts: Sequence[int], draw: Draw) -> list[int]:
    """Draw what follows a draft from the row before it."""
    return accept(drafts, lambda index: draw(max(0, index - 1)))


@pytest.mark.parametrize("rule", [keen, twice, shifted])
def test_a_biased_rule_is_found_out(rule: Rule) -> None:
    assert chi_square(rule, 1.0) > 2 * LIMIT
