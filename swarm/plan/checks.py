"""A sweep's measured steps beside what the planner says of them: the same prediction as `swarm plan --calibrate`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.plan.calibration import Calibration, Point, fit
from swarm.plan.planner import PlanInputs, step_of

MIN_LEFT_OUT = 3  # points that must stay for a fit without one of them to say something


@dataclass(frozen=True, slots=True, kw_only=True)
class RttCheck:
    """One round trip of a sweep.

    Attributes:
        error_share: (predicted - measured) / measured.
        left_out_error_share: the same of a calibration that has not seen this point; None: too few others.
    """

    rtt_s: float
    measured_step_s: float
    predicted_step_s: float
    error_share: float
    left_out_error_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCheck:
    """One rate of a sweep, against the rate before it.

    Attributes:
        lengthens_by_s: measured; a slower rate lengthens a step.
        miss_share: (predicted lengthening - measured one) / this rate's measured step.
    """

    rate_bit_s: float
    measured_step_s: float
    predicted_step_s: float
    lengthens_by_s: float
    predicted_lengthens_by_s: float
    miss_share: float


def check_rtts(inputs: PlanInputs, points: Sequence[Point], calibration: Calibration) -> list[RttCheck]:
    """Return each point beside its prediction; `inputs` is what was measured, but for the round trip."""
    checks = []
    for index, point in enumerate(points):
        at = replace(inputs, rtts_s=(point.rtt_s,))
        predicted_s = step_of(at, calibration).step_s
        others = [*points[:index], *points[index + 1 :]]
        left_out = None
        if len(others) >= MIN_LEFT_OUT:
            blind = fit(others, n_tokens=calibration.n_tokens, rate_bit_s=calibration.rate_bit_s)
            left_out = step_of(at, blind).step_s / point.step_s - 1
        checks.append(
            RttCheck(
                rtt_s=point.rtt_s,
                measured_step_s=point.step_s,
                predicted_step_s=predicted_s,
                error_share=predicted_s / point.step_s - 1,
                left_out_error_share=left_out,
            )
        )
    return checks


def check_rates(
    inputs: PlanInputs, rates_bit_s: Sequence[float], steps_s: Sequence[float], calibration: Calibration
) -> list[RateCheck]:
    """Return each rate's step beside its prediction; `inputs` is what was measured, but for the rate."""
    predicted = [step_of(replace(inputs, rate_bit_s=rate), calibration).step_s for rate in rates_bit_s]
    checks = []
    for index, (rate_bit_s, step_s) in enumerate(zip(rates_bit_s, steps_s, strict=True)):
        before = max(0, index - 1)
        lengthens_by_s = step_s - steps_s[before]
        predicted_lengthens_by_s = predicted[index] - predicted[before]
        checks.append(
            RateCheck(
                rate_bit_s=rate_bit_s,
                measured_step_s=step_s,
                predicted_step_s=predicted[index],
                lengthens_by_s=lengthens_by_s,
                predicted_lengthens_by_s=predicted_lengthens_by_s,
                miss_share=(predicted_lengthens_by_s - lengthens_by_s) / step_s,
            )
        )
    return checks
