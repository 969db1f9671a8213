"""Statistics of logits against plain numpy, written the long way."""

from __future__ import annotations

import json
import math

import numpy as np
import numpy.typing as npt
import pytest

from swarm.errors import EngineError
from swarm.gate import statistics
from swarm.gate.statistics import CLEAR_GAP, FormStatistics, StockWindow

V = 50
Logits = npt.NDArray[np.float32]


def pair(n_tokens: int, seed: int, noise: float = 0.3) -> tuple[Logits, Logits, npt.NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    stock = rng.standard_normal((n_tokens, V)).astype(np.float32)
    ours = (stock + noise * rng.standard_normal((n_tokens, V))).astype(np.float32)
    return ours, stock, rng.integers(0, V, n_tokens)


def log_p(row: Logits, token: int) -> float:
    probabilities = np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum()
    return math.log(probabilities[token])


@pytest.mark.parametrize("block_values", [1, 3 * V, 1 << 22])
def test_figures_are_those_of_a_plain_loop_over_all_positions(
    monkeypatch: pytest.MonkeyPatch, block_values: int
) -> None:
    monkeypatch.setattr(statistics, "BLOCK_VALUES", block_values)
    figures = FormStatistics()
    same, clear, cosines, ours_nll, stock_nll = [], [], [], [], []
    for n_tokens, seed in ((7, 0), (1, 1), (40, 2)):
        ours, stock, targets = pair(n_tokens, seed)
        figures.add(ours, StockWindow.of(stock, targets))
        for a, b, target in zip(ours, stock, targets, strict=True):
            ordered = sorted(b)
            same.append(int(np.argmax(a)) == int(np.argmax(b)))
            clear.append(ordered[-1] - ordered[-2] > CLEAR_GAP)
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            cosines.append(wide_a @ wide_b / np.linalg.norm(wide_a) / np.linalg.norm(wide_b))
            ours_nll.append(-log_p(a, target))
            stock_nll.append(-log_p(b, target))
    assert figures.n_positions == 48
    assert 0 < sum(clear) < 48
    assert not all(same)
    assert figures.argmax_agreement == np.mean(same)
    assert figures.n_clear == sum(clear)
    assert figures.clear_agreement == np.mean([s for s, c in zip(same, clear, strict=True) if c])
    assert figures.min_cosine == pytest.approx(min(cosines), rel=1e-12)
    assert figures.mean_cosine == pytest.approx(np.mean(cosines), rel=1e-12)
    expected = math.exp(np.mean(ours_nll)) / math.exp(np.mean(stock_nll))
    assert figures.perplexity_ratio == pytest.approx(expected, rel=1e-9)
    assert figures.stock_perplexity == pytest.approx(math.exp(np.mean(stock_nll)), rel=1e-9)
    changes = np.array(ours_nll) - np.array(stock_nll)
    assert figures.perplexity_error == pytest.approx(expected * np.std(changes) / math.sqrt(48), rel=1e-9)


def test_equal_logits_agree_in_everything() -> None:
    _, stock, targets = pair(9, 3)
    figures = FormStatistics()
    figures.add(stock.copy(), StockWindow.of(stock, targets))
    assert figures.identical
    assert (figures.argmax_agreement, figures.clear_agreement, figures.perplexity_ratio) == (1.0, 1.0, 1.0)
    assert figures.min_cosine == pytest.approx(1, abs=1e-12)
    assert figures.min_cosine is not None
    assert figures.min_cosine <= 1


def test_one_last_bit_is_not_identical_and_agrees_else() -> None:
    _, stock, _ = pair(3, 4)
    ours = stock.copy()
    ours[1, 5] = np.nextafter(ours[1, 5], np.float32(9))
    figures = FormStatistics()
    figures.add(ours, StockWindow.of(stock))
    assert (figures.identical, figures.n_different, figures.argmax_agreement) == (False, 1, 1.0)


def test_only_stocks_gap_makes_a_position_clear() -> None:
    stock = np.zeros((3, V), np.float32)
    stock[:, 0] = 1
    stock[:, 1] = [1 - CLEAR_GAP / 2, 1 - 2 * CLEAR_GAP, 1]
    ours = np.zeros((3, V), np.float32)
    ours[:, 1] = 5  # wrong everywhere, and clearly so
    figures = FormStatistics()
    figures.add(ours, StockWindow.of(stock))
    assert (figures.n_clear, figures.n_same_clear, figures.clear_agreement) == (1, 0, 0.0)
    assert figures.argmax_agreement == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_counted_and_leaves_no_perplexity(bad: float) -> None:
    _, stock, targets = pair(4, 5)
    ours = stock.copy()
    ours[2, 7] = bad
    figures = FormStatistics()
    figures.add(stock.copy(), StockWindow.of(stock, targets))
    figures.add(ours, StockWindow.of(stock, targets))
    assert figures.n_not_finite == 1
    assert figures.perplexity_ratio is None
    assert figures.perplexity_error is None
    assert figures.argmax_agreement == 7 / 8
    assert figures.min_cosine == 0.0
    assert figures.mean_cosine == pytest.approx(7 / 8)
    assert json.dumps([figures.mean_cosine, figures.perplexity_ratio], allow_nan=False)


def test_a_window_that_could_not_be_computed_disagrees_everywhere() -> None:
    _, stock, targets = pair(6, 6)
    figures = FormStatistics()
    figures.add_failure(StockWindow.of(stock, targets))
    assert (figures.n_positions, figures.n_not_finite, figures.n_same_argmax) == (6, 6, 0)
    assert figures.mean_cosine == 0.0


def test_very_large_logits_do_not_overflow() -> None:
    stock = np.zeros((2, V), np.float32)
    stock[:, 3] = 3e38
    ours = stock.copy()
    ours[:, 4] = 3e38
    figures = FormStatistics()
    figures.add(ours, StockWindow.of(stock, np.array([3, 3])))
    assert figures.mean_cosine == pytest.approx(math.sqrt(0.5))
    assert figures.perplexity_ratio == pytest.approx(2)
    far = FormStatistics()
    far.add(ours, StockWindow.of(stock, np.array([0, 0])))
    assert json.dumps([far.perplexity_ratio, far.stock_perplexity], allow_nan=False)


def test_a_zero_row_has_cosine_zero() -> None:
    _, stock, _ = pair(1, 7)
    figures = FormStatistics()
    figures.add(np.zeros_like(stock), StockWindow.of(stock))
    assert figures.mean_cosine == 0.0


def test_nothing_measured_is_none() -> None:
    figures = FormStatistics()
    assert not figures.identical
    values = (figures.argmax_agreement, figures.clear_agreement, figures.min_cosine, figures.mean_cosine)
    assert values == (None, None, None, None)
    assert (figures.perplexity_ratio, figures.perplexity_error, figures.stock_perplexity) == (None, None, None)


@pytest.mark.parametrize(("ours", "stock"), [((1, V), (3, V)), ((3, V), (1, V)), ((2, V), (2, V + 1))])
def test_logits_that_do_not_cover_the_same_are_refused(ours: tuple[int, int], stock: tuple[int, int]) -> None:
    figures = FormStatistics()
    with pytest.raises(ValueError, match="logits do not match"):
        figures.add(np.zeros(ours, np.float32), StockWindow.of(np.zeros(stock, np.float32)))
    assert figures.n_positions == 0


def test_stocks_own_nan_is_an_error_not_a_measure() -> None:
    _, stock, _ = pair(2, 8)
    stock[1, 1] = math.nan
    with pytest.raises(EngineError, match="not finite"):
        StockWindow.of(stock)
