"""The accept rule: what is drawn with drafts is what is drawn without, and the generator has moved as far."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pytest

from swarm.speculation.accept import DraftStats, accept
from swarm.speculation.ngram import NgramDrafter

N_VOCAB = 7


def drawing(tokens: list[int], rows: list[int]) -> list[int]:
    """Accept drafts 5, 6, 7 with a sampler that draws these tokens; note which rows it was asked for."""

    def draw(row: int) -> int:
        rows.append(row)
        return tokens[row]

    return accept([5, 6, 7], draw)


@pytest.mark.parametrize(
    ("would_draw", "drawn"),
    [
        ([5, 6, 7, 8], [5, 6, 7, 8]),  # all, and one more
        ([5, 6, 9, 8], [5, 6, 9]),
        ([9, 6, 7, 8], [9]),
        ([5, 5, 7, 8], [5, 5]),
    ],
)
def test_drafts_stand_up_to_the_first_that_is_not_drawn(would_draw: list[int], drawn: list[int]) -> None:
    rows: list[int] = []
    assert drawing(would_draw, rows) == drawn
    assert rows == list(range(len(drawn))), "a row was drawn from twice, out of order or past the correction"


def test_without_drafts_one_token_is_drawn() -> None:
    assert accept([], lambda row: 4 + row) == [4]


def probabilities(tokens: list[int]) -> npt.NDArray[np.float64]:
    """A model: which token follows depends on the last two, and rather strongly, so that texts repeat."""
    rng = np.random.default_rng(zlib.crc32(bytes(tokens[-2:])))
    weights = np.exp(3 * rng.standard_normal(N_VOCAB))
    chances: npt.NDArray[np.float64] = weights / weights.sum()
    return chances


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_drafts_change_neither_a_greedy_nor_a_seeded_text(seed: int, is_greedy: bool) -> None:
    def sample(tokens: list[int], rng: np.random.Generator) -> int:
        chance = probabilities(tokens)
        return int(chance.argmax()) if is_greedy else int(rng.choice(N_VOCAB, p=chance))

    start = [seed, 1, 2]
    plain_rng = np.random.default_rng(seed)
    plain = list(start)
    for _ in range(300):
        plain.append(sample(plain, plain_rng))

    rng = np.random.default_rng(seed)
    tokens, drafter, stats = list(start), NgramDrafter(), DraftStats()
    drafter.extend(start)
    while len(tokens) < 303:
        draft_tokens = drafter.draft(min(6, 302 - len(tokens)))
        context = [*tokens, *draft_tokens]
        n_known = len(tokens)
        drawn = accept(draft_tokens, lambda row, c=context, n=n_known: sample(c[: n + row], rng))  # type: ignore[misc]
        stats.count(len(draft_tokens), len(drawn))
        tokens += drawn
        drafter.extend(drawn)
    assert tokens == plain
    assert rng.bit_generator.state == plain_rng.bit_generator.state
    assert stats.accept_length > 1.2, "drafts were never accepted: the test shows nothing"
    if not is_greedy:  # a greedy text of this model soon loops, and then every draft is right
        assert stats.n_accepted < stats.n_drafted, "drafts were never refused: the test shows nothing"


def test_the_accept_length_counts_the_token_that_the_backbone_adds() -> None:
    stats = DraftStats()
    assert stats.accept_length == 1.0
    for n_drafted, length in ((8, 9), (8, 1), (0, 1), (8, 3)):
        stats.count(n_drafted, length)
    assert (stats.n_steps, stats.n_drafted, stats.n_accepted) == (4, 24, 10)
    assert stats.accept_length == 14 / 4
    assert stats.lengths == {9: 1, 1: 2, 3: 1}
