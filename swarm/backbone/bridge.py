"""The bridge between the engine's thread, which computes the backbone, and the event loop, which asks peers.

    engine's thread                              event loop
      MoeHook begins a layer  -- call_soon_threadsafe -->  the dispatch begins, in that callback
      shared expert ...                                    batches leave, answers come
      MoeHook waits           <-- a lock -----------------  the last answer is taken, in the tick in which it comes

One wake-up of the loop and one of the thread for a layer. Why the loop keeps the sockets, and what else was tried:
docs/performance.md, "The engine's thread and the socket".
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from swarm.backbone.eager_task import EagerTask
from swarm.backbone.moe_hook import ExpertBackend, LayerResult
from swarm.dispatch.origin import Origin, StepOrigins
from swarm.errors import ConnectionLost, SwarmError
from swarm.speculation.costs import StepTrips

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """One layer's two ways over the bridge; seconds of `time.perf_counter`.

    Attributes:
        asked_s: the hook has the layer's inputs; on the engine's thread.
        began_s: its dispatch begins; on the loop.
        awaited_s: the thread begins to wait, if there is still something to wait for.
        done_s: the layer's output is there; on the loop.
        taken_s: the thread goes on with it.
    """

    asked_s: float
    began_s: float
    awaited_s: float
    done_s: float
    taken_s: float

    @property
    def is_waited(self) -> bool:
        """Whether the thread was asleep when the output came."""
        return self.awaited_s < self.done_s


class LayerDispatcher(Protocol):
    """What computes a layer on the event loop: `swarm.dispatch.dispatcher.Dispatcher`."""

    def dispatch(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
        origin: Origin | None = None,
    ) -> Coroutine[Any, Any, npt.NDArray[np.float32]]:
        """Return the routed experts' output, [T, D] float32; `origin`: of the rows, where it is known."""
        ...


class EngineStep:
    """One call's work, and where its outcome goes."""

    def __init__(self, run: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        self.run = run
        self.done = done
        self.is_given_up = False  # owned by the bridge, under its lock


class Crossing:
    """A layer on its way; what the hook waits for.

    A plain lock and one callback: 19 us there and back (uvloop, measured), 26 with `run_coroutine_threadsafe`.
    """

    def __init__(self, forget: Callable[[Crossing], None], live: npt.NDArray[np.bool_] | None = None) -> None:
        """`live`: which rows of the layer were dispatched; None: all."""
        self.asked_at = time.perf_counter()
        self.began_at = 0.0  # on the loop
        self.done_at: float | None = None
        self.on_taken: Callable[[HandOver], None] | None = None
        self.is_trip = True
        self._forget = forget
        self._live = live
        self._is_under_way = threading.Lock()
        self._is_under_way.acquire()
        self._task: EagerTask[npt.NDArray[np.float32]] | None = None
        self._is_cancelled = False

    def result(self) -> npt.NDArray[np.float32]:
        """Wait on the engine's thread; once. Raises what the dispatch did, or CancelledError."""
        awaited_at = time.perf_counter()
        with self._is_under_way:
            if self.on_taken is not None:
                self.on_taken(self._times(awaited_at))
            task = self._task
            self._task = None  # else a cycle: a long prompt's rows would be kept until the next collection
            assert task is not None
            try:
                rows = task.result()
            except asyncio.CancelledError as error:
                raise concurrent.futures.CancelledError from error
        if self._live is None:
            return rows
        padded = np.zeros((len(self._live), *rows.shape[1:]), rows.dtype)
        padded[self._live] = rows
        return padded

    def start(self, layer: Coroutine[Any, Any, npt.NDArray[np.float32]]) -> None:
        """Begin; on the loop."""
        self.began_at = time.perf_counter()
        self._task = EagerTask(layer, self._settle)
        if self._is_cancelled:
            self._task.cancel()
        self._task.start()

    def cancel(self) -> None:
        """Give up, also before the start; on the loop."""
        self._is_cancelled = True
        task = self._task  # once: the engine's thread takes it as it takes the rows
        if task is not None:
            task.cancel()

    def _times(self, awaited_at: float) -> HandOver:
        assert self.done_at is not None
        return HandOver(
            asked_s=self.asked_at,
            began_s=self.began_at,
            awaited_s=awaited_at,
            done_s=self.done_at,
            taken_s=time.perf_counter(),
        )

    def _settle(self, _task: EagerTask[npt.NDArray[np.float32]]) -> None:
        self.done_at = time.perf_counter()
        self._forget(self)
        self._is_under_way.release()


class _Zeros:
    """The answer for rows that nobody needs any more."""

    def __init__(self, x: npt.NDArray[np.float32]) -> None:
        self._rows = np.zeros_like(x)

    def result(self) -> npt.NDArray[np.float32]:
        """Return zeros, [T, D]."""
        return self._rows


class Bridge(ExpertBackend):
    """Takes a layer from the engine's thread to the dispatcher on the loop, for the one step that is under way."""

    def __init__(
        self, dispatcher: LayerDispatcher, loop: asyncio.AbstractEventLoop, kept: Callable[[int], Mask | None] | None
    ) -> None:
        self._dispatcher = dispatcher
        self._loop = loop
        self._kept = kept
        self._n_skipped = self._n_trips = 0  # of the latest step; on the engine's thread
        self._trip_s = 0.0  # likewise; owned by the lock
        self._lock = threading.Lock()
        self._in_flight: set[Crossing] = set()
        self._step: EngineStep | None = None
        self._abort_reason: SwarmError | None = None  # of this step
        self._end_reason: SwarmError | None = None  # of this step and all that follow
        self.origins: StepOrigins | None = None  # of the step under way; on the engine's thread
        self._latest: tuple[int, npt.NDArray[np.int32], Origin] | None = None  # layer, choice and origin; likewise
        self._dropped: set[int] = set()  # sequences of this step whose rows are dispatched no more
        self.on_hand_over: Callable[[HandOver], None] | None = None
        """Told of each layer that was waited for, on the engine's thread; for benchmarks."""

    def begin(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
    ) -> LayerResult:
        """Start a dispatch; on the engine's thread. The dispatcher bounds its time, so waiting for it is bounded too."""
        with self._lock:
            if self._end_reason or self._abort_reason:
                raise self.reason
            origin = self.origins.of(layer, len(topk_ids)) if self.origins is not None else None
            live: npt.NDArray[np.bool_] | None = None
            if origin is not None:
                if self._dropped:
                    live = ~np.isin(origin.sequences, list(self._dropped))
                    if not live.any():
                        return _Zeros(x)
                    x, topk_ids, topk_weights, origin = (
                        x[live],
                        topk_ids[live],
                        topk_weights[live],
                        origin.of(live.nonzero()[0]),
                    )
                self._latest = layer, topk_ids, origin
            crossing = Crossing(self._forget, live)
            crossing.on_taken = self.on_hand_over
            kept = self._kept(layer) if self._kept is not None else None
            crossing.is_trip = kept is None or not kept[topk_ids].all()
            self._n_trips += crossing.is_trip
            self._n_skipped += not crossing.is_trip
            self._loop.call_soon_threadsafe(self._start, crossing, layer, x, topk_ids, topk_weights, origin)
            self._in_flight.add(crossing)
        return crossing

    def _start(
        self,
        crossing: Crossing,
        layer: int,
        x: npt.NDArray[np.float32],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
        origin: Origin | None,
    ) -> None:
        crossing.start(self._dispatcher.dispatch(layer, x, topk_ids, topk_weights, origin))

    @property
    def reason(self) -> SwarmError:
        """Why the layers of the step under way are given up."""
        return self._end_reason or self._abort_reason or ConnectionLost("a layer was cancelled")

    def enter(self, step: EngineStep) -> bool:
        """Take layers of this step from here on; False when its caller has given it up. Raises after `end`."""
        with self._lock:
            if self._end_reason is not None:
                raise self._end_reason
            if not step.is_given_up:
                self._step, self._abort_reason = step, None
                self._dropped.clear()
            return not step.is_given_up

    def drop(self, sequence: int) -> None:
        """Dispatch no more rows of this sequence in the step under way: its text is of no use any more."""
        with self._lock:
            self._dropped.add(sequence)

    def begin_step(self) -> None:
        """Forget what a former step chose, lest anybody be blamed for it, and counted; on the engine's thread."""
        self._latest = None
        self._n_skipped = self._n_trips = 0
        with self._lock:
            self._trip_s = 0.0

    @property
    def trips(self) -> StepTrips:
        """What the latest step asked of the network."""
        return StepTrips(n_trips=self._n_trips, n_skipped=self._n_skipped, trip_s=self._trip_s)

    def chose(self, layer: int, experts: Sequence[int]) -> set[int]:
        """Return which sequences of the layer dispatched last chose one of these experts there."""
        if self._latest is None or self._latest[0] != layer:
            return set()
        _, topk_ids, origin = self._latest
        return set(origin.sequences[np.isin(topk_ids, experts).any(axis=1)].tolist())

    def give_up(self, step: EngineStep, reason: SwarmError) -> bool:
        """End the step's layer under way and refuse its further ones; False when it has not begun and never will.

        Other callers' steps go on, before it and after it in line.
        """
        with self._lock:
            if self._step is not step:
                step.is_given_up = True
                return False
            self._abort_reason = reason
            in_flight = list(self._in_flight)
        for crossing in in_flight:
            self._loop.call_soon_threadsafe(crossing.cancel)
        return True

    def end(self, reason: SwarmError) -> None:
        """End the layer under way and refuse every step and layer from here on."""
        with self._lock:
            self._end_reason = reason
            in_flight = list(self._in_flight)
        for crossing in in_flight:
            self._loop.call_soon_threadsafe(crossing.cancel)

    def _forget(self, crossing: Crossing) -> None:
        with self._lock:
            self._in_flight.discard(crossing)
            if crossing.is_trip and crossing.done_at is not None:
                self._trip_s += crossing.done_at - crossing.asked_at
