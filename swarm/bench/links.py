"""Whether the choice between QUIC and TLS links is right: each path measured with both, and with what the policy chooses.

Two hosts as network namespaces (root), so that TCP meets the same delay and loss as QUIC does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarm.bench.link_asker import KINDS
from swarm.emulation.hosts import EmulatedHosts, Host
from swarm.emulation.path import PathSpec
from swarm.errors import SwarmError

START_TIMEOUT_S = 20.0
MOST_P50, MOST_P99 = 1.03, 1.10  # what the policy may cost over the better fixed choice


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What to measure.

    Attributes:
        rtts_s, losses: of the paths; each round trip with each loss (of every packet, either way).
        n: dispatches of each kind on each path, after `n_warm_up`.
        size_out, size_back, busy_us: of a dispatch; bytes, and how long the member computes.
    """

    rtts_s: tuple[float, ...] = (0.0002, 0.001, 0.003, 0.01, 0.03)
    losses: tuple[float, ...] = (0.0, 0.001, 0.01)
    n: int = 1000
    n_warm_up: int = 100
    size_out: int = 2200
    size_back: int = 4100
    busy_us: int = 300
    seed: int = 0


async def measure_links(options: LinkOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench links`; raises UserError without root."""
    paths = [(rtt_s, loss) for rtt_s in options.rtts_s for loss in options.losses]
    figures = []
    async with EmulatedHosts() as hosts:
        backbone, peer = await hosts.add("backbone"), await hosts.add("peer")
        await hosts.connect("backbone", "peer", PathSpec(seed=options.seed))
        for n_done, (rtt_s, loss) in enumerate(paths):
            await hosts.change("backbone", "peer", PathSpec(delay_s=rtt_s / 2, loss=loss, seed=options.seed))
            figures.append({"path_rtt_s": rtt_s, "loss": loss, **await _measure(options, backbone, peer)})
            progress(n_done + 1, len(paths))
    return {
        "n": options.n,
        "size_out": options.size_out,
        "size_back": options.size_back,
        "busy_us": options.busy_us,
        "paths": figures,
        "worst_p50_over_better": max(each["p50_over_better"] for each in figures),
        "worst_p99_over_better": max(each["p99_over_better"] for each in figures),
        "is_within": all(
            each["p50_over_better"] <= MOST_P50 and each["p99_over_better"] <= MOST_P99 for each in figures
        ),
    }


async def _measure(options: LinkOptions, backbone: Host, peer: Host) -> dict[str, Any]:
    async with _running(peer.command(sys.executable, "-m", "swarm.bench.link_member", peer.address)) as member:
        told = await _line(member, START_TIMEOUT_S)
        numbers = (options.size_out, options.size_back, options.busy_us, options.n_warm_up, options.n)
        arguments = (told["node_id"], peer.address, told["port"], *numbers)
        command = (sys.executable, "-m", "swarm.bench.link_asker", *map(str, arguments))
        async with _running(backbone.command(*command)) as asker:
            answer = await _line(asker, None)
    if "error" in answer:
        raise SwarmError(f"the dispatches were not answered: {answer['error']}")
    return judge(answer["seconds"]) | {"auto_share_tls": answer["n_auto_over_tls"] / options.n}


def judge(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return p50 and p99 by kind, and how many times the better fixed choice's the policy's are."""
    figures: dict[str, Any] = {}
    for kind in KINDS:
        p50, p99 = (float(each) for each in np.percentile(seconds[kind], (50, 99)))
        figures |= {f"{kind}_p50_s": p50, f"{kind}_p99_s": p99}
    for name in ("p50", "p99"):
        better = min(figures[f"quic_{name}_s"], figures[f"tls_{name}_s"])
        figures[f"{name}_over_better"] = figures[f"auto_{name}_s"] / better
    return figures


@contextlib.asynccontextmanager
async def _running(command: tuple[str, ...]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        limit=64 << 20,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), START_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _line(process: asyncio.subprocess.Process, timeout_s: float | None) -> dict[str, Any]:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
    if not line:
        raise SwarmError("a process of the measurement ended early")
    told: dict[str, Any] = json.loads(line)
    return told
