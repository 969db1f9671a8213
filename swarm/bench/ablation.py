"""Each lever of the product switched off alone: what it saves of round trips and of milliseconds a token.

Everything runs on one swarm with exact kernels, so that the form `exact` can be compared too. The levers of a single text are
measured by writing the same stretches of text (greedy, in their true context) on a backbone for each variant, in turn; those of
several requests, and of a prompt that comes again, by answering requests.

    partial sums   raw rows of every expert come back instead of weighted sums (form `exact`)
    q8 rows        rows travel as f32
    star           peers are asked one after the other
    overlap        the shared expert waits for the answer (of a model that has one)
    drafts         one token a step
    local experts  no experts in the backbone; drafts by prompt lookup alone
    batching       four requests one after the other instead of at once
    lanes          four requests in one lane instead of two
    prefix cache   a prompt that was computed before is computed again
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import EngineConfig
from swarm.backbone.local_keeper import LocalBudget
from swarm.backbone.requests import GenerationRequest, SamplingParams
from swarm.bench.draft_texts import Piece, novel_pieces
from swarm.bench.popularity import keep_popularity
from swarm.bench.speculation import read_tokens
from swarm.bench.testbed import PathOptions, Testbed, open_testbed
from swarm.dispatch.layer_counts import DispatchStats
from swarm.identity import Identity
from swarm.wire.rows import parse_wire

LOCAL_SHARE = 0.5
N_DRAFT = 8
N_REQUESTS = 4
N_REPEATS = 2  # of a prompt that comes again
OPEN_TIMEOUT_S = 60.0
WIRE = "q8/f16"

Progress = Callable[[int, int], None]
Configure = Callable[[BackboneConfig], BackboneConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationOptions:
    """What to measure.

    Attributes:
        source: text that the model was not trained on.
        n_pieces: stretches of it that are written by each variant.
    """

    model: Path
    source: Path
    paths: PathOptions
    n_peers: int = 3
    n_pieces: int = 3
    n_tokens: int = 24


@dataclass(slots=True)
class _Cost:
    """What tokens took, one entry for each thing that was written."""

    token_s: list[float] = field(default_factory=list)
    trips: list[float] = field(default_factory=list)


async def measure_ablation(options: AblationOptions, progress: Progress) -> dict[str, Any]:
    """Return the figures of `swarm bench ablation`; raises UserError where the text is too short."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        opening = open_testbed(
            folder,
            options.model,
            n_peers=options.n_peers,
            wire=parse_wire(WIRE),
            paths=options.paths,
            engine=EngineConfig(n_ctx=512, exact_kernels=True),
            peer_options=("--exact-kernels",),
        )
        testbed = await stack.enter_async_context(opening)
        text = read_tokens(options.source, testbed.running.engine)
        pieces = novel_pieces(text[len(text) // 2 :], options.n_pieces, n_tokens=options.n_tokens)
        ablation = _Ablation(stack, testbed, options, text[: len(text) // 2])
        found = await ablation.write(pieces, progress)
        served = await ablation.serve(pieces[0])
        return {
            "model": options.model.name,
            "n_peers": options.n_peers,
            "rtt_s": options.paths.rtt_s(0),
            "n_pieces": options.n_pieces,
            "n_tokens": options.n_tokens,
            "wire": WIRE,
            "local_share": LOCAL_SHARE,
            "token_s": statistics.fmean(found["all"].token_s),
            "trips_per_token": statistics.fmean(found["all"].trips),
            "levers": sorted(
                [_saved(name, cost, found["all"]) for name, cost in found.items() if name != "all"] + served,
                key=lambda lever: -lever["saved_s_per_token"],
            ),
        }


def _saved(name: str, off: _Cost, on: _Cost) -> dict[str, Any]:
    ratios = [without / with_ for without, with_ in zip(off.token_s, on.token_s, strict=True)]
    return {
        "lever": name,
        "saved_s_per_token": statistics.fmean(off.token_s) - statistics.fmean(on.token_s),
        "saved_trips_per_token": statistics.fmean(off.trips) - statistics.fmean(on.trips),
        "slower_without": statistics.median(ratios),
        "slower_without_all": ratios,
    }


class _Ablation:
    def __init__(
        self, stack: contextlib.AsyncExitStack, testbed: Testbed, options: AblationOptions, learned: list[int]
    ) -> None:
        assert testbed.config is not None
        self._stack = stack
        self._options = options
        self._learned = learned
        spec = testbed.running.manifest.spec
        self._all_bytes = spec.n_expert * sum(map(spec.block_size_bytes, spec.moe_layers))
        self._config = replace(
            testbed.config, local_experts=LocalBudget(int(self._all_bytes * LOCAL_SHARE)), n_draft=N_DRAFT
        )
        self._plain = testbed.running

    async def _open(self, configure: Configure = lambda config: config) -> RunningBackbone:
        """Return another backbone, with its local experts loaded and held."""
        config = configure(self._config)
        running = await self._stack.enter_async_context(open_backbone(config, Identity.generate()))
        await running.holders.wait_complete(OPEN_TIMEOUT_S)
        if (keeper := running.keeper) is not None:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                while not keeper.n_changes:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            keeper.is_held = True
        return running

    async def write(self, pieces: list[Piece], progress: Progress) -> dict[str, _Cost]:
        """Return variant -> its costs; `all` has every lever."""
        engine = self._plain.engine
        for at in range(0, 1000, 250):  # what is popular
            part = self._learned[at : at + 250]
            await engine.call(engine.context.clear)
            await engine.call(lambda part=part: engine.decode(part, 0, "all"))  # type: ignore[misc]
        keep_popularity(
            self._config, self._plain.dispatcher.popularity, self._plain.manifest.model_id
        )  # all the others begin with it
        variants = {
            "all": await self._open(),
            "partial sums": await self._open(lambda config: replace(config, wire=parse_wire("exact"))),
            "q8 rows": await self._open(lambda config: replace(config, wire=parse_wire("f32"))),
            "star": await self._open(),
            "drafts": await self._open(lambda config: replace(config, n_draft=0)),
            "local experts": await self._open(lambda config: replace(config, local_experts=None)),
        }
        variants["star"].dispatcher.asks_in_turn = True
        if self._plain.manifest.spec.n_ff_shared:
            variants["overlap"] = await self._open(
                lambda config: replace(config, engine=replace(config.engine, overlaps=False))
            )
        costs = {name: _Cost() for name in variants}
        for running in variants.values():
            await self._write(running, pieces[0])  # warm: paths, graphs, what drafts cost
        for number, piece in enumerate(pieces):
            for place in range(len(variants)):
                progress(number * len(variants) + place, len(pieces) * len(variants))
                name = list(variants)[(number + place) % len(variants)]
                token_s, trips = await self._write(variants[name], piece)
                costs[name].token_s.append(token_s)
                costs[name].trips.append(trips)
        progress(1, 1)
        return costs

    async def _write(self, running: RunningBackbone, piece: Piece) -> tuple[float, float]:
        """Return seconds and round trips a token."""
        engine = running.engine
        continuation = Continuation(
            engine,
            lambda row: int(engine.context.logits(row).argmax()),
            n_batch=512,
            n_draft=N_DRAFT if running.drafting is not None else 0,
            drafter=running.drafting(engine, 0) if running.drafting is not None else None,
        )
        await continuation.start(list(piece.prompt))
        await continuation.first()
        running.dispatcher.stats = stats = DispatchStats()
        n_tokens, began_at = 0, time.perf_counter()
        while n_tokens < piece.n_tokens - 1:
            n_tokens += len(await continuation.step(piece.n_tokens - 1 - n_tokens))
        return (time.perf_counter() - began_at) / n_tokens, stats.n_round_trips / n_tokens

    async def serve(self, piece: Piece) -> list[dict[str, Any]]:
        """Return what batching, lanes and the prefix cache save."""
        two_lanes = await self._open(lambda config: replace(config, n_slots=N_REQUESTS, n_lanes=2))
        one_lane = await self._open(lambda config: replace(config, n_slots=N_REQUESTS))
        alone = await self._open(lambda config: replace(config, n_slots=1))
        uncached = await self._open(
            lambda config: replace(config, n_slots=1, serving=replace(config.serving, cache_bytes=0))
        )
        costs = {name: _Cost() for name in ("two lanes", "one lane", "alone", "cached", "uncached")}
        for _ in range(N_REPEATS):
            for name, running in (("two lanes", two_lanes), ("one lane", one_lane), ("alone", alone)):
                await self._answer(running, piece, costs[name], N_REQUESTS, shifts=True)
            for name, running in (("cached", alone), ("uncached", uncached)):
                await self._answer(running, piece, _Cost(), 1)
                await self._answer(running, replace(piece, prompt=piece.prompt[::-1]), _Cost(), 1)  # takes the slot
                await self._answer(running, piece, costs[name], 1)
        return [
            _saved("batching", costs["alone"], costs["one lane"]),
            _saved("lanes", costs["one lane"], costs["two lanes"]),
            _saved("prefix cache", costs["uncached"], costs["cached"]),
        ]

    async def _answer(
        self, running: RunningBackbone, piece: Piece, cost: _Cost, n_requests: int, *, shifts: bool = False
    ) -> None:
        """Answer requests at once; `shifts`: each with a prompt of its own."""
        running.dispatcher.stats = stats = DispatchStats()
        began_at = time.perf_counter()

        async def one(number: int) -> int:
            prompt = (*piece.prompt[number:], *piece.prompt[:number]) if shifts else piece.prompt
            request = GenerationRequest(
                prompt=prompt, sampling=SamplingParams(temperature=0), max_tokens=piece.n_tokens
            )
            n_tokens = 0
            async for delta in running.backbone.generate(request):
                n_tokens = delta.n_completion_tokens
            return n_tokens

        n_tokens = sum(await asyncio.gather(*map(one, range(n_requests))))
        cost.token_s.append((time.perf_counter() - began_at) / n_tokens)
        cost.trips.append(stats.n_round_trips / n_tokens)
