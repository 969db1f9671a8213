"""Decode over emulated paths: tokens per second, how close to the bound of round trips, next to stock llama.cpp.

The bound is 1 / the sum over layers of the slowest path that was really drawn, from the emulator's own stamps: zero compute,
zero software. What is measured is decoding, one token a step; the prompt's prefill is not.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarm.backbone.engine import EngineConfig
from swarm.backbone.stock import StockModel
from swarm.bench.testbed import PathOptions, Testbed, drawn_round_trips_s, open_testbed
from swarm.wire.rows import Wire

PROMPT_SEED = 1
N_PROMPT = 16
N_WARM_UP = 3  # tokens of each repetition that are not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """What to measure."""

    model: Path
    n_peers: int
    wire: Wire
    paths: PathOptions
    n_tokens: int = 32
    n_repetitions: int = 5


@dataclass(slots=True)
class _Repetition:
    seconds: float
    n_spans: int  # spans of it, the last ones of the testbed
    bytes_out: int
    bytes_back: int


async def measure_decode(options: DecodeOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench decode`; medians over interleaved repetitions of the swarm and of stock."""
    engine = EngineConfig(n_ctx=N_PROMPT + N_WARM_UP + options.n_tokens + 1, n_threads=1)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        opening = open_testbed(
            Path(folder),
            options.model,
            n_peers=options.n_peers,
            wire=options.wire,
            paths=options.paths,
            engine=engine,
        )
        async with opening as testbed:
            with StockModel(options.model, engine) as stock:
                repetitions: list[_Repetition] = []
                stock_speeds: list[float] = []
                for done in range(options.n_repetitions):
                    progress(done, options.n_repetitions)
                    repetitions.append(await _decode(testbed, options.n_tokens))
                    stock_speeds.append(stock.tokens_per_s(_prompt(stock.n_vocab), options.n_tokens))
                progress(options.n_repetitions, options.n_repetitions)
                return await _figures(testbed, options, repetitions, stock_speeds)


def _prompt(n_vocab: int) -> list[int]:
    rng = np.random.default_rng(PROMPT_SEED)
    return [int(token) for token in rng.integers(1, n_vocab, N_PROMPT)]


async def _decode(testbed: Testbed, n_tokens: int) -> _Repetition:
    engine, endpoint = testbed.running.engine, testbed.running.endpoint
    await engine.call(engine.context.clear)
    prompt = _prompt(engine.model.n_vocab)

    def prefill() -> int:
        engine.decode(prompt, 0, "last")
        return int(engine.context.logits(-1).argmax())

    token, position = await engine.call(prefill), len(prompt)

    def step(token: int, position: int) -> int:
        engine.decode([token], position, "last")
        return int(engine.context.logits(-1).argmax())

    started, n_before, sent, received = 0.0, 0, 0, 0
    for i in range(N_WARM_UP + n_tokens):
        if i == N_WARM_UP:
            n_before = len(testbed.spans)
            sent, received = endpoint.bytes_sent, endpoint.bytes_received
            started = time.perf_counter()
        token = await engine.call(lambda t=token, p=position + i: step(t, p))  # type: ignore[misc]
    return _Repetition(
        time.perf_counter() - started,
        len(testbed.spans) - n_before,
        endpoint.bytes_sent - sent,
        endpoint.bytes_received - received,
    )


async def _figures(
    testbed: Testbed, options: DecodeOptions, repetitions: list[_Repetition], stock_speeds: list[float]
) -> dict[str, Any]:
    n_layers = len(testbed.running.manifest.spec.moe_layers)
    n_tokens = options.n_tokens
    stats = await testbed.path_stats()
    # The spans of the counted steps: the last n_spans of each repetition.
    bounds: list[float] = []
    all_spans = []
    end = len(testbed.spans)
    for repetition in reversed(repetitions):
        spans = testbed.spans[end - repetition.n_spans : end]
        end -= repetition.n_spans + (N_WARM_UP + 1) * n_layers
        all_spans.append(spans)
        if stats is not None:
            bounds.append(sum(drawn_round_trips_s(spans, stats, testbed.path_names)))
    bounds.reverse()
    all_spans.reverse()
    tokens_per_s = statistics.median(n_tokens / repetition.seconds for repetition in repetitions)
    stock = statistics.median(stock_speeds)
    shares = [bound / repetition.seconds for bound, repetition in zip(bounds, repetitions, strict=False) if bound]
    flat = [span for spans in all_spans for span in spans]
    n_token_layers = n_tokens * n_layers * len(repetitions)
    return {
        "model": options.model.name,
        "n_peers": options.n_peers,
        "wire": str(options.wire),
        "n_tokens": n_tokens,
        "n_repetitions": len(repetitions),
        "layers": n_layers,
        "rtt_s": options.paths.rtt_s(0),
        "tokens_per_s": tokens_per_s,
        "step_s": 1 / tokens_per_s,
        "rtt_bound_tokens_per_s": statistics.median(n_tokens / bound for bound in bounds) if bounds else None,
        "share_of_bound": statistics.median(shares) if shares else None,
        "shares_of_bound": shares,
        "round_trips_per_token": len(flat) / (n_tokens * len(repetitions)),
        "accept_length": 1.0,
        "shared_hidden_share": testbed.running.engine.overlap.hidden_share,
        "stock_tokens_per_s": stock,
        "share_of_stock": tokens_per_s / stock,
        "destinations_per_token": statistics.fmean(span.n_destinations for span in flat),
        "bytes_out_per_token_layer": sum(r.bytes_out for r in repetitions) / n_token_layers,
        "bytes_back_per_token_layer": sum(r.bytes_back for r in repetitions) / n_token_layers,
        "stages_s": {
            "plan": statistics.median((s.planned_ns - s.began_ns) / 1e9 for s in flat),
            "trip": statistics.median((s.returned_ns - s.planned_ns) / 1e9 for s in flat),
            "compute": statistics.median(s.compute_s for s in flat),
            "queue": statistics.median(s.queue_s for s in flat),
            "combine": statistics.median((s.ended_ns - s.returned_ns) / 1e9 for s in flat),
        },
        "emulator": stats.summary() if stats is not None else None,
    }
