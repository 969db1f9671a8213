"""What a layer costs more when its experts are at peers than in one executor in this process, by the time that it computes.

One backbone, whose weights, thread and tokens are the same for both: only who computes the experts differs. A layer computes
longer as it does in nature, by more rows in a step: decoded tokens, drafts, prompts; of one sequence, or of several at once.

    swarm        rows to the peers and back; where the model has a shared expert, this waits for them first, so that one thing
                 is compared with one: peers and backbone never compute at the same time
    overlapped   the same as it is served: the shared expert runs meanwhile, on another core
    in process   the same graph, its callback calls the executor

The sides take turns, each as long; what is shown are medians of pairs of turns.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarm.backbone.engine import Engine, EngineConfig, StepPart
from swarm.backbone.in_process import InProcessExperts
from swarm.backbone.moe_hook import MoeHook
from swarm.bench.overhead_curve import LIMIT, Point, fit_curve
from swarm.bench.testbed import Link, PathOptions, Testbed, open_testbed
from swarm.native.llama import LlamaContext
from swarm.wire.rows import Wire

TOKEN_SEED = 1
N_CONTEXT = 512  # positions of a sequence; a turn begins at the first
MAX_ROWS = 512  # of a step: one graph, one dispatch per layer

Steps = Sequence[Sequence[StepPart]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadOptions:
    """What to measure.

    Attributes:
        n_streams: sequences in a step.
        n_rows: of a step, all sequences together; those that do not divide are left out.
        turn_s: how long a side computes in a turn, about, and one step at least.
        chunk_bytes: None: as the dispatcher has it; 0: batches are never cut.
    """

    models: tuple[Path, ...]
    wire: Wire
    n_peers: int = 1
    link: Link = "tls"
    n_streams: tuple[int, ...] = (1, 4)
    n_rows: tuple[int, ...] = (1, 4, 16, 64, 256, 512)
    n_repetitions: int = 5
    turn_s: float = 0.2
    chunk_bytes: int | None = None

    def points(self) -> list[tuple[int, int]]:
        """Return (streams, rows) of everything to measure of a model."""
        return [(n, rows) for n in self.n_streams for rows in self.n_rows if rows % n == 0]


@dataclass(slots=True)
class _Turns:
    """One side's turns at one point; seconds of a step."""

    step_s: list[float] = field(default_factory=list)
    experts_s: list[float] = field(default_factory=list)


class _Side:
    """Whoever computes steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def turn(self, steps: Steps, turns: _Turns | None) -> float:
        """Compute the steps in an empty context, and return the seconds of one."""
        step_s = await self._engine.call(lambda: self._run(steps))
        if turns is not None:
            turns.step_s.append(step_s)
        return step_s

    def _run(self, steps: Steps) -> float:
        self._engine.context.clear()
        started = time.perf_counter()
        for parts in steps:
            self._engine.decode_parts(parts)
        return (time.perf_counter() - started) / len(steps)


class _InProcess(_Side):
    """The same weights on the same thread, with another context whose experts are in this process."""

    def __init__(self, engine: Engine, experts: InProcessExperts, context: LlamaContext, hook: MoeHook) -> None:
        super().__init__(engine)
        self._experts, self._context, self._hook = experts, context, hook
        self._experts_s = 0.0  # of a step of the latest turn

    async def turn(self, steps: Steps, turns: _Turns | None) -> float:
        step_s = await super().turn(steps, turns)
        if turns is not None:
            turns.experts_s.append(self._experts_s)
        return step_s

    def _run(self, steps: Steps) -> float:
        self._context.clear()
        before_s, started = self._experts.compute_s, time.perf_counter()
        for parts in steps:
            self._context.decode_parts(parts)
            error = self._hook.take_error() or self._context.take_callback_error()
            if error is not None:
                raise error
        seconds = time.perf_counter() - started
        self._experts_s = (self._experts.compute_s - before_s) / len(steps)
        return seconds / len(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """Who is compared; `overlapped` is None where the model has no shared expert."""

    swarm: _Side
    overlapped: _Side | None
    in_process: _InProcess


async def measure_overhead(options: OverheadOptions, progress: Progress) -> dict[str, Any]:
    """Return the figures of `swarm bench overhead`; seconds of one layer unless a name says otherwise."""
    n_done, n_total = 0, len(options.models) * len(options.points())
    points: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    n_links: list[int] = []
    for model in options.models:
        async with _open(options, model) as testbed, _sides(testbed, model) as sides:
            own: list[dict[str, Any]] = []
            for n_streams, n_rows in options.points():
                progress(n_done, n_total)
                figures = await _measure(testbed, sides, options, n_streams=n_streams, n_rows=n_rows)
                own.append({"model": model.stem, **figures})
                n_done += 1
            links = testbed.running.dispatcher.links
            n_links.append(links.n_open if links is not None else 0)
        points += own
        curves += _curves(model.stem, own)
    progress(n_done, n_total)
    return {
        "n_peers": options.n_peers,
        "link": options.link,
        "n_tls_links": n_links,
        "wire": str(options.wire),
        "n_repetitions": options.n_repetitions,
        "chunk_bytes": options.chunk_bytes,
        "limit": LIMIT,
        "curves": curves,
        "points": points,
    }


@contextlib.asynccontextmanager
async def _open(options: OverheadOptions, model: Path) -> AsyncIterator[Testbed]:
    engine = EngineConfig(n_ctx=N_CONTEXT, n_batch=MAX_ROWS, n_ubatch=MAX_ROWS, n_threads=1)
    n_slots = max(options.n_streams)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        opening = open_testbed(
            Path(folder),
            model,
            n_peers=options.n_peers,
            wire=options.wire,
            paths=PathOptions(),
            engine=engine,
            peer_options=() if options.link == "quic" else ("--tls-links",),
            adapt=lambda config: replace(config, tls_links=options.link != "quic", n_slots=n_slots),
        )
        async with opening as testbed:
            if options.link != "quic":
                await testbed.open_links(is_forced=options.link == "tls")
            if options.chunk_bytes is not None:
                testbed.running.dispatcher.chunk_bytes = options.chunk_bytes
            yield testbed


@contextlib.asynccontextmanager
async def _sides(testbed: Testbed, model: Path) -> AsyncIterator[_Sides]:
    running, config = testbed.running, testbed.config
    assert config is not None
    spec, engine_config = running.manifest.spec, replace(config.engine, n_sequences=config.n_slots)
    async with contextlib.AsyncExitStack() as stack:
        waiting: Engine | None = None
        if spec.n_ff_shared:
            waiting = Engine(
                model, spec, replace(engine_config, overlaps=False), running.dispatcher, shares=running.engine
            )
            await waiting.start()
            stack.push_async_callback(waiting.close)
        experts = stack.enter_context(InProcessExperts.open(model))
        hook = MoeHook(spec.moe_layers, experts, output=spec.expert_kind.output_node)
        context = LlamaContext(
            running.engine.model,
            n_ctx=engine_config.n_ctx * engine_config.n_sequences,
            n_seq_max=engine_config.n_sequences,
            n_batch=engine_config.n_batch,
            n_ubatch=engine_config.n_ubatch,
            n_threads=engine_config.n_threads,
            eval_callback=hook,
        )
        stack.callback(context.close)
        yield _Sides(
            swarm=_Side(waiting or running.engine),
            overlapped=_Side(running.engine) if waiting is not None else None,
            in_process=_InProcess(running.engine, experts, context, hook),
        )


async def _measure(
    testbed: Testbed, sides: _Sides, options: OverheadOptions, *, n_streams: int, n_rows: int
) -> dict[str, Any]:
    """Return the figures of one point."""
    n_layers = len(testbed.running.manifest.spec.moe_layers)
    n_each = n_rows // n_streams
    tokens = _tokens(testbed.running.engine.model.n_vocab, n_streams)
    everybody = [side for side in (sides.swarm, sides.overlapped, sides.in_process) if side is not None]
    for side in everybody:  # warm: graphs, pages, the hook's lessons
        step_s = await side.turn(make_steps(tokens, n_each, 1), None)
    steps = make_steps(tokens, n_each, max(1, min(N_CONTEXT // n_each, round(options.turn_s / step_s))))
    turns = {id(side): _Turns() for side in everybody}
    testbed.spans.clear()
    for done in range(options.n_repetitions):
        for side in everybody if done % 2 == 0 else reversed(everybody):
            await side.turn(steps, turns[id(side)])
    alone, swarm = turns[id(sides.in_process)], turns[id(sides.swarm)]
    overlapped = turns[id(sides.overlapped)] if sides.overlapped is not None else None
    spans = testbed.spans
    step_s, swarm_step_s = statistics.median(alone.step_s), statistics.median(swarm.step_s)
    return {
        "n_streams": n_streams,
        "n_rows": n_rows,
        "n_steps": len(steps),
        "layer_s": step_s / n_layers,
        "experts_s": statistics.median(alone.experts_s) / n_layers,
        "extra_s": _extra_s(swarm, alone) / n_layers,
        "overhead": _overhead(swarm, alone),
        "overheads": [1 - one / other for one, other in zip(alone.step_s, swarm.step_s, strict=True)],
        "overlapped_extra_s": _extra_s(overlapped, alone) / n_layers if overlapped is not None else None,
        "overlapped_overhead": _overhead(overlapped, alone) if overlapped is not None else None,
        "tokens_per_s": n_rows / swarm_step_s,
        "in_process_tokens_per_s": n_rows / step_s,
        "peer_compute_s": statistics.median(sum(batch.compute_s for batch in span.batches) for span in spans),
        "n_batches": statistics.fmean(span.n_batches for span in spans),
    }


def _tokens(n_vocab: int, n_streams: int) -> list[list[int]]:
    rng = np.random.default_rng(TOKEN_SEED)
    return [[int(token) for token in rng.integers(1, n_vocab, N_CONTEXT)] for _ in range(n_streams)]


def make_steps(tokens: list[list[int]], n_each: int, n_steps: int) -> Steps:
    """Return steps of `n_each` rows of each sequence; all rows' logits, or the last layer would have fewer."""
    return [
        [
            StepPart(
                tokens=sequence[step * n_each : (step + 1) * n_each],
                first_position=step * n_each,
                sequence=index,
                logits="all",
                origin=index,
            )
            for index, sequence in enumerate(tokens)
        ]
        for step in range(n_steps)
    ]


def _extra_s(turns: _Turns, alone: _Turns) -> float:
    return statistics.median(one - other for one, other in zip(turns.step_s, alone.step_s, strict=True))


def _overhead(turns: _Turns, alone: _Turns) -> float:
    return statistics.median(1 - other / one for one, other in zip(turns.step_s, alone.step_s, strict=True))


def _curves(model: str, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the points of a model say, of each number of sequences."""
    curves = []
    for n_streams in sorted({point["n_streams"] for point in points}):
        own = [each for each in points if each["n_streams"] == n_streams]
        for prefix in ("", "overlapped_"):
            if own[0][f"{prefix}extra_s"] is None:
                continue
            curve = fit_curve(
                [
                    Point(
                        n_rows=each["n_rows"],
                        layer_s=each["layer_s"],
                        extra_s=each[f"{prefix}extra_s"],
                        overhead=each[f"{prefix}overhead"],
                    )
                    for each in own
                ]
            )
            curves.append(
                {
                    "model": model,
                    "n_streams": n_streams,
                    "is_overlapped": bool(prefix),
                    "hop_s": curve.hop_s,
                    "row_s": curve.row_s,
                    "under_from_s": curve.under_from_s,
                    "how": curve.how.value,
                }
            )
    return curves
