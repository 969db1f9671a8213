"""What the transport costs: a star over our Endpoint beside the same star over bare QUIC and bare UDP.

The members are processes of their own on this machine. Nothing is computed: what is measured is software;
`bench/latency` measures paths.
All medians are of repetitions that alternate between the kinds, so that the machine's noise meets all of them alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from swarm.bench.bare_links import HEAD, BareLink, QuicSocket, TlsStreams, UdpSocket
from swarm.bench.star_member import TAG
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress
from swarm.net.endpoint import Endpoint
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec

ANSWER_TIMEOUT_S = 10.0
START_TIMEOUT_S = 20.0
N_EXPERTS_USED = 8  # of the dispatches sent here: 48 bytes of ids and weights
DISPATCH_OVERHEAD_BYTES = 5 + 24 + 1 + 6 * N_EXPERTS_USED  # frame and header of one row with 8 pairs (wire/frames)
RESULT_OVERHEAD_BYTES = 5 + 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StarReport:
    """Seconds per round of a star, all members asked at once.

    Attributes:
        library: aioquic or qh3.
        endpoint_p50_s, quic_star_p50_s, udp_star_p50_s, tls_star_p50_s: medians; `endpoint` is ours, with frames and session.
        ratio: endpoint / quic, the median of the ratios of each repetition.
        compute_s: what each member computed in the figures with `beyond`; None where there were none.
        quic_beyond_p50_s, udp_beyond_p50_s, tls_beyond_p50_s: the same less `compute_s`, to compare a layer that computes with.
        compute_star_p50_s: what `n_members` computations at once, of `compute_s` each, take on this machine's cores: a star of
            empty datagrams whose members compute, less one whose members do not.
        beside_p50_s: of what was measured in turn with the stars.
        bytes_out_per_member, bytes_back_per_member: UDP payload of ours per dispatch, acknowledgements included.
    """

    library: str
    n_members: int
    size_out: int
    size_back: int
    n_rounds: int
    endpoint_p50_s: float
    quic_star_p50_s: float
    udp_star_p50_s: float
    tls_star_p50_s: float
    ratio: float
    compute_s: float | None
    quic_beyond_p50_s: float | None
    udp_beyond_p50_s: float | None
    tls_beyond_p50_s: float | None
    compute_star_p50_s: float | None
    beside_p50_s: float | None
    bytes_out_per_member: float
    bytes_back_per_member: float

    def as_json(self) -> dict[str, object]:
        """Return what goes into a run record."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Member:
    """A member that runs, by its node id and ports on loopback."""

    node_id: NodeId
    endpoint: SocketAddress
    quic: SocketAddress
    udp: SocketAddress
    tls: SocketAddress


@contextlib.asynccontextmanager
async def members(n: int) -> AsyncIterator[list[Member]]:
    """Run `n` members, each in its process with one thread; they end with the context."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes: list[asyncio.subprocess.Process] = []
    try:
        started = []
        for _ in range(n):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "swarm.bench.star_member",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
            )
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
            if not line:
                raise SwarmError("a member of the star did not start")
            told = json.loads(line)
            ports = [("127.0.0.1", int(told[kind])) for kind in ("endpoint", "quic", "udp", "tls")]
            started.append(Member(NodeId.parse(told["node_id"]), *ports))
        yield started
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in processes:
            try:
                await asyncio.wait_for(process.wait(), START_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()


def bench_dispatch(size_out: int, size_back: int, wait_s: float = 0.0, busy_s: float = 0.0) -> m.Dispatch:
    """Return a dispatch whose frame has about `size_out` bytes and asks a member for an answer of about `size_back`.

    `wait_s`, `busy_s`: before the answer, at most 65 ms each; the second keeps a core busy.
    """
    n_out = max(1, (size_out - DISPATCH_OVERHEAD_BYTES) // 4)
    n_back = max(1, (size_back - RESULT_OVERHEAD_BYTES) // 4)
    return m.Dispatch(
        model_tag=TAG.pack(n_back, round(wait_s * 1e6), round(busy_s * 1e6)),
        layer=0,
        rows_codec=RowCodec.F32,
        result_codec=RowCodec.F32,
        row_counts=np.array([N_EXPERTS_USED], np.uint8),
        expert_ids=np.arange(N_EXPERTS_USED, dtype=np.uint16),
        weights=np.full(N_EXPERTS_USED, 0.125, np.float32),
        rows=np.zeros((1, n_out), np.float32),
    )


async def measure_star(
    *,
    n_members: int = 3,
    size_out: int = 2200,
    size_back: int = 2200,
    n_rounds: int = 200,
    n_repetitions: int = 5,
    compute_s: float | None = None,
    beside: Callable[[], Awaitable[None]] | None = None,
) -> StarReport:
    """Return what a star costs on loopback, ours and bare. `n_rounds` of each kind, and of `beside`, in each repetition.

    With `compute_s` the bare stars are measured a second time, with members that compute so long before they answer (`busy`),
    and that time is taken off again. Beside a real layer this is the fair figure: its peers compete for the cores and lose
    their caches, but there is also idle time of cores that they use. Measured on 2 cores, 3 members, 280 us: QUIC's star costs
    1.19 to 1.27 ms beyond that, against 1.25 to 1.35 for one that computes nothing; UDP's 0.43 against 0.12.
    """
    async with contextlib.AsyncExitStack() as stack:
        started = await stack.enter_async_context(members(n_members))
        endpoint = await stack.enter_async_context(Endpoint(Identity.generate(), host="127.0.0.1"))
        connections = [await endpoint.dial(each.endpoint, expected=each.node_id) for each in started]
        quic, udp, tls = QuicSocket(), UdpSocket(), TlsStreams()
        stack.callback(quic.close)
        stack.callback(udp.close)
        stack.callback(tls.close)
        quic_links = [await quic.dial(each.quic) for each in started]
        udp_links = [await udp.dial(each.udp) for each in started]
        tls_links = [await tls.dial(each.tls) for each in started]
        request = bench_dispatch(size_out, size_back)

        async def ours() -> None:
            await asyncio.gather(*(each.request(request, timeout_s=ANSWER_TIMEOUT_S) for each in connections))

        def bare(
            links: Sequence[BareLink], busy_us: int = 0, sizes: tuple[int, int] = (size_out, size_back)
        ) -> Callable[[], Awaitable[None]]:
            async def once() -> None:
                await asyncio.gather(*(each.echo(*sizes, busy_us) for each in links))

            return once

        kinds = {"endpoint": ours, "quic": bare(quic_links), "udp": bare(udp_links), "tls": bare(tls_links)}
        if compute_s is not None:
            busy_us = round(compute_s * 1e6)
            kinds |= {
                f"{name}, busy": bare(links, busy_us)
                for name, links in (("quic", quic_links), ("udp", udp_links), ("tls", tls_links))
            }
            empty = (HEAD.size, HEAD.size)
            kinds |= {"empty": bare(udp_links, 0, empty), "empty, busy": bare(udp_links, busy_us, empty)}
        if beside is not None:
            kinds["beside"] = beside
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        ratios = []
        for kind in kinds.values():
            await _timed(kind, 20)  # warm: windows, caches, round trips known
        sent, received = endpoint.bytes_sent, endpoint.bytes_received
        for _ in range(n_repetitions):
            taken = {name: await _timed(kind, n_rounds) for name, kind in kinds.items()}
            for name, each in taken.items():
                times[name] += each
            ratios.append(statistics.median(taken["endpoint"]) / statistics.median(taken["quic"]))
        n = n_rounds * n_repetitions * n_members
        return StarReport(
            library=os.environ.get("SWARM_QUIC", "aioquic"),
            n_members=n_members,
            size_out=size_out,
            size_back=size_back,
            n_rounds=n_rounds * n_repetitions,
            endpoint_p50_s=statistics.median(times["endpoint"]),
            quic_star_p50_s=statistics.median(times["quic"]),
            udp_star_p50_s=statistics.median(times["udp"]),
            tls_star_p50_s=statistics.median(times["tls"]),
            ratio=statistics.median(ratios),
            compute_s=compute_s,
            quic_beyond_p50_s=None if compute_s is None else statistics.median(times["quic, busy"]) - compute_s,
            udp_beyond_p50_s=None if compute_s is None else statistics.median(times["udp, busy"]) - compute_s,
            tls_beyond_p50_s=None if compute_s is None else statistics.median(times["tls, busy"]) - compute_s,
            compute_star_p50_s=None
            if compute_s is None
            else statistics.median(times["empty, busy"]) - statistics.median(times["empty"]),
            beside_p50_s=None if beside is None else statistics.median(times["beside"]),
            bytes_out_per_member=(endpoint.bytes_sent - sent) / n,
            bytes_back_per_member=(endpoint.bytes_received - received) / n,
        )


async def _timed(call: Callable[[], Awaitable[None]], n: int) -> list[float]:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return times
