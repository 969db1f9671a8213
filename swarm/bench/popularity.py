"""What popular experts are worth under skewed routing: kept at the backbone, or held by more peers.

Three ways of serving one model decode the same tokens in turn:

    none       every expert on one peer: contiguous slices
    local      the same peers; the backbone keeps the most popular experts in its memory
    replicas   the same slices and some peers more, each with the slice that `join --experts auto` would choose

The tokens are random and given beforehand, so that each step's routing is a draw from the model's own skew and the same in all
three; placement changes who computes, never what the router chooses. A prefill of random tokens is measured besides: there
what counts is the busiest peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.engine import EngineConfig
from swarm.backbone.local_keeper import LocalBudget
from swarm.bench.testbed import PathOptions, Testbed, open_testbed
from swarm.dispatch.layer_counts import DispatchStats
from swarm.dispatch.local_choice import kept_share
from swarm.dispatch.popularity import Popularity
from swarm.emulation.processes import contiguous_shares
from swarm.errors import UserError
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import ModelSpec, read_spec
from swarm.registry.records import MAX_TTL_S, ExpertAnnouncement, RoutingHistogram, levels_of
from swarm.registry.scarcity import choose_slice, scarcity
from swarm.wire.rows import Wire
from swarm.wire.session import WIRE_VERSIONS

MODES = ("none", "local", "replicas")
N_LEARN = 1024  # tokens whose routing is known before anything is placed
N_PROMPT = 16
N_WARM_UP = 2  # steps of each repetition that are not counted
LOAD_TIMEOUT_S = 60.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PopularityOptions:
    """What to measure.

    Attributes:
        n_local: experts a layer that fit into the backbone's memory, on average over the layers.
        n_extra: peers more for the replicas, each as large as the others.
        n_tokens: decoded in each repetition; n_prefill: of its prompt.
    """

    model: Path
    n_peers: int = 4
    n_local: int = 32
    n_extra: int = 2
    wire: Wire
    paths: PathOptions
    n_tokens: int = 24
    n_prefill: int = 128
    n_repetitions: int = 5
    seed: int = 0


@dataclass(slots=True)
class _Repetition:
    """What one mode did of one repetition."""

    decode_s: float
    prefill_s: float
    decode: DispatchStats
    prefill: DispatchStats


async def measure_popularity(options: PopularityOptions, progress: Progress) -> dict[str, Any]:
    """Return the figures of `swarm bench popularity`.

    Raises:
        UserError: more peers or local experts than the model has experts.
    """
    with GgufFile(options.model) as file:
        spec = read_spec(file)
    if max(options.n_local, options.n_peers) > spec.n_expert:
        raise UserError(f"the model has {spec.n_expert} experts a layer: give fewer --local or --peers")
    n_ctx = max(options.n_prefill, N_PROMPT + N_WARM_UP + options.n_tokens) + 1
    engine = EngineConfig(n_ctx=max(n_ctx, 512), n_threads=1)
    async with contextlib.AsyncExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-"))) for _ in range(2)]
        slices = [ExpertSet.of(spec.moe_layers, share) for share in contiguous_shares(spec.n_expert, options.n_peers)]
        plain = await _open(stack, folders[0], options, engine, slices)
        popularity = await _learn(plain.running, options)
        extra = replica_slices(spec, popularity, slices, options.n_extra)
        size_bytes = options.n_local * sum(map(spec.block_size_bytes, spec.moe_layers))
        local = await open_local(stack, plain, engine, popularity, size_bytes)
        more = await _open(stack, folders[1], options, engine, [*slices, *extra])
        sides = dict(zip(MODES, (plain.running, local, more.running), strict=True))
        done: dict[str, list[_Repetition]] = {mode: [] for mode in MODES}
        for turn in range(options.n_repetitions):
            for place in range(len(MODES)):
                progress(turn * len(MODES) + place, options.n_repetitions * len(MODES))
                mode = MODES[(turn + place) % len(MODES)]
                done[mode].append(await _repeat(sides[mode], options, turn))
        progress(1, 1)
        n_peers = {mode: options.n_peers + (options.n_extra if mode == "replicas" else 0) for mode in MODES}
        assert local.local is not None
        counts, layers = popularity.counts, popularity.layers
        return {
            "model": options.model.name,
            "wire": str(options.wire),
            "rtt_s": options.paths.rtt_s(0),
            "rate_bit_s": options.paths.rate_bit_s,
            "layers": len(spec.moe_layers),
            "n_expert": spec.n_expert,
            "n_expert_used": spec.n_expert_used,
            "n_tokens": options.n_tokens,
            "n_prefill": options.n_prefill,
            "n_repetitions": options.n_repetitions,
            "hottest_half_share": _hottest_share(counts, spec.n_expert // 2),
            "hottest_eighth_share": _hottest_share(counts, spec.n_expert // 8),
            "local_experts_share_of_choices": kept_share(counts, layers, local.local.experts),
            "local_bytes": local.local.n_bytes,
            "modes": [_figures(mode, done[mode], done["none"], n_peers[mode], len(layers), options) for mode in MODES],
        }


def replica_slices(
    spec: ModelSpec, popularity: Popularity, slices: list[ExpertSet], n_extra: int, *, seed: int = 0
) -> list[ExpertSet]:
    """Return what so many volunteers would choose one after another by `--experts auto`, each as large as the first slice."""
    model, layers = ModelId(bytes(32)), spec.moe_layers
    block_bytes = [spec.block_size_bytes(layer) for layer in layers]
    budget = sum(spec.block_size_bytes(layer) * len(experts) for layer, experts in slices[0].by_layer.items())
    histogram = RoutingHistogram(
        node=NodeId(bytes([1]) * 32),
        seq=1,
        ttl_s=MAX_TTL_S,
        model=model,
        n_tokens=round(popularity.n_tokens),
        window_s=1,
        loads=tuple(
            (layer, levels_of(row.tolist()))
            for layer, row in zip(layers, np.rint(popularity.counts).astype(np.int64), strict=True)
        ),
    )
    rng = np.random.default_rng(seed)
    held = list(slices)
    for _ in range(n_extra):
        announced = [_announcement(NodeId(bytes([index]) * 32), model, experts) for index, experts in enumerate(held)]
        scarce = scarcity(layers, spec.n_expert, [histogram], announced)
        held.append(choose_slice(scarce, layers, block_bytes, budget, NodeId(rng.bytes(32))))
    return held[len(slices) :]


def _announcement(node: NodeId, model: ModelId, experts: ExpertSet) -> ExpertAnnouncement:
    return ExpertAnnouncement(
        node=node,
        seq=1,
        ttl_s=MAX_TTL_S,
        model=model,
        model_name="bench",
        experts=experts,
        addresses=("127.0.0.1:1",),
        exact_kernels=False,
        wire_versions=tuple(sorted(WIRE_VERSIONS)),
    )


async def _open(
    stack: contextlib.AsyncExitStack,
    folder: Path,
    options: PopularityOptions,
    engine: EngineConfig,
    slices: list[ExpertSet],
) -> Testbed:
    opening = open_testbed(
        folder,
        options.model,
        n_peers=len(slices),
        wire=options.wire,
        paths=options.paths,
        engine=engine,
        slices=slices,
    )
    return await stack.enter_async_context(opening)


async def open_local(
    stack: contextlib.AsyncExitStack, testbed: Testbed, engine: EngineConfig, popularity: Popularity, size_bytes: int
) -> RunningBackbone:
    """Return a second backbone of the same peers that keeps `size_bytes` of experts, by what the first one has learned.

    It learns that as after a restart: from the state folder.
    """
    assert testbed.config is not None
    manifest = testbed.running.manifest
    spec = manifest.spec
    keep_popularity(testbed.config, popularity, manifest.model_id)
    config = replace(testbed.config, engine=engine, local_experts=LocalBudget(size_bytes))
    running = await stack.enter_async_context(open_backbone(config, Identity.generate()))
    await running.holders.wait_complete(LOAD_TIMEOUT_S)
    assert running.local is not None
    assert running.keeper is not None
    async with asyncio.timeout(LOAD_TIMEOUT_S):
        while running.local.n_bytes + max(map(spec.block_size_bytes, spec.moe_layers)) <= size_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    running.keeper.is_held = True
    return running


def keep_popularity(config: BackboneConfig, popularity: Popularity, model: ModelId) -> None:
    """Write what was learned where backbones of this configuration look for it when they start."""
    config.folders.state.mkdir(parents=True, exist_ok=True)
    (config.folders.state / f"popularity-{model}.json").write_bytes(popularity.to_bytes())


def _random_tokens(running: RunningBackbone, seed: tuple[int, ...], n_tokens: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(1, running.engine.model.n_vocab, n_tokens)]


async def _compute(running: RunningBackbone, tokens: list[int], first_position: int) -> None:
    await running.engine.call(lambda: running.engine.decode(tokens, first_position, "last"))


async def _learn(running: RunningBackbone, options: PopularityOptions) -> Popularity:
    """Return the routing of random tokens, other ones than those that are measured."""
    tokens = _random_tokens(running, (options.seed, 0), N_LEARN)
    n_batch = min(running.engine.context.n_ctx, running.engine.context.n_batch)
    for at in range(0, len(tokens), n_batch):
        await running.engine.call(running.engine.context.clear)
        await _compute(running, tokens[at : at + n_batch], 0)
    return running.dispatcher.popularity


async def _repeat(running: RunningBackbone, options: PopularityOptions, turn: int) -> _Repetition:
    engine, dispatcher = running.engine, running.dispatcher
    prompt = _random_tokens(running, (options.seed, 1, turn), options.n_prefill)
    dispatcher.stats = prefill = DispatchStats()
    await engine.call(engine.context.clear)
    started = time.perf_counter()
    await _compute(running, prompt, 0)
    prefill_s = time.perf_counter() - started
    await engine.call(engine.context.clear)
    tokens = _random_tokens(running, (options.seed, 2, turn), N_PROMPT + N_WARM_UP + options.n_tokens)
    await _compute(running, tokens[:N_PROMPT], 0)
    for position in range(N_PROMPT, len(tokens)):
        if position == N_PROMPT + N_WARM_UP:
            dispatcher.stats = DispatchStats()
            started = time.perf_counter()
        await _compute(running, [tokens[position]], position)
    return _Repetition(time.perf_counter() - started, prefill_s, dispatcher.stats, prefill)


def _figures(
    mode: str,
    done: list[_Repetition],
    none: list[_Repetition],
    n_peers: int,
    n_layers: int,
    options: PopularityOptions,
) -> dict[str, Any]:
    decode = [each.decode for each in done]
    n_rows, n_rows_none = (sum(each.decode.n_rows_sent for each in of) for of in (done, none))
    n_trips = sum(each.n_round_trips for each in decode)
    n_skipped = sum(each.n_skipped_trips for each in decode)
    pairs = list(zip(done, none, strict=True))
    return {
        "mode": mode,
        "n_peers": n_peers,
        "tokens_per_s": statistics.median(options.n_tokens / each.decode_s for each in done),
        "speedup": statistics.median(other.decode_s / one.decode_s for one, other in pairs),
        "speedups": [other.decode_s / one.decode_s for one, other in pairs],
        "choices_kept_share": sum(each.n_local_assignments for each in decode)
        / sum(each.n_assignments for each in decode),
        "rows_kept_share": 1 - n_rows / n_rows_none,
        "rows_sent_per_token_layer": n_rows / (options.n_tokens * n_layers * len(done)),
        "skipped_trips_share": n_skipped / (n_trips + n_skipped),
        "max_over_mean_load": max_over_mean_load(decode, n_peers),
        "prefill_tokens_per_s": statistics.median(options.n_prefill / each.prefill_s for each in done),
        "prefill_speedup": statistics.median(other.prefill_s / one.prefill_s for one, other in pairs),
        "prefill_max_over_mean_load": max_over_mean_load([each.prefill for each in done], n_peers),
    }


def max_over_mean_load(stats: list[DispatchStats], n_peers: int) -> float:
    """Return the busiest peer's share of all that peers computed, over an even share; peers that got nothing count."""
    loads: dict[NodeId, int] = {}
    for each in stats:
        for node, n_pairs in each.assignments.items():
            if node.raw != bytes(32):
                loads[node] = loads.get(node, 0) + n_pairs
    return max(loads.values(), default=0) * n_peers / max(1, sum(loads.values()))


def _hottest_share(counts: npt.NDArray[np.float64], n_hottest: int) -> float:
    """Return which share of its layer's choices goes to the most chosen experts, mean over layers."""
    ordered = -np.sort(-counts, axis=1)
    return float((ordered[:, :n_hottest].sum(axis=1) / ordered.sum(axis=1)).mean())
