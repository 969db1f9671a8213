"""Compares wire forms layer by layer, for models whose experts do not fit in memory.

The backbone runs a text with one layer's experts in memory at a time: read, used, freed. The hidden states that reach a
layer are therefore the text's own (the pass goes on with f32). At each sampled layer every form computes the same rows, and
its output is compared with f32's by cosine; random rows through random experts are added, since a short text does not meet
every expert.

What it cannot say: nothing is compared with stock llama.cpp, and errors of a layer are not carried into the next ones, so it
gives no agreement and no perplexity. It finds a form that breaks a layer (overflow, outliers, a bad codec), not a small
loss that adds up. A pass reads the experts of every layer up to the last sampled one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarm.errors import UserError
from swarm.experts.executor import ExpertExecutor
from swarm.gate.form_table import (
    WINDOW_TOKENS,
    GateModel,
    cut_windows,
    gate_engine,
    leading_bos,
    text_tokens,
    window_tokens,
)
from swarm.gate.hooked_model import HookedModel
from swarm.gate.simulated_peers import (
    N_PEERS,
    Carry,
    NotFinite,
    PeerPlan,
    Ready,
    SimulatedPeers,
    carry_rows,
    load_experts,
)
from swarm.gate.verdict import FormReport, Thresholds, bytes_per_row, require_at_least
from swarm.ids import ExpertSet, format_index_set
from swarm.model.spec import ModelSpec
from swarm.wire.rows import Wire, WireForm

N_SAMPLED = 8  # layers taken when none are named: the first, the last and some between; guessed
DEFAULT_TOKENS = 512
RANDOM_ROWS = 64
SEED = 1
MEMORY_SHARE = 0.8  # of what is available may be taken
COPIES = 3  # of the file in memory for the full comparison: stock's, the simulated peers', the real peers'

F32 = Wire(WireForm.F32, WireForm.F32)

Rows = npt.NDArray[np.float32]


@dataclass(slots=True)
class LayerStatistics:
    """One form at one layer: cosines of the experts' output, row by row, with f32's."""

    n_rows: int = 0
    n_not_finite: int = 0
    min_cosine: float = 1.0
    sum_cosine: float = 0.0

    def add(self, ours: Rows, reference: Rows) -> None:
        """Count rows [T, D]. A row that is zero on both sides agrees."""
        wide, truth = ours.astype(np.float64), reference.astype(np.float64)
        norms = np.linalg.norm(wide, axis=1) * np.linalg.norm(truth, axis=1)
        both_zero = ~wide.any(axis=1) & ~truth.any(axis=1)
        product = np.einsum("td,td->t", wide, truth)
        cosines = np.where(norms > 0, product / np.where(norms > 0, norms, 1), both_zero.astype(np.float64))
        cosines = np.minimum(cosines, 1.0)
        self.n_rows += len(ours)
        self.min_cosine = min(self.min_cosine, float(cosines.min()))
        self.sum_cosine += float(cosines.sum())

    def add_failure(self, n_rows: int) -> None:
        """Count rows that the form could not carry; their cosine is 0."""
        self.n_rows += n_rows
        self.n_not_finite += n_rows
        self.min_cosine = min(self.min_cosine, 0.0)

    @property
    def mean_cosine(self) -> float | None:
        """The mean over the rows, None without any."""
        return self.sum_cosine / self.n_rows if self.n_rows else None


@dataclass(slots=True)
class _Streamed:
    """An `ExpertBackend` that loads a layer's experts when the graph comes to it."""

    model: GateModel
    sampled: frozenset[int]
    statistics: dict[Wire, dict[int, LayerStatistics]]
    plan: PeerPlan
    carry: Carry
    progress: Callable[[int], None]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED))

    def begin(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> Ready:
        if layer > max(self.sampled):
            return Ready(np.zeros_like(x))
        spec = self.model.spec
        experts = ExpertSet.of([layer], range(spec.n_expert))
        with load_experts(spec, self.model.source, experts) as ffn:
            executor = ExpertExecutor(ffn, spec)
            truth = SimulatedPeers(executor, spec, F32, self.plan)
            output = truth.compute(layer, x, topk_ids, topk_weights)
            if layer in self.sampled:
                chance = self._random_rows(x, topk_ids, topk_weights)
                reference = truth.compute(layer, *chance)
                for wire, by_layer in self.statistics.items():
                    peers = SimulatedPeers(executor, spec, wire, self.plan, self.carry)
                    for inputs, expected in (((x, topk_ids, topk_weights), output), (chance, reference)):
                        try:
                            by_layer[layer].add(peers.compute(layer, *inputs), expected)
                        except NotFinite:
                            by_layer[layer].add_failure(len(expected))
        self.progress(layer)
        return Ready(output)

    def _random_rows(
        self, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows
    ) -> tuple[Rows, npt.NDArray[np.int32], Rows]:
        """Return normal rows of the text's mean square, distinct random experts, and weights taken from the text's."""
        n_used = topk_ids.shape[1]
        scale = np.float32(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
        rows = self.rng.standard_normal((RANDOM_ROWS, x.shape[1]), dtype=np.float32) * scale
        ids = self.rng.random((RANDOM_ROWS, self.model.spec.n_expert)).argsort(axis=1)[:, :n_used].astype(np.int32)
        weights = topk_weights[self.rng.integers(0, len(topk_weights), RANDOM_ROWS)]
        return rows, ids, np.ascontiguousarray(weights)


def measure_layers(
    model: GateModel,
    wires: Sequence[Wire],
    text: str,
    *,
    layers: Collection[int] = (),
    n_tokens: int = DEFAULT_TOKENS,
    n_peers: int = N_PEERS,
    carry: Carry = carry_rows,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Wire, dict[int, LayerStatistics]]:
    """Return each form's statistics at each sampled layer.

    Args:
        layers: which to sample; empty: N_SAMPLED of them, evenly spread.

    Raises:
        UserError: a layer without experts, or a text that is too short.
        EngineError: llama.cpp failed.
    """
    spec = model.spec
    sampled = frozenset(layers) or spread(spec.moe_layers, N_SAMPLED)
    if not sampled.issubset(spec.moe_layers):
        raise UserError(
            f"layers without experts: got {format_index_set(sampled.difference(spec.moe_layers))}, "
            f"the model's MoE layers are {format_index_set(spec.moe_layers)}"
        )
    statistics = {wire: {layer: LayerStatistics() for layer in sorted(sampled)} for wire in wires}
    n_read = sum(layer <= max(sampled) for layer in spec.moe_layers)
    n_done = n_all = 0

    def advance(_layer: int) -> None:
        nonlocal n_done
        n_done += 1
        progress(n_done, n_all)

    experts = _Streamed(
        model, sampled, statistics, PeerPlan.contiguous(spec, min(n_peers, spec.n_expert)), carry, advance
    )
    with HookedModel(model.backbone_path, spec, gate_engine(WINDOW_TOKENS), experts) as hooked:
        tokens = text_tokens(hooked.model, text, n_tokens)
        windows = list(cut_windows(tokens, window_tokens(hooked.model.n_vocab), leading_bos(hooked.model)))
        n_all = n_read * len(windows)
        for window in windows:
            hooked.clear()
            hooked.logits(window.tokens, 0)  # of all tokens, else the last layer sees but one
    return statistics


def judge_layers(
    wire: Wire,
    by_layer: Mapping[int, LayerStatistics],
    thresholds: Thresholds,
    spec: ModelSpec,
) -> FormReport:
    """Return the form's report: the worst layer's figures. `mean_cosine` is the least of the layers' means."""
    reasons = []
    for layer, figures in by_layer.items():
        if figures.n_not_finite:
            reasons.append(f"not finite: {figures.n_not_finite} of {figures.n_rows} rows of layer {layer}")
        reasons += require_at_least(f"mean cosine of layer {layer}", figures.mean_cosine, thresholds.min_layer_cosine)
    means = [figures.mean_cosine for figures in by_layer.values()]
    known = [mean for mean in means if mean is not None]
    return FormReport(
        wire=wire,
        bytes_per_row=bytes_per_row(wire, spec),
        n_positions=sum(figures.n_rows for figures in by_layer.values()),
        identical=None,
        argmax_agreement=None,
        clear_agreement=None,
        min_cosine=min((figures.min_cosine for figures in by_layer.values()), default=None),
        mean_cosine=min(known) if len(known) == len(means) and known else None,
        perplexity_ratio=None,
        reasons=tuple(reasons if by_layer else ["nothing was measured"]),
    )


def spread(layers: Sequence[int], n: int) -> frozenset[int]:
    """Return `n` of the layers, or all if there are fewer: the first, the last, and evenly between."""
    if len(layers) <= n:
        return frozenset(layers)
    return frozenset(layers[round(i * (len(layers) - 1) / (n - 1))] for i in range(n))


def is_too_large(path: Path, available_bytes: int | None = None) -> bool:
    """Return whether the full comparison of this file would not fit in memory."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    return COPIES * path.stat().st_size > MEMORY_SHARE * available


def available_memory_bytes() -> int:
    """Return how much memory can be taken without swapping; where the system does not say, all of it."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return 1 << 62
