"""A fit of measured decode steps: step = a + trips x RTT x layers, and the points it was made from.

The file holds what `swarm bench sweep` measured on one model: a JSON list of points, an object with that list under `points`, or
a run record with such an object under `figures`.

    {"points": [{"rtt_s": 0.001, "step_s": 0.031, "layers": 16}, ...], "rate_bit_s": 1e9, "n_tokens": 1}

    rtt_s, step_s, layers   required; layers = MoE layers with a round trip
    rate_bit_s, n_tokens    optional: what was measured at, taken as an infinite rate and one token if absent
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarm.errors import UserError

MAX_POINTS = 100_000
MIN_RTT_RANGE = 2.0  # guessed: below this ratio of largest to smallest RTT the slope is noise, and taken as 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured step."""

    rtt_s: float
    step_s: float
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPoint:
    """A measured step beside the fit's; `error_share` is (fitted - measured) / measured."""

    rtt_s: float
    measured_step_s: float
    fitted_step_s: float
    error_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a sweep says of one machine, model and network.

    Attributes:
        a_s: of one step: all local compute, peers' compute and software, of `layers` layers.
        trips_per_layer: the slope, in RTTs per layer and step; 1 means that nothing waits twice.
        rate_bit_s: of the links under the sweep; None: fast enough not to matter.
        max_error_share: the largest |fitted - measured| / measured.
    """

    a_s: float
    trips_per_layer: float
    layers: float
    n_tokens: int
    rate_bit_s: float | None
    points: tuple[CheckedPoint, ...]
    max_error_share: float

    def step_s(self, rtt_s: float, layers: float) -> float:
        """Return the predicted step; another number of layers takes its share of `a_s`."""
        return self.a_s * layers / self.layers + self.trips_per_layer * rtt_s * layers


def fit(points: Sequence[Point], *, n_tokens: int = 1, rate_bit_s: float | None = None) -> Calibration:
    """Return the least-squares fit over relative errors, so that short steps count as much as long ones.

    The slope is fitted only where the RTTs span a factor of two; it and `a_s` are never negative.
    """
    assert points, "no points to fit"
    trips = np.array([point.rtt_s * point.layers for point in points])
    steps = np.array([point.step_s for point in points])
    mean_layers = float(np.mean([point.layers for point in points]))
    shares = np.array([point.layers for point in points]) / mean_layers  # of a_s
    slope = 1.0
    if trips.max() > MIN_RTT_RANGE * trips.min():
        matrix = np.stack([shares / steps, trips / steps], axis=1)  # [N, 2]
        solution, *_ = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)
        slope = max(0.0, float(solution[1]))
    weights = shares / steps
    rest = 1 - slope * trips / steps
    a_s = max(0.0, float(weights @ rest / (weights @ weights)))
    if a_s == 0.0:  # the best slope through the origin
        slope = float((trips / steps).sum() / ((trips / steps) ** 2).sum()) if trips.any() else 1.0
    fitted = a_s * shares + slope * trips
    checked = tuple(
        CheckedPoint(
            rtt_s=point.rtt_s,
            measured_step_s=point.step_s,
            fitted_step_s=float(value),
            error_share=float(value) / point.step_s - 1,
        )
        for point, value in zip(points, fitted, strict=True)
    )
    return Calibration(
        a_s=a_s,
        trips_per_layer=slope,
        layers=mean_layers,
        n_tokens=n_tokens,
        rate_bit_s=rate_bit_s,
        points=checked,
        max_error_share=max(abs(point.error_share) for point in checked),
    )


def parse_calibration(text: str) -> Calibration:
    """Return the fit of a calibration file's content. Raises UserError."""
    try:
        content = json.loads(text)
        if isinstance(content, dict) and isinstance(content.get("figures"), dict):
            content = content["figures"]
        header = content if isinstance(content, dict) else {}
        listed = header.get("points") if header else content
        if not isinstance(listed, list) or not 0 < len(listed) <= MAX_POINTS:
            raise ValueError(f"expected a list of 1 to {MAX_POINTS} points")
        points = [
            Point(
                rtt_s=_number(each, "rtt_s", zero=True),
                step_s=_number(each, "step_s"),
                layers=int(_number(each, "layers")),
            )
            for each in listed
        ]
        if min(point.layers for point in points) < 1:
            raise ValueError("layers must be at least 1")
        rate = _number(header, "rate_bit_s") if header.get("rate_bit_s") is not None else None
        n_tokens = int(_number(header, "n_tokens")) if "n_tokens" in header else 1
    except (ValueError, RecursionError) as error:
        raise UserError(
            f'bad calibration: {error}; expected [{{"rtt_s": 0.02, "step_s": 0.4, "layers": 16}}, ...]'
        ) from error
    return fit(points, n_tokens=n_tokens, rate_bit_s=rate)


def _number(value: object, key: str, *, zero: bool = False) -> float:
    found = value.get(key) if isinstance(value, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise ValueError(f"{key} is missing or no number: got {str(found)[:40]}")
    if found < 0 or (found == 0 and not zero):
        raise ValueError(f"{key} out of range: got {found}")
    return float(found)
