"""How one wire form's logits compare with stock llama.cpp's, gathered window by window.

Pure numpy; knows nothing of models, forms or thresholds. No logits are kept: memory is one window of stock's and one of the
form's, plus temporaries of BLOCK_VALUES.

    agreement       share of positions whose likeliest token is the same
    clear           the same over positions where stock's two best logits are more than CLEAR_GAP apart: elsewhere the
                    order of the two is a near-tie that any rounding flips
    cosine          of the two rows of logits
    perplexity      exp(mean of -log p(next token of the text)); the ratio is the form's over stock's
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarm.errors import EngineError

CLEAR_GAP = 0.2  # logits; measured on the embedded Q4_K_M, 20,000 positions: 89 % are clear, and f32 flips one of them
BLOCK_VALUES = 4 << 20  # logits converted to float64 at a time: 32 MB; guessed, larger blocks are no faster

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StockWindow:
    """One window of stock's logits and what every form is compared with, computed once.

    Attributes:
        logits: [T, V].
        argmax: [T].
        is_clear: [T], the top-2 gap is above CLEAR_GAP.
        norms: float64 [T].
        targets: [T], the text's next token of each position; None where there is no text.
        nll: float64 [T], -log p(target); None without targets.
    """

    logits: Logits
    argmax: npt.NDArray[np.intp]
    is_clear: npt.NDArray[np.bool_]
    norms: npt.NDArray[np.float64]
    targets: npt.NDArray[np.int64] | None
    nll: npt.NDArray[np.float64] | None

    @classmethod
    def of(cls, logits: Logits, targets: npt.NDArray[np.int64] | None = None) -> StockWindow:
        """Return the window of these logits, [T, V]; raises EngineError when stock's own are not finite."""
        if logits.ndim != 2 or logits.shape[1] < 2 or not len(logits):
            raise ValueError(f"logits have a wrong shape: got {logits.shape}, expected [T, V]")
        if not np.isfinite(logits).all():
            raise EngineError("stock llama.cpp's own logits are not finite: there is nothing to compare with")
        n_tokens = len(logits)
        gaps = np.empty(n_tokens, np.float32)
        norms = np.empty(n_tokens, np.float64)
        nll = None if targets is None else np.empty(n_tokens, np.float64)
        for rows in _blocks(logits):
            best = np.partition(logits[rows], -2, axis=1)[:, -2:]  # [N, 2], ascending
            gaps[rows] = best[:, 1] - best[:, 0]
            wide = logits[rows].astype(np.float64)
            norms[rows] = np.sqrt(np.einsum("tv,tv->t", wide, wide))
            if nll is not None and targets is not None:
                nll[rows] = _negative_log_likelihood(wide, targets[rows])
        return cls(
            logits=logits,
            argmax=logits.argmax(axis=1),
            is_clear=gaps > CLEAR_GAP,
            norms=norms,
            targets=targets,
            nll=nll,
        )


@dataclass(slots=True)
class FormStatistics:
    """Sums over the positions seen so far. A ratio with nothing under it is None.

    Attributes:
        n_different: rows that are not stock's bit for bit.
        n_not_finite: rows with a NaN or an infinity; each is a disagreement of cosine 0, and leaves no perplexity.
        n_targets: positions whose next token is known.
        nll, stock_nll: sums of -log p over those positions.
    """

    n_positions: int = 0
    n_different: int = 0
    n_not_finite: int = 0
    n_same_argmax: int = 0
    n_clear: int = 0
    n_same_clear: int = 0
    n_targets: int = 0
    nll: float = 0.0
    stock_nll: float = 0.0
    _sum_squared_change: float = field(default=0.0, repr=False)
    _min_cosine: float = field(default=1.0, repr=False)
    _sum_cosine: float = field(default=0.0, repr=False)

    def add(self, ours: Logits, stock: StockWindow) -> None:
        """Count the form's logits [T, V] of the same positions; raises ValueError for another shape."""
        if ours.shape != stock.logits.shape:  # numpy would compare one row with many
            raise ValueError(f"logits do not match: got {ours.shape} of the form and {stock.logits.shape} of stock")
        is_finite = np.empty(len(ours), np.bool_)
        cosines = np.empty(len(ours), np.float64)
        nll = np.zeros(len(ours), np.float64)
        for rows in _blocks(ours):
            is_finite[rows] = np.isfinite(ours[rows]).all(axis=1)
            with np.errstate(all="ignore"):  # rows that are not finite are set right below
                wide = ours[rows].astype(np.float64)
                product = np.einsum("tv,tv->t", wide, stock.logits[rows].astype(np.float64))
                norms = np.sqrt(np.einsum("tv,tv->t", wide, wide)) * stock.norms[rows]
                cosines[rows] = np.where(norms > 0, product / np.where(norms > 0, norms, 1), 0)
                if stock.targets is not None:
                    nll[rows] = _negative_log_likelihood(wide, stock.targets[rows])
            self.n_different += int((ours[rows].view(np.uint32) != stock.logits[rows].view(np.uint32)).any(1).sum())
        same = (ours.argmax(axis=1) == stock.argmax) & is_finite
        cosines = np.where(is_finite, np.minimum(cosines, 1.0), 0.0)  # rounding can leave 1 + 2e-16
        self.n_positions += len(ours)
        self.n_not_finite += int((~is_finite).sum())
        self.n_same_argmax += int(same.sum())
        self.n_clear += int(stock.is_clear.sum())
        self.n_same_clear += int((same & stock.is_clear).sum())
        self._min_cosine = min(self._min_cosine, float(cosines.min()))
        self._sum_cosine += float(cosines.sum())
        if stock.nll is not None and is_finite.all():
            self.n_targets += len(ours)
            self.nll += float(nll.sum())
            self.stock_nll += float(stock.nll.sum())
            self._sum_squared_change += float(np.square(nll - stock.nll).sum())

    def add_failure(self, stock: StockWindow) -> None:
        """Count a window that the form could not compute, because its numbers were not finite on the way."""
        self.add(np.full(stock.logits.shape, np.nan, np.float32), stock)

    @property
    def identical(self) -> bool:
        """Whether every row is stock's, bit for bit, and there was at least one."""
        return self.n_positions > 0 and self.n_different == 0

    @property
    def argmax_agreement(self) -> float | None:
        """Share of all positions with the same likeliest token."""
        return self.n_same_argmax / self.n_positions if self.n_positions else None

    @property
    def clear_agreement(self) -> float | None:
        """Share of clear positions with the same likeliest token."""
        return self.n_same_clear / self.n_clear if self.n_clear else None

    @property
    def min_cosine(self) -> float | None:
        """The least cosine of two rows."""
        return self._min_cosine if self.n_positions else None

    @property
    def mean_cosine(self) -> float | None:
        """The mean cosine of two rows."""
        return self._sum_cosine / self.n_positions if self.n_positions else None

    @property
    def perplexity_ratio(self) -> float | None:
        """The form's perplexity over stock's, on the same positions; None without a text or with a bad row."""
        if not self.n_targets or self.n_not_finite:
            return None
        return math.exp(min((self.nll - self.stock_nll) / self.n_targets, 700.0))  # JSON has no infinity

    @property
    def perplexity_error(self) -> float | None:
        """Standard error of the ratio, taking positions as independent: how much another text could change it."""
        ratio = self.perplexity_ratio
        if ratio is None or self.n_targets < 2:
            return None
        mean = (self.nll - self.stock_nll) / self.n_targets
        variance = max(self._sum_squared_change / self.n_targets - mean * mean, 0.0)
        return ratio * math.sqrt(variance / self.n_targets)

    @property
    def stock_perplexity(self) -> float | None:
        """Stock's perplexity on those positions."""
        return math.exp(min(self.stock_nll / self.n_targets, 700.0)) if self.n_targets else None


def _negative_log_likelihood(
    logits: npt.NDArray[np.float64], targets: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return -log softmax(logits)[target] for each row, [N]."""
    peak = logits.max(axis=1)
    chosen = logits[np.arange(len(targets)), targets]
    log_sum: npt.NDArray[np.float64] = np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    nll: npt.NDArray[np.float64] = (peak - chosen) + log_sum  # in this order: a huge peak would swallow the sum
    return nll


def _blocks(logits: Logits) -> Iterator[slice]:
    n_rows = max(1, BLOCK_VALUES // logits.shape[1])
    for start in range(0, len(logits), n_rows):
        yield slice(start, start + n_rows)
