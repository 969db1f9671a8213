"""One MoE layer's dispatch: what it costs in bytes and time, beside bare stars of the same bytes in the same run.

The layer is real: peers compute random experts of the shape asked for. Ids are drawn at random, evenly or by Zipf's law.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.backbone.engine import EngineConfig
from swarm.bench.synthetic import SyntheticModel
from swarm.bench.testbed import PathOptions, Testbed, open_testbed
from swarm.bench.transport import measure_star
from swarm.wire import messages as m
from swarm.wire.rows import Wire

N_WARM_UP = 20
ECHO_TIMEOUT_S = 10.0
N_STAR_ROUNDS = 100
N_STAR_REPETITIONS = 5
HEAD_DIM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """What to measure.

    Attributes:
        skew: exponent of Zipf's law over the experts; 0 draws them evenly.
        n_tokens: rows of one dispatch.
    """

    d_model: int = 2048
    n_expert: int = 64
    n_expert_used: int = 8
    n_ff_exp: int = 256
    n_tokens: int = 1
    skew: float = 0.0
    n_peers: int = 3
    wire: Wire
    paths: PathOptions = field(default_factory=PathOptions)
    n_dispatches: int = 200
    seed: int = 0

    @property
    def model(self) -> SyntheticModel:
        """One MoE layer of that shape."""
        return SyntheticModel(
            n_layers=1,
            n_embd=self.d_model,
            n_expert=self.n_expert,
            n_expert_used=self.n_expert_used,
            n_ff_exp=self.n_ff_exp,
            n_head=self.d_model // HEAD_DIM,
            n_head_kv=1,
            name=f"layer-d{self.d_model}-e{self.n_expert}-k{self.n_expert_used}-ff{self.n_ff_exp}",
        )


def draw_choices(
    rng: np.random.Generator, options: DispatchOptions
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return one dispatch's ids [T, K], distinct in each row, and weights [T, K] that add up to one."""
    shape = (options.n_tokens, options.n_expert)
    # The K largest of log p + Gumbel noise are K draws without replacement (Efraimidis and Spirakis; Vieira 2014).
    log_p = -options.skew * np.log(np.arange(1, options.n_expert + 1))
    keys = log_p + rng.gumbel(size=shape)  # [T, E]
    ids = np.argsort(-keys, axis=1)[:, : options.n_expert_used].astype(np.int32)  # [T, K]
    weights = rng.random(ids.shape, dtype=np.float32) + np.float32(0.1)
    return ids, weights / weights.sum(axis=1, keepdims=True)


async def measure_dispatch(
    options: DispatchOptions, model_file: Path, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return the figures of `swarm bench dispatch`; seconds and bytes of UDP payload."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        opening = open_testbed(
            Path(folder),
            model_file,
            n_peers=options.n_peers,
            wire=options.wire,
            paths=options.paths,
            engine=EngineConfig(n_ctx=64, n_batch=32, n_ubatch=32),
        )
        async with opening as testbed:
            figures = await _measure(testbed, options, progress)
    # The stars' members are processes of their own, started once the peers have gone: two cores are not more.
    star = await measure_star(
        n_members=round(figures["destinations_per_token"]),
        size_out=round(figures["payload_out"]),
        size_back=round(figures["payload_back"]),
        n_rounds=N_STAR_ROUNDS,
        n_repetitions=N_STAR_REPETITIONS,
    )
    beyond_compute_s = figures["p50_s"] - figures["compute_s"]
    return figures | {
        "quic_star_p50_s": star.quic_star_p50_s,
        "udp_star_p50_s": star.udp_star_p50_s,
        "beyond_compute_p50_s": beyond_compute_s,
        "beyond_compute_over_quic_star": beyond_compute_s / star.quic_star_p50_s if options.paths.is_direct else None,
        "transport": star.library,
    }


async def _measure(testbed: Testbed, options: DispatchOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    dispatcher, endpoint = testbed.running.dispatcher, testbed.running.endpoint
    rng = np.random.default_rng(options.seed)
    seconds: list[float] = []
    echoes: list[float] = []
    sent = received = repaired = payload_out = payload_back = 0
    for i in range(N_WARM_UP + options.n_dispatches):
        x = rng.standard_normal((options.n_tokens, options.d_model), dtype=np.float32)
        ids, weights = draw_choices(rng, options)
        if i == N_WARM_UP:
            testbed.spans.clear()
            sent, received, repaired = endpoint.bytes_sent, endpoint.bytes_received, endpoint.repair_bytes
            payload_out, payload_back = dispatcher.stats.bytes_out, dispatcher.stats.bytes_back
        started = time.perf_counter()
        await dispatcher.dispatch(0, x, ids, weights)
        if i >= N_WARM_UP:
            seconds.append(time.perf_counter() - started)
            progress(i - N_WARM_UP + 1, options.n_dispatches)
    sent, received = endpoint.bytes_sent - sent, endpoint.bytes_received - received
    repaired = endpoint.repair_bytes - repaired
    payload_out = dispatcher.stats.bytes_out - payload_out
    payload_back = dispatcher.stats.bytes_back - payload_back
    spans = list(testbed.spans)
    for _ in range(min(options.n_dispatches, 30)):
        echoes.append(await _echo(testbed))
    n_destinations = sum(span.n_destinations for span in spans)
    n_batches_tokens = n_destinations * options.n_tokens
    n_token_layers = len(seconds) * options.n_tokens
    compute_s = statistics.median(span.compute_s for span in spans)
    rtt_s = statistics.median(echoes)
    p50, p95, p99 = (float(each) for each in np.percentile(seconds, (50, 95, 99)))
    return {
        "d_model": options.d_model,
        "n_expert": options.n_expert,
        "n_expert_used": options.n_expert_used,
        "n_tokens": options.n_tokens,
        "n_peers": options.n_peers,
        "wire": str(options.wire),
        "n_dispatches": len(seconds),
        "bytes_out_per_token_layer": sent / n_batches_tokens,
        "bytes_back_per_token_layer": received / n_batches_tokens,
        "bytes_all_destinations": (sent + received) / n_token_layers,
        "payload_out": payload_out / n_batches_tokens,
        "payload_back": payload_back / n_batches_tokens,
        "destinations_per_token": n_destinations / len(spans),
        "repair_bytes": repaired / n_token_layers,
        "rtt_s": rtt_s,
        "compute_s": compute_s,
        "p50_s": p50,
        "p95_s": p95,
        "p99_s": p99,
        "overhead_p50_s": p50 - rtt_s - compute_s,
        "stages_s": {
            "plan": statistics.median((s.planned_ns - s.began_ns) / 1e9 for s in spans),
            "trip": statistics.median((s.returned_ns - s.planned_ns) / 1e9 for s in spans),
            "queue": statistics.median(s.queue_s for s in spans),
            "combine": statistics.median((s.ended_ns - s.returned_ns) / 1e9 for s in spans),
        },
    }


async def _echo(testbed: Testbed) -> float:
    """Return the slowest of small questions, one to each peer in turn: the path, and a little software."""
    holders = testbed.running.holders
    slowest = 0.0
    for node in holders.placement.destinations:
        asked = time.perf_counter()
        connection = await holders.connection(node)
        await connection.request(m.GetStatus(), timeout_s=ECHO_TIMEOUT_S)
        slowest = max(slowest, time.perf_counter() - asked)
    return slowest
