"""The comparison of simulated with real peers; the whole of it, over real processes, is tests/e2e/test_verify.py."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.gate.shortcut import count_different_rows


def test_rows_are_compared_bit_for_bit() -> None:
    expected = np.ones((4, 3), np.float32)
    got = expected.copy()
    assert count_different_rows(got, expected) == 0
    got[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    got[3] = 0
    assert count_different_rows(got, expected) == 2
    assert count_different_rows(np.zeros((1, 3), np.float32), -np.zeros((1, 3), np.float32)) == 1


def test_rows_that_do_not_cover_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="logits do not match"):
        count_different_rows(np.zeros((1, 3), np.float32), np.zeros((4, 3), np.float32))
