"""Many streams at once over emulated paths: tokens per second of all together and of one alone, and how soon a first token comes.

The streams are asked of the backbone as the gateway asks them; HTTP itself is left out. Single and many take turns in each
repetition, so that the scaling is a ratio within one run. Tokens count only while all of them stream: from the moment at which
the last stream has its first token to the end of the first.

With `n_compared` tokens, every stream's answer in the batch is compared with the one it has alone: tokens at temperature 0 are
the same, or differ first where the two best logits are a near-tie, since kernels may sum in another order with more rows.

A *cold* first token is of a prompt that nobody has seen; a *warm* one of the same prompt again, of which a slot or the prefix
cache still has all but the last token.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarm.backbone.engine import EngineConfig
from swarm.backbone.generate import Backbone, ServingConfig
from swarm.backbone.requests import GenerationRequest, SamplingParams, TokenLogprob
from swarm.bench.testbed import PathOptions, Testbed, open_testbed
from swarm.wire.rows import Wire

logger = logging.getLogger(__name__)

N_PROMPT = 16
TIE_GAP = 0.2  # of logits: the gate's figure (docs/gate.md)
N_WARM_UP = 4  # tokens of the first request, which meets cold connections


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """What to measure.

    Attributes:
        n_streams: requests at once; n_slots: that can run at once, over n_lanes.
        n_tokens: of each stream.
        n_prefix: tokens of the prompt whose first token is timed cold and warm; 0: none.
        n_compared: tokens of answers that are compared with those of each request alone; 0: none.
        is_reproducible: as `swarm serve --reproducible`; needs the wire form exact, and as many lanes as slots.
    """

    model: Path
    n_peers: int
    wire: Wire
    paths: PathOptions
    n_streams: int = 4
    n_lanes: int = 1
    n_slots: int = 4
    n_tokens: int = 24
    n_repetitions: int = 3
    n_prefix: int = 1000
    n_compared: int = 0
    n_ctx: int = 4096
    fill_wait_s: float = 0.0
    is_reproducible: bool = False


@dataclass(frozen=True, slots=True)
class _Stream:
    """When a stream's tokens came, seconds of `time.perf_counter`."""

    asked_at: float
    token_at: list[float]

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.asked_at

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_at, self.token_at[1:], strict=False)]


async def measure_gateway(options: GatewayOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench gateway`; medians over interleaved repetitions."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        opening = open_testbed(
            Path(folder),
            options.model,
            n_peers=options.n_peers,
            wire=options.wire,
            paths=options.paths,
            engine=EngineConfig(n_ctx=options.n_ctx, n_threads=1, exact_kernels=options.is_reproducible),
            peer_options=("--exact-kernels",) if options.is_reproducible else (),
            adapt=lambda config: replace(
                config,
                n_slots=options.n_slots,
                n_lanes=options.n_lanes,
                serving=ServingConfig(fill_wait_s=options.fill_wait_s, is_reproducible=options.is_reproducible),
            ),
        )
        async with opening as testbed:
            return await _measure(testbed, options, progress)


async def _measure(testbed: Testbed, options: GatewayOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    backbone, rng = testbed.running.backbone, np.random.default_rng(1)
    model = testbed.running.engine.model
    # None ends before the others: an end of generation is never drawn.
    ends = [token for token in range(model.n_vocab) if model.is_end_of_generation(token)]
    sampling = SamplingParams(temperature=0, logit_bias=tuple((token, -np.inf) for token in ends))

    def prompt(n_tokens: int) -> tuple[int, ...]:
        return tuple(rng.integers(1, model.n_vocab, n_tokens).tolist())

    def ask(tokens: tuple[int, ...], n_tokens: int) -> GenerationRequest:
        return GenerationRequest(prompt=tokens, max_tokens=n_tokens, sampling=sampling)

    await _read(backbone, ask(prompt(N_PROMPT), N_WARM_UP))
    singles: list[_Stream] = []
    many: list[list[_Stream]] = []
    colds: list[_Stream] = []
    warms: list[_Stream] = []
    for done in range(options.n_repetitions):
        progress(done, options.n_repetitions)
        singles.append(await _read(backbone, ask(prompt(N_PROMPT), options.n_tokens)))
        requests = [ask(prompt(N_PROMPT), options.n_tokens) for _ in range(options.n_streams)]
        many.append(list(await asyncio.gather(*(_read(backbone, request) for request in requests))))
        if options.n_prefix:
            long = prompt(options.n_prefix)
            colds.append(await _read(backbone, ask(long, 1)))
            warms.append(await _read(backbone, ask(long, 1)))
    progress(options.n_repetitions, options.n_repetitions)
    figures = _figures(options, backbone, singles, many, colds, warms)
    if options.n_compared:
        requests = [
            replace(ask(prompt(N_PROMPT + i), options.n_compared), n_logprobs=2) for i in range(options.n_streams)
        ]
        together = await asyncio.gather(*(_tokens(backbone, request) for request in requests))
        alone = [await _tokens(backbone, request) for request in requests]
        figures |= compared(together, alone)
    return figures


async def _read(backbone: Backbone, request: GenerationRequest) -> _Stream:
    asked_at = time.perf_counter()
    token_at: list[float] = []
    async for delta in backbone.generate(request):
        if delta.finish_reason is None:
            token_at.append(time.perf_counter())
    return _Stream(asked_at, token_at)


async def _tokens(backbone: Backbone, request: GenerationRequest) -> list[TokenLogprob]:
    return [entry async for delta in backbone.generate(request) for entry in delta.logprobs]


def compared(together: Sequence[Sequence[TokenLogprob]], alone: Sequence[Sequence[TokenLogprob]]) -> dict[str, Any]:
    """Return how many answers are the same, and of the others by how much the better token led where they differ first.

    Each difference is logged: one at a tie for information, another as a warning.
    """
    gaps = []
    for answer, (ours, reference) in enumerate(zip(together, alone, strict=True)):
        for index, (mine, other) in enumerate(zip(ours, reference, strict=True)):
            if mine.piece != other.piece:
                (_, best), (_, second) = other.likeliest
                gap = best - second
                gaps.append(gap)
                level = logging.INFO if gap <= TIE_GAP else logging.WARNING
                text = "answer %d differs from the one it has alone from token %d on, where the best logit led by %.3f"
                logger.log(level, text, answer, index, gap)
                break
    return {
        "n_compared_answers": len(alone),
        "n_compared_tokens": sum(map(len, alone)),
        "n_same_answers": len(alone) - len(gaps),
        "n_ties": sum(gap <= TIE_GAP for gap in gaps),
        "n_wrong": sum(gap > TIE_GAP for gap in gaps),
        "gaps_where_different": gaps,
    }


def together_per_s(streams: list[_Stream]) -> float:
    """Return the tokens per second of all streams while all of them stream: the sum of what each has from token to token."""
    begin = max(stream.token_at[0] for stream in streams)
    end = min(stream.token_at[-1] for stream in streams)
    total = 0.0
    for stream in streams:
        times = [at for at in stream.token_at if begin <= at <= end]
        total += (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return total


def _figures(
    options: GatewayOptions,
    backbone: Backbone,
    singles: list[_Stream],
    many: list[list[_Stream]],
    colds: list[_Stream],
    warms: list[_Stream],
) -> dict[str, Any]:
    step_s = statistics.median(gap for stream in singles for gap in stream.gaps_s)
    step_among_many_s = statistics.median(gap for streams in many for stream in streams for gap in stream.gaps_s)
    single = statistics.median(together_per_s([stream]) for stream in singles)
    aggregate = statistics.median(together_per_s(streams) for streams in many)
    stats = backbone.stats
    figures: dict[str, Any] = {
        "model": options.model.name,
        "n_peers": options.n_peers,
        "wire": str(options.wire),
        "rtt_s": options.paths.rtt_s(0),
        "n_streams": options.n_streams,
        "n_lanes": options.n_lanes,
        "n_slots": options.n_slots,
        "n_tokens": options.n_tokens,
        "n_repetitions": options.n_repetitions,
        "fill_wait_s": options.fill_wait_s,
        "is_reproducible": options.is_reproducible,
        "aggregate_tokens_per_s": aggregate,
        "single_tokens_per_s": single,
        "scaling": aggregate / single,
        "scalings": [
            together_per_s(streams) / together_per_s([one]) for one, streams in zip(singles, many, strict=True)
        ],
        "step_s": step_s,
        "step_among_many_s": step_among_many_s,
        "latency_ratio": step_among_many_s / step_s,
        "ttft_single_s": statistics.median(stream.ttft_s for stream in singles),
        "ttft_among_many_s": statistics.median(stream.ttft_s for streams in many for stream in streams),
        "requests_per_step": stats.batch.total / max(stats.batch.n, 1),
    }
    if colds:
        cold, warm = (statistics.median(stream.ttft_s for stream in streams) for streams in (colds, warms))
        figures |= {
            "n_prefix": options.n_prefix,
            "ttft_cold_s": cold,
            "ttft_warm_s": warm,
            "ttft_lower_share": 1 - warm / cold,
            "ttft_warm_steps": warm / step_s,
        }
    return figures
