"""Computes dispatches on an expert slice: checks what came from the network, computes, combines, counts.

    x [N, D], row_counts [N], expert_ids [P], weights [P] -> raw rows [P, D] (no weights) or partial sums [N, D]

Pairs are in row order: the first `row_counts[0]` of them belong to row 0, and so on.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swarm.errors import ExpertsNotHeld, RemoteProtocolError
from swarm.experts.slice_memory import ExpertNotLoaded
from swarm.model.spec import ModelSpec
from swarm.native.library import has_exact_kernels

_FEW = 8  # pairs that are looked at in Python: less code that goes cold, and no slower (1 us either way when hot)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignments:
    """How many pairs an executor has computed.

    Attributes:
        layers: the model's MoE layers: the rows of `counts`.
        counts: pairs per (MoE layer, expert), [L, E], int64.
        total: their sum.
    """

    layers: tuple[int, ...]
    counts: npt.NDArray[np.int64]
    total: int


class SliceFfn(Protocol):
    """What computes: `expert_ffn.ExpertFfn`, `device_ffn.DeviceFfn`."""

    max_pairs: int

    def compute(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        row_index: npt.NDArray[np.integer],
        experts: npt.NDArray[np.integer],
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the output of each pair, [P, D]; in `out`, if it is given."""
        ...

    def compute_choice(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        experts: npt.NDArray[np.integer],
        weights: npt.NDArray[np.float32] | None = None,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the outputs of K experts for each row, [N, K, D], or with weights their sums, [N, D]."""
        ...


class ExpertExecutor:
    """Answers dispatches from a slice. Safe to use from several threads."""

    def __init__(self, ffn: SliceFfn, spec: ModelSpec) -> None:
        self._ffn = ffn
        self._spec = spec
        self._lock = threading.Lock()
        self._row_of = {layer: row for row, layer in enumerate(spec.moe_layers)}
        self._counts = np.zeros((len(spec.moe_layers), spec.n_expert), np.int64)
        self._counts_of = {layer: memoryview(self._counts[row]) for layer, row in self._row_of.items()}

    def run(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        row_counts: npt.NDArray[np.uint8],
        expert_ids: npt.NDArray[np.integer],
        weights: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.float32]:
        """Return the experts' outputs, freshly allocated, float32.

        Without weights, the raw rows in pair order, [P, D]. With weights, each row's weighted sum over its pairs, [N, D], added
        in pair order; of more pairs than one graph takes in the order of experts, unless kernels are exact.

        Args:
            x: untrusted, [N, D], float32.
            row_counts: untrusted, [N], uint8: pairs of each row.
            expert_ids: untrusted, [P], global ids.
            weights: untrusted, [P], float32.

        Raises:
            RemoteProtocolError: anything does not fit the model or the rest of the dispatch.
            ExpertsNotHeld: it fits the model, but not this slice.
            EngineError: ggml failed.
        """
        self._check_untrusted(layer, x, row_counts, expert_ids, weights)
        try:
            y = self._compute(layer, x, row_counts, expert_ids, weights)
        except ExpertNotLoaded as error:
            raise ExpertsNotHeld(str(error)) from error
        with self._lock:
            if len(expert_ids) <= _FEW:
                counts = self._counts_of[layer]
                for expert in expert_ids.tolist():
                    counts[expert] += 1
            else:
                self._counts[self._row_of[layer]] += np.bincount(expert_ids, minlength=self._spec.n_expert)
        return y

    def _compute(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        row_counts: npt.NDArray[np.uint8],
        expert_ids: npt.NDArray[np.integer],
        weights: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.float32]:
        n_rows, n_pairs = len(row_counts), len(expert_ids)
        if n_pairs <= self._ffn.max_pairs and (n_rows == 1 or (row_counts == row_counts[0]).all()):
            # One token, or one peer that holds all: no row is copied, and ggml makes the sums. The bits are the same.
            shape = (n_rows, n_pairs // n_rows)
            y = self._ffn.compute_choice(
                layer, x, expert_ids.reshape(shape), None if weights is None else weights.reshape(shape)
            )
            return y.reshape(-1, x.shape[1])  # [N, D] or [P, D]
        counts = row_counts.astype(np.intp)  # [N]
        rows = np.repeat(np.arange(n_rows), counts)  # [P]
        if weights is not None and n_pairs > self._ffn.max_pairs and not has_exact_kernels():
            order = np.argsort(expert_ids, kind="stable")  # [P]
            if not _repeats(rows[order], expert_ids[order]):
                return self._sum_by_expert(layer, x, rows[order], expert_ids[order], weights[order])
        y = self._ffn.compute(layer, x, rows, expert_ids)  # [P, D]
        if weights is None:
            return y
        y *= weights[:, None]
        return _sum_rows(y, np.cumsum(counts) - counts, counts)  # [N, D]

    def _sum_by_expert(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        rows: npt.NDArray[np.intp],
        expert_ids: npt.NDArray[np.integer],
        weights: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """Return the sums, [N, D], of pairs that are sorted by expert, none twice.

        The outputs of all pairs are never in memory at once: 512 rows of 8 of D=2048 would be 34 MB, gone through five times.
        """
        n_pairs, cut = len(rows), self._ffn.max_pairs
        part = np.empty((cut, x.shape[1]), np.float32)
        total = np.zeros_like(x)  # [N, D]
        for start in range(0, n_pairs, cut):
            at = slice(start, min(start + cut, n_pairs))
            y = self._ffn.compute(layer, x, rows[at], expert_ids[at], part[: at.stop - start])
            y *= weights[at, None]
            ends = np.flatnonzero(np.diff(expert_ids[at])) + 1
            for of_one, added in zip(np.split(rows[at], ends), np.split(y, ends), strict=True):
                total[of_one] += added
        return total

    def _check_untrusted(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        row_counts: npt.NDArray[np.uint8],
        expert_ids: npt.NDArray[np.integer],
        weights: npt.NDArray[np.float32] | None,
    ) -> None:
        spec = self._spec
        if layer not in self._row_of:
            raise RemoteProtocolError(f"no such MoE layer: got {layer}")
        if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != spec.n_embd:
            raise RemoteProtocolError(f"bad rows: got {x.dtype} {x.shape}, expected float32 (N, {spec.n_embd})")
        n_rows = len(x)
        if row_counts.dtype != np.uint8 or row_counts.shape != (n_rows,) or not n_rows:
            raise RemoteProtocolError(f"bad row counts: got {row_counts.shape}, expected one for each of {len(x)} rows")
        if n_rows == 1:  # a decoded token, here and below: numpy's reductions go cold between two of them
            least = most = n_pairs = int(row_counts.item())
        else:
            least, most, n_pairs = int(row_counts.min()), int(row_counts.max()), int(row_counts.sum(dtype=np.int64))
        if least < 1 or most > spec.n_expert_used:
            raise RemoteProtocolError(f"bad row counts: expected 1 to {spec.n_expert_used} experts for each row")
        if expert_ids.dtype.kind not in "iu" or expert_ids.shape != (n_pairs,):
            raise RemoteProtocolError(f"bad expert ids: got {expert_ids.shape}, expected {n_pairs}")
        if n_pairs <= _FEW:
            ids = expert_ids.tolist()
            least, most = min(ids), max(ids)
        else:
            least, most = int(expert_ids.min()), int(expert_ids.max())
        if least < 0 or most >= spec.n_expert:
            raise RemoteProtocolError(f"bad expert ids: expected 0 to {spec.n_expert - 1}")
        if weights is None:
            return
        if weights.dtype != np.float32 or weights.shape != (n_pairs,):
            raise RemoteProtocolError(f"bad weights: got {weights.dtype} {weights.shape}, expected float32 {n_pairs}")
        # A sum of finite float32 is finite in Python's float64.
        is_finite = math.isfinite(sum(weights.tolist())) if n_pairs <= _FEW else bool(np.isfinite(weights).all())
        if not is_finite:
            raise RemoteProtocolError("bad weights: got a value that is not finite")

    def assignments(self) -> Assignments:
        """Return a copy of the counters."""
        with self._lock:
            counts = self._counts.copy()
        return Assignments(layers=self._spec.moe_layers, counts=counts, total=int(counts.sum()))


def _repeats(rows: npt.NDArray[np.intp], expert_ids: npt.NDArray[np.integer]) -> bool:
    """Return whether a pair is there twice, of pairs sorted by expert and row."""
    return bool(((rows[1:] == rows[:-1]) & (expert_ids[1:] == expert_ids[:-1])).any())


def _sum_rows(
    y: npt.NDArray[np.float32], starts: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]
) -> npt.NDArray[np.float32]:
    """Return the sum of each run of `counts[n]` rows of y from `starts[n]` on, [N, D].

    Adds strictly in order, ((y0 + y1) + y2) + ...; np.add.reduceat groups otherwise and takes thrice the time.
    """
    total = y[starts]  # [N, D]
    for k in range(1, int(counts.max())):
        rows = np.flatnonzero(counts > k)
        total[rows] += y[starts[rows] + k]
    return total
