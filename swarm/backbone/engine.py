"""The thread that owns llama.cpp, and the one bridge between it and the event loop.

    event loop                                   engine thread
      call(step) --- queue ------------------->    step(context): llama_decode
      dispatch()  <-- call_soon_threadsafe ----    MoeHook begins a layer
                  --- lock -------------------->    MoeHook waits at ffn_moe_out, or later
      result      <-- call_soon_threadsafe ----    step returns

Nothing else crosses. The thread takes one step at a time; a step is a function of the context.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from swarm.backbone.moe_hook import ExpertBackend, LayerResult, MoeHook, OverlapStats
from swarm.dispatch.origin import Origin, OriginPart, StepOrigins, next_sequence
from swarm.errors import ConnectionLost, EngineError, ExpertUnavailable, SwarmError
from swarm.model.expert_kinds import Stub
from swarm.model.spec import ModelSpec
from swarm.native.devices import CPU, choose_device
from swarm.native.library import use_exact_kernels
from swarm.native.llama import BatchPart, LlamaContext, LlamaModel
from swarm.speculation.costs import StepTrips

logger = logging.getLogger(__name__)

T = TypeVar("T")
Mask = npt.NDArray[np.bool_]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How llama.cpp runs the backbone.

    Attributes:
        n_ctx: tokens of each sequence; 0 takes the model's own, up to 4096.
        n_sequences: that the KV cache has room for at once.
        device: where the backbone's layers are computed: `cpu`, `auto`, or as `swarm.native.devices.choose_device` takes it.
        kv_types: of K and of V in the cache; see `swarm.native.llama.KV_TYPES`.
        n_batch, n_ubatch: most tokens of a call and of one graph; an ubatch is what one dispatch of a layer carries.
        exact_kernels: no repacked weights, no tiled kernels: sums in the order of every other such build.
        overlaps: run the shared expert during the round trip.
    """

    n_ctx: int = 0
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int = 1
    exact_kernels: bool = False
    overlaps: bool = True
    n_sequences: int = 1
    kv_types: tuple[str, str] = ("f16", "f16")
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart(BatchPart):
    """What one sequence adds to a step.

    Attributes:
        origin: the sequence's id of `swarm.dispatch.origin.next_sequence`; `sequence` is llama.cpp's own number.
    """

    origin: int


class _Step:
    """One call's work, and where its outcome goes."""

    def __init__(self, run: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        self.run = run
        self.done = done
        self.is_given_up = False  # owned by the bridge, under its lock


class _Flight:
    """A layer on its way; what the hook waits for.

    A plain lock and one callback: 19 us there and back (uvloop, measured), 26 with `run_coroutine_threadsafe`.
    """

    def __init__(self, forget: Callable[[_Flight], None], live: npt.NDArray[np.bool_] | None = None) -> None:
        """`live`: which rows of the layer were dispatched; None: all."""
        self.began_at = time.perf_counter()
        self.done_at: float | None = None
        self.is_trip = True
        self._forget = forget
        self._live = live
        self._is_under_way = threading.Lock()
        self._is_under_way.acquire()
        self._task: asyncio.Task[npt.NDArray[np.float32]] | None = None
        self._is_cancelled = False

    def result(self) -> npt.NDArray[np.float32]:
        """Wait on the engine's thread; raises what the dispatch did, or CancelledError."""
        with self._is_under_way:
            assert self._task is not None
            if self._task.cancelled():
                raise concurrent.futures.CancelledError
            rows = self._task.result()
        if self._live is None:
            return rows
        padded = np.zeros((len(self._live), *rows.shape[1:]), rows.dtype)
        padded[self._live] = rows
        return padded

    def start(self, layer: Coroutine[Any, Any, npt.NDArray[np.float32]]) -> None:
        """Begin; on the loop."""
        self._task = asyncio.get_running_loop().create_task(layer)
        self._task.add_done_callback(self._settle)
        if self._is_cancelled:
            self._task.cancel()

    def cancel(self) -> None:
        """Give up, also before the start; on the loop."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _settle(self, task: asyncio.Task[npt.NDArray[np.float32]]) -> None:
        self.done_at = time.perf_counter()
        self._forget(self)
        if not task.cancelled():
            task.exception()  # seen: a step that has failed before waits for its layers no more
        self._is_under_way.release()


class _Zeros:
    """The answer for rows that nobody needs any more."""

    def __init__(self, x: npt.NDArray[np.float32]) -> None:
        self._rows = np.zeros_like(x)

    def result(self) -> npt.NDArray[np.float32]:
        """Return zeros, [T, D]."""
        return self._rows


class _Bridge(ExpertBackend):
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
        self._in_flight: set[_Flight] = set()
        self._step: _Step | None = None
        self._abort_reason: SwarmError | None = None  # of this step
        self._end_reason: SwarmError | None = None  # of this step and all that follow
        self.origins: StepOrigins | None = None  # of the step under way; on the engine's thread
        self._latest: tuple[int, npt.NDArray[np.int32], Origin] | None = None  # layer, choice and origin; likewise
        self._dropped: set[int] = set()  # sequences of this step whose rows are dispatched no more

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
            flight = _Flight(self._forget, live)
            kept = self._kept(layer) if self._kept is not None else None
            flight.is_trip = kept is None or not kept[topk_ids].all()
            self._n_trips += flight.is_trip
            self._n_skipped += not flight.is_trip
            self._loop.call_soon_threadsafe(self._start, flight, layer, x, topk_ids, topk_weights, origin)
            self._in_flight.add(flight)
        return flight

    def _start(
        self,
        flight: _Flight,
        layer: int,
        x: npt.NDArray[np.float32],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
        origin: Origin | None,
    ) -> None:
        flight.start(self._dispatcher.dispatch(layer, x, topk_ids, topk_weights, origin))

    @property
    def reason(self) -> SwarmError:
        """Why the layers of the step under way are given up."""
        return self._end_reason or self._abort_reason or ConnectionLost("a layer was cancelled")

    def enter(self, step: _Step) -> bool:
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

    def give_up(self, step: _Step, reason: SwarmError) -> bool:
        """End the step's layer under way and refuse its further ones; False when it has not begun and never will.

        Other callers' steps go on, before it and after it in line.
        """
        with self._lock:
            if self._step is not step:
                step.is_given_up = True
                return False
            self._abort_reason = reason
            in_flight = list(self._in_flight)
        for flight in in_flight:
            self._loop.call_soon_threadsafe(flight.cancel)
        return True

    def end(self, reason: SwarmError) -> None:
        """End the layer under way and refuse every step and layer from here on."""
        with self._lock:
            self._end_reason = reason
            in_flight = list(self._in_flight)
        for flight in in_flight:
            self._loop.call_soon_threadsafe(flight.cancel)

    def _forget(self, flight: _Flight) -> None:
        with self._lock:
            self._in_flight.discard(flight)
            if flight.is_trip and flight.done_at is not None:
                self._trip_s += flight.done_at - flight.began_at


class Engine:
    """A llama.cpp context on a thread of its own: one lane. Several may share one model's weights."""

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        config: EngineConfig,
        dispatcher: LayerDispatcher,
        *,
        shares: Engine | None = None,
        kept: Callable[[int], Mask | None] | None = None,
    ) -> None:
        """Prepare an engine for a backbone file (stub experts); `start` loads it.

        Args:
            kept: of a layer, which experts the dispatcher computes in this process, bool [E]; called on the engine's thread.
            shares: a running engine whose weights this one uses; it must be closed after this one.
        """
        self._shares = shares
        self._kept = kept
        self._origins: dict[int, int] = {}  # of the sequences that `decode` computes
        self._path = path
        self._spec = spec
        self._config = config
        self._dispatcher = dispatcher
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bridge: _Bridge | None = None
        self._model: LlamaModel | None = None
        self._context: LlamaContext | None = None
        self._hook: MoeHook | None = None

    @property
    def model(self) -> LlamaModel:
        """The loaded model: its vocabulary may be used from any thread."""
        if self._model is None:
            raise EngineError("the engine is not running")
        return self._model

    @property
    def context(self) -> LlamaContext:
        """The context; only for steps, on the engine's thread."""
        if self._context is None:
            raise EngineError("the engine is not running")
        return self._context

    @property
    def overlap(self) -> OverlapStats:
        """How much local work ran during the round trips so far."""
        if self._hook is None:
            raise EngineError("the engine is not running")
        return self._hook.overlap

    @property
    def trips(self) -> StepTrips:
        """What the latest step asked of the network; on the engine's thread."""
        return self._bridge.trips if self._bridge is not None else StepTrips()

    async def start(self) -> None:
        """Load the model.

        Raises:
            EngineError, UserError: llama.cpp cannot load or run it.
        """
        if self._config.exact_kernels:
            use_exact_kernels()
        self._loop = asyncio.get_running_loop()
        self._bridge = _Bridge(self._dispatcher, self._loop, self._kept)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        try:
            await self.call(self._load)
        except BaseException:
            await self.close()
            raise

    async def call(self, step: Callable[[], T]) -> T:
        """Return what `step` returns on the engine's thread. One caller at a time; others wait in line.

        A cancelled caller does not leave a step behind: one that waits in line is dropped; of one that runs, the layer
        under way is given up and the step ends first.
        """
        if self._thread is None or self._loop is None or self._bridge is None:
            raise EngineError("the engine is not running")
        done: asyncio.Future[T] = self._loop.create_future()
        entry = _Step(step, done)
        self._steps.put(entry)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            done.add_done_callback(lambda future: future.exception())  # seen: nobody waits for it any more
            if self._bridge.give_up(entry, ConnectionLost("the request was given up")):
                while not done.done():  # even if cancelled again: the caller frees what the step still uses
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([done])
            raise

    def decode(
        self,
        tokens: Sequence[int],
        first_position: int,
        logits: Literal["all", "last", "none"] = "last",
        *,
        sequence: int = 0,
    ) -> None:
        """Compute tokens at consecutive positions of one sequence; a step, so call it through `call`.

        Raises:
            ExpertUnavailable: a layer could not be computed. The KV cache is as it was before.
            EngineError: llama.cpp failed; the KV cache is as it was before.
        """
        if first_position == 0 or sequence not in self._origins:
            self._origins[sequence] = next_sequence()
        part = StepPart(
            tokens=tokens,
            first_position=first_position,
            sequence=sequence,
            logits=logits,
            origin=self._origins[sequence],
        )
        try:
            self.decode_parts((part,))
        except SwarmError:
            self.roll_back((part,))
            raise

    def draft_row(
        self,
        token: int,
        position: int,
        sequence: int,
        experts: ExpertBackend,
        left_out: Mapping[int, npt.NDArray[np.intp]],
    ) -> npt.NDArray[np.float32]:
        """Return the logits [V] after one more token of a sequence, as `experts` alone would have them; on this thread.

        The token stays in the KV cache, as no real step would have computed it: remove it before the next one.

        Raises:
            SwarmError: it could not be computed; the token may be in the KV cache.
        """
        assert self._hook is not None
        error: BaseException | None = None
        with self._hook.drafting(experts, left_out):
            try:
                self.context.decode([token], first_position=position, sequence=sequence, logits="last")
            except EngineError as failure:
                error = failure
            failures = (self._hook.take_error(), self.context.take_callback_error(), error)
        error = next((failure for failure in failures if failure is not None), None)
        if error is None:
            return self.context.logits(-1)
        if isinstance(error, SwarmError):
            raise error
        raise EngineError(f"a draft failed: {error!r}") from error

    def decode_parts(self, parts: Sequence[StepPart]) -> None:
        """Compute tokens of several sequences in one batch; a step, so call it through `call`.

        Raises:
            ExpertUnavailable, EngineError: as `decode`; a part of it may be in the KV cache: `roll_back`.
        """
        assert self._hook is not None
        assert self._bridge is not None
        self._bridge.begin_step()
        self._bridge.origins = StepOrigins(
            [
                OriginPart(
                    sequence=part.origin,
                    first_position=part.first_position,
                    n_rows=len(part.tokens),
                    logits=part.logits,
                )
                for part in parts
            ],
            n_ubatch=self._config.n_ubatch,
        )
        error: BaseException | None = None
        try:
            self.context.decode_parts(parts)
        except EngineError as failure:
            error = failure
        # All are taken: one that stayed behind would fail the next step. The hook's own came first.
        failures = (self._hook.take_error(has_run=error is None), self.context.take_callback_error(), error)
        error = next((failure for failure in failures if failure is not None), None)
        if error is None:
            return
        if isinstance(error, SwarmError):
            raise error
        if isinstance(error, concurrent.futures.CancelledError):
            raise self._bridge.reason from error
        raise EngineError(f"a layer failed: {error!r}") from error

    def roll_back(self, parts: Sequence[StepPart]) -> list[int]:
        """Remove a failed step from the KV cache; return the origins of the sequences that had to go as a whole."""
        lost = []
        for part in parts:
            if not self.context.remove(part.sequence, part.first_position):
                self.context.remove(part.sequence, 0)  # a memory that cannot forget a part
                lost.append(part.origin)
        return lost

    def concerned(self, error: BaseException) -> set[int]:
        """Return the origins of the sequences that needed what the last step failed for; empty if that is not known."""
        assert self._bridge is not None
        return self._bridge.chose(error.layer, error.experts) if isinstance(error, ExpertUnavailable) else set()

    def drop(self, origin: int) -> None:
        """Ask nobody any more for a sequence's rows in the step under way; from any thread."""
        if self._bridge is not None:
            self._bridge.drop(origin)

    @property
    def n_ctx(self) -> int:
        """Tokens that each sequence has room for."""
        return self.context.n_ctx // self._config.n_sequences

    @property
    def n_batch(self) -> int:
        """Most tokens of a step."""
        return self.context.n_batch

    async def close(self) -> None:
        """Give up the step under way and free everything. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._bridge is not None:
            self._bridge.end(ConnectionLost("the engine is closing"))
        self._steps.put(None)
        await asyncio.to_thread(thread.join)  # its last layer may still need this loop, so the loop must not block

    def _load(self) -> None:
        config = self._config
        if self._shares is not None:
            self._model = self._shares.model
        else:
            # Only where nothing is repacked does a mapped file cost less memory than one that was read; and stubs that are
            # holes of the file must not be read at all.
            is_mapped = config.exact_kernels or self._spec.expert_kind.stub is Stub.SPARSE
            self._model = LlamaModel(
                self._path,
                exact_kernels=config.exact_kernels,
                device=None if config.device == CPU else choose_device(config.device),
                is_mapped=is_mapped,
            )
        assert self._bridge is not None
        self._hook = MoeHook(
            self._spec.moe_layers,
            self._bridge,
            overlaps=config.overlaps,
            output=self._spec.expert_kind.output_node,
        )
        n_ctx = config.n_ctx or min(self._model.n_ctx_train or 4096, 4096)
        self._context = LlamaContext(
            self._model,
            n_ctx=n_ctx * config.n_sequences,
            n_seq_max=config.n_sequences,
            kv_types=config.kv_types,
            n_batch=config.n_batch,
            n_ubatch=config.n_ubatch,
            n_threads=config.n_threads,
            eval_callback=self._hook,
        )

    def _run(self) -> None:
        assert self._loop is not None
        assert self._bridge is not None
        while (step := self._steps.get()) is not None:
            outcome: Any = None
            error: BaseException | None = None
            try:
                if not self._bridge.enter(step):
                    continue
                outcome = step.run()
            except BaseException as failure:
                error = failure
            try:
                self._loop.call_soon_threadsafe(_settle, step.done, outcome, error)
            except RuntimeError:  # the loop is gone: nobody waits
                break
        if self._context is not None:
            self._context.close()
            self._context = None
        if self._model is not None:
            if self._shares is None:
                self._model.close()
            self._model = None


def _settle(done: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(outcome)
    else:
        done.set_exception(error)
