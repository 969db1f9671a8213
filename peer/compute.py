"""Computes dispatches in the order they came, behind a bounded line; those that wait for one layer together.

Two places to compute: a thread of its own, and, for what is surely short, the loop itself. To hand a dispatch to a thread
and its answer back takes two wake-ups and, on a busy machine, two waits for a core.

    at_once() -> the thread rests, nobody waits or has come in between, and it is short? Computed before it returns
    start() -> line -> _pump, once a tick -> the thread rests, nobody else waits, and it is short?
                                             yes: computed on the loop
                                             no:  the thread takes groups until the line is empty
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peer.batching import MAX_MERGED_PAIRS, Line, merge
from swarm.errors import Overloaded, RemoteProtocolError
from swarm.experts.executor import ExpertExecutor
from swarm.wire import messages as m
from swarm.wire.frames import LIMITS, RESULT_HEAD_BYTES, FrameType
from swarm.wire.rows import RowCodec, row_bytes

MAX_LINE = 128  # dispatches waiting or under way; guessed: two per layer of a deep model. More are refused as busy
# The longest computation that the loop takes itself, by the time per pair so far. Pings and arriving packets wait as long:
# little beside the jitter of a path, and a 500th of the silence after which a ping is sent. It saves the hop to the thread:
# of one token with three peers on two cores a dispatch waits 20 us in line instead of 100 to 300 (30 us on an idle machine).
INLINE_S = 0.001
# Where several backbones ask, a merged group is to take no longer: so long one waits for another's, at each layer. Guessed: a
# tenth of a short path's round trip and more; merging saves 60 us a dispatch.
SHARED_GROUP_S = 0.003
SURELY_FITS_BYTES = LIMITS[FrameType.RESULT] // 2
PAIR_GAIN = 0.2  # of the running mean of the time per pair; guessed: a wait for a core is forgotten after a few


@dataclass(slots=True)
class ComputeStats:
    """What this peer has computed since it started.

    Attributes:
        n_computations: calls of the executor, which answered `n_dispatches` dispatches.
        compute_s: of all computations, a merged one once.
        queue_s: of all dispatches, from their arrival to the start of their computation.
    """

    n_dispatches: int = 0
    n_rows: int = 0
    n_computations: int = 0
    compute_s: float = 0.0
    queue_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Entry:
    dispatch: m.Dispatch
    answer: asyncio.Future[m.Result]
    arrived: float


Outcome = npt.NDArray[np.float32] | Exception


@dataclass(slots=True)
class _Done:
    """A group that has been computed, with an outcome for each entry."""

    group: list[_Entry]
    outcomes: list[Outcome]
    started: float
    ended: float


class Compute:
    """Runs an executor for one event loop. ggml's own threads come below it."""

    def __init__(self, executor: ExpertExecutor) -> None:
        self._executor = executor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # of the line, `_handed`, `_is_thread_busy` and `_is_closed`
        self._wake = threading.Condition(self._lock)
        self._line: Line[_Entry] = Line()
        self._handed: list[_Entry] | None = None
        self._is_thread_busy = False
        self._is_closed = False
        self._is_pump_due = False
        self._n_in_line = 0
        self._latest: Hashable = None  # who asked last
        self._pair_s = math.inf  # running mean; owned by whoever computes
        self.stats = ComputeStats()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    @property
    def n_in_line(self) -> int:
        """Dispatches waiting or under way."""
        return self._n_in_line

    def at_once(self, dispatch: m.Dispatch, asker: Hashable = None) -> m.Result | None:
        """Return the answer of a dispatch that is surely short, while nobody waits and only its asker asks; None: use `start`.

        A decoded token so takes neither a place in line nor a future, and its answer leaves in the tick in which it came.

        Raises:
            What `start` raises, and what its future fails with.
        """
        if asker is not self._latest and asker != self._latest:  # the line is to see that there are several
            self._latest = asker
            return None
        layer, row_counts, expert_ids = dispatch.layer, dispatch.row_counts, dispatch.expert_ids
        n_pairs = len(expert_ids)
        if self._n_in_line or n_pairs * self._pair_s > INLINE_S:
            return None
        # Without the lock: only this loop makes the thread busy, and while that rests only this loop changes the line.
        if self._is_thread_busy or self._is_closed or self._line.is_shared:
            return None
        started = time.perf_counter()
        rows = self._executor.run(layer, dispatch.rows, row_counts, expert_ids, dispatch.weights)
        compute_s = time.perf_counter() - started
        if rows.nbytes > SURELY_FITS_BYTES:  # as f32, of which no codec makes more; nothing long was computed in vain
            _check_answer_fits(dispatch)
        self._note_pairs(compute_s, n_pairs)
        stats = self.stats
        stats.n_rows += len(row_counts)
        stats.n_dispatches += 1
        stats.n_computations += 1
        stats.compute_s += compute_s
        return m.Result(codec=dispatch.result_codec, rows=rows, compute_us=round(compute_s * 1e6), queue_us=0)

    def start(self, dispatch: m.Dispatch, asker: Hashable = None) -> asyncio.Future[m.Result]:
        """Return the future of the answer. One that was computed together with others reports the time of them all.

        Cancelled, it leaves the line; a computation under way is finished. Askers take turns.

        Raises:
            RemoteProtocolError: the answer would not fit a frame.
            Overloaded: the line is full.

        The future fails with:
            RemoteProtocolError: the dispatch does not fit the model.
            ExpertsNotHeld: it does not fit the slice.
            EngineError: ggml failed.
        """
        _check_answer_fits(dispatch)
        if self._n_in_line >= MAX_LINE:
            raise Overloaded(f"{self._n_in_line} dispatches wait at this peer", retry_after_s=0.2)
        self._loop = asyncio.get_running_loop()
        entry = _Entry(dispatch, self._loop.create_future(), time.perf_counter())
        with self._lock:
            self._line.add(entry, asker)
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)  # not at once: what else has arrived in this tick may be merged with it
        self._n_in_line += 1
        entry.answer.add_done_callback(functools.partial(self._on_done, entry))
        return entry.answer

    def _on_done(self, entry: _Entry, answer: asyncio.Future[m.Result]) -> None:
        self._n_in_line -= 1
        if answer.cancelled():
            with self._lock:
                self._line.discard(entry)

    def _pump(self) -> None:
        """Compute what is short, or see that the thread does what waits."""
        self._is_pump_due = False
        with self._lock:
            if self._is_thread_busy or self._is_closed or not self._line:
                return
            group = self._take()
            is_inline = not self._line and _n_pairs(group) * self._pair_s <= INLINE_S
            if not is_inline:
                self._handed, self._is_thread_busy = group, True
                self._wake.notify()
                return
        self._settle(self._compute(group))

    def _take(self) -> list[_Entry]:
        if not self._line.is_shared:
            return self._line.take()
        return self._line.take(min(MAX_MERGED_PAIRS, int(SHARED_GROUP_S / max(self._pair_s, 1e-9))))

    def _run(self) -> None:
        """The thread: groups that are handed over, then the rest of the line."""
        while True:
            with self._lock:
                self._wake.wait_for(lambda: self._handed or self._is_closed)
                group, self._handed = self._handed, None
            if group is None:
                return
            while group is not None:
                done = self._compute(group)
                with self._lock:
                    group = self._take() if self._line and not self._is_closed else None
                    self._is_thread_busy = group is not None
                self._call_loop(self._settle, done)

    def _compute(self, group: list[_Entry]) -> _Done:
        started = time.perf_counter()
        outcomes: list[Outcome] = []
        if len(group) > 1:
            try:
                merged = merge([entry.dispatch for entry in group])
                layer = group[0].dispatch.layer
                sums = self._executor.run(layer, merged.rows, merged.row_counts, merged.expert_ids, merged.weights)
                outcomes = [*merged.split(sums)]
            except Exception:  # SwarmError of one of them, or no memory for all: each by itself tells whose fault it is
                outcomes = []
        if not outcomes:
            outcomes = [self._outcome(entry.dispatch) for entry in group]
        ended = time.perf_counter()
        self._note_pairs(ended - started, _n_pairs(group))
        return _Done(group, outcomes, started, ended)

    def _note_pairs(self, compute_s: float, n_pairs: int) -> None:
        pair_s, mean_s = compute_s / max(1, n_pairs), self._pair_s
        self._pair_s = pair_s if mean_s == math.inf else mean_s + PAIR_GAIN * (pair_s - mean_s)

    def _outcome(self, dispatch: m.Dispatch) -> Outcome:
        try:
            return self._executor.run(
                dispatch.layer, dispatch.rows, dispatch.row_counts, dispatch.expert_ids, dispatch.weights
            )
        except Exception as error:  # the handler of the request tells the other side; this thread must live on
            return error

    def _settle(self, done: _Done) -> None:
        """Answer a group's dispatches; on the loop."""
        compute_s, n_answered = done.ended - done.started, 0
        for entry, outcome in zip(done.group, done.outcomes, strict=True):
            if entry.answer.done():  # cancelled
                continue
            if isinstance(outcome, Exception):
                entry.answer.set_exception(outcome)
                continue
            n_answered += 1
            queue_s = done.started - entry.arrived
            self.stats.n_rows += len(entry.dispatch.row_counts)
            self.stats.queue_s += queue_s
            result = m.Result(
                codec=entry.dispatch.result_codec,
                rows=outcome,
                compute_us=round(compute_s * 1e6),
                queue_us=round(queue_s * 1e6),
            )
            entry.answer.set_result(result)
        self.stats.n_dispatches += n_answered
        if n_answered:
            self.stats.n_computations += 1
            self.stats.compute_s += compute_s

    def _call_loop(self, call: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            pass  # the loop is closed: nobody waits

    def stop(self) -> None:
        """Take up nothing more; what waits is cancelled. Does not wait for what is under way. From any thread."""
        with self._lock:
            self._is_closed = True
            dropped = []
            while self._line:
                dropped += self._line.take()
            self._wake.notify()
        for entry in dropped:
            self._call_loop(entry.answer.cancel)

    def close(self) -> None:
        """End the thread; a computation under way is finished first, what waits is cancelled. From any thread."""
        self.stop()
        self._thread.join()

    async def wait_closed(self) -> None:
        """Close, and leave the loop free meanwhile. Cancelled, it returns at once; the thread keeps no process alive."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            self.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended.set)

        # Not by `asyncio.to_thread`: a loop does not end before what runs there.
        threading.Thread(target=close, name="closing compute", daemon=True).start()
        await ended.wait()


def _n_pairs(group: Sequence[_Entry]) -> int:
    return sum(len(entry.dispatch.expert_ids) for entry in group)


def _check_answer_fits(dispatch: m.Dispatch) -> None:
    """Raise RemoteProtocolError if the answer would not fit a frame: nobody may make us compute it in vain."""
    is_exact = dispatch.result_codec is RowCodec.EXACT
    n_rows = len(dispatch.expert_ids) if is_exact else len(dispatch.row_counts)
    size = RESULT_HEAD_BYTES + n_rows * row_bytes(dispatch.rows.shape[1], dispatch.result_codec)
    if size > LIMITS[FrameType.RESULT]:
        limit = LIMITS[FrameType.RESULT]
        raise RemoteProtocolError(f"a dispatch whose answer is too large: {size} bytes, expected at most {limit}")
