"""What a backbone has served so far: counts, and times as histograms. Pure; the gateway writes them out for Prometheus."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from swarm.speculation.accept import DraftStats

# Upper bounds of the histograms' buckets, seconds: from a step on loopback to a long prompt over a WAN. Chosen by hand.
TIME_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    """How often values fell at or below each bound.

    Attributes:
        bounds: ascending.
        counts: of values up to each bound and above the one before; the last count is of those above all bounds.
        total: sum of the values.
    """

    def __init__(self, bounds: tuple[float, ...] = TIME_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def n(self) -> int:
        """Values so far."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Add a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


def _batches() -> Histogram:
    return Histogram(BATCH_BOUNDS)


@dataclass(slots=True)
class ServingStats:
    """Sums since the start.

    Attributes:
        n_requests: that came, refused ones too.
        n_cancelled: whose client left before the end.
        n_prompt_tokens, n_completion_tokens: of requests that got a slot.
        n_kept_tokens: of the prompts', those that were computed already; n_cache_hits: requests that had any.
        n_rows: computed in steps.
        queue, ttft, inter_token, step: seconds waited for a slot; to the first token; between two tokens; of a step.
        batch: requests in a step.
    """

    n_requests: int = 0
    n_cancelled: int = 0
    n_prompt_tokens: int = 0
    n_completion_tokens: int = 0
    n_kept_tokens: int = 0
    n_cache_hits: int = 0
    n_rows: int = 0
    drafts: DraftStats = field(default_factory=DraftStats)
    queue: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    step: Histogram = field(default_factory=Histogram)
    batch: Histogram = field(default_factory=_batches)
