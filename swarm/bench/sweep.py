"""Decode steps at several round trips and rates, measured in turn on one swarm, beside what the planner predicts of them.

The paths are changed under way. In each repetition all round trips are measured from the shortest to the longest, at the
first rate; then all rates, at one round trip. A change is followed by steps that do not count, for the connections to learn the
path. Steps are of one token, without drafts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import EngineConfig
from swarm.bench.testbed import PathOptions, Testbed, drawn_round_trips_s, open_testbed
from swarm.emulation.hub import EmulatorStats
from swarm.errors import UserError
from swarm.plan.calibration import Point, fit
from swarm.plan.checks import check_rates, check_rtts
from swarm.plan.planner import PlanInputs
from swarm.plan.shape import shape_of_file
from swarm.wire.rows import Wire

PROMPT_SEED = 1
N_PROMPT = 16
N_WARM_UP = 2  # steps after a change of the paths that do not count
POINT_S = 3.0  # a point's steps in one repetition take about so long at most, by their round trips
MIN_STEPS = 3  # however long they take


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What to measure.

    Attributes:
        rtts_s: round trips, measured at the first of `rates_bit_s`.
        rates_bit_s: access links of every host per direction, fastest first, measured at the round trip of `paths`.
        paths: jitter, loss and seed of every point.
        n_steps: most steps of a point in one repetition.
    """

    model: Path
    n_peers: int
    wire: Wire
    rtts_s: tuple[float, ...]
    rates_bit_s: tuple[float, ...]
    paths: PathOptions
    n_steps: int = 24
    n_repetitions: int = 5

    def __post_init__(self) -> None:
        if not self.rtts_s or not self.rates_bit_s:
            raise UserError("nothing to sweep: expected at least one round trip and one rate")

    @property
    def points(self) -> list[PathOptions]:
        """The paths of every point, in the order of measuring: round trips, then rates."""
        at_rtts = [replace(self.paths, rtts_s=(rtt,), rate_bit_s=self.rates_bit_s[0]) for rtt in sorted(self.rtts_s)]
        at_rates = [replace(self.paths, rate_bit_s=rate) for rate in sorted(self.rates_bit_s, reverse=True)]
        return at_rtts + at_rates

    def n_steps_at(self, paths: PathOptions, n_layers: int) -> int:
        """Return how many steps of a point are measured in one repetition."""
        fitting = int(POINT_S / max(1e-9, n_layers * paths.rtt_s(0)))
        return min(self.n_steps, max(MIN_STEPS, fitting))


@dataclass(slots=True)
class _Measured:
    """One point; a value for each repetition."""

    paths: PathOptions
    step_s: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # among the testbed's, of one repetition each
    bytes_out: list[float] = field(default_factory=list)  # of a step
    bytes_back: list[float] = field(default_factory=list)
    repair_bytes: int = 0

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


async def measure_sweep(options: SweepOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench sweep`; a run record of them is a calibration for `swarm plan`."""
    shape = shape_of_file(options.model)
    points = [_Measured(paths) for paths in options.points]
    n_steps = sum(N_WARM_UP + options.n_steps_at(point.paths, shape.n_layers) for point in points)
    engine = EngineConfig(n_ctx=N_PROMPT + n_steps + 1, n_threads=1)
    n_done, n_total = 0, options.n_repetitions * len(points)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        opening = open_testbed(
            Path(folder),
            options.model,
            n_peers=options.n_peers,
            wire=options.wire,
            paths=points[0].paths,
            engine=engine,
        )
        async with opening as testbed:
            for _ in range(options.n_repetitions):
                continuation = None
                for point in points:
                    progress(n_done, n_total)
                    await testbed.change_paths(point.paths)
                    if continuation is None:
                        continuation = await _begin(testbed, engine)
                    await _measure(testbed, continuation, point, options.n_steps_at(point.paths, shape.n_layers))
                    n_done += 1
            progress(n_done, n_total)
            stats = await testbed.path_stats()
            assert stats is not None  # a rate is emulated
            figures = [_point_figures(testbed, point, stats) for point in points]
    n_rtts = len(options.rtts_s)
    at_rtts, at_rates = points[:n_rtts], points[n_rtts:]
    inputs = PlanInputs(
        shape=shape,
        n_peers=options.n_peers,
        rtts_s=options.paths.rtts_s,
        rate_bit_s=points[0].paths.rate_bit_s or 0.0,
        wire=str(options.wire),
    )
    measured = [Point(rtt_s=point.paths.rtt_s(0), step_s=point.median_s, layers=shape.n_layers) for point in at_rtts]
    calibration = fit(measured, rate_bit_s=inputs.rate_bit_s)
    rtt_checks = check_rtts(inputs, measured, calibration)
    rate_checks = check_rates(
        inputs,
        [point.paths.rate_bit_s or 0.0 for point in at_rates],
        [point.median_s for point in at_rates],
        calibration,
    )
    return {
        "model": options.model.name,
        "n_peers": options.n_peers,
        "wire": str(options.wire),
        "n_repetitions": options.n_repetitions,
        "n_tokens": 1,
        "rate_bit_s": inputs.rate_bit_s,
        "a_s": calibration.a_s,
        "trips_per_layer": calibration.trips_per_layer,
        "max_error_share": max(abs(check.error_share) for check in rtt_checks),
        "max_miss_share": max(abs(check.miss_share) for check in rate_checks),
        "points": [
            asdict(point) | asdict(check) | each
            for point, check, each in zip(measured, rtt_checks, figures[:n_rtts], strict=True)
        ],
        "rates": [
            {"rtt_s": point.paths.rtt_s(0)} | asdict(check) | each
            for point, check, each in zip(at_rates, rate_checks, figures[n_rtts:], strict=True)
        ],
        "emulator": stats.summary(),
    }


async def _begin(testbed: Testbed, config: EngineConfig) -> Continuation:
    engine = testbed.running.engine
    rng = np.random.default_rng(PROMPT_SEED)
    continuation = Continuation(engine, lambda row: int(engine.context.logits(row).argmax()), n_batch=config.n_batch)
    await continuation.start([int(token) for token in rng.integers(1, engine.model.n_vocab, N_PROMPT)])
    await continuation.first()
    return continuation


async def _measure(testbed: Testbed, continuation: Continuation, point: _Measured, n_steps: int) -> None:
    endpoint = testbed.running.endpoint
    for _ in range(N_WARM_UP):
        await continuation.step(1)
    first_span = len(testbed.spans)
    sent, received, repaired = endpoint.bytes_sent, endpoint.bytes_received, endpoint.repair_bytes
    seconds = []
    for _ in range(n_steps):
        started = time.perf_counter()
        await continuation.step(1)
        seconds.append(time.perf_counter() - started)
    point.step_s.append(statistics.median(seconds))
    point.spans.append((first_span, len(testbed.spans)))
    point.bytes_out.append((endpoint.bytes_sent - sent) / n_steps)
    point.bytes_back.append((endpoint.bytes_received - received) / n_steps)
    point.repair_bytes += endpoint.repair_bytes - repaired


def _point_figures(testbed: Testbed, point: _Measured, stats: EmulatorStats) -> dict[str, Any]:
    """Return what else a point shows: `drawn_s` is the share of a step that the paths really delivered as round trips."""
    drawn = []
    for step_s, (first, end) in zip(point.step_s, point.spans, strict=True):
        trips = drawn_round_trips_s(testbed.spans[first:end], stats, testbed.path_names)
        n_layers = len(testbed.running.manifest.spec.moe_layers)
        drawn.append(sum(trips) / (len(trips) / n_layers) / step_s)
    return {
        "steps_s": point.step_s,
        "drawn_share": statistics.median(drawn),
        "destinations_per_token": statistics.fmean(
            span.n_destinations for first, end in point.spans for span in testbed.spans[first:end]
        ),
        "bytes_out_per_step": statistics.median(point.bytes_out),
        "bytes_back_per_step": statistics.median(point.bytes_back),
        "repair_bytes": point.repair_bytes,
    }
