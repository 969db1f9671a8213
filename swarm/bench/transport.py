"""What the transport costs: a star over our Endpoint beside the same star over bare QUIC and bare UDP, and latency by size.

The members are processes of their own on this machine. Nothing is computed: what is measured is software and path.
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

from swarm.bench.bare_links import BareLink, QuicSocket, UdpSocket
from swarm.bench.star_member import TAG
from swarm.emulation.hub import EmulatedPaths
from swarm.emulation.path import PathSpec
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec

ANSWER_TIMEOUT_S = 10.0
START_TIMEOUT_S = 20.0
N_EXPERTS_USED = 8  # of the dispatches sent here: 48 bytes of ids and weights
DISPATCH_OVERHEAD_BYTES = 5 + 24 + 1 + 6 * N_EXPERTS_USED  # frame and header of one row with 8 pairs (wire/frames)
RESULT_OVERHEAD_BYTES = 5 + 20
ECHO_BYTES = 64  # of the small echo that stands for the path's round trip


@dataclass(frozen=True, slots=True, kw_only=True)
class StarReport:
    """Seconds per round of a star, all members asked at once.

    Attributes:
        library: aioquic or qh3.
        endpoint_p50_s, quic_star_p50_s, udp_star_p50_s: medians; `endpoint` is ours, with frames and session.
        ratio: endpoint / quic, the median of the ratios of each repetition.
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
    ratio: float
    bytes_out_per_member: float
    bytes_back_per_member: float

    def as_json(self) -> dict[str, object]:
        """Return what goes into a run record."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport:
    """Dispatches of one size over an emulated path.

    Attributes:
        rtt_s: median of small echoes on the same path in the same run.
        first_s: the first dispatch after the hello; `after_silence_s` the first after `silence_s` without one.
        repair_share: bytes sent a second time, of all others.
    """

    size_out: int
    size_back: int
    loss: float
    n: int
    rtt_s: float
    first_s: float
    after_silence_s: float | None
    silence_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float
    n_failed: int
    repair_share: float

    def as_json(self) -> dict[str, object]:
        """Return what goes into a run record, with the figures in round trips beside those in seconds."""
        in_rtt = {
            name.replace("_s", "_rtt"): getattr(self, name) / self.rtt_s
            for name in ("first_s", "p50_s", "p95_s", "p99_s", "max_s")
        }
        if self.after_silence_s is not None:
            in_rtt["after_silence_rtt"] = self.after_silence_s / self.rtt_s
        return {**asdict(self), **in_rtt}


@dataclass(frozen=True, slots=True)
class Member:
    """A member that runs, by its node id and ports on loopback."""

    node_id: NodeId
    endpoint: SocketAddress
    quic: SocketAddress
    udp: SocketAddress


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
            ports = [("127.0.0.1", int(told[kind])) for kind in ("endpoint", "quic", "udp")]
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


def bench_dispatch(size_out: int, size_back: int, wait_s: float = 0.0) -> m.Dispatch:
    """Return a dispatch whose frame has about `size_out` bytes and asks a member for an answer of about `size_back`."""
    n_out = max(1, (size_out - DISPATCH_OVERHEAD_BYTES) // 4)
    n_back = max(1, (size_back - RESULT_OVERHEAD_BYTES) // 4)
    return m.Dispatch(
        model_tag=TAG.pack(n_back, round(wait_s * 1e6)),
        layer=0,
        rows_codec=RowCodec.F32,
        result_codec=RowCodec.F32,
        row_counts=np.array([N_EXPERTS_USED], np.uint8),
        expert_ids=np.arange(N_EXPERTS_USED, dtype=np.uint16),
        weights=np.full(N_EXPERTS_USED, 0.125, np.float32),
        rows=np.zeros((1, n_out), np.float32),
    )


async def measure_star(
    *, n_members: int = 3, size_out: int = 2200, size_back: int = 2200, n_rounds: int = 200, n_repetitions: int = 5
) -> StarReport:
    """Return what a star costs on loopback, ours and bare. `n_rounds` of each kind in each repetition."""
    async with contextlib.AsyncExitStack() as stack:
        started = await stack.enter_async_context(members(n_members))
        endpoint = await stack.enter_async_context(Endpoint(Identity.generate(), host="127.0.0.1"))
        connections = [await endpoint.dial(each.endpoint, expected=each.node_id) for each in started]
        quic, udp = QuicSocket(), UdpSocket()
        stack.callback(quic.close)
        stack.callback(udp.close)
        quic_links = [await quic.dial(each.quic) for each in started]
        udp_links = [await udp.dial(each.udp) for each in started]
        request = bench_dispatch(size_out, size_back)

        async def ours() -> None:
            await asyncio.gather(*(each.request(request, timeout_s=ANSWER_TIMEOUT_S) for each in connections))

        def bare(links: Sequence[BareLink]) -> Callable[[], Awaitable[None]]:
            async def once() -> None:
                await asyncio.gather(*(each.echo(size_out, size_back) for each in links))

            return once

        kinds = {"endpoint": ours, "quic": bare(quic_links), "udp": bare(udp_links)}
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
            ratio=statistics.median(ratios),
            bytes_out_per_member=(endpoint.bytes_sent - sent) / n,
            bytes_back_per_member=(endpoint.bytes_received - received) / n,
        )


async def measure_latency(
    *,
    size_out: int,
    size_back: int,
    spec: PathSpec,
    n: int,
    silence_s: float = 0.0,
    n_echoes: int = 10,
) -> LatencyReport:
    """Return how long dispatches take over an emulated path, one after another, and the path's round trip beside them.

    On a lossless path the echoes are small dispatches on a connection of their own, so that the measured one is fresh.
    """
    async with contextlib.AsyncExitStack() as stack:
        (member,) = await stack.enter_async_context(members(1))
        hub = await stack.enter_async_context(EmulatedPaths())
        front = await hub.front(spec=spec, to=member.endpoint)
        endpoint = await stack.enter_async_context(Endpoint(Identity.generate(), host="127.0.0.1"))
        echo_front = await hub.front(spec=PathSpec(delay_s=spec.delay_s), to=member.endpoint)
        echoing = await endpoint.dial(echo_front, expected=member.node_id)
        echoes: list[float] = []

        async def echo() -> None:
            small = bench_dispatch(ECHO_BYTES, ECHO_BYTES)
            for _ in range(n_echoes):
                echoes.extend(await _timed(lambda: _ask(echoing, small), 1))

        await echo()
        connection = await endpoint.dial(front, expected=member.node_id)
        request = bench_dispatch(size_out, size_back)
        (first,) = await _timed(lambda: _ask(connection, request), 1)
        after_silence = None
        if silence_s:
            await asyncio.sleep(silence_s)
            (after_silence,) = await _timed(lambda: _ask(connection, request), 1)
        times: list[float] = []
        n_failed = 0
        for _ in range(n):
            try:
                start = time.perf_counter()
                await _ask(connection, request)
                times.append(time.perf_counter() - start)
            except SwarmError:
                n_failed += 1
                if not connection.is_open:
                    connection = await endpoint.dial(front, expected=member.node_id)
        await echo()
        p50, p95, p99, most = (float(each) for each in np.percentile(times, (50, 95, 99, 100)))
        return LatencyReport(
            size_out=size_out,
            size_back=size_back,
            loss=spec.loss,
            n=n,
            rtt_s=statistics.median(echoes),
            first_s=first,
            after_silence_s=after_silence,
            silence_s=silence_s,
            p50_s=p50,
            p95_s=p95,
            p99_s=p99,
            max_s=most,
            n_failed=n_failed,
            repair_share=endpoint.repair_bytes / endpoint.bytes_sent,
        )


async def _ask(connection: Connection, request: m.Dispatch) -> None:
    await connection.request(request, timeout_s=ANSWER_TIMEOUT_S)


async def _timed(call: Callable[[], Awaitable[None]], n: int) -> list[float]:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return times
