"""How much memory and processor time processes take over a long run. One series for each life of a process.

A process that is killed and started again begins a new life: it warms up again, and is judged by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process: seconds since it was first seen, resident bytes."""

    age_s: float
    rss_bytes: int


@dataclass(slots=True)
class Life:
    """A process from when it was first seen to its end.

    Attributes:
        cpu_s: processor time until it was last seen, its start included.
    """

    name: str
    pid: int
    first_at: float
    cpu_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def growth(self, warm_up_s: float) -> float | None:
        """Return by which share it was larger, at most, than when its warm-up ended; None if it was not seen twice since."""
        warm = [sample.rss_bytes for sample in self.samples if sample.age_s >= warm_up_s]
        return max(warm) / warm[0] - 1 if len(warm) > 1 else None


class ProcessUsage:
    """Looks at processes now and then.

    Attributes:
        lives: pid -> what was seen of it.
    """

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}

    def look(self, processes: Iterable[tuple[str, int]], now: float) -> None:
        """Note what these (name, pid) hold now; one that has ended is passed over."""
        for name, pid in processes:
            try:
                size, spent_s = psutil.Process(pid).memory_info().rss, cpu_s(pid)
            except psutil.NoSuchProcess:
                continue
            if size == 0:  # ended, and nobody has read its status yet
                continue
            life = self.lives.setdefault(pid, Life(name, pid, now))
            life.cpu_s = spent_s
            life.samples.append(Sample(now - life.first_at, size))


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, all threads. Raises psutil.NoSuchProcess."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
