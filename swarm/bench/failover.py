"""What a user sees of a peer's death: the same tokens, and how long the text stalls.

Three peers, every expert on two of them: shares 0 and 1, 1 and 2, 2 and 0. First the tokens of an undisturbed run; then, in each
run, something happens to a random peer at a random moment of a random token:

    kill   SIGKILL: the process is gone, its port answers nothing
    stop   SIGSTOP: it hangs, with open sockets
    cut    its path loses every packet, both ways
    drain  SIGTERM: it says that it leaves

and the tokens are compared. A run that differs must differ first where the undisturbed run's two best logits were nearly tied.
After each run the peer is brought back, and the next run begins when it is in use again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import EngineConfig
from swarm.bench.testbed import free_port
from swarm.dispatch.attempts import AttemptStats
from swarm.emulation.hub import EmulatedPaths, SocketAddress
from swarm.emulation.path import PathSpec
from swarm.emulation.processes import Child, LocalSwarm, ProcessFailed, contiguous_shares
from swarm.errors import SwarmError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from swarm.net.addresses import format_address
from swarm.registry.client import parse_registry
from swarm.wire import messages as m
from swarm.wire.rows import Wire, WireForm
from swarm.wire.session import LOST_AFTER_S

logger = logging.getLogger(__name__)

PROMPT = "The :mod:`json` module provides an interface to convert objects in memory to a"
N_PEERS = 3
TIE_GAP = 0.2  # of the two best logits; the gate's figure (shared by all greedy comparisons)
COVER_TIMEOUT_S = 60.0
# Longer than the session's silence: a request that gives up before would begin that anew each time, and a dead connection
# to a peer that has come back at the same address would never be found dead.
STATUS_TIMEOUT_S = LOST_AFTER_S + 1.0
N_AFTER = 20  # tokens after the last strike: a stall shows at once
MAX_WAIT_TOKENS = 1500  # tokens decoded while a killed peer comes back; above the context, the sequence starts anew


class Kind(StrEnum):
    """What happens to a peer."""

    KILL = "kill"
    STOP = "stop"
    CUT = "cut"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverOptions:
    """What to measure.

    Attributes:
        is_twice: kill (or whatever) a second peer in the same run, once the first is back and in use.
    """

    model: Path
    kind: Kind
    wire: Wire
    n_runs: int = 20
    n_tokens: int = 200
    is_twice: bool = False
    seed: int = 1


@dataclass(slots=True)
class _Run:
    """One run's outcome; seconds."""

    victims: list[int]
    tokens: list[int] = field(default_factory=list)
    struck_at_tokens: list[int] = field(default_factory=list)
    stall_s: float = 0.0
    error: str | None = None


@dataclass(slots=True)
class _Reference:
    """The undisturbed run."""

    tokens: list[int]
    gaps: list[float]  # between the two best logits, for each token
    steps_s: list[float]


class Arena:
    """A backbone in this process and three peers that can be struck."""

    def __init__(self, running: RunningBackbone, swarm: LocalSwarm, hub: EmulatedPaths | None) -> None:
        self.running = running
        self.fronts: list[SocketAddress] = []
        self._struck: set[int] = set()
        self._swarm = swarm
        self._hub = hub

    def peer(self, index: int) -> Child:
        """Return the process of a peer, the latest."""
        return self._swarm.peers[index]

    async def strike(self, kind: Kind, index: int) -> None:
        """Let it happen to a peer."""
        peer = self.peer(index)
        self._struck.add(index)
        if kind is Kind.KILL:
            peer.strike()
        elif kind is Kind.STOP:
            peer.suspend()
        elif kind is Kind.DRAIN:
            peer.leave()
        else:
            assert self._hub is not None
            await self._hub.change(self.fronts[index], PathSpec(loss=1.0))

    async def mend(self, kind: Kind, index: int) -> None:
        """Bring a peer back, without waiting until it is in use."""
        self._struck.discard(index)
        peer = self.peer(index)
        if kind is Kind.KILL:
            await peer.kill()
            await self._swarm.restart(peer)
        elif kind is Kind.DRAIN:
            await peer.process.wait()
            await self._swarm.restart(peer)
        elif kind is Kind.STOP:
            peer.resume()
        else:
            assert self._hub is not None
            await self._hub.change(self.fronts[index], PathSpec())

    async def mend_all(self, kind: Kind) -> None:
        """Bring back who was struck, and return when all three are in use."""
        for index in list(self._struck):
            await self.mend(kind, index)
        await self.wait_all()

    async def wait_all(self) -> None:
        """Return when every peer is in use, on a connection that answers."""
        try:
            async with asyncio.timeout(COVER_TIMEOUT_S):
                while not await self._are_all_alive():
                    self.running.holders.look_soon()
                    await asyncio.sleep(0.1)
        except TimeoutError:
            n_used = len(self.running.holders.placement.destinations)
            raise ProcessFailed(
                f"a peer has not come back within {COVER_TIMEOUT_S:g} s: {n_used} of {N_PEERS} are in use"
            ) from None

    async def _are_all_alive(self) -> bool:
        holders = self.running.holders
        if len(holders.placement.destinations) < N_PEERS:
            return False
        for node in holders.placement.destinations:
            connection = self.running.pool.connection(node)
            if connection is None:
                return False
            try:
                await connection.request(m.GetStatus(), timeout_s=STATUS_TIMEOUT_S)
            except SwarmError:
                return False
        return True


@contextlib.asynccontextmanager
async def open_arena(folder: Path, model: Path, wire: Wire, *, has_paths: bool, n_ctx: int) -> AsyncIterator[Arena]:
    """Yield a backbone and three peers with every expert on two of them; `has_paths`: over paths that can be cut."""
    with GgufFile(model) as file:
        shares = contiguous_shares(read_spec(file).n_expert, N_PEERS)
    is_exact = wire.back is WireForm.EXACT
    async with contextlib.AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(LocalSwarm(folder / "children"))
        hub = await stack.enter_async_context(EmulatedPaths()) if has_paths else None
        fronts: list[SocketAddress] = []
        for index in range(N_PEERS):
            held = sorted({*shares[index], *shares[(index + 1) % N_PEERS]})
            options = ["--model", str(model), *(["--exact-kernels"] if is_exact else [])]
            if hub is not None:
                port = free_port()
                fronts.append(await hub.front(spec=PathSpec(), to=("127.0.0.1", port)))
                options += ["--port", str(port), "--advertise", format_address(fronts[-1])]
            await swarm.add_peer(held, *options)
        config = BackboneConfig(
            registry=parse_registry(swarm.registry),
            folders=Folders.below(folder),
            model_file=model,
            wire=wire,
            host="127.0.0.1",
            engine=EngineConfig(n_ctx=n_ctx, n_threads=1, exact_kernels=is_exact),
        )
        running = await stack.enter_async_context(open_backbone(config, Identity.generate()))
        arena = Arena(running, swarm, hub)
        arena.fronts = fronts
        await arena.wait_all()
        yield arena


async def measure_failover(options: FailoverOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench failover`."""
    rng = random.Random(options.seed)
    n_most = options.n_tokens if not options.is_twice else MAX_WAIT_TOKENS
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        opening = open_arena(
            Path(folder), options.model, options.wire, has_paths=options.kind is Kind.CUT, n_ctx=n_most + 64
        )
        async with opening as arena:
            reference = await _undisturbed(arena, n_most)
            runs: list[_Run] = []
            for done in range(options.n_runs):
                progress(done, options.n_runs)
                runs.append(await _disturbed(arena, options, rng, reference, n_most))
            progress(options.n_runs, options.n_runs)
            return _figures(arena, options, reference, runs)


async def _start(arena: Arena, gaps: list[float] | None = None) -> Continuation:
    engine = arena.running.engine

    def draw(row: int) -> int:
        logits = engine.context.logits(row)
        if gaps is not None:
            second, best = np.partition(logits, -2)[-2:]
            gaps.append(float(best - second))
        return int(logits.argmax())

    tokens = engine.model.tokenize(PROMPT, add_special=True, parse_special=False)
    continuation = Continuation(engine, draw, n_batch=EngineConfig().n_batch)
    await continuation.start(tokens)
    return continuation


async def _undisturbed(arena: Arena, n_tokens: int) -> _Reference:
    gaps: list[float] = []
    continuation = await _start(arena, gaps)
    tokens, steps_s = [await continuation.first()], list[float]()
    while len(tokens) < n_tokens:
        began = time.perf_counter()
        tokens += await continuation.step(1)
        steps_s.append(time.perf_counter() - began)
    return _Reference(tokens, gaps, steps_s)


async def _disturbed(
    arena: Arena, options: FailoverOptions, rng: random.Random, reference: _Reference, n_most: int
) -> _Run:
    """Decode while things happen; bring everybody back afterwards."""
    kind, step_s = options.kind, statistics.median(reference.steps_s)
    victims = rng.sample(range(N_PEERS), 2 if options.is_twice else 1)
    run = _Run(victims)
    next_at: int | None = rng.randrange(options.n_tokens - N_AFTER)
    left = list(victims)
    coming_back: asyncio.Task[None] | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            continuation = await _start(arena)
            run.tokens.append(await continuation.first())
            last = time.perf_counter()
            n_end = options.n_tokens
            while len(run.tokens) < min(n_end, n_most):
                if next_at is not None and len(run.tokens) >= next_at:
                    victim, next_at = left.pop(0), None
                    run.struck_at_tokens.append(len(run.tokens))
                    tasks.create_task(_strike_in(arena, kind, victim, rng.uniform(0, step_s)))
                    if left:
                        n_end = n_most
                        coming_back = tasks.create_task(_mend_in(arena, kind, 10 * step_s))
                if left and coming_back is not None and coming_back.done():
                    next_at = len(run.tokens) + rng.randrange(N_AFTER)
                    coming_back = None
                    n_end = next_at + 2 * N_AFTER
                run.tokens += await continuation.step(1)
                now = time.perf_counter()
                if run.struck_at_tokens:
                    run.stall_s = max(run.stall_s, now - last)
                last = now
    except* SwarmError as group:
        run.error = str(group.exceptions[0])
    if run.error is not None:
        logger.warning("a run failed: %s", run.error)
    await arena.mend_all(kind)
    return run


async def _strike_in(arena: Arena, kind: Kind, victim: int, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    await arena.strike(kind, victim)


async def _mend_in(arena: Arena, kind: Kind, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    await arena.mend_all(kind)


def _first_difference(run: _Run, reference: _Reference) -> int | None:
    """Return the index of the first token that is not the undisturbed run's."""
    for index, (token, expected) in enumerate(zip(run.tokens, reference.tokens, strict=False)):
        if token != expected:
            return index
    return None


def _figures(arena: Arena, options: FailoverOptions, reference: _Reference, runs: list[_Run]) -> dict[str, Any]:
    differences = [_first_difference(run, reference) for run in runs]
    gaps = [reference.gaps[at] for at in differences if at is not None]
    whole = [run for run, at in zip(runs, differences, strict=True) if at is None and run.error is None]
    attempts: AttemptStats = arena.running.dispatcher.stats.attempts
    return {
        "model": options.model.name,
        "kind": options.kind.value,
        "wire": str(options.wire),
        "is_twice": options.is_twice,
        "n_tokens": options.n_tokens,
        "runs": len(runs),
        "identical_runs": len(whole),
        "tied_runs": sum(gap <= TIE_GAP for gap in gaps),
        "largest_gap_at_a_difference": max(gaps, default=None),
        "failed_runs": sum(run.error is not None for run in runs),
        "errors": sorted({run.error for run in runs if run.error is not None}),
        "max_stall_s": max((run.stall_s for run in runs), default=0.0),
        "median_stall_s": statistics.median(run.stall_s for run in runs),
        "stalls_s": [round(run.stall_s, 4) for run in runs],
        "struck": [list(zip(run.victims, run.struck_at_tokens, strict=False)) for run in runs],
        "undisturbed_step_s": statistics.median(reference.steps_s),
        "undisturbed_longest_step_s": max(reference.steps_s),
        "sequence_stickiness": arena.running.dispatcher.replicas.sequence_stickiness,
        "attempts": {name: getattr(attempts, name) for name in AttemptStats.__slots__},
    }
