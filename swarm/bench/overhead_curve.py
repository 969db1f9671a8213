"""From which computing time of a layer on a swarm costs next to nothing: what a run of `swarm bench overhead` says. Pure.

    layer_s    a layer in one process, all of it: attention, router, experts
    extra_s    what the same layer takes more with its experts at peers
    overhead   share of throughput that is lost: 1 - tokens/s of the swarm over tokens/s of the process

What a layer takes more is a + b * rows: a hop, and what every row adds. So the overhead falls with the rows towards what a row
adds over what it takes to compute; below the limit for good only where that is less than the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

LIMIT = 0.012  # share of throughput; the field's figure for a directly linked expert host


class How(StrEnum):
    """Where a layer time comes from."""

    MEASURED = "measured"
    EXTRAPOLATED = "extrapolated"
    NEVER = "never"  # a row adds more than the limit of what it takes to compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of rows in a step; seconds are of one layer."""

    n_rows: int
    layer_s: float
    extra_s: float
    overhead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What points of one model say together.

    Attributes:
        hop_s, row_s: a and b of extra_s.
        under_from_s: the layer time from which on the overhead is at most the limit; None: never.
    """

    hop_s: float
    row_s: float
    under_from_s: float | None
    how: How


def fit_curve(points: Sequence[Point], limit: float = LIMIT) -> Curve:
    """Return what these points say; at least one.

    *Measured* is the shortest layer that is within the limit and that only layers within it follow, so the longest must be.
    Else both lines, extra_s = a + b * rows and layer_s = c + d * rows, are followed to where they meet the limit.
    """
    points = sorted(points, key=lambda point: point.layer_s)
    hop_s, row_s = _line([(point.n_rows, point.extra_s, point.layer_s) for point in points])
    under_from_s: float | None = None
    for point in reversed(points):
        if point.overhead > limit:
            break
        under_from_s = point.layer_s
    if under_from_s is not None:
        return Curve(hop_s=hop_s, row_s=row_s, under_from_s=under_from_s, how=How.MEASURED)
    under_from_s = _crossing_s(points, hop_s, max(0.0, row_s), limit)
    how = How.NEVER if under_from_s is None else How.EXTRAPOLATED
    return Curve(hop_s=hop_s, row_s=row_s, under_from_s=under_from_s, how=how)


def _crossing_s(points: Sequence[Point], hop_s: float, row_s: float, limit: float) -> float | None:
    base_s, compute_s = _line([(point.n_rows, point.layer_s, point.layer_s) for point in points])  # c, d
    share = limit / (1 - limit)  # of a layer's time, where `limit` is of the throughput
    if row_s <= 0.0 or len(points) == 1:
        return max(0.0, hop_s) / share
    gain_s = share * compute_s - row_s  # what a row brings nearer to the limit
    if gain_s <= 0:
        return None
    n_rows = (hop_s - share * base_s) / gain_s
    return max(0.0, base_s + compute_s * n_rows)


def _line(samples: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Return a and b of the line a + b * x nearest to samples of (x, y, scale); errors count by their share of the scale.

    A layer of 100 ms is measured to a millisecond, one of 1 ms to a few microseconds.
    """
    x, y, scale = (np.array(column, float) for column in zip(*samples, strict=True))
    if len(samples) == 1:
        return float(y[0]), 0.0
    b, a = np.polyfit(x, y, 1, w=1 / scale)
    return float(a), float(b)
