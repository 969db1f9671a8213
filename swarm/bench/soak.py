"""Many clients that come and go for a long time, while peers die and come back: does anything fail, does anything grow?

A relay, a backbone with its gateway and two peers for each expert, in processes of their own; clients ask over HTTP. Once in
each period a random peer is killed, and started again a third of the period later. All the while every process's resident memory
is read; it may grow while it warms up, and then not any more. When the clients have gone, what each process still takes of a
core is measured.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from swarm.bench.process_usage import Life, ProcessUsage, cpu_s
from swarm.bench.soak_clients import SoakClients
from swarm.emulation.processes import LocalSwarm
from swarm.errors import SwarmError
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec

N_SHARES = 2  # into which the experts are cut; two peers hold each
COVER_TIMEOUT_S = 60.0
LOOK_EVERY_S = 2.0
SHOWN_EVERY_S = 30.0  # between the samples of a record
QUIET_S = 5.0  # after the last answer, before idle time is measured
IDLE_S = 10.0  # measured idle time
# What fills up in the course of a run is small, so that it is full when the warm-up ends: texts of 512 tokens, a cache of a few.
BACKBONE_OPTIONS = ("--slots", "8", "--lanes", "2", "--ctx", "512", "--prefix-cache", "8MiB", "--drain", "5s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """What to run.

    Attributes:
        duration_s: in which clients ask.
        warm_up_s: of a process's life, in which it may grow.
        kill_every_s: a peer is killed once in each of these periods.
        think_s: a client's mean time between an answer and the next question.
    """

    model: Path
    duration_s: float
    n_clients: int = 8
    warm_up_s: float = 60.0
    kill_every_s: float = 60.0
    think_s: float = 3.0
    seed: int = 20


async def measure_soak(options: SoakOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench soak`.

    Raises:
        SwarmError: a process did not start, or was not seen by the backbone.
    """
    usage = ProcessUsage()
    with GgufFile(options.model) as file:
        n_expert = read_spec(file).n_expert
    with tempfile.TemporaryDirectory(prefix="swarm-soak-") as folder:
        async with LocalSwarm(Path(folder)) as swarm:
            backbone = await swarm.start_backbone(options.model, *BACKBONE_OPTIONS)
            for _ in range(2):  # every expert on two peers
                await swarm.add_peers(N_SHARES, n_expert)
            url = str(backbone.ready["url"])
            await _wait_covered(url)
            return await _soak(swarm, url, options, usage, progress)


async def _soak(
    swarm: LocalSwarm,
    url: str,
    options: SoakOptions,
    usage: ProcessUsage,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    clients = SoakClients(url, options.n_clients, think_s=options.think_s, seed=options.seed)
    began_at = time.monotonic()
    until = began_at + options.duration_s
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(clients.run(until))
        killing = group.create_task(_kill_and_restart(swarm, options, until))
        while not (asking.done() and killing.done()):
            now = time.monotonic()
            usage.look(_processes(swarm), now)
            progress(min(int(now - began_at), int(options.duration_s)), int(options.duration_s))
            await asyncio.wait((asking, killing), timeout=LOOK_EVERY_S, return_when=asyncio.ALL_COMPLETED)
    took_s = time.monotonic() - began_at
    usage.look(_processes(swarm), time.monotonic())
    n_busy_cores = sum(life.cpu_s for life in usage.lives.values()) / took_s  # the starts are small beside it
    await asyncio.sleep(QUIET_S)
    idle_before = _cpu(swarm)
    await asyncio.sleep(IDLE_S)
    idle = {name: (spent - idle_before[name]) / IDLE_S for name, spent in _cpu(swarm).items()}
    return _figures(options, clients, usage, killing.result(), idle, n_busy_cores)


async def _kill_and_restart(swarm: LocalSwarm, options: SoakOptions, until: float) -> int:
    """Kill a peer in each period and start it again, so that all are there at the end; return how often."""
    rng = random.Random(options.seed)
    third_s = options.kill_every_s / 3
    n_killed = 0
    while time.monotonic() + 2 * third_s < until:
        await asyncio.sleep(third_s)
        victim = rng.choice(swarm.peers)
        await victim.kill()
        n_killed += 1
        await asyncio.sleep(third_s)
        await swarm.restart(victim)
        await asyncio.sleep(min(third_s, max(until - time.monotonic(), 0)))
    return n_killed


async def _wait_covered(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        try:
            async with asyncio.timeout(COVER_TIMEOUT_S):
                while True:
                    async with session.get(url.removesuffix("/v1") + "/health") as answer:
                        if answer.status == 200:
                            return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise SwarmError(f"experts have no peer after {COVER_TIMEOUT_S:g} s") from None


def _processes(swarm: LocalSwarm) -> Iterator[tuple[str, int]]:
    for child in (swarm.relay, swarm.backbone, *swarm.peers):
        if child is not None and child.is_running:
            yield child.home.name, child.pid


def _cpu(swarm: LocalSwarm) -> dict[str, float]:
    return {name: cpu_s(pid) for name, pid in _processes(swarm)}


def _figures(
    options: SoakOptions,
    clients: SoakClients,
    usage: ProcessUsage,
    n_killed: int,
    idle: dict[str, float],
    n_busy_cores: float,
) -> dict[str, Any]:
    growths = [life.growth(options.warm_up_s) for life in usage.lives.values()]
    return {
        "model": options.model.name,
        "duration_s": options.duration_s,
        "n_clients": options.n_clients,
        "think_s": options.think_s,
        "warm_up_s": options.warm_up_s,
        "kill_every_s": options.kill_every_s,
        "n_killed": n_killed,
        "n_answered": clients.n_answered,
        "n_left": clients.n_left,
        "n_failed": len(clients.failures),
        "failures": clients.failures[:20],
        "median_answer_s": statistics.median(clients.latencies_s) if clients.latencies_s else None,
        "longest_answer_s": max(clients.latencies_s, default=None),
        "n_judged_lives": sum(growth is not None for growth in growths),
        "largest_growth": max((growth for growth in growths if growth is not None), default=None),
        "largest_idle_cpu": max(idle.values()),
        "idle_cpu": idle,
        "n_busy_cores": n_busy_cores,
        "processes": [_shown(life, options.warm_up_s) for life in usage.lives.values()],
    }


def _shown(life: Life, warm_up_s: float) -> dict[str, Any]:
    samples, next_s = [], 0.0
    for sample in life.samples:
        if sample.age_s >= next_s or sample is life.samples[-1]:
            samples.append([round(sample.age_s), round(sample.rss_bytes / 2**20, 1)])
            next_s = sample.age_s + SHOWN_EVERY_S
    return {
        "name": life.name,
        "lived_s": round(life.samples[-1].age_s),
        "growth": life.growth(warm_up_s),
        "rss_mib_by_age_s": samples,
    }
