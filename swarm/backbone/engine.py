"""The thread that owns llama.cpp.

    event loop                                   engine thread
      call(step) --- queue ------------------->    step(context): llama_decode
      dispatch()  <----------- bridge ---------    MoeHook begins a layer
                  ------------ bridge -------->    MoeHook waits at ffn_moe_out, or later
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from swarm.backbone.bridge import Bridge, EngineStep, HandOver, LayerDispatcher, Mask
from swarm.backbone.moe_hook import ExpertBackend, MoeHook, OverlapStats
from swarm.dispatch.origin import OriginPart, StepOrigins, next_sequence
from swarm.errors import ConnectionLost, EngineError, ExpertUnavailable, SwarmError
from swarm.model.expert_kinds import Stub
from swarm.model.spec import ModelSpec
from swarm.native.devices import CPU, choose_device
from swarm.native.library import use_exact_kernels
from swarm.native.llama import BatchPart, LlamaContext, LlamaModel
from swarm.native.pages import give_back_freed
from swarm.speculation.costs import StepTrips

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Rows of a step after which freed memory goes back to the system: the messages of 512 rows leave 20 to 45 MB (measured, D=2048 in
# f32), at most; and so long a step hardly notices 3 ms. Guessed.
LONG_STEP_ROWS = 128


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
        self._steps: queue.SimpleQueue[EngineStep | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bridge: Bridge | None = None
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

    def watch_hand_overs(self, watcher: Callable[[HandOver], None] | None) -> None:
        """Tell `watcher` of each layer that is waited for, on the engine's thread; for benchmarks."""
        if self._bridge is None:
            raise EngineError("the engine is not running")
        self._bridge.on_hand_over = watcher

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
        self._bridge = Bridge(self._dispatcher, self._loop, self._kept)
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
        entry = EngineStep(step, done)
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
        if sum(len(part.tokens) for part in parts) >= LONG_STEP_ROWS:
            give_back_freed()
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
