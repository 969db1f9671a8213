"""One MoE layer's dispatch: what it costs in bytes and time, beside bare stars of the same bytes in the same run.

The layer is real: peers compute random experts of the shape asked for. Ids are drawn at random, evenly or by Zipf's law.

With `compares_serial` each dispatch is followed by the same one in a serial chain, peer after peer: what the star replaces.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.backbone.engine import EngineConfig
from swarm.bench.routing import draw_weights
from swarm.bench.synthetic import SyntheticModel
from swarm.bench.testbed import Link, PathOptions, Testbed, open_testbed, require_direct
from swarm.bench.transport import measure_star
from swarm.dispatch.dispatcher import Dispatcher
from swarm.errors import UserError
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
        compares_serial: ask the peers one after the other too; of one token, and only of tokens that need every peer.
        link: `tls` opens TLS links beside QUIC, `auto` only where the paths are short and clean.
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
    compares_serial: bool = False
    link: Link = "quic"

    def __post_init__(self) -> None:
        require_direct(self.link, self.paths)
        if self.compares_serial and not (self.n_tokens == 1 and 1 <= self.n_peers <= self.n_expert_used):
            raise UserError(
                f"a serial chain is measured with one token that needs every peer: got {self.n_tokens} tokens, "
                f"{self.n_peers} peers and {self.n_expert_used} experts used"
            )

    @property
    def model(self) -> SyntheticModel:
        """One MoE layer of that shape."""
        return layer_model(self.d_model, self.n_expert, self.n_expert_used, self.n_ff_exp)


def layer_model(d_model: int, n_expert: int, n_expert_used: int, n_ff_exp: int) -> SyntheticModel:
    """Return a model of one MoE layer of that shape, with as little else as may be."""
    return SyntheticModel(
        n_layers=1,
        n_embd=d_model,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        n_ff_exp=n_ff_exp,
        n_head=d_model // HEAD_DIM,
        n_head_kv=1,
        name=f"layer-d{d_model}-e{n_expert}-k{n_expert_used}-ff{n_ff_exp}",
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
    return ids, draw_weights(rng, ids)


async def measure_dispatch(
    options: DispatchOptions, model_file: Path, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return the figures of `swarm bench dispatch`; seconds and bytes, by kind of path as `net/byte_counts` has them."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        opening = open_testbed(
            Path(folder),
            model_file,
            n_peers=options.n_peers,
            wire=options.wire,
            paths=options.paths,
            engine=EngineConfig(n_ctx=64, n_batch=32, n_ubatch=32),
            peer_options=() if options.link == "quic" else ("--tls-links",),
            adapt=lambda config: replace(config, tls_links=options.link != "quic"),
        )
        async with opening as testbed:
            if options.link != "quic":
                await testbed.open_links(is_forced=options.link == "tls")
            figures = await _measure(testbed, options, progress)
            return figures | await _compare(testbed, options, figures)


async def _compare(testbed: Testbed, options: DispatchOptions, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the bare stars' figures; on direct paths the layer's too, measured in turn with theirs.

    What else the machine does meets all of them alike: stars measured after the layer differed by half from run to run.
    """
    rng = np.random.default_rng(options.seed + 1)
    draws = []
    for _ in range(N_STAR_ROUNDS):
        x = rng.standard_normal((options.n_tokens, options.d_model), dtype=np.float32)
        draws.append((x, *draw_choices(rng, options)))
    turns = itertools.cycle(draws)

    async def once() -> None:
        await testbed.running.dispatcher.dispatch(0, *next(turns))

    testbed.spans.clear()
    star = await measure_star(
        n_members=round(figures["destinations_per_token"]),
        size_out=round(figures["payload_out"]),
        size_back=round(figures["payload_back"]),
        n_rounds=N_STAR_ROUNDS,
        n_repetitions=N_STAR_REPETITIONS,
        compute_s=figures["compute_mean_s"],
        beside=once if options.paths.is_direct else None,
    )
    beyond_s, over_bare, over_computing = figures["p50_s"] - figures["compute_s"], None, None
    beyond_star_s = None
    if star.beside_p50_s is not None:
        beyond_s = star.beside_p50_s - statistics.median(span.compute_s for span in testbed.spans)
        beyond_star_s = star.beside_p50_s - star.compute_star_p50_s if star.compute_star_p50_s is not None else None
        over_bare = beyond_s / star.quic_star_p50_s
        over_computing = beyond_s / star.quic_beyond_p50_s if star.quic_beyond_p50_s else None
    return {
        "quic_star_p50_s": star.quic_star_p50_s,
        "udp_star_p50_s": star.udp_star_p50_s,
        "tls_star_p50_s": star.tls_star_p50_s,
        "quic_star_beyond_compute_p50_s": star.quic_beyond_p50_s,
        "udp_star_beyond_compute_p50_s": star.udp_beyond_p50_s,
        "tls_star_beyond_compute_p50_s": star.tls_beyond_p50_s,
        "beyond_compute_p50_s": beyond_s,
        "compute_star_p50_s": star.compute_star_p50_s,
        "beyond_compute_star_p50_s": beyond_star_s,
        "beyond_compute_over_quic_star": over_bare,
        "beyond_compute_over_computing_quic_star": over_computing,
        "transport": star.library,
        "link": options.link,
        "n_tls_links": links.n_open if (links := testbed.running.dispatcher.links) is not None else 0,
    }


async def _measure(testbed: Testbed, options: DispatchOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    dispatcher, endpoint = testbed.running.dispatcher, testbed.running.endpoint
    before = endpoint.counts.now()
    rng = np.random.default_rng(options.seed)
    seconds: list[float] = []
    serial: list[float] = []
    echoes: list[float] = []
    payload_out = payload_back = 0
    own_cpu_s = peers_cpu_s = 0.0
    chain = _SerialChain(testbed)
    for i in range(N_WARM_UP + options.n_dispatches):
        x = rng.standard_normal((options.n_tokens, options.d_model), dtype=np.float32)
        ids, weights = draw_choices(rng, options)
        while options.compares_serial and chain.n_destinations(ids) < options.n_peers:
            ids, weights = draw_choices(rng, options)
        if i == N_WARM_UP:
            dispatcher.catch_up()
            testbed.spans.clear()
            before = endpoint.counts.now()
            payload_out, payload_back = dispatcher.stats.bytes_out, dispatcher.stats.bytes_back
            own_cpu_s, peers_cpu_s = time.process_time(), _peers_cpu_s(testbed)
        started = time.perf_counter()
        await dispatcher.dispatch(0, x, ids, weights)
        if i >= N_WARM_UP:
            seconds.append(time.perf_counter() - started)
            progress(i - N_WARM_UP + 1, options.n_dispatches)
            if options.compares_serial:
                before_chain = endpoint.counts.now()
                serial.append(await chain.ask(x, ids, weights))
                before += endpoint.counts.now() - before_chain  # the chain's bytes are not the star's
    moved = endpoint.counts.now() - before
    sent, received = moved.total.sent, moved.total.received
    payload_out = dispatcher.stats.bytes_out - payload_out
    payload_back = dispatcher.stats.bytes_back - payload_back
    own_cpu_s, peers_cpu_s = time.process_time() - own_cpu_s, _peers_cpu_s(testbed) - peers_cpu_s
    dispatcher.catch_up()
    spans = list(testbed.spans)
    for _ in range(min(options.n_dispatches, 30)):
        echoes.append(await _echo(testbed))
    n_destinations = sum(span.n_destinations for span in spans)
    n_batches_tokens = n_destinations * options.n_tokens
    n_token_layers = len(seconds) * options.n_tokens
    compute_s = statistics.median(span.compute_s for span in spans)
    rtt_s = statistics.median(echoes)
    p50, p95, p99 = (float(each) for each in np.percentile(seconds, (50, 95, 99)))
    figures: dict[str, Any] = {
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
        "bytes_by_path": moved.shares(n_batches_tokens),
        "repair_bytes": moved.total.repair / n_token_layers,
        "rtt_s": rtt_s,
        "compute_s": compute_s,
        "compute_mean_s": await _compute_mean_s(testbed),
        "p50_s": p50,
        "p95_s": p95,
        "p99_s": p99,
        "overhead_p50_s": p50 - rtt_s - compute_s,
        "cpu_per_dispatch_s": own_cpu_s / len(seconds),
        "peers_cpu_per_dispatch_s": peers_cpu_s / len(seconds) if peers_cpu_s else None,
        "stages_s": {
            "plan": statistics.median((s.planned_ns - s.began_ns) / 1e9 for s in spans),
            "trip": statistics.median((s.returned_ns - s.planned_ns) / 1e9 for s in spans),
            "queue": statistics.median(s.queue_s for s in spans),
            "combine": statistics.median((s.ended_ns - s.returned_ns) / 1e9 for s in spans),
        },
    }
    if serial:
        serial_p50 = statistics.median(serial)
        figures |= {
            "slowest_rtt_s": rtt_s,
            "star_over_slowest": p50 / rtt_s,
            "serial_p50_s": serial_p50,
            "serial_over_star": statistics.median(one / star for one, star in zip(serial, seconds, strict=True)),
        }
    return figures


def _peers_cpu_s(testbed: Testbed) -> float:
    """Return the processor time that all peers have taken so far, by the scheduler's own count; 0 where it has none."""
    n_ns = 0
    for peer in testbed.swarm.peers:
        for task in Path(f"/proc/{peer.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                n_ns += int(task.read_text().split()[0])
    return n_ns / 1e9


class _SerialChain:
    """Asks the peers of a token one after the other; its dispatches count in nothing of the star's."""

    def __init__(self, testbed: Testbed) -> None:
        running = testbed.running
        self._dispatcher = Dispatcher(
            running.manifest.model_id, running.manifest.spec, running.holders, running.dispatcher.wire
        )
        self._owner_of = running.holders.placement.owner_of(0)  # [E]

    def n_destinations(self, ids: npt.NDArray[np.int32]) -> int:
        """Return how many peers these choices need."""
        return len(np.unique(self._owner_of[ids]))

    async def ask(
        self, x: npt.NDArray[np.float32], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]
    ) -> float:
        """Return the seconds of one token's layer, x [1, D], the choice [1, K], peer after peer."""
        owners = self._owner_of[ids[0]]  # [K]
        started = time.perf_counter()
        for owner in np.unique(owners):
            chosen = owners == owner
            await self._dispatcher.dispatch(0, x, ids[:, chosen], weights[:, chosen])
        return time.perf_counter() - started


async def _compute_mean_s(testbed: Testbed) -> float:
    """Return the mean time that a peer computed for a dispatch, as the peers say; `compute_s` is the slowest's of each."""
    holders = testbed.running.holders
    n_dispatches, seconds = 0, 0.0
    for node in holders.placement.destinations:
        connection = await holders.connection(node)
        answer = await connection.request(m.GetStatus(), timeout_s=ECHO_TIMEOUT_S)
        assert isinstance(answer, m.Status)  # the session checks an answer's type
        status = json.loads(answer.data)
        n_dispatches += status["n_dispatches"]
        seconds += status["compute_s"]
    return seconds / n_dispatches


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
