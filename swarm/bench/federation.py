"""Two backbones on one pool of peers: what each gets, alone and beside the other.

Each backbone is a process of its own, with a key, an access link and paths of its own; the peers, and their access links, are
shared. In turn the first works alone, both together, the second alone, each for as long. What a backbone got is its tokens by
the time in which their steps ran. `shares` are of what both got together; `kept` is what each got beside the other over what it
got alone.

On one machine the two also share its cores: a backbone's own computing slows the other down as no federation would. With
`disk_rate` the peers pass the time instead of computing all of it, so that the pool is what is scarce.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from swarm.bench.federation_member import Job, MemberOptions, Step
from swarm.bench.testbed import PathOptions, free_port
from swarm.emulation.hub import EmulatedPaths
from swarm.emulation.link import LinkSpec
from swarm.emulation.processes import LocalSwarm, ProcessFailed, contiguous_shares
from swarm.errors import UserError
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from swarm.net.addresses import format_address
from swarm.wire.rows import Wire

N_BACKBONES = 2
START_TIMEOUT_S = 90.0
ANSWER_SLACK_S = 90.0  # of the last step of a job: a prompt at a slow rate
LINE_LIMIT_BYTES = 16 << 20
RAMP_S = 0.5  # at the beginning of a job, not counted: the first prompt
SETTLE_S = 0.3  # between two jobs


class Phase(StrEnum):
    """What a backbone does all the time."""

    DECODE = "decode"
    PREFILL = "prefill"


class Pooling(StrEnum):
    """What the peers hold, and who uses them."""

    PARTS = "parts"  # each expert has one peer
    SHARED = "shared"  # every peer holds everything, both backbones use all
    DISJOINT = "disjoint"  # every peer holds everything, each backbone uses every second one


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationOptions:
    """What to measure.

    Attributes:
        phases, n_streams: of each backbone: what it does, and in how many sequences at once.
        n_prompt_tokens: of each prompt of a prefill.
        turn_s: of each of the three jobs of a repetition.
        disk_rate: bytes per second as text, like 200MB: peers compute as slowly as from such a disk. None: as they can.
    """

    model: Path
    n_peers: int
    wire: Wire
    paths: PathOptions
    phases: tuple[Phase, Phase] = (Phase.DECODE, Phase.DECODE)
    n_streams: tuple[int, int] = (1, 1)
    n_prompt_tokens: int = 256
    turn_s: float = 6.0
    n_repetitions: int = 3
    pooling: Pooling = Pooling.PARTS
    disk_rate: str | None = None


class _Member:
    """The parent's end of a `federation_member`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the member's next line."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            said = " / ".join(self._log.read_text(errors="replace").splitlines()[-5:])
            raise ProcessFailed(f"a backbone of the federation has failed: {said or 'it said nothing'}")
        told: dict[str, Any] = json.loads(line)
        return told

    async def do(self, job: Job) -> list[Step]:
        """Return the steps of a job; raises ProcessFailed where one of its sequences failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        await self._process.stdin.drain()
        told = await self.answer(job.until - time.monotonic() + ANSWER_SLACK_S)
        if told["errors"]:
            raise ProcessFailed(f"a backbone of the federation could not go on: {told['errors'][0]}")
        return [Step(**step) for step in told["steps"]]


async def measure_federation(options: FederationOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench federation`; medians over the repetitions."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        async with _federation(options, Path(folder)) as (members, hub):
            alone: tuple[list[float], list[float]] = [], []
            together: tuple[list[float], list[float]] = [], []
            await _turn(options, members, range(N_BACKBONES))  # not counted: paths and caches are new
            for done in range(options.n_repetitions):
                progress(done, options.n_repetitions)
                for who in ([0], [0, 1], [1]):
                    rates = await _turn(options, members, who)
                    for index in who:
                        (together if len(who) > 1 else alone)[index].append(rates[index])
            progress(options.n_repetitions, options.n_repetitions)
            stats = await hub.stats() if hub is not None else None
    figures = {
        "model": options.model.name,
        "n_peers": options.n_peers,
        "wire": str(options.wire),
        "rtt_s": options.paths.rtt_s(0),
        "rate_bit_s": options.paths.rate_bit_s,
        "phases": [phase.value for phase in options.phases],
        "n_streams": list(options.n_streams),
        "n_prompt_tokens": options.n_prompt_tokens,
        "turn_s": options.turn_s,
        "pooling": options.pooling.value,
        "disk_rate": options.disk_rate,
        "n_repetitions": options.n_repetitions,
    } | federation_figures(alone, together)
    if stats is not None:
        figures["emulator"] = stats.summary()
    return figures


def federation_figures(alone: Sequence[Sequence[float]], together: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what tokens per second mean, each by backbone and repetition."""
    pools = [sum(each) for each in zip(*together, strict=True)]
    shares = [
        statistics.median(mine / pool if pool else 0.0 for mine, pool in zip(each, pools, strict=True))
        for each in together
    ]
    kept = [
        statistics.median(
            beside / by_itself if by_itself else 0.0 for beside, by_itself in zip(each, other, strict=True)
        )
        for each, other in zip(together, alone, strict=True)
    ]
    return {
        "pool_tokens_per_s": statistics.median(pools),
        "tokens_per_s": [statistics.median(each) for each in together],
        "alone_tokens_per_s": [statistics.median(each) for each in alone],
        "shares": shares,
        "least_share": min(shares),
        "kept": kept,
        "pool_over_alone": statistics.median(pools) / max(statistics.median(each) for each in alone),
        "each_repetition": {"alone": [list(each) for each in alone], "together": [list(each) for each in together]},
    }


def tokens_between(steps: Sequence[Step], began: float, ended: float) -> float:
    """Return the tokens of the time from `began` to `ended`; a step's are spread evenly over its own time."""
    total = 0.0
    for step in steps:
        inside_s = min(step.ended, ended) - max(step.began, began)
        if inside_s > 0:
            total += step.n_tokens * inside_s / (step.ended - step.began)
    return total


async def _turn(options: FederationOptions, members: Sequence[_Member], who: Sequence[int]) -> dict[int, float]:
    """Return the tokens per second of each of `who`, who work at once."""
    await asyncio.sleep(SETTLE_S)
    began = time.monotonic()
    until = began + RAMP_S + options.turn_s
    jobs = [members[index].do(Job(phase=options.phases[index].value, until=until)) for index in who]
    found = await asyncio.gather(*jobs)
    return {
        index: tokens_between(steps, began + RAMP_S, until) / options.turn_s
        for index, steps in zip(who, found, strict=True)
    }


@contextlib.asynccontextmanager
async def _federation(
    options: FederationOptions, folder: Path
) -> AsyncIterator[tuple[list[_Member], EmulatedPaths | None]]:
    """Yield the two backbones, each over paths of its own to all peers."""
    with GgufFile(options.model) as file:
        n_expert = read_spec(file).n_expert
    least = N_BACKBONES if options.pooling is Pooling.DISJOINT else 1
    if not least <= options.n_peers <= n_expert:
        raise UserError(f"wrong number of peers: got {options.n_peers}, expected {least} to {n_expert}")
    ports = [free_port() for _ in range(N_BACKBONES)]
    async with contextlib.AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(LocalSwarm(folder / "children"))
        hub: EmulatedPaths | None = None
        if not options.paths.is_direct:
            hub = await stack.enter_async_context(EmulatedPaths())
            await _declare_links(hub, options)
        slow = [] if options.disk_rate is None else ["--slow-disk", options.disk_rate]
        shares = contiguous_shares(n_expert, options.n_peers)
        if options.pooling is not Pooling.PARTS:
            shares = [range(n_expert)] * options.n_peers
        for index, share in enumerate(shares):
            extra = await _lay_paths(hub, options, index, ports) if hub is not None else []
            await swarm.add_peer(share, "--model", str(options.model), *slow, *extra)
        members = []
        nodes = [str(peer.ready["node"]) for peer in swarm.peers]
        for index, port in enumerate(ports):
            told = MemberOptions(
                registry=swarm.registry,
                folder=str(folder / f"backbone{index}"),
                model=str(options.model),
                wire=str(options.wire),
                port=port,
                phase=options.phases[index].value,
                n_streams=options.n_streams[index],
                n_prompt_tokens=options.n_prompt_tokens,
                allowed_peers=tuple(nodes[index::N_BACKBONES]) if options.pooling is Pooling.DISJOINT else (),
            )
            members.append(await stack.enter_async_context(_member(told, folder / f"backbone{index}.log")))
        yield members, hub


async def _declare_links(hub: EmulatedPaths, options: FederationOptions) -> None:
    if options.paths.rate_bit_s is None:
        return
    hosts = [f"backbone{i}" for i in range(N_BACKBONES)] + [f"peer{i}" for i in range(options.n_peers)]
    for host in hosts:
        await hub.access(host, LinkSpec(rate_bit_s=options.paths.rate_bit_s))


async def _lay_paths(hub: EmulatedPaths, options: FederationOptions, peer: int, ports: Sequence[int]) -> list[str]:
    """Return the options of a peer that is reached over a path of each backbone."""
    port = free_port()
    spec, is_limited = options.paths.spec(peer), options.paths.rate_bit_s is not None
    front = await hub.front(spec=spec, to=("127.0.0.1", port), name=f"path{peer}")
    for backbone, client_port in enumerate(ports):
        await hub.client(
            front,
            client_port,
            spec=spec,
            client=f"backbone{backbone}" if is_limited else None,
            server=f"peer{peer}" if is_limited else None,
            name=f"path{peer}-{backbone}",
        )
    return ["--port", str(port), "--advertise", format_address(front)]


@contextlib.asynccontextmanager
async def _member(options: MemberOptions, log: Path) -> AsyncIterator[_Member]:
    """Start a backbone, and wait until it can serve."""
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "swarm.bench.federation_member",
            json.dumps(asdict(options)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            limit=LINE_LIMIT_BYTES,
        )
    member = _Member(process, log)
    try:
        await member.answer(START_TIMEOUT_S)
        yield member
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(10.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
