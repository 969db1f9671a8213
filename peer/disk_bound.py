"""An executor that takes as long as one whose experts do not fit into memory: a stand-in for tests and benchmarks.

For each computation it first passes the time in which a disk would deliver the blocks of the experts that are asked for; then it
computes as usual. Nothing is kept from one computation to the next, the worst that a cache can do.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from swarm.experts.executor import ExpertExecutor, SliceFfn
from swarm.model.spec import ModelSpec


class DiskBoundExecutor(ExpertExecutor):
    """Computes after a wait."""

    def __init__(self, ffn: SliceFfn, spec: ModelSpec, *, bytes_per_s: float) -> None:
        super().__init__(ffn, spec)
        self._bytes_per_s = bytes_per_s
        self._block_bytes = {layer: spec.block_size_bytes(layer) for layer in spec.moe_layers}

    def run(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        row_counts: npt.NDArray[np.uint8],
        expert_ids: npt.NDArray[np.integer],
        weights: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.float32]:
        """Return the experts' outputs; see `ExpertExecutor.run`."""
        n_blocks = len(np.unique(expert_ids))
        time.sleep(n_blocks * self._block_bytes.get(layer, 0) / self._bytes_per_s)  # on the thread that computes
        return super().run(layer, x, row_counts, expert_ids, weights)
