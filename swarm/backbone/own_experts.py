"""What a backbone computes itself, by two policies over one way of computing.

    kept          the popular ones, in memory (`local_experts`): always computed here, never asked of a peer
    last resort   all others, from the operator's own file: computed here while no peer answers for them

    the plan gives this process a batch -> compute -> a thread of its own -> ExpertExecutor -> memory, or the file's pages

The file is opened when it is first needed. What ggml need not interleave is computed from the mapped file, so that memory grows
by what is really used, and the system may take it back.
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
from swarm.backbone.local_experts import LocalExperts
from swarm.errors import ExpertsNotHeld
from swarm.experts.executor import ExpertExecutor
from swarm.model.spec import ModelSpec

logger = logging.getLogger(__name__)


class OwnExperts:
    """Experts of this process; see `swarm.dispatch.holders.OwnExperts`."""

    def __init__(
        self, path: Path | None, spec: ModelSpec, *, local: LocalExperts | None = None, n_threads: int = 1
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            path: the whole model, as the last resort; None: there is none.
            local: what is kept in memory; it stays the caller's to close, after this.
        """
        self._path = path
        self._spec = spec
        self._local = local
        self._n_threads = n_threads
        self._experts = spec.all_experts
        self._opened: InProcessExperts | None = None
        self._executor: ExpertExecutor | None = None
        # One thread: ggml's own come below it, and a second computation would only take the first one's cores.
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="own experts")

    @property
    def is_last_resort(self) -> bool:
        """Whether experts that are not kept can be computed too."""
        return self._path is not None

    def kept(self, layer: int) -> npt.NDArray[np.bool_] | None:
        """Return which experts are always computed here, bool [E]; None: none."""
        return None if self._local is None else self._local.kept(layer)

    def holds(self, layer: int, experts: Collection[int]) -> bool:
        """Return whether all of these can be computed here, kept or not."""
        if self._path is not None:
            return all((layer, expert) in self._experts for expert in experts)
        return self._local is not None and self._local.holds(layer, experts)

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
            ExpertsNotHeld: they are not kept any more, and there is no last resort.
            SwarmError: the file cannot be opened any more, memory is short, or ggml failed.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._run, layer, x, row_counts, expert_ids, weights)

    async def close(self) -> None:
        """Free everything, after what is under way: opening a large file may take long, so the loop stays free meanwhile."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
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
        if self._local is not None:
            try:
                return self._local.compute(layer, x, row_counts, expert_ids, weights)
            except ExpertsNotHeld:  # some are here as the last resort, or the set has changed since the plan
                if self._path is None:
                    raise
        if self._executor is None:
            if self._path is None:
                raise ExpertsNotHeld(f"layer {layer} is not computed here")
            logger.warning(
                "computing some experts here, from %s: no peer answers for them, or an audit asks", self._path.name
            )
            self._opened = InProcessExperts.open(self._path, n_threads=self._n_threads)
            self._executor = ExpertExecutor(self._opened.ffn, self._spec)
        return self._executor.run(layer, x, row_counts, expert_ids, weights)
