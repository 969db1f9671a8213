"""Passes time as experts do, for members of a star that compute nothing: on one core, reading memory that no cache holds.

An expert's weights (1.7 MB at D=2048, F=256, Q8_0) push the interpreter's code and data out of the caches, after which the
same software takes longer: to compare with a star whose members keep their caches would blame the transport for that.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

# More than a processor's last cache; 32 MiB where this was measured.
MEMORY_BYTES = 64 << 20
STEP_BYTES = 64 << 10  # read between two looks at the clock: 5 us, measured


class Busy:
    """Memory to read, made when it is first asked for."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.float32] | None = None
        self._at = 0

    def compute(self, busy_us: int) -> None:
        """Return after so many microseconds, at most one step late; at once for 0."""
        if not busy_us:
            return
        until = time.perf_counter() + busy_us / 1e6
        if self._memory is None:
            self._memory = np.ones((MEMORY_BYTES // STEP_BYTES, STEP_BYTES // 4), np.float32)
        while time.perf_counter() < until:
            self._memory[self._at].sum()
            self._at = (self._at + 1) % len(self._memory)
