"""One thread that computes dispatches in the order they came, behind a bounded line, so that the loop stays awake."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm.errors import Overloaded
from swarm.experts.executor import ExpertExecutor
from swarm.wire import messages as m

MAX_LINE = 128  # dispatches waiting or under way; guessed: two per layer of a deep model. More are refused as busy


@dataclass(slots=True)
class ComputeStats:
    """What this peer has computed since it started."""

    n_dispatches: int = 0
    n_rows: int = 0
    compute_s: float = 0.0
    queue_s: float = 0.0


class Compute:
    """Runs an executor on a thread of its own. ggml's own threads come below it."""

    def __init__(self, executor: ExpertExecutor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._n_in_line = 0
        self.stats = ComputeStats()

    @property
    def n_in_line(self) -> int:
        """Dispatches waiting or under way."""
        return self._n_in_line

    async def run(self, dispatch: m.Dispatch) -> m.Result:
        """Return the answer to a dispatch.

        Raises:
            RemoteProtocolError: the dispatch does not fit the slice.
            Overloaded: the line is full.
            EngineError: ggml failed.
        """
        if self._n_in_line >= MAX_LINE:
            raise Overloaded(f"{self._n_in_line} dispatches wait at this peer", retry_after_s=0.2)
        self._n_in_line += 1
        arrived = time.perf_counter()
        try:
            rows, started, ended = await asyncio.get_running_loop().run_in_executor(self._thread, self._work, dispatch)
        finally:
            self._n_in_line -= 1
        self.stats.n_dispatches += 1
        self.stats.n_rows += len(dispatch.row_counts)
        self.stats.compute_s += ended - started
        self.stats.queue_s += started - arrived
        return m.Result(
            codec=dispatch.result_codec,
            rows=rows,
            compute_us=round((ended - started) * 1e6),
            queue_us=round((started - arrived) * 1e6),
        )

    def _work(self, dispatch: m.Dispatch) -> tuple[npt.NDArray[np.float32], float, float]:
        started = time.perf_counter()
        rows = self._executor.run(
            dispatch.layer, dispatch.rows, dispatch.row_counts, dispatch.expert_ids, dispatch.weights
        )
        return rows, started, time.perf_counter()

    def close(self) -> None:
        """End the thread; a dispatch under way is finished first."""
        self._thread.shutdown(wait=True, cancel_futures=True)
