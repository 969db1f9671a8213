"""The test double lies as it says: how much, and whether it says the same again."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.bench.cheating_peer import NOISE, CheatKind, lie
from swarm.dispatch.audit_opinions import deviation

ROWS = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)


@pytest.mark.parametrize("kind", [CheatKind.NOISE, CheatKind.SLY])
def test_noise_is_5_percent_of_each_row(kind: CheatKind) -> None:
    wrong = lie(kind, ROWS, np.random.default_rng(2))
    assert wrong.dtype == np.float32
    norms = np.linalg.norm(wrong - ROWS, axis=1) / np.linalg.norm(ROWS, axis=1)
    np.testing.assert_allclose(norms, NOISE, rtol=1e-4)


def test_orthogonal_rows_have_cosine_0_and_are_linear() -> None:
    rng = np.random.default_rng(2)
    wrong = lie(CheatKind.ORTHOGONAL, ROWS, rng)
    assert abs(deviation(wrong, ROWS).cosine) < 1e-6
    split = [lie(CheatKind.ORTHOGONAL, part, rng) for part in (ROWS - 1, np.ones_like(ROWS))]
    np.testing.assert_allclose(wrong, split[0] + split[1], atol=1e-6)


@pytest.mark.parametrize(("kind", "is_same"), [("orthogonal", True), ("noise", False), ("sly", True)])
def test_whether_it_says_the_same_again_alone_or_among_others(kind: str, is_same: bool) -> None:
    rng = np.random.default_rng(2)
    first, again = lie(CheatKind(kind), ROWS, rng), lie(CheatKind(kind), ROWS[2:3], rng)
    assert np.array_equal(first[2:3], again) is is_same
