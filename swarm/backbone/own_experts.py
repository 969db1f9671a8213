"""The experts of the operator's own file, as the last resort of a backbone: opened when they are first needed.

    nobody holds an expert, or all its holders have failed -> compute -> a thread of its own -> ExpertExecutor -> the file's pages

Until then they cost nothing. What ggml need not interleave is computed from the mapped file, so that memory grows by what is
really used, and the system may take it back.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarm.backbone.in_process import InProcessExperts
from swarm.experts.executor import ExpertExecutor
from swarm.model.spec import ModelSpec

logger = logging.getLogger(__name__)


class OwnExperts:
    """All experts of a whole model file; see `swarm.dispatch.holders.OwnExperts`."""

    def __init__(self, path: Path, spec: ModelSpec, *, n_threads: int = 1) -> None:
        """Prepare; nothing is read yet."""
        self._path = path
        self._spec = spec
        self._n_threads = n_threads
        self._experts = spec.all_experts
        self._opened: InProcessExperts | None = None
        self._executor: ExpertExecutor | None = None
        # One thread: ggml's own come below it, and a second computation would only take the first one's cores.
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="own experts")

    def holds(self, layer: int, experts: Collection[int]) -> bool:
        """Return whether the model has these experts in this layer."""
        return all((layer, expert) in self._experts for expert in experts)

    async def compute(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        row_counts: npt.NDArray[np.uint8],
        expert_ids: npt.NDArray[np.integer],
        weights: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.float32]:
        """Return raw rows [P, D] or, with weights, partial sums [N, D], float32.

        Raises:
            SwarmError: the file cannot be opened any more, memory is short, or ggml failed.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._run, layer, x, row_counts, expert_ids, weights)

    def close(self) -> None:
        """Free everything, after what is under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._opened is not None:
            self._opened.close()

    def _run(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        row_counts: npt.NDArray[np.uint8],
        expert_ids: npt.NDArray[np.integer],
        weights: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.float32]:
        if self._executor is None:
            logger.warning("no peer answers for some experts: computing them here, from %s", self._path.name)
            self._opened = InProcessExperts.open(self._path, n_threads=self._n_threads)
            self._executor = ExpertExecutor(self._opened.ffn, self._spec)
        return self._executor.run(layer, x, row_counts, expert_ids, weights)
