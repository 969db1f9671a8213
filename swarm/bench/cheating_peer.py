"""A real peer whose numbers are wrong while it is told so: a test double for audits.

`python -m swarm.bench.cheating_peer KIND join ...` runs `swarm join ...` with an executor that lies from SIGUSR1 on, and is
honest again from SIGUSR2 on. All else is the daemon's own: handshake, announcement, checks, forms.

    orthogonal   each row turned by a right angle: cosine 0, and the same each time it is asked, alone or as a part
    noise        5 % of the row's norm, drawn anew each time
    sly          noise that depends on the row alone: the same each time the same row is asked
"""

from __future__ import annotations

import runpy
import signal
import sys
import zlib
from collections.abc import Callable
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from swarm.experts.executor import ExpertExecutor

NOISE = 0.05  # of a row's norm

Rows = npt.NDArray[np.float32]


class CheatKind(StrEnum):
    """How a peer lies."""

    ORTHOGONAL = "orthogonal"
    NOISE = "noise"
    SLY = "sly"


def lie(kind: CheatKind, rows: Rows, rng: np.random.Generator) -> Rows:
    """Return wrong rows in place of right ones, [N, D]."""
    if kind is CheatKind.ORTHOGONAL:
        turned = np.empty_like(rows)
        turned[:, 0::2], turned[:, 1::2] = -rows[:, 1::2], rows[:, 0::2]
        return turned
    if kind is CheatKind.SLY:
        noise = np.stack([np.random.default_rng(zlib.crc32(row.tobytes())).standard_normal(len(row)) for row in rows])
    else:
        noise = rng.standard_normal(rows.shape)
    scale = np.linalg.norm(rows, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    wrong: Rows = (rows + NOISE * scale * noise).astype(np.float32)
    return wrong


class Cheat:
    """Stands between an executor and whoever asks it."""

    def __init__(self, kind: CheatKind) -> None:
        self.is_lying = False
        self._kind = kind
        self._rng = np.random.default_rng()

    def install(self) -> None:
        """Let every executor of this process lie when it shall, and listen to the signals."""
        honest: Callable[..., Rows] = ExpertExecutor.run

        def run(executor: ExpertExecutor, *arguments: object, **named: object) -> Rows:
            rows = honest(executor, *arguments, **named)
            return lie(self._kind, rows, self._rng) if self.is_lying else rows

        ExpertExecutor.run = run  # type: ignore[assignment, method-assign]
        signal.signal(signal.SIGUSR1, lambda *_: self._set(True))
        signal.signal(signal.SIGUSR2, lambda *_: self._set(False))

    def _set(self, is_lying: bool) -> None:
        self.is_lying = is_lying


if __name__ == "__main__":
    Cheat(CheatKind(sys.argv[1])).install()
    sys.argv = ["swarm", *sys.argv[2:]]
    runpy.run_module("swarm", run_name="__main__", alter_sys=False)
