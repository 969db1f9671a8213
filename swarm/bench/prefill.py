"""Prefill over emulated paths: tokens per second with batches cut into chunks and whole, and where bandwidth begins to bind.

A prompt is computed in one step; chunked and whole runs alternate. `bytes_s` is what the bytes alone take on the backbone's
access link, in its busier direction: zero round trips, zero compute. Bandwidth binds where that is most of the step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarm.backbone.engine import EngineConfig
from swarm.bench.testbed import PathOptions, Testbed, open_testbed
from swarm.dispatch.chunks import CHUNK_BYTES
from swarm.wire.rows import Wire

PROMPT_SEED = 1
SWEEP_TOKENS = 64  # measured beside the whole prompt at each rate of a sweep
SWEEP_REPETITIONS = 3  # at 10 Mbit/s one prompt of 512 tokens of synth16 takes 14 s
BINDS_FROM = 0.5  # share of a step from which its bytes are said to bind


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOptions:
    """What to measure.

    Attributes:
        chunk_bytes: of the chunked runs; 0: measure whole batches only.
        sweep_bit_s: further rates, SWEEP_REPETITIONS each, with `n_tokens` and with SWEEP_TOKENS.
    """

    model: Path
    n_peers: int
    wire: Wire
    paths: PathOptions
    n_tokens: int = 512
    n_repetitions: int = 5
    chunk_bytes: int = CHUNK_BYTES
    sweep_bit_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One prompt's step."""

    n_tokens: int
    seconds: float
    bytes_out: int
    bytes_back: int
    n_batches: float  # requests of a layer, mean
    trip_s: float  # of a layer, mean: from the first byte out to the last answer
    compute_s: float  # of a layer, mean: of its longest batch

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


async def measure_prefill(options: PrefillOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench prefill`."""
    n_done, n_total = 0, options.n_repetitions + len(options.sweep_bit_s)
    progress(n_done, n_total)
    chunked: list[_Run] = []
    whole: list[_Run] = []
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        async with _testbed(options, Path(folder), options.paths) as testbed:
            n_layers = len(testbed.running.manifest.spec.moe_layers)
            await _prefill(testbed, min(SWEEP_TOKENS, options.n_tokens), 0)  # warm: graphs, windows, the hook's lessons
            for _ in range(options.n_repetitions):
                whole.append(await _prefill(testbed, options.n_tokens, 0))
                if options.chunk_bytes:
                    chunked.append(await _prefill(testbed, options.n_tokens, options.chunk_bytes))
                n_done += 1
                progress(n_done, n_total)
            emulator = await testbed.path_stats()
    sweep = []
    for rate_bit_s in options.sweep_bit_s:
        paths = replace(options.paths, rate_bit_s=rate_bit_s)
        with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
            async with _testbed(options, Path(folder), paths) as testbed:
                await _prefill(testbed, min(SWEEP_TOKENS, options.n_tokens), 0)
                for n_tokens in sorted({min(SWEEP_TOKENS, options.n_tokens), options.n_tokens}):
                    runs = [await _prefill(testbed, n_tokens, options.chunk_bytes) for _ in range(SWEEP_REPETITIONS)]
                    sweep.append({"rate_bit_s": rate_bit_s, **_figures(runs, rate_bit_s)})
        n_done += 1
        progress(n_done, n_total)
    figures: dict[str, Any] = {
        "model": options.model.name,
        "n_peers": options.n_peers,
        "wire": str(options.wire),
        "layers": n_layers,
        "rtt_s": options.paths.rtt_s(0),
        "rate_bit_s": options.paths.rate_bit_s,
        "n_repetitions": options.n_repetitions,
        "chunk_bytes": options.chunk_bytes,
        **_figures(chunked or whole, options.paths.rate_bit_s),
        "unchunked_tokens_per_s": statistics.median(run.tokens_per_s for run in whole),
        "unchunked": _figures(whole, options.paths.rate_bit_s),
        "sweep": sweep,
    }
    if emulator is not None:
        figures["emulator"] = emulator.summary()
    if chunked:
        ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(chunked, whole, strict=True)]
        figures |= {"chunked_over_unchunked": statistics.median(ratios), "ratios": ratios}
    return figures


def _testbed(options: PrefillOptions, folder: Path, paths: PathOptions) -> Any:
    n_batch = max(options.n_tokens, SWEEP_TOKENS)
    return open_testbed(
        folder,
        options.model,
        n_peers=options.n_peers,
        wire=options.wire,
        paths=paths,
        engine=EngineConfig(n_ctx=n_batch, n_batch=n_batch, n_ubatch=n_batch, n_threads=1),
    )


async def _prefill(testbed: Testbed, n_tokens: int, chunk_bytes: int) -> _Run:
    engine, endpoint, dispatcher = testbed.running.engine, testbed.running.endpoint, testbed.running.dispatcher
    dispatcher.chunk_bytes = chunk_bytes
    await engine.call(engine.context.clear)
    rng = np.random.default_rng(PROMPT_SEED)
    prompt = [int(token) for token in rng.integers(1, engine.model.n_vocab, n_tokens)]
    n_spans, sent, received = len(testbed.spans), endpoint.bytes_sent, endpoint.bytes_received
    started = time.perf_counter()
    await engine.call(lambda: engine.decode(prompt, 0, "last"))
    seconds = time.perf_counter() - started
    spans = testbed.spans[n_spans:]
    return _Run(
        n_tokens=n_tokens,
        seconds=seconds,
        bytes_out=endpoint.bytes_sent - sent,
        bytes_back=endpoint.bytes_received - received,
        n_batches=statistics.fmean(span.n_batches for span in spans),
        trip_s=statistics.fmean((span.returned_ns - span.planned_ns) / 1e9 for span in spans),
        compute_s=statistics.fmean(span.compute_s for span in spans),
    )


def _figures(runs: list[_Run], rate_bit_s: float | None) -> dict[str, Any]:
    """Return the medians of runs alike."""
    seconds = statistics.median(run.seconds for run in runs)
    busier = statistics.median(max(run.bytes_out, run.bytes_back) for run in runs)
    figures: dict[str, Any] = {
        "n_tokens": runs[0].n_tokens,
        "tokens_per_s": statistics.median(run.tokens_per_s for run in runs),
        "step_s": seconds,
        "bytes_out": statistics.median(run.bytes_out for run in runs),
        "bytes_back": statistics.median(run.bytes_back for run in runs),
        "n_batches_per_layer": statistics.median(run.n_batches for run in runs),
        "layer_trip_s": statistics.median(run.trip_s for run in runs),
        "longest_batch_compute_s": statistics.median(run.compute_s for run in runs),
    }
    if rate_bit_s is not None:
        bytes_s = busier * 8 / rate_bit_s
        figures |= {"bytes_s": bytes_s, "bytes_share": bytes_s / seconds, "binds": bytes_s / seconds >= BINDS_FROM}
    return figures
