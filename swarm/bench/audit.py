"""How soon a peer that returns wrong numbers is caught, and what becomes of the answers that it had a part in.

Three real peers, every expert on two of them. In each run a new backbone, that knows nobody's record, first answers honestly
until all peers have passed as many audits as a newcomer must: so the share that counts is the one asked for. Then a random one of
those in use begins to lie at a random token of an answer, streamed in every other run. Answers follow until it is caught, or has
lied MAX_BATCHES times; then one more, which must be honest.

    held answer       equal to the honest one, in full
    streamed answer   ends with an error that names the last audited token; what came up to that one is the honest text;
                      or, the lie being caught before anything of it left, goes on to the honest end
    next answer       equal to the honest one

A *batch* is one answer of the lying peer that was used. In forms of partial sums texts may differ by rounding, at a tie: only in
the form `exact` must all be equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.engine import EngineConfig
from swarm.backbone.prepared import PreparedModel, prepare_model
from swarm.backbone.requests import GenerationRequest, SamplingParams
from swarm.bench.cheating_peer import CheatKind
from swarm.dispatch.attempts import Order
from swarm.dispatch.audit import DEFAULT_TOLERANCE
from swarm.dispatch.audit_opinions import Rows
from swarm.dispatch.auditor import Auditor
from swarm.dispatch.origin import Origin
from swarm.dispatch.plan import HERE
from swarm.emulation.processes import LocalSwarm, ProcessFailed, contiguous_shares
from swarm.errors import AuditFailed
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.interruptible import run_interruptibly
from swarm.registry.client import parse_registry
from swarm.wire import messages as m
from swarm.wire.rows import Wire, WireForm

logger = logging.getLogger(__name__)

PROMPT = "The :mod:`json` module provides an interface to convert objects in memory to a"
N_PEERS = 3
MAX_BATCHES = 200  # of the lying peer, within which it must be caught
MIN_USE_SHARE = 0.1  # of the honest answers' batches: who is used less would lie to nobody
COVER_TIMEOUT_S = 60.0
MAX_WARM_UP = 40  # honest answers before a run gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What to measure.

    Attributes:
        kind: None: nobody lies; whoever is caught then is accused wrongly.
    """

    model: Path
    kind: CheatKind | None
    wire: Wire
    share: float
    n_runs: int = 20
    n_tokens: int = 100
    seed: int = 1


@dataclass(slots=True)
class _Run:
    """One run's outcome. What was not seen in it is None."""

    is_streamed: bool
    n_batches: int | None = None  # of the lying peer until it was caught; None: it was not
    n_all_batches: int | None = None
    detection_s: float | None = None
    n_accused: int = 0
    reason: str = ""
    held_equal: bool | None = None  # of the held answers during which it lied
    stream_named: int | None = None  # the last audited token, by the stream's error
    stream_prefix_equal: bool | None = None
    stream_equal: bool | None = None  # of a stream without an error: caught before a wrong token left
    next_equal: bool | None = None
    n_warm_up: int = 0
    errors: list[str] = field(default_factory=list)


class _Watch:
    """Counts answers as they are observed, and lets the lie begin in the middle of one."""

    def __init__(self, auditor: Auditor) -> None:
        self.used: Counter[NodeId] = Counter()
        self.begin: Callable[[], None] = lambda: None
        self.begin_at: int | None = None  # once so many answers were observed
        self._auditor = auditor
        self._observe = auditor.observe
        auditor.observe = self.observe  # type: ignore[method-assign]

    def observe(self, layer: int, x: Rows, answers: Sequence[tuple[Order, m.Result]], origin: Origin | None) -> None:
        self.used.update(order.node for order, _ in answers if order.node != HERE)
        self._observe(layer, x, answers, origin)
        if self.begin_at is not None and self.used.total() >= self.begin_at:
            self.begin_at = None
            self.begin()


async def measure_audit(options: AuditOptions, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench audit`."""
    rng = random.Random(options.seed)
    is_exact = options.wire.back is WireForm.EXACT
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        folder = Path(name)
        async with LocalSwarm(folder / "children") as swarm:
            prepared = await run_interruptibly(
                lambda check: prepare_model(options.model, Folders.below(folder), check=check)
            )
            with prepared:
                shares = contiguous_shares(prepared.manifest.spec.n_expert, N_PEERS)
                kind = options.kind or CheatKind.NOISE
                for index in range(N_PEERS):
                    held = sorted({*shares[index], *shares[(index + 1) % N_PEERS]})
                    flags = ["--model", str(options.model), *(["--exact-kernels"] if is_exact else [])]
                    await swarm.add_peer(held, *flags, program=("swarm.bench.cheating_peer", kind))
                runs: list[_Run] = []
                reference: list[str] = []
                for done in range(options.n_runs):
                    progress(done, options.n_runs)
                    runs.append(await _run(options, prepared, swarm, folder, rng, reference, is_streamed=done % 2 == 1))
                progress(options.n_runs, options.n_runs)
    return _figures(options, runs)


async def _run(
    options: AuditOptions,
    prepared: PreparedModel,
    swarm: LocalSwarm,
    folder: Path,
    rng: random.Random,
    reference: list[str],
    *,
    is_streamed: bool,
) -> _Run:
    run = _Run(is_streamed)
    config = BackboneConfig(
        registry=parse_registry(swarm.registry),
        folders=Folders.below(folder),
        model_file=options.model,
        wire=options.wire,
        host="127.0.0.1",
        engine=EngineConfig(
            n_ctx=options.n_tokens + 64, n_threads=1, exact_kernels=options.wire.back is WireForm.EXACT
        ),
        audit_share=options.share,
        shares_histogram=False,
    )
    async with open_backbone(config, Identity.generate(), prepared=prepared) as running:
        await _wait_all(running)
        auditor = running.dispatcher.audits
        assert auditor is not None
        watch = _Watch(auditor)
        await _warm_up(options, running, auditor, watch, run, reference)
        if run.errors:
            return run
        n_before = watch.used.copy()
        usual = [node for node, n in n_before.items() if n >= MIN_USE_SHARE * n_before.total()]
        victim = rng.choice(sorted(usual))
        process = next(each for each in swarm.peers if each.ready["node"] == str(victim))
        try:
            await _lie(options, running, auditor, watch, victim, process.signal, rng, run, reference)
        finally:
            process.signal(signal.SIGUSR2)
        run.n_accused = sum(node != victim or options.kind is None for node in _caught(running, auditor))
    return run


async def _warm_up(
    options: AuditOptions,
    running: RunningBackbone,
    auditor: Auditor,
    watch: _Watch,
    run: _Run,
    reference: list[str],
) -> None:
    """Answer honestly until nobody who is used is new."""
    for _ in range(MAX_WARM_UP):
        run.n_warm_up += 1
        texts = [text async for text in _texts(running, options, is_streamed=True)]
        if not reference:
            reference += texts
        elif texts != reference:
            run.errors.append("two honest answers differ")
        usual = [node for node, n in watch.used.items() if n >= MIN_USE_SHARE * watch.used.total()]
        if all(auditor.verdict(node).value == "honest" for node in usual):
            return
    run.errors.append(f"peers are still new after {MAX_WARM_UP} answers")


async def _lie(
    options: AuditOptions,
    running: RunningBackbone,
    auditor: Auditor,
    watch: _Watch,
    victim: NodeId,
    tell: Callable[[int], None],
    rng: random.Random,
    run: _Run,
    reference: list[str],
) -> None:
    """Let the victim begin to lie in the middle of an answer, and go on until it is caught."""
    began: list[tuple[float, int, int]] = []
    caught_at: list[tuple[float, int, int]] = []

    def begin() -> None:
        began.append((time.perf_counter(), watch.used[victim], watch.used.total()))
        if options.kind is not None:
            tell(signal.SIGUSR1)

    def on_caught(node: NodeId, caught: Any) -> None:
        if node == victim and not caught_at:
            caught_at.append((time.perf_counter(), watch.used[victim], watch.used.total()))
            run.reason = caught.reason

    auditor.on_caught = on_caught
    n_of_answer = watch.used.total() // run.n_warm_up
    watch.begin = begin
    watch.begin_at = watch.used.total() + rng.randrange(max(1, n_of_answer // 2))
    while not caught_at and (not began or watch.used[victim] - began[0][1] < MAX_BATCHES):
        texts: list[str] = []
        try:
            async for text in _texts(running, options, is_streamed=run.is_streamed):
                texts.append(text)
        except AuditFailed as error:
            run.stream_named = error.n_audited
            run.stream_prefix_equal = texts[: error.n_audited] == reference[: error.n_audited]
            break
        if run.is_streamed:
            run.stream_equal = texts == reference if caught_at else None
        else:
            run.held_equal = "".join(texts) == "".join(reference) and run.held_equal is not False
    if caught_at and began:
        run.detection_s = caught_at[0][0] - began[0][0]
        run.n_batches, run.n_all_batches = caught_at[0][1] - began[0][1], caught_at[0][2] - began[0][2]
    run.next_equal = [text async for text in _texts(running, options, is_streamed=True)] == reference


async def _texts(running: RunningBackbone, options: AuditOptions, *, is_streamed: bool) -> AsyncIterator[str]:
    """Yield an answer's pieces of text, one for each token."""
    request = GenerationRequest(
        prompt=PROMPT,
        max_tokens=options.n_tokens,
        sampling=SamplingParams(temperature=0),
        is_stream=is_streamed,
    )
    async with contextlib.aclosing(running.backbone.generate(request)) as deltas:
        async for delta in deltas:
            yield delta.text


def _caught(running: RunningBackbone, auditor: Auditor) -> list[NodeId]:
    peers = auditor.report()["peers"]
    return [NodeId.parse(each["node"]) for each in peers if each["verdict"] == "caught"]


async def _wait_all(running: RunningBackbone) -> None:
    try:
        async with asyncio.timeout(COVER_TIMEOUT_S):
            while len(running.holders.placement.destinations) < N_PEERS:
                running.holders.look_soon()
                await asyncio.sleep(0.05)
    except TimeoutError:
        n_used = len(running.holders.placement.destinations)
        raise ProcessFailed(f"{n_used} of {N_PEERS} peers are in use after {COVER_TIMEOUT_S:g} s") from None


def _figures(options: AuditOptions, runs: list[_Run]) -> dict[str, Any]:
    found = [run for run in runs if run.n_batches is not None]
    batches = [run.n_batches for run in found if run.n_batches is not None]
    streamed = [run for run in runs if run.is_streamed]
    return {
        "model": options.model.name,
        "kind": options.kind.value if options.kind else "none",
        "wire": str(options.wire),
        "share": options.share,
        "tolerance": DEFAULT_TOLERANCE,
        "n_tokens": options.n_tokens,
        "runs": len(runs),
        "detected_runs": sum(n <= MAX_BATCHES for n in batches),
        "max_batches_to_detection": max(batches, default=None),
        "median_batches_to_detection": statistics.median(batches) if batches else None,
        "max_all_batches_to_detection": max((run.n_all_batches or 0 for run in found), default=None),
        "max_detection_s": max((run.detection_s or 0.0 for run in found), default=None),
        "wrong_accusations": sum(run.n_accused for run in runs),
        "held_runs": len(runs) - len(streamed),
        "held_equal_runs": sum(run.held_equal is True for run in runs),
        "streamed_runs": len(streamed),
        "streamed_error_runs": sum(run.stream_named is not None for run in streamed),
        "streamed_prefix_equal_runs": sum(run.stream_prefix_equal is True for run in streamed),
        "streamed_equal_runs": sum(run.stream_equal is True for run in streamed),
        "next_equal_runs": sum(run.next_equal is True for run in runs),
        "batches_to_detection": batches,
        "reasons": sorted({run.reason for run in runs if run.reason}),
        "last_audited_tokens": [run.stream_named for run in streamed],
        "errors": sorted({error for run in runs for error in run.errors}),
    }
