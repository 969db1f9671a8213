"""Latency of dispatches over an emulated path: the first one, the first after silence, and the tail under random loss.

A member answers at once, without computing. The path's round trip is that of small dispatches on a connection of their own, over
a lossless path of the same delay, in the same run and between the measured ones.

    clean     each connection is new; its first dispatch, then one after `silence_s`. One dispatch is under way at a time,
              while the other connections are silent
    loss      `n_connections` at once, each one dispatch after another, each path with a seed of its own
    control   the same without loss: what so many at once cost by themselves
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass

import numpy as np

from swarm.bench.transport import ANSWER_TIMEOUT_S, Member, bench_dispatch, members
from swarm.emulation.hub import EmulatedPaths
from swarm.emulation.path import PathSpec
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.wire import messages as m

ECHO_BYTES = 64  # of the small echo that stands for the path's round trip
N_CONTROL = 20  # dispatches of each connection in the control


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """What to measure.

    Attributes:
        size_bytes: of a dispatch and of its answer.
        n_fresh: connections whose first dispatch, and first after silence, is measured.
        n_lossy: dispatches at `loss`, all connections together; 0: none.
    """

    size_bytes: int
    rtt_s: float = 0.08
    loss: float = 0.0
    silence_s: float = 5.0
    n_fresh: int = 9
    n_lossy: int = 1000
    n_connections: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Dispatches of several connections, one after another on each; seconds.

    Attributes:
        rtt_s: median of small echoes meanwhile.
        repair_share: bytes that the backbone's side sent a second time, of all others.
    """

    n: int
    n_failed: int
    rtt_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float
    repair_share: float

    def as_json(self) -> dict[str, object]:
        """Return what goes into a run record, with the figures in round trips beside those in seconds."""
        names = ("p50_s", "p95_s", "p99_s", "max_s")
        return asdict(self) | {name.replace("_s", "_rtt"): getattr(self, name) / self.rtt_s for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport:
    """Dispatches of one size.

    Attributes:
        rtt_s: median of small echoes between the fresh connections' dispatches.
        first_s: medians over fresh connections: of the first dispatch after the hello; `after_silence_s`: of the next.
    """

    size_bytes: int
    loss: float
    silence_s: float
    n_fresh: int
    n_connections: int
    rtt_s: float
    first_s: float
    after_silence_s: float
    lossy: Tail | None
    control: Tail | None

    def as_json(self) -> dict[str, object]:
        """Return what goes into a run record."""
        plain = asdict(self) | {
            "first_rtt": self.first_s / self.rtt_s,
            "after_silence_rtt": self.after_silence_s / self.rtt_s,
        }
        for name in ("lossy", "control"):
            tail: Tail | None = getattr(self, name)
            plain[name] = tail.as_json() if tail is not None else None
        return plain


async def measure_latency(options: LatencyOptions, progress: Callable[[int, int], None]) -> LatencyReport:
    """Return the figures of one size; `progress` is told of dispatches."""
    n_total = 2 * options.n_fresh + (options.n_lossy + N_CONTROL * options.n_connections if options.n_lossy else 0)
    n_done = 0

    def count() -> None:
        nonlocal n_done
        n_done += 1
        progress(n_done, n_total)

    async with _world() as world:
        rtt_s, first_s, after_silence_s = await _fresh(world, options, count)
        lossy = control = None
        if options.n_lossy:
            control = await _tail(world, options, 0.0, N_CONTROL, count)
            lossy = await _tail(world, options, options.loss, options.n_lossy // options.n_connections, count)
    return LatencyReport(
        size_bytes=options.size_bytes,
        loss=options.loss,
        silence_s=options.silence_s,
        n_fresh=options.n_fresh,
        n_connections=options.n_connections,
        rtt_s=rtt_s,
        first_s=first_s,
        after_silence_s=after_silence_s,
        lossy=lossy,
        control=control,
    )


@dataclass(slots=True)
class _World:
    """A member, paths to it, and our endpoint."""

    member: Member
    hub: EmulatedPaths
    endpoint: Endpoint
    n_paths: int = 0

    async def dial(self, spec: PathSpec) -> Connection:
        """Return a connection over a path of its own."""
        self.n_paths += 1
        front = await self.hub.front(spec=spec, to=self.member.endpoint, name=f"path{self.n_paths}")
        return await self.endpoint.dial(front, expected=self.member.node_id)


@contextlib.asynccontextmanager
async def _world() -> AsyncIterator[_World]:
    async with contextlib.AsyncExitStack() as stack:
        (member,) = await stack.enter_async_context(members(1))
        hub = await stack.enter_async_context(EmulatedPaths())
        endpoint = await stack.enter_async_context(Endpoint(Identity.generate(), host="127.0.0.1"))
        yield _World(member, hub, endpoint)


async def _fresh(world: _World, options: LatencyOptions, count: Callable[[], None]) -> tuple[float, float, float]:
    """Return medians: of the echoes, of first dispatches and of those after silence."""
    spec = PathSpec(delay_s=options.rtt_s / 2)
    request = bench_dispatch(options.size_bytes, options.size_bytes)
    echoing = await world.dial(spec)
    echoes: list[float] = []
    first: list[float] = []
    again: list[float] = []
    silent: list[tuple[float, Connection]] = []
    for _ in range(options.n_fresh):
        echoes.append(await _echo_s(echoing))
        connection = await world.dial(spec)
        first.append(await _seconds(connection, request))
        silent.append((time.perf_counter() + options.silence_s, connection))
        count()
    for until, connection in silent:
        await asyncio.sleep(max(0.0, until - time.perf_counter()))
        echoes.append(await _echo_s(echoing))
        again.append(await _seconds(connection, request))
        count()
        connection.close()
    echoing.close()
    return statistics.median(echoes), statistics.median(first), statistics.median(again)


async def _tail(world: _World, options: LatencyOptions, loss: float, n_each: int, count: Callable[[], None]) -> Tail:
    """Return the figures of `n_each` dispatches on each connection, all connections at once."""
    request = bench_dispatch(options.size_bytes, options.size_bytes)
    times: list[float] = []
    echoes: list[float] = []
    n_failed = 0
    echoing = await world.dial(PathSpec(delay_s=options.rtt_s / 2))
    specs = [
        PathSpec(delay_s=options.rtt_s / 2, loss=loss, seed=options.seed + index)
        for index in range(options.n_connections)
    ]
    sent, repaired = world.endpoint.bytes_sent, world.endpoint.repair_bytes
    is_over = asyncio.Event()

    async def ask(spec: PathSpec) -> None:
        nonlocal n_failed
        connection = await world.dial(spec)
        for _ in range(n_each):
            try:
                times.append(await _seconds(connection, request))
            except SwarmError:
                n_failed += 1
                if not connection.is_open:
                    connection = await world.dial(spec)
            count()
        connection.close()

    async def echo() -> None:
        while not is_over.is_set():
            echoes.append(await _echo_s(echoing))
            await asyncio.sleep(options.rtt_s)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(echo())
        async with asyncio.TaskGroup() as asking:
            for spec in specs:
                asking.create_task(ask(spec))
        is_over.set()
    echoing.close()
    p50, p95, p99, most = (float(each) for each in np.percentile(times, (50, 95, 99, 100)))
    return Tail(
        n=len(times),
        n_failed=n_failed,
        rtt_s=statistics.median(echoes),
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        max_s=most,
        repair_share=(world.endpoint.repair_bytes - repaired) / (world.endpoint.bytes_sent - sent),
    )


async def _echo_s(connection: Connection) -> float:
    return await _seconds(connection, bench_dispatch(ECHO_BYTES, ECHO_BYTES))


async def _seconds(connection: Connection, request: m.Dispatch) -> float:
    start = time.perf_counter()
    await connection.request(request, timeout_s=ANSWER_TIMEOUT_S)
    return time.perf_counter() - start
