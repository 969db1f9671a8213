"""Decode over emulated paths: tokens per second, how close to the bound of round trips, next to stock llama.cpp.

The bound is 1 / the sum over layers of the slowest path that was really drawn, from the emulator's own stamps: zero compute,
zero software. What is measured is decoding; the prompt's prefill is not.

With `compares_overlap` each repetition decodes the same tokens on a second backbone too, which waits for each layer's answer
before it computes the shared expert.

With drafts a step may add several tokens. Each repetition then decodes the same tokens without drafts too, so that the gain is
a ratio within one run; kernels may sum in another order with more rows, so the first token that differs is told.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarm.backbone.assembly import RunningBackbone
from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import EngineConfig
from swarm.backbone.stock import StockModel
from swarm.bench.hand_overs import HandOverWatch
from swarm.bench.testbed import Link, PathOptions, Testbed, drawn_round_trips_s, open_testbed, require_direct
from swarm.errors import UserError
from swarm.net.byte_counts import Amounts
from swarm.speculation.accept import DraftStats
from swarm.wire.rows import Wire

PROMPT_SEED = 1
N_PROMPT = 16
N_WARM_UP = 3  # tokens of each repetition that are not counted
N_BATCH = EngineConfig().n_batch
MAX_CHARACTERS_PER_TOKEN = 32  # a guess, far above what text takes: a large file need not be tokenised whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """What to measure.

    Attributes:
        n_draft: most tokens that a step drafts; 0: one token a step.
        text: a file whose first tokens are the prompt; None: random tokens.
        compares_overlap: decode without overlap too.
        link: `tls` opens TLS links beside QUIC, `auto` only where the paths are short and clean.
    """

    model: Path
    n_peers: int
    wire: Wire
    paths: PathOptions
    n_tokens: int = 32
    n_repetitions: int = 5
    n_draft: int = 0
    n_prompt: int = N_PROMPT
    text: Path | None = None
    compares_overlap: bool = False
    link: Link = "quic"

    def __post_init__(self) -> None:
        require_direct(self.link, self.paths)


@dataclass(slots=True)
class _Repetition:
    seconds: float
    first_span: int  # its spans among the testbed's
    end_span: int
    moved: Amounts
    tokens: list[int]
    drafts: DraftStats


async def measure_decode(options: DecodeOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench decode`; medians over interleaved repetitions of the swarm and of stock."""
    engine = EngineConfig(n_ctx=options.n_prompt + N_WARM_UP + options.n_tokens + 1, n_threads=1)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        opening = open_testbed(
            Path(folder),
            options.model,
            n_peers=options.n_peers,
            wire=options.wire,
            paths=options.paths,
            engine=engine,
            adapt=lambda config: replace(config, tls_links=options.link != "quic"),
        )
        async with opening as testbed, contextlib.AsyncExitStack() as stack:
            if options.link != "quic":
                await testbed.open_links(is_forced=options.link == "tls")
            prompt = _prompt(testbed, options)
            running, waiting = testbed.running, None
            if options.compares_overlap:
                waiting = await stack.enter_async_context(testbed.add_backbone(replace(engine, overlaps=False)))
            watch = HandOverWatch(running.engine)
            with StockModel(options.model, engine) as stock:
                waited: list[_Repetition] = []
                repetitions: list[_Repetition] = []
                undrafted: list[_Repetition] = []
                stock_speeds: list[float] = []
                for done in range(options.n_repetitions):
                    progress(done, options.n_repetitions)
                    if waiting is not None and done % 2:  # whoever is first in turn
                        waited.append(await _decode(testbed, waiting, prompt, options.n_tokens, options.n_draft))
                    repetitions.append(
                        await _decode(testbed, running, prompt, options.n_tokens, options.n_draft, watch)
                    )
                    if waiting is not None and not done % 2:
                        waited.append(await _decode(testbed, waiting, prompt, options.n_tokens, options.n_draft))
                    if options.n_draft:
                        undrafted.append(await _decode(testbed, running, prompt, options.n_tokens, 0))
                    stock_speeds.append(stock.tokens_per_s(prompt, options.n_tokens))
                progress(options.n_repetitions, options.n_repetitions)
                figures = await _figures(testbed, options, repetitions, stock_speeds)
                figures["bridge"] = watch.figures()
                return figures | _gain(repetitions, undrafted) | _overlap(repetitions, waited)


def _prompt(testbed: Testbed, options: DecodeOptions) -> list[int]:
    model = testbed.running.engine.model
    if options.text is None:
        rng = np.random.default_rng(PROMPT_SEED)
        return [int(token) for token in rng.integers(1, model.n_vocab, options.n_prompt)]
    text = options.text.read_text(encoding="utf-8", errors="replace")[: options.n_prompt * MAX_CHARACTERS_PER_TOKEN]
    tokens = model.tokenize(text, add_special=True, parse_special=False)
    if len(tokens) < options.n_prompt:
        raise UserError(f"{options.text} is too short: got {len(tokens)} tokens, expected {options.n_prompt}")
    return tokens[: options.n_prompt]


async def _decode(
    testbed: Testbed,
    running: RunningBackbone,
    prompt: list[int],
    n_tokens: int,
    n_draft: int,
    watch: HandOverWatch | None = None,
) -> _Repetition:
    """Decode greedily, not stopping at an end of generation, so that every repetition has as many tokens."""
    engine, endpoint = running.engine, running.endpoint
    continuation = Continuation(
        engine,
        lambda row: int(engine.context.logits(row).argmax()),
        n_batch=N_BATCH,
        n_draft=n_draft,
    )
    await continuation.start(prompt)
    await continuation.first()
    for _ in range(N_WARM_UP):
        await continuation.step(1)
    continuation.stats = drafts = DraftStats()
    first_span, tokens = len(testbed.spans), list[int]()
    before = endpoint.counts.now()
    started = time.perf_counter()
    with watch.counting() if watch is not None else contextlib.nullcontext():
        while len(tokens) < n_tokens:
            tokens += await continuation.step(n_tokens - len(tokens))
    return _Repetition(
        seconds=time.perf_counter() - started,
        first_span=first_span,
        end_span=len(testbed.spans),
        moved=endpoint.counts.now() - before,
        tokens=tokens,
        drafts=drafts,
    )


def _gain(repetitions: list[_Repetition], undrafted: list[_Repetition]) -> dict[str, Any]:
    """Return what drafts gained; empty where none were made."""
    if not undrafted:
        return {}
    pairs = list(zip(repetitions, undrafted, strict=True))
    differ = [i for one, other in pairs for i in range(len(one.tokens)) if one.tokens[i] != other.tokens[i]]
    n_drafted = sum(repetition.drafts.n_drafted for repetition in repetitions)
    return {
        "n_drafted_per_step": n_drafted / sum(repetition.drafts.n_steps for repetition in repetitions),
        "undrafted_tokens_per_s": statistics.median(len(each.tokens) / each.seconds for each in undrafted),
        "draft_speedup": statistics.median(other.seconds / one.seconds for one, other in pairs),
        "first_difference": min(differ, default=None),
    }


def _overlap(repetitions: list[_Repetition], waited: list[_Repetition]) -> dict[str, Any]:
    """Return what overlap gained; empty where nothing was decoded without it."""
    if not waited:
        return {}
    pairs = list(zip(repetitions, waited, strict=True))
    return {
        "overlap_s_per_token": statistics.median(each.seconds / len(each.tokens) for each in repetitions),
        "waiting_s_per_token": statistics.median(each.seconds / len(each.tokens) for each in waited),
        "overlap_speedup": statistics.median(other.seconds / one.seconds for one, other in pairs),
        "overlap_speedups": [other.seconds / one.seconds for one, other in pairs],
    }


async def _figures(
    testbed: Testbed, options: DecodeOptions, repetitions: list[_Repetition], stock_speeds: list[float]
) -> dict[str, Any]:
    n_layers = len(testbed.running.manifest.spec.moe_layers)
    n_tokens = options.n_tokens
    stats = await testbed.path_stats()
    bounds: list[float] = []
    all_spans = []
    for repetition in repetitions:
        spans = testbed.spans[repetition.first_span : repetition.end_span]
        all_spans.append(spans)
        if stats is not None:
            bounds.append(sum(drawn_round_trips_s(spans, stats, testbed.path_names)))
    tokens_per_s = statistics.median(n_tokens / repetition.seconds for repetition in repetitions)
    stock = statistics.median(stock_speeds)
    shares = [bound / repetition.seconds for bound, repetition in zip(bounds, repetitions, strict=False) if bound]
    flat = [span for spans in all_spans for span in spans]
    n_token_layers = n_tokens * n_layers * len(repetitions)
    moved = functools.reduce(operator.add, (repetition.moved for repetition in repetitions))
    return {
        "model": options.model.name,
        "n_peers": options.n_peers,
        "wire": str(options.wire),
        "n_tokens": n_tokens,
        "n_repetitions": len(repetitions),
        "n_prompt": options.n_prompt,
        "text": options.text.name if options.text is not None else None,
        "n_draft": options.n_draft,
        "layers": n_layers,
        "rtt_s": options.paths.rtt_s(0),
        "tokens_per_s": tokens_per_s,
        "step_s": statistics.median(each.seconds / each.drafts.n_steps for each in repetitions),
        "rtt_bound_tokens_per_s": statistics.median(n_tokens / bound for bound in bounds) if bounds else None,
        "share_of_bound": statistics.median(shares) if shares else None,
        "shares_of_bound": shares,
        "round_trips_per_token": len(flat) / (n_tokens * len(repetitions)),
        "accept_length": n_tokens * len(repetitions) / sum(each.drafts.n_steps for each in repetitions),
        "shared_hidden_share": testbed.running.engine.overlap.hidden_share,
        "stock_tokens_per_s": stock,
        "share_of_stock": tokens_per_s / stock,
        "destinations_per_token": statistics.fmean(span.n_destinations for span in flat),
        "bytes_out_per_token_layer": moved.total.sent / n_token_layers,
        "bytes_back_per_token_layer": moved.total.received / n_token_layers,
        "bytes_by_path": moved.shares(n_token_layers),
        "stages_s": {
            "plan": statistics.median((s.planned_ns - s.began_ns) / 1e9 for s in flat),
            "trip": statistics.median((s.returned_ns - s.planned_ns) / 1e9 for s in flat),
            "compute": statistics.median(s.compute_s for s in flat),
            "queue": statistics.median(s.queue_s for s in flat),
            "combine": statistics.median((s.ended_ns - s.returned_ns) / 1e9 for s in flat),
        },
        "emulator": stats.summary() if stats is not None else None,
    }
