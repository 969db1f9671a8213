"""One lane at work: step after step of whatever requests are in its batch, on its engine's thread.

    request gets a seat    its slot is filled with what is there of its prompt (`slots`), it joins the batch (`scheduler`)
    step                   plan; draft, decode and draw on the engine's thread; the answers grow
    request is over        it leaves the batch; its slot keeps its text

A step that fails is rolled back and nothing of it is kept. Where one request's rows were the cause, it ends alone and the
others' step is made again; where the cause is not known, each is tried by itself.

A request whose client has gone leaves at once, or with the end of the step under way: until then its rows are dispatched no
more; a step in which nobody is left is given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from swarm.backbone.answer import Answer
from swarm.backbone.drawing import Drawer
from swarm.backbone.engine import Engine, StepPart
from swarm.backbone.prefix_cache import Entry, Tokens, as_tokens
from swarm.backbone.reproducible import MOST_ROWS, accompanied
from swarm.backbone.row_budget import RowBudget
from swarm.backbone.scheduler import LaneSchedule, LiveRequest, StepShare
from swarm.backbone.slots import NOTHING, Seat, Slot
from swarm.errors import ConnectionLost, EngineError, SwarmError
from swarm.speculation.accept import accept
from swarm.speculation.drafter import Observer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Proposer(Protocol):
    """Drafts one sequence's next tokens; called on the lane's thread, before its step is decoded."""

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return up to `n` tokens that may follow."""
        ...


class LaneEvents(Protocol):
    """What a lane tells whoever runs it; on the loop."""

    def offer(self, tokens: Tokens, origin: int, state: npt.NDArray[np.uint8]) -> None:
        """Take a text that its slot gives up."""
        ...

    def adopted(self, job: Job, origin: int, n_tokens: int) -> None:
        """A job begins with tokens that another sequence computed (0: with none)."""
        ...

    def rewound(self, job: Job) -> None:
        """What a job had from the position on at which it was rewound is forgotten."""
        ...

    def replaced(self, origin: int) -> None:
        """A slot holds nothing of this sequence any more."""
        ...

    def drawn(self, job: Job, n_drafted: int, n_drawn: int, *, is_first: bool) -> None:
        """A step gave a job tokens."""
        ...

    def stepped(self, n_requests: int, n_rows: int, seconds: float) -> None:
        """A step has ended well."""
        ...

    def freed(self, job: Job) -> None:
        """A job's slot is free."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """A request at work.

    Attributes:
        lender: the sequence whose cached text it is about to begin with; 0: none.
        began_at: when it was accepted; seated_at: when it got its slot; token_at: of its latest token.
    """

    live: LiveRequest
    answer: Answer
    drawer: Drawer
    slot: Slot
    proposer: Proposer | None = None
    lender: int = 0
    began_at: float = 0.0
    seated_at: float = 0.0
    token_at: float | None = None
    is_freed: bool = False


@dataclass(slots=True)
class _Result:
    """What a step gave one request."""

    drawn: list[int] = field(default_factory=list)
    n_drafted: int = 0
    error: SwarmError | None = None
    is_lost: bool = False  # its sequence had to be removed as a whole


@dataclass(frozen=True, slots=True)
class _Failure:
    """A step that failed and was rolled back."""

    error: BaseException
    lost: Sequence[int]
    concerned: set[int]


class Lane:
    """The batch of one engine.

    Attributes:
        jobs: origin -> what is at work; schedule: its batch; slots: its places; budget: of rows, which all lanes share.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        events: LaneEvents,
        *,
        n_slots: int,
        fill_wait_s: float,
        now: Callable[[], float],
        is_reproducible: bool = False,
        budget: RowBudget | None = None,
    ) -> None:
        """The engine must have room for `n_slots` sequences.

        Args:
            budget: of the rows of prompts of all lanes; None: this one is alone.
            is_reproducible: shape steps as `swarm.backbone.reproducible` has it; needs `n_slots` 1 and exact kernels.
        """
        self.slots = [Slot(lane=index, sequence=sequence) for sequence in range(n_slots)]
        self.jobs: dict[int, Job] = {}
        self.engine = engine
        self._events = events
        self._index = index
        self.budget = budget or RowBudget()
        self.schedule = LaneSchedule(
            n_slots=n_slots, fill_wait_s=fill_wait_s, room=lambda: self.budget.room(self._index)
        )
        self._now = now
        self._is_reproducible = is_reproducible
        self._newcomers: deque[tuple[Job, Seat]] = deque()
        self._changed = asyncio.Event()
        self._step: frozenset[int] = frozenset()  # origins in the step under way
        self._scope: asyncio.Timeout | None = None

    def texts(self) -> dict[int, Tokens]:
        """Return origin -> computed tokens of what is at work."""
        return {origin: as_tokens(job.live.tokens[: job.live.n_computed]) for origin, job in self.jobs.items()}

    def seat(self, job: Job, seat: Seat) -> None:
        """Take a job in; its slot is its own from here on."""
        job.slot.is_busy = True
        self.jobs[job.live.origin] = job
        job.answer.on_read = lambda: self._read(job)
        self._newcomers.append((job, seat))
        self._changed.set()

    def leave(self, job: Job) -> None:
        """Free a job's slot, now or with the end of the step under way."""
        live = job.live
        if job.is_freed:
            return
        live.is_gone = True
        self._changed.set()
        if live.origin not in self._step:
            self._free(job)
            return
        self.engine.drop(live.origin)
        if self._scope is not None and all(self.jobs[each].live.is_gone for each in self._step):
            self._scope.reschedule(0)

    def can_rewind(self, job: Job, position: int) -> bool:
        """Return whether a job can be computed anew from a position on: nobody has read what depends on it.

        A token is drawn from the row before it. A stream's draw that was made for nothing cannot be taken back, unless it was
        the first.
        """
        live = job.live
        if job.answer.is_held or live.n_drawn == 0:
            return True
        return position + 1 >= len(live.tokens) and live.origin not in self._step

    def rewind(self, job: Job, position: int) -> None:
        """Let a job be computed anew from a position on, if it can."""
        live = job.live
        if position >= live.n_computed and live.origin not in self._step:
            self._events.rewound(job)  # nothing of it was computed yet
            return
        job.answer.reopen()
        live.rewind_to = position if live.rewind_to is None else min(position, live.rewind_to)
        self._changed.set()

    async def run(self) -> None:
        """Work for ever; the engine must be running."""
        self.schedule.n_batch = min(self.engine.n_batch, MOST_ROWS if self._is_reproducible else self.engine.n_batch)
        while True:
            self._changed.clear()
            try:
                await self._take_in()
                await self._rewind_all()
            except SwarmError as error:
                self.end(error)
            except Exception as error:
                logger.error("a lane cannot prepare its step", exc_info=error)
                self.end(EngineError(f"a lane cannot prepare its step: {error!r}"))
            starts_at = self.schedule.starts_at(self._now())
            wait_s = None if starts_at is None else starts_at - self._now()
            if wait_s is None or wait_s > 0:
                try:
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
                except TimeoutError:
                    pass
                continue
            await self._make_step(self.schedule.plan())

    # Seats

    async def _take_in(self) -> None:
        while self._newcomers:
            job, seat = self._newcomers.popleft()
            if job.is_freed:
                continue
            live = job.live
            source, n_kept = seat.source, seat.n_kept
            if isinstance(source, Slot):  # which may have forgotten something since it was chosen
                other = self.jobs.get(source.origin)
                n_kept = min(n_kept, len(source.tokens) if other is None else other.live.n_computed)
            if self._is_reproducible and n_kept == 1:  # it may have been computed alone, and has other bits then
                n_kept = 0
            old_tokens, old_origin = seat.slot.tokens, seat.slot.origin
            seat.slot.tokens = NOTHING  # should it fail, nobody knows what is left
            n_kept, state = await self._alone(
                job,
                lambda seat=seat, n=n_kept, old=old_tokens: self._fill(seat, n, old),  # type: ignore[misc]
            )
            if state is not None:
                self._events.offer(old_tokens, old_origin, state)
            live.n_computed = n_kept
            self._events.adopted(job, source.origin if source is not None and n_kept else 0, n_kept)
            self._events.replaced(old_origin)
            seat.slot.origin = live.origin
            if live.is_gone:  # its client went meanwhile
                self._free(job)
            else:
                self.schedule.join(live)

    async def _alone(self, job: Job, work: Callable[[], T]) -> T:
        """Return what `work` returns on the engine's thread; the job cannot be freed meanwhile."""
        self._step = frozenset((job.live.origin,))
        try:
            return await self.engine.call(work)
        finally:
            self._step = frozenset()

    def _fill(self, seat: Seat, n_kept: int, old: Tokens) -> tuple[int, npt.NDArray[np.uint8] | None]:
        """Make a slot hold the beginning of its new text; on the engine's thread. Return how much, and the old text's state."""
        context, sequence, source = self.engine.context, seat.slot.sequence, seat.source
        state: npt.NDArray[np.uint8] | None = None
        if seat.is_saved and context.remove(sequence, len(old)):
            state = context.save(sequence)
        if source is not seat.slot:
            context.remove(sequence, 0)
            if isinstance(source, Slot):
                context.copy(source.sequence, sequence, n_kept)
            elif isinstance(source, Entry):
                assert isinstance(source.state, np.ndarray)
                n_kept = n_kept if context.restore(sequence, source.state) else 0
        if n_kept == 0 or not context.remove(sequence, n_kept):
            context.remove(sequence, 0)  # a memory that cannot forget a part keeps nothing
            n_kept = 0
        return n_kept, state

    async def _rewind_all(self) -> None:
        for job in [job for job in self.jobs.values() if job.live.rewind_to is not None and not job.live.is_gone]:
            live, position = job.live, job.live.rewind_to
            live.rewind_to = None
            if position is None or job.is_freed:  # its client went while another was rewound
                continue
            if position >= live.n_computed:
                if live.n_drawn and not job.answer.is_held:  # a stream between two steps: nothing was made in vain
                    self._events.rewound(job)
                    continue
                position = live.n_computed  # of a step that was passed over, its rows and what was drawn of them remain
            n_drawn = job.drawer.rewind(max(position + 1 - live.n_prompt, 0))
            position = min(position, live.n_prompt + n_drawn - 1)
            is_partial = await self._alone(
                job,
                lambda sequence=live.sequence, position=position: self._forget(sequence, position),  # type: ignore[misc]
            )
            live.n_computed = position if is_partial else 0
            live.tokens = live.tokens[: live.n_prompt + n_drawn]
            if job.answer.is_held:
                job.answer.rewind(n_drawn)
            self._events.rewound(job)
            if live.is_gone:
                self._free(job)
            elif not job.answer.is_over and live not in self.schedule.requests:
                self.schedule.join(live)

    def _forget(self, sequence: int, position: int) -> bool:
        if self.engine.context.remove(sequence, position):
            return True
        self.engine.context.remove(sequence, 0)
        return False

    # Steps

    async def _make_step(self, shares: list[StepShare]) -> None:
        if not shares:
            return
        self._step = frozenset(share.request.origin for share in shares)
        jobs = [self.jobs[share.request.origin] for share in shares]
        n_prompt_rows = sum(share.n_prompt_rows for share in shares)
        n_pending = sum(live.n_pending for live in self.schedule.requests if live.is_ready and live.n_pending > 1)
        self.budget.began(self._index, n_prompt_rows, wants_more=n_pending > n_prompt_rows)
        began_at = self._now()
        outcome: list[_Result] | _Failure | None = None
        try:
            async with asyncio.timeout(None) as self._scope:
                outcome = await self.engine.call(lambda: self._compute(shares, jobs))
        except TimeoutError:
            logger.debug("a step was given up: nobody waits for it")
            if self.engine.model.has_recurrent_state:  # it was rolled back, perhaps with all that was before it
                for job in jobs:
                    job.live.n_computed = 0
        except Exception as error:
            outcome = _Failure(error, tuple(self._step), set())
        finally:
            self._scope = None
            self._step = frozenset()
            self.budget.ended(self._index)
        if isinstance(outcome, _Failure):
            self._take_failure(jobs, outcome)
        elif outcome is not None:
            n_rows = sum(share.n_rows + result.n_drafted for share, result in zip(shares, outcome, strict=True))
            seconds = self._now() - began_at
            self.schedule.ended(n_rows, seconds)
            self._events.stepped(len(shares), n_rows, seconds)
            for share, job, result in zip(shares, jobs, outcome, strict=True):
                self._take_result(share, job, result)
        for job in jobs:
            if job.live.is_gone and not job.is_freed:
                self._free(job)

    def _compute(self, shares: list[StepShare], jobs: list[Job]) -> list[_Result] | _Failure:
        """One step, on the engine's thread."""
        drafts: list[list[int]] = []
        for share, job in zip(shares, jobs, strict=True):
            try:
                drafts.append(self._propose(share, job))
            except SwarmError as error:  # nobody knows what is left of its text; the others' are as they were
                self._forget(share.request.sequence, 0)
                return _Failure(error, (share.request.origin,), {share.request.origin})
        parts = []
        for share, draft in zip(shares, drafts, strict=True):
            live = share.request
            at = live.n_computed
            parts.append(
                StepPart(
                    tokens=[*live.tokens[at : at + share.n_rows], *draft],
                    first_position=at,
                    sequence=live.sequence,
                    logits=("all" if draft else "last") if share.draws else "none",
                    origin=live.origin,
                )
            )
        n_before = 0  # rows before the first share's own
        if self._is_reproducible:
            [part], live = parts, shares[0].request
            if len(part.tokens) == 1 and part.first_position > 0 and self._forget_last(live):
                n_before = 1
            parts = accompanied(part, live.tokens[live.n_computed] if n_before else None)
        began_at = time.perf_counter()
        try:
            self.engine.decode_parts(parts)
        except SwarmError as error:
            return _Failure(error, self.engine.roll_back(parts), self.engine.concerned(error))
        if all(share.draws and share.n_rows == 1 for share in shares):  # a prompt's rows tell nothing of a draft's
            n_rows, seconds = len(shares) + sum(map(len, drafts)), time.perf_counter() - began_at
            for job in jobs:
                if isinstance(job.proposer, Observer):
                    job.proposer.observe(n_rows, seconds, len(shares) - 1)
        results = []
        row = n_before
        for share, job, draft in zip(shares, jobs, drafts, strict=True):
            results.append(self._draw(share, job, draft, row + share.n_rows - 1) if share.draws else _Result())
            row += share.n_rows + len(draft)
        return results

    def _forget_last(self, live: LiveRequest) -> bool:
        """Forget a sequence's last row, to be computed anew; return whether it could be."""
        if not self.engine.context.remove(live.sequence, live.n_computed - 1):
            return False
        live.n_computed -= 1
        return True

    def _propose(self, share: StepShare, job: Job) -> list[int]:
        if job.proposer is None or share.n_draft < 1:
            return []
        draft = job.proposer.propose(share.request.tokens, share.n_draft)[: share.n_draft]
        for index, token in enumerate(draft):
            if self.engine.model.is_end_of_generation(token):
                return draft[:index]  # nothing follows it: its row would be of no use
        return draft

    def _draw(self, share: StepShare, job: Job, draft: list[int], row: int) -> _Result:
        context, live = self.engine.context, share.request
        result = _Result(n_drafted=len(draft))
        try:
            result.drawn = accept(draft, lambda index: job.drawer.draw(context, row + index))
        except SwarmError as error:
            result.error = error
            return result
        if len(result.drawn) <= len(draft):
            n_kept = live.n_computed + share.n_rows + len(result.drawn) - 1
            result.is_lost = not self._forget(live.sequence, n_kept)
        return result

    def _take_result(self, share: StepShare, job: Job, result: _Result) -> None:
        live, answer = job.live, job.answer
        if result.is_lost:
            live.n_computed = 0
        if live.is_gone or live.rewind_to is not None:
            return  # what its slot holds beyond `n_computed` is removed before it is used again
        if result.error is not None:
            answer.fail(result.error)
            self._free(job)
            return
        is_first = live.n_drawn == 0
        live.tokens += result.drawn
        live.n_computed = len(live.tokens) - 1 if share.draws else live.n_computed + share.n_rows
        if result.is_lost:
            logger.warning("this model's memory cannot take back a draft; drafts are off for this answer")
            live.n_computed = live.n_draft = 0
        if not result.drawn:
            return
        self._events.drawn(job, result.n_drafted, len(result.drawn), is_first=is_first)
        job.token_at = self._now()
        for token in result.drawn:
            logprobs = (job.drawer.logprobs.popleft(),) if job.drawer.logprobs else ()
            answer.feed(token, logprobs)
        live.n_unread = answer.n_unread
        if answer.is_over:
            self._rest(job)

    def _take_failure(self, jobs: list[Job], failure: _Failure) -> None:
        for job in jobs:
            if job.live.origin in failure.lost:
                job.live.n_computed = 0
        left = [job for job in jobs if not job.live.is_gone]
        blamed = [job for job in left if job.live.origin in failure.concerned]
        if not blamed and any(job.live.is_gone and job.live.origin in failure.concerned for job in jobs):
            return  # who needed it has gone meanwhile: the others' step is made again
        is_final = isinstance(failure.error, ConnectionLost) or not isinstance(failure.error, SwarmError)
        if len(left) > 1 and not blamed and not is_final:
            logger.info("a step of %d requests failed, each is tried alone: %s", len(left), failure.error)
            self.schedule.isolate(job.live for job in left)
            return
        for job in blamed or left:
            if not isinstance(failure.error, SwarmError):
                job.answer.fail(EngineError(f"a step failed: {failure.error!r}"))
                logger.error("a step failed", exc_info=failure.error)
            else:
                job.answer.fail(failure.error)
            self._free(job)

    # Ends

    def _read(self, job: Job) -> None:
        job.live.n_unread = job.answer.n_unread
        self._changed.set()

    def _rest(self, job: Job) -> None:
        """Take a complete answer out of the batch. One that is held keeps its slot: it may still be rewound."""
        self.schedule.leave(job.live)
        if not job.answer.is_held:
            self._free(job)

    def end(self, error: SwarmError) -> None:
        """Let everything at work fail."""
        for job in list(self.jobs.values()):
            job.answer.fail(error)
            self._free(job)

    def _free(self, job: Job) -> None:
        if job.is_freed:
            return
        job.is_freed = True
        live, slot = job.live, job.slot
        self.jobs.pop(live.origin, None)
        self.schedule.leave(live)
        if slot.origin == live.origin:  # else its seat was never filled: what was there still is
            slot.tokens = as_tokens(live.tokens[: live.n_computed])
        slot.is_busy = False
        slot.used_at = self._now()
        job.drawer.close()
        self._events.freed(job)
