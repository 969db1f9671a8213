"""Answers many requests at once on one or several lanes: who waits, who gets which slot, what is kept of whose text.

request -> line (bounded) -> slot of a lane -> steps with whoever else is there (`lane`) -> text
                               ^ the prompt's beginning, from a slot or the prefix cache (`slots`, `prefix_cache`)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from swarm.backbone.answer import Answer
from swarm.backbone.drawing import Drawer
from swarm.backbone.engine import Engine
from swarm.backbone.grammar import GrammarVocabulary
from swarm.backbone.lane import Job, Lane, Proposer
from swarm.backbone.prefix_cache import Entry, PrefixCache, Tokens, as_tokens
from swarm.backbone.requests import GenerationRequest, TextDelta
from swarm.backbone.row_budget import RowBudget
from swarm.backbone.scheduler import LiveRequest, WaitingLine
from swarm.backbone.serving_stats import ServingStats
from swarm.backbone.slots import choose_seat
from swarm.backbone.tracing import RequestTrace, Tracer
from swarm.dispatch.holders import Holders
from swarm.dispatch.origin import next_sequence
from swarm.errors import AuditFailed, ConnectionLost, DeadlineExceeded, Overloaded, UserError
from swarm.speculation.accept import DraftStats
from swarm.speculation.ngram import NgramDrafter

logger = logging.getLogger(__name__)

MAX_LINE = 64  # requests that wait for a slot; guessed. More are refused with a time to try again
LINE_TIMEOUT_S = 300.0  # guessed: longer than the clients' own patience, so that none waits here in vain for ever
COVER_WAIT_S = 3.0  # how long a request waits for a missing expert's holder before it fails
# How long a complete answer waits for audits of its rows that are under way. Guessed: a replica answers in a fraction of it.
AUDIT_WAIT_S = 2.0
CACHE_BYTES = 512 << 20  # of the prefix cache; guessed: 33,000 tokens of synth16, 5,500 of a Qwen3-30B


class Audits(Protocol):
    """What is known of the answers of peers that were audited: `swarm.dispatch`."""

    def adopt(self, child: int, parent: int, n_tokens: int) -> None:
        """A sequence begins with the first positions of another."""
        ...

    def release(self, sequence: int) -> None:
        """Nobody needs a sequence any more."""
        ...

    async def settle(self, sequence: int, timeout_s: float) -> None:
        """Wait for the audits under way that concern a sequence."""
        ...

    def tainted_from(self, sequence: int) -> int | None:
        """Return the first position that is not to be trusted."""
        ...

    def healed(self, sequence: int) -> None:
        """A sequence holds nothing any more that is not to be trusted."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """How requests share the lanes.

    Attributes:
        n_draft: most tokens that a step drafts; 0: one token a step.
        fill_wait_s: how long a step waits for more requests to join it.
        cache_bytes: of the prefix cache, in this process's memory; 0: none.
        max_line: requests that may wait for a slot.
        request_timeout_s: after which a request ends with an error; None: never.
        is_reproducible: an answer's bits do not depend on who else is served, nor on what of its text was there already. Needs a
            lane for each slot, exact kernels, and peers that have them (`swarm.backbone.reproducible`).
        n_prompt_rows: that all lanes have under way together (`swarm.backbone.row_budget`); None: no bound.
    """

    n_draft: int = 0
    fill_wait_s: float = 0.0
    cache_bytes: int = CACHE_BYTES
    max_line: int = MAX_LINE
    request_timeout_s: float | None = None
    is_reproducible: bool = False
    n_prompt_rows: int | None = None


class Backbone:
    """A `TextGenerator` over one model. Use as an async context manager: the lanes work inside.

    Attributes:
        stats: counts and times so far.
        on_step: told of each step: requests, rows, seconds.
    """

    def __init__(
        self,
        engines: Engine | Sequence[Engine],
        holders: Holders,
        model_name: str,
        *,
        n_slots: int = 1,
        config: ServingConfig | None = None,
        proposer: Callable[[Engine, int], Proposer] | None = None,
        audits: Audits | None = None,
        tracer: Tracer | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            engines: one for each lane, with room for `n_slots` sequences each.
            proposer: makes what drafts for one sequence (lane, llama.cpp's number); None: prompt lookup.

        Raises:
            UserError: reproducible answers are asked for of a model that cannot give them.
        """
        self._engines = [engines] if isinstance(engines, Engine) else list(engines)
        self._config = config or ServingConfig()
        if self._config.is_reproducible:
            assert n_slots == 1, "a lane for each slot"
            if self._engines[0].model.has_recurrent_state:
                raise UserError("this model's memory cannot take back one token, so its answers cannot be reproducible")
        self._holders = holders
        self._model_name = model_name
        self._proposer = proposer
        self._audits = audits
        self._tracer = tracer
        self._now = now
        self._vocabulary = GrammarVocabulary(self._engines[0])
        self.cache = PrefixCache(self._config.cache_bytes, on_drop=self._dropped)
        budget = RowBudget(self._config.n_prompt_rows)
        self.lanes = [
            Lane(
                index,
                engine,
                self,
                n_slots=n_slots,
                fill_wait_s=self._config.fill_wait_s,
                now=now,
                is_reproducible=self._config.is_reproducible,
                budget=budget,
            )
            for index, engine in enumerate(self._engines)
        ]
        self.n_slots = n_slots * len(self.lanes)
        self.line = WaitingLine(self._config.max_line, self.n_slots)
        self.stats = ServingStats()
        self._free_slots = asyncio.Semaphore(self.n_slots)
        self._n_taken = 0
        self._held_origins: Counter[int] = Counter()  # sequence -> slots and entries that hold tokens of it
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._running = [self._tasks.create_task(lane.run()) for lane in self.lanes]
        return self

    async def __aexit__(self, *failure: object) -> None:
        for task in self._running:
            task.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)  # steps under way end first: they use what is freed then
        finally:
            for lane in self.lanes:
                lane.end(ConnectionLost("the backbone is closing"))

    # What a gateway asks

    @property
    def drafts(self) -> DraftStats:
        """What drafts brought so far."""
        return self.stats.drafts

    @property
    def model_name(self) -> str:
        """`label@8hex`."""
        return self._model_name

    @property
    def n_ctx(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._engines[0].n_ctx

    @property
    def chat_template(self) -> str | None:
        """The GGUF's own Jinja2 template."""
        return self._engines[0].model.chat_template

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token` and `eos_token` as text; empty where the model has none."""
        model = self._engines[0].model
        named = {"bos_token": model.bos_token, "eos_token": model.eos_token}
        return {
            name: "" if token is None else model.piece(token, special=True).decode(errors="replace")
            for name, token in named.items()
        }

    def tokenize(self, request: GenerationRequest) -> list[int]:
        """Return the prompt's tokens.

        Raises:
            UserError: it is empty, has unknown tokens, or leaves no room for an answer.
        """
        model = self._engines[0].model
        if isinstance(request.prompt, str):
            tokens = model.tokenize(
                request.prompt, add_special=request.add_special, parse_special=request.parse_special
            )
            if model.bos_token is not None and tokens[:2] == [model.bos_token] * 2:
                del tokens[0]  # the chat template wrote one already
        else:
            tokens = list(request.prompt)
            if any(not 0 <= token < model.n_vocab for token in tokens):
                raise UserError(f"unknown token in the prompt: expected 0 to {model.n_vocab - 1}")
        if not tokens:
            raise UserError("the prompt is empty")
        if len(tokens) >= self.n_ctx:
            raise UserError(f"the prompt is too long: got {len(tokens)} tokens, expected at most {self.n_ctx - 1}")
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included. Raises UserError for an unknown token."""
        model = self._engines[0].model
        if any(not 0 <= token < model.n_vocab for token in tokens):
            raise UserError(f"unknown token: expected 0 to {model.n_vocab - 1}")
        return b"".join(model.piece(token, special=True) for token in tokens).decode(errors="replace")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        """Stream the answer; closing the iterator frees its slot and gives up what is under way for it alone.

        Raises:
            UserError: the prompt is empty or does not fit.
            ExpertUnavailable: no live holder for some experts, at the start or in the middle.
            Overloaded: the line is full, or the backbone is leaving.
            DeadlineExceeded: the request took too long.
            AuditFailed: tokens that were sent turned out to be a cheat's.
        """
        if self._is_draining:
            raise Overloaded("this backbone is shutting down", retry_after_s=10.0)
        began_at = self._now()
        self.stats.n_requests += 1
        self.line.enter(self.n_slots - self._n_taken)
        is_in_line = True
        try:
            tokens = await asyncio.to_thread(self.tokenize, request)  # a long text takes a good part of a second
            drawer = await self.drawer(request)
            try:
                await self._turn()
            except BaseException:
                drawer.close()
                raise
            self.line.leave()
            is_in_line = False
            if self._is_draining:
                drawer.close()
                self._release()
                raise Overloaded("this backbone is shutting down", retry_after_s=10.0)
            self.stats.queue.observe(self._now() - began_at)
            async with contextlib.aclosing(self._answer(tokens, request, drawer, began_at)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            if is_in_line:
                self.line.leave()

    async def drawer(self, request: GenerationRequest) -> Drawer:
        """Return what draws a request's tokens. Raises UserError for a bad grammar or bias."""
        if request.ignores_end:  # the first time, a large vocabulary takes a tenth of a second
            await asyncio.to_thread(lambda: self._engines[0].model.end_tokens)
        matcher = None
        if request.grammar is not None:  # a complex one takes a second
            matcher = await asyncio.to_thread(self._vocabulary.matcher, request.grammar)
        return Drawer(request, self._engines[0].model, matcher)

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for those that have a slot; return whether all were answered."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self.idle()
        except TimeoutError:
            return False
        return True

    async def idle(self) -> None:
        """Wait until no request has a slot."""
        await self._idle.wait()

    def taint(self, tainted: Mapping[int, int]) -> None:
        """Take back what a cheat's answers went into: sequence -> first position that is not to be trusted.

        What was kept from there on is forgotten. Answers are computed anew from there, but those that have sent more: they fail.
        """
        self.cache.drop(lambda entry: tainted.get(entry.origin, len(entry.tokens)) < len(entry.tokens))
        for lane in self.lanes:
            for slot in lane.slots:
                if not slot.is_busy and slot.origin in tainted:
                    slot.tokens = slot.tokens[: tainted[slot.origin]]
            for origin in lane.jobs.keys() & tainted.keys():
                job, position = lane.jobs[origin], tainted[origin]
                if lane.can_rewind(job, position):
                    lane.rewind(job, position)
                else:
                    job.answer.fail(AuditFailed(max(position + 1 - job.live.n_prompt, 0)))

    # A request's life

    async def _turn(self) -> None:
        """Wait in line, not for ever, until there is a free slot."""
        try:
            async with asyncio.timeout(LINE_TIMEOUT_S):
                await self._free_slots.acquire()
            self._n_taken += 1
        except TimeoutError:
            raise Overloaded(f"no turn within {LINE_TIMEOUT_S:g} s", retry_after_s=30.0) from None

    def _release(self) -> None:
        self._n_taken -= 1
        self._free_slots.release()

    async def _answer(
        self, prompt: list[int], request: GenerationRequest, drawer: Drawer, began_at: float
    ) -> AsyncGenerator[TextDelta, None]:
        job: Job | None = None
        trace: RequestTrace | None = None
        came_ns = time.monotonic_ns() - round((self._now() - began_at) * 1e9)
        try:
            if self._holders.missing():
                await self._holders.wait_complete(COVER_WAIT_S)
            job = self._seat(prompt, request, drawer, began_at)
            if request.is_traced and self._tracer is not None:
                trace = self._tracer.open(job.live.origin, came_ns)
            with self._deadline(job):
                async for delta in self._read(job):
                    is_last = delta.finish_reason is not None
                    yield replace(delta, trace=trace.as_json()) if is_last and trace is not None else delta
            logger.info("answered %d + %d tokens in %.2f s", len(prompt), job.answer.n_tokens, self._now() - began_at)
        finally:
            if trace is not None and job is not None and self._tracer is not None:
                self._tracer.close(job.live.origin)
            if job is None:
                drawer.close()
                self._release()
            else:
                if not job.answer.is_over:
                    self.stats.n_cancelled += 1
                self.lanes[job.slot.lane].leave(job)

    def _seat(self, prompt: list[int], request: GenerationRequest, drawer: Drawer, began_at: float) -> Job:
        tokens = as_tokens(prompt)
        texts = {origin: text for lane in self.lanes for origin, text in lane.texts().items()}
        seat = choose_seat([lane.slots for lane in self.lanes], self.cache, tokens, texts)
        assert seat is not None, "a slot was free"
        room = self.n_ctx - len(prompt)
        n_most = room if request.max_tokens is None else min(request.max_tokens, room)
        answer = Answer(request, self._engines[0].model, n_prompt=len(prompt), n_most=n_most)
        job = Job(
            live=LiveRequest(
                origin=next_sequence(),
                sequence=seat.slot.sequence,
                tokens=list(prompt),
                n_prompt=len(prompt),
                n_computed=0,
                n_most=n_most,
                n_draft=self._config.n_draft,
            ),
            answer=answer,
            drawer=drawer,
            slot=seat.slot,
            began_at=began_at,
            seated_at=self._now(),
        )
        if self._config.n_draft:
            engine = self._engines[seat.slot.lane]
            job.proposer = self._proposer(engine, seat.slot.sequence) if self._proposer else PromptLookup()
        if isinstance(seat.source, Entry):
            self.cache.used(seat.source)
            job.lender = seat.source.origin  # its marks are needed until they are taken over, in the cache or not
            self._held_origins[job.lender] += 1
        self._idle.clear()
        self.lanes[seat.slot.lane].seat(job, seat)
        return job

    async def _read(self, job: Job) -> AsyncIterator[TextDelta]:
        answer = job.answer
        while answer.is_held:
            await answer.complete()
            if self._audits is None or answer.finish_reason is None:
                break
            await self._audits.settle(job.live.origin, AUDIT_WAIT_S)
            if answer.finish_reason is not None:
                break  # else it is computed anew, from some place on
        answer.let_go()
        while (delta := await answer.read()) is not None:
            yield delta

    @contextlib.contextmanager
    def _deadline(self, job: Job) -> Iterator[None]:
        timeout_s = self._config.request_timeout_s
        if timeout_s is None:
            yield
            return
        error = DeadlineExceeded(f"the request took longer than {timeout_s:g} s")
        timer = asyncio.get_running_loop().call_later(timeout_s, job.answer.fail, error)
        try:
            yield
        finally:
            timer.cancel()

    # What lanes tell

    def offer(self, tokens: Tokens, origin: int, state: npt.NDArray[np.uint8]) -> None:
        """Keep a text that its slot gives up."""
        position = self._audits.tainted_from(origin) if self._audits is not None else None
        if position is not None and position < len(tokens):  # a peer was caught while the state was copied
            return
        if self.cache.add(tokens, origin, state, state.nbytes):
            self._held_origins[origin] += 1

    def adopted(self, job: Job, origin: int, n_tokens: int) -> None:
        """Note what a job need not compute."""
        self._held_origins[job.live.origin] += 1
        job.answer.n_cached = n_tokens
        self.stats.n_prompt_tokens += job.live.n_prompt
        self.stats.n_kept_tokens += n_tokens
        self.stats.n_cache_hits += n_tokens > 0
        if self._audits is not None and origin:
            self._audits.adopt(job.live.origin, origin, n_tokens)
            position = self._audits.tainted_from(job.live.origin)
            if position is not None:
                self.lanes[job.slot.lane].rewind(job, position)
        self._return(job)

    def _return(self, job: Job) -> None:
        """Let go of the sequence whose entry a job begins with."""
        lender, job.lender = job.lender, 0
        self.replaced(lender)

    def rewound(self, job: Job) -> None:
        """Note that a job has forgotten what was wrong."""
        if self._audits is not None:
            self._audits.healed(job.live.origin)

    def replaced(self, origin: int) -> None:
        """Let go of a sequence that a slot held."""
        if not origin:
            return
        self._held_origins[origin] -= 1
        if self._held_origins[origin] <= 0:
            del self._held_origins[origin]
            if self._audits is not None:
                self._audits.release(origin)

    def _dropped(self, entry: Entry) -> None:
        self.replaced(entry.origin)

    def drawn(self, job: Job, n_drafted: int, n_drawn: int, *, is_first: bool) -> None:
        """Count what a step gave a job."""
        now = self._now()
        self.stats.n_completion_tokens += n_drawn
        if is_first:
            self.stats.ttft.observe(now - job.began_at)
        else:
            self.stats.drafts.count(n_drafted, n_drawn)
            if job.token_at is not None:
                self.stats.inter_token.observe((now - job.token_at) / n_drawn)

    def stepped(self, n_requests: int, n_rows: int, seconds: float) -> None:
        """Count a step."""
        self.stats.step.observe(seconds)
        self.stats.batch.observe(n_requests)
        self.stats.n_rows += n_rows

    def freed(self, job: Job) -> None:
        """Give the slot to whoever waits."""
        self._return(job)
        self.line.served(self._now() - job.seated_at)
        self._release()
        if not any(lane.jobs for lane in self.lanes):
            self._idle.set()


class PromptLookup:
    """A `Proposer` over an n-gram drafter."""

    def __init__(self) -> None:
        self._drafter = NgramDrafter()
        self._n_known = 0

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return up to `n` tokens that followed the last ones where they stood before."""
        if len(tokens) < self._n_known:  # it was rewound
            self._drafter, self._n_known = NgramDrafter(), 0
        self._drafter.extend(tokens[self._n_known :])
        self._n_known = len(tokens)
        return self._drafter.draft(n)
