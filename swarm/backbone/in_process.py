"""Experts computed in this process, straight in the eval callback: no event loop, no wire, no copy of the rows.

An `ExpertBackend` for the hook. It may hold any set of (layer, expert): all of them is a backbone without peers, some of them
are the hot ones beside a swarm. Give the engine and these experts the same number of threads: the engine's thread calls
both, so that one pool of OpenMP threads serves them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from swarm.errors import ExpertUnavailable
from swarm.experts.expert_ffn import ExpertFfn, ExpertNotLoaded
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from swarm.model.spec import read_spec

# Activations of one graph: 7,600 pairs of D=2048, F=768, so that 512 tokens with 8 experts each are one graph. Only what is
# used becomes resident: 71 MB of those 512 tokens.
SCRATCH_BYTES = 192 << 20

Rows = npt.NDArray[np.float32]


class Answer:
    """A layer's output that is there already."""

    def __init__(self, rows: Rows, done_at: float) -> None:
        self._rows = rows
        self.done_at = done_at

    def result(self) -> Rows:
        """Return it."""
        return self._rows


class InProcessExperts:
    """An `ExpertBackend` over an expert slice. Use as a context manager.

    Attributes:
        ffn: the slice; for partial sums of some pairs give it to an `ExpertExecutor`.
        compute_s: spent computing so far.
        n_layers_computed: layers that were computed, each time.
    """

    def __init__(self, ffn: ExpertFfn) -> None:
        """Take the slice; it is closed with this object."""
        self.ffn = ffn
        self.compute_s = 0.0
        self.n_layers_computed = 0

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        experts: ExpertSet | None = None,
        n_threads: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Load experts (None: all) of a whole model file. What ggml does not interleave stays in the file's pages.

        Raises:
            UserError: not a model that can be served, or experts outside it.
            EngineError: memory is short.
        """
        with GgufFile(path) as file:
            spec = read_spec(file)
            source = GgufSource(file)
            chosen = experts if experts is not None else spec.all_experts
            ffn = ExpertFfn(spec, chosen, n_threads=n_threads, mapped=file, scratch_bytes=SCRATCH_BYTES)
            try:
                loaded = ffn.loaded
                for n_done, (layer, expert) in enumerate(chosen, 1):
                    if (layer, expert) not in loaded:
                        ffn.load(layer, expert, source.read_block(layer, expert))
                    if progress is not None:
                        progress(n_done, len(chosen))
            except BaseException:
                ffn.close()
                raise
        return cls(ffn)

    def begin(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> Answer:
        """Compute x [T, D] for the choice [T, K]; the answer is there when this returns. Raises as `compute_into`."""
        rows = np.empty(x.shape, np.float32)
        self.compute_into(layer, x, topk_ids, topk_weights, rows)
        return Answer(rows, time.perf_counter())

    def compute_into(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows, out: Rows) -> None:
        """Compute x [T, D] for the choice [T, K], and write the sums to out [T, D], C order.

        Raises:
            ExpertUnavailable: an expert is not held.
            EngineError: ggml failed.
        """
        started = time.perf_counter()
        try:
            self.ffn.compute_choice(layer, x, topk_ids, topk_weights, out)
        except ExpertNotLoaded as error:
            raise ExpertUnavailable(layer, error.experts, "this process does not hold them") from error
        self.compute_s += time.perf_counter() - started
        self.n_layers_computed += 1

    def close(self) -> None:
        """Free the slice; a second call does nothing."""
        self.ffn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
