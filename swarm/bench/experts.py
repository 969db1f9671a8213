"""One layer's experts in ggml: grouped against one call per expert, time under skew, FLOP per byte and where its knee is.

    n_e rows per expert     x [G n_e, D] in random order, G experts: one grouped call, or G calls of n_e rows
    skew                    T tokens with K experts each, drawn by Zipf's law: rows of the busiest expert over the mean
    intensity               FLOP per byte of weights, 2 n_e / bytes per weight; the knee is where bytes stop being what binds

Every call takes experts that the calls just before it did not, so that few rows find their weights in memory and not in a cache.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as GgmlType

from swarm.bench.dispatch import HEAD_DIM, DispatchOptions, draw_choices
from swarm.bench.synthetic import SyntheticModel
from swarm.errors import UserError
from swarm.experts.expert_ffn import ExpertFfn
from swarm.interruptible import Check
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from swarm.model.spec import read_spec
from swarm.wire.rows import parse_wire

SCRATCH_BYTES = 256 << 20  # activations of one graph: 8 experts x 1024 rows of D=2048, F=768 take 210 MB
MIN_CALL_S = 0.02  # a repetition makes as many calls as take about so long: a call of one row takes half a millisecond
MEMORY_BYTES = 512 << 20  # read to measure the memory: sixteen times the largest cache met here
N_MEMORY_READS = 5

Rows = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOptions:
    """What to measure.

    Attributes:
        n_rows: rows per expert, each one measured; 1 is always needed for the knee.
        n_grouped: G: experts of one grouped call.
        skews: exponents of Zipf's law.
        n_tokens: T of the calls under skew.
        repacks: interleaved weights, as stock llama.cpp has them; False: as they are stored.
    """

    d_model: int = 2048
    n_expert: int = 128
    n_expert_used: int = 8
    n_ff_exp: int = 768
    weight_type: str = "Q4_K"
    n_rows: tuple[int, ...] = (1, 8, 64, 1024)
    n_grouped: int = 8
    skews: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5)
    n_tokens: int = 512
    n_threads: int = 1
    n_repetitions: int = 5
    repacks: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.weight_type not in GgmlType.__members__:
            raise UserError(f"no such type of weights: {self.weight_type}")
        if not self.n_rows or min(self.n_rows) < 1:
            raise UserError("rows per expert must be at least 1")
        if not 1 <= self.n_grouped <= self.n_expert:
            raise UserError(f"experts of a call: got {self.n_grouped}, expected 1 to {self.n_expert}")

    @property
    def model(self) -> SyntheticModel:
        """One MoE layer of that shape."""
        return SyntheticModel(
            n_layers=1,
            n_embd=self.d_model,
            n_expert=self.n_expert,
            n_expert_used=self.n_expert_used,
            n_ff_exp=self.n_ff_exp,
            n_head=self.d_model // HEAD_DIM,
            n_head_kv=1,
            n_embd_head=256,  # so that K and V fill blocks of any type
            weight_type=GgmlType[self.weight_type],
            name=f"experts-d{self.d_model}-e{self.n_expert}-k{self.n_expert_used}-ff{self.n_ff_exp}-{self.weight_type.lower()}",
        )


class _Layer:
    """The loaded layer, and calls of it."""

    def __init__(self, options: ExpertsOptions, ffn: ExpertFfn) -> None:
        self._options = options
        self._ffn = ffn
        self._rng = np.random.default_rng(options.seed)
        self._next = 0

    def _experts(self) -> npt.NDArray[np.int32]:
        """Return the next G experts, round and round: those of the last calls are the coldest."""
        chosen = (self._next + np.arange(self._options.n_grouped)) % self._options.n_expert
        self._next = int(chosen[-1]) + 1
        return chosen.astype(np.int32)

    def grouped_s(self, x: Rows, n_rows: int) -> float:
        """Return the seconds of one call for G experts with n_e rows each, in random order."""
        ids = self._rng.permutation(np.repeat(self._experts(), n_rows))[:, np.newaxis]  # [P, 1]
        started = time.perf_counter()
        self._ffn.compute_choice(0, x, ids)
        return time.perf_counter() - started

    def single_s(self, x: Rows, n_rows: int) -> float:
        """Return the seconds of G calls, one for each expert with its n_e rows."""
        experts = self._experts()
        started = time.perf_counter()
        for index, expert in enumerate(experts):
            part = x[index * n_rows : (index + 1) * n_rows]
            self._ffn.compute_choice(0, part, np.full((n_rows, 1), expert, np.int32))
        return time.perf_counter() - started

    def choice_s(self, x: Rows, ids: npt.NDArray[np.int32], weights: Rows) -> float:
        """Return the seconds of one call as a hook makes it."""
        started = time.perf_counter()
        self._ffn.compute_choice(0, x, ids, weights)
        return time.perf_counter() - started

    def rows(self, n_rows: int) -> Rows:
        """Return random rows."""
        return self._rng.standard_normal((n_rows, self._options.d_model), dtype=np.float32)


def measure_experts(options: ExpertsOptions, model: Path, progress: Progress, check: Check) -> dict[str, Any]:
    """Return the figures of `swarm bench experts`; medians of interleaved repetitions."""
    with GgufFile(model) as file:
        spec = read_spec(file)
        source = GgufSource(file)
        with ExpertFfn(
            spec,
            spec.all_experts,
            n_threads=options.n_threads,
            repacks=options.repacks,
            scratch_bytes=SCRATCH_BYTES,
        ) as ffn:
            for layer, expert in spec.all_experts:
                check()
                ffn.load(layer, expert, source.read_block(layer, expert))
            n_done, n_total = 0, len(options.n_rows) + 1

            def advance() -> None:
                nonlocal n_done
                progress(n_done, n_total)
                n_done += 1

            layer_ = _Layer(options, ffn)
            expert_bytes = spec.block_size_bytes(spec.moe_layers[0])
            by_rows = []
            for n_rows in options.n_rows:
                advance()
                by_rows.append(_at(options, layer_, n_rows, expert_bytes, check))
            advance()
            by_skew = _under_skew(options, layer_, check)
            progress(n_total, n_total)
            n_repacked_bytes = ffn.n_repacked_bytes
    memory = memory_bytes_per_s(options.n_threads)
    return {
        "d_model": options.d_model,
        "n_expert": options.n_expert,
        "n_expert_used": options.n_expert_used,
        "n_ff_exp": options.n_ff_exp,
        "weight_type": options.weight_type,
        "n_threads": options.n_threads,
        "n_repetitions": options.n_repetitions,
        "n_grouped": options.n_grouped,
        "expert_bytes": expert_bytes,
        "repacked_bytes": n_repacked_bytes,
        "memory_bytes_per_s": memory,
        **knee(by_rows, expert_bytes / _weights_of(options), memory),
        "rows_per_expert": by_rows,
        "skew": by_skew,
    }


def _weights_of(options: ExpertsOptions) -> int:
    return 3 * options.d_model * options.n_ff_exp


def _at(options: ExpertsOptions, layer: _Layer, n_rows: int, expert_bytes: int, check: Check) -> dict[str, Any]:
    """Return the figures at one number of rows per expert."""
    x = layer.rows(options.n_grouped * n_rows)
    once_s = layer.grouped_s(x, n_rows)  # warm: both graphs
    layer.single_s(x, n_rows)
    n_calls = max(1, round(MIN_CALL_S / once_s))
    grouped: list[float] = []
    single: list[float] = []
    for repetition in range(options.n_repetitions):
        check()
        for is_grouped in (True, False) if repetition % 2 == 0 else (False, True):
            call = layer.grouped_s if is_grouped else layer.single_s
            times = [call(x, n_rows) for _ in range(n_calls)]
            (grouped if is_grouped else single).append(statistics.median(times))
    grouped_s = statistics.median(grouped)
    flop = 2 * _weights_of(options) * options.n_grouped * n_rows
    read_bytes = expert_bytes * options.n_grouped
    return {
        "n_rows": n_rows,
        "grouped_s": grouped_s,
        "single_s": statistics.median(single),
        "grouped_speedup": statistics.median(one / other for one, other in zip(single, grouped, strict=True)),
        "flop_per_byte": flop / read_bytes,
        "flops_per_s": flop / grouped_s,
        "weight_bytes_per_s": read_bytes / grouped_s,
    }


def knee(by_rows: list[dict[str, Any]], bytes_per_weight: float, memory_bytes_per_s: float) -> dict[str, Any]:
    """Return where weights' bytes stop being what binds, by what was measured.

    Two roofs: the most FLOP/s of all points, and the most bytes of weights a second. Their quotient is the intensity of the
    knee; below it, twice the rows take less than twice the time.
    """
    flops_per_s = max(point["flops_per_s"] for point in by_rows)
    bytes_per_s = max(point["weight_bytes_per_s"] for point in by_rows)
    intensity = flops_per_s / bytes_per_s
    return {
        "peak_flops_per_s": flops_per_s,
        "peak_weight_bytes_per_s": bytes_per_s,
        "share_of_memory": bytes_per_s / memory_bytes_per_s,
        "knee_flop_per_byte": intensity,
        "knee_rows_per_expert": intensity * bytes_per_weight / 2,
    }


def _under_skew(options: ExpertsOptions, layer: _Layer, check: Check) -> list[dict[str, Any]]:
    """Return time against the busiest expert's rows, the skews in turn in each repetition."""
    rng = np.random.default_rng(options.seed)
    x = layer.rows(options.n_tokens)
    choices = []
    for skew in options.skews:
        draw = DispatchOptions(
            d_model=options.d_model,
            n_expert=options.n_expert,
            n_expert_used=options.n_expert_used,
            n_tokens=options.n_tokens,
            skew=skew,
            wire=parse_wire("f32"),
        )
        choices.append(draw_choices(rng, draw))
    layer.choice_s(x, *choices[0])  # warm
    seconds: list[list[float]] = [[] for _ in choices]
    for _ in range(options.n_repetitions):
        check()
        for times, (ids, weights) in zip(seconds, choices, strict=True):
            times.append(layer.choice_s(x, ids, weights))
    found = []
    for skew, times, (ids, _) in zip(options.skews, seconds, choices, strict=True):
        rows = np.bincount(ids.ravel(), minlength=options.n_expert)
        found.append(
            {
                "skew": skew,
                "n_tokens": options.n_tokens,
                "n_experts_met": int((rows > 0).sum()),
                "max_over_mean": float(rows.max() / rows.mean()),
                "s": statistics.median(times),
                "over_even": statistics.median(t / even for t, even in zip(times, seconds[0], strict=True)),
            }
        )
    return found


def memory_bytes_per_s(n_threads: int) -> float:
    """Return how fast this many threads read memory, by numpy's sum of integers; the best of a few."""
    data = np.ones(MEMORY_BYTES // 8, np.uint64)
    parts = np.array_split(data, n_threads)
    best_s = np.inf
    for _ in range(N_MEMORY_READS):
        threads = [threading.Thread(target=part.sum) for part in parts]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best_s = min(best_s, time.perf_counter() - started)
    return float(MEMORY_BYTES / best_s)
