"""Some experts in this process's own memory: what they compute costs no round trip.

Layer by layer: a layer's experts are one slice of their own, so that its set can change while the others serve. A new slice is
made beside the old one and takes its place at once; the old one is freed when a computation under way in it has ended. So
memory is at most one layer's share above what is kept.

Used from several threads: by the dispatcher (`compute`), and straight from the eval callback for drafts (`DraftExperts`).
Which experts are kept is not decided here (`local_keeper`, `dispatch/local_choice`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm.backbone.in_process import Answer
from swarm.errors import EngineError, ExpertsNotHeld
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn, ExpertNotLoaded
from swarm.ids import ExpertSet
from swarm.model.spec import ModelSpec

# Activations of one graph of a layer: 82 pairs of D=2048, F=768; more pairs are cut, by expert (docs/experts.md: 16 MiB saves 2 %
# of a prefill). Small, because each layer has its own; only what is used becomes resident.
SCRATCH_BYTES = 2 << 20

Rows = npt.NDArray[np.float32]
ReadBlock = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """One layer's experts, loaded.

    Attributes:
        experts: the set; `mask` says the same, bool [E], read-only.
        left_out: intp, the others' ids.
        stand_ins: int32 [E], each expert's own id, or for one that is not kept the id of one that is.
    """

    experts: frozenset[int]
    mask: npt.NDArray[np.bool_]
    left_out: npt.NDArray[np.intp]
    stand_ins: npt.NDArray[np.int32]
    ffn: ExpertFfn
    executor: ExpertExecutor


class LocalExperts:
    """The experts that are kept here, of all layers; empty at first."""

    def __init__(self, spec: ModelSpec, *, n_threads: int = 1) -> None:
        """`n_threads`: 1 unless this process has its cores for itself: idle OpenMP threads spin."""
        self.spec = spec
        self._n_threads = n_threads
        self._layers: dict[int, _Layer] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def experts(self) -> ExpertSet:
        """What is kept now."""
        return ExpertSet({layer: each.experts for layer, each in sorted(self._layers.items())})

    @property
    def n_bytes(self) -> int:
        """How much the kept blocks take."""
        return sum(self.spec.block_size_bytes(layer) * len(each.experts) for layer, each in list(self._layers.items()))

    def kept(self, layer: int) -> npt.NDArray[np.bool_] | None:
        """Return which experts of a layer are kept, bool [E], never changed afterwards; None: none of them."""
        found = self._layers.get(layer)
        return None if found is None else found.mask

    def holds(self, layer: int, experts: Collection[int]) -> bool:
        """Return whether all of these are kept."""
        found = self._layers.get(layer)
        return found is not None and found.experts.issuperset(experts)

    @property
    def can_draft(self) -> bool:
        """Whether each layer keeps as many experts as a token uses: then a router can do with them."""
        return all(
            (each := self._layers.get(layer)) is not None and len(each.experts) >= self.spec.n_used(layer)
            for layer in self.spec.moe_layers
        )

    def change(self, experts: ExpertSet, read_block: ReadBlock, check: Callable[[], None] = lambda: None) -> None:
        """Keep these experts from now on, and no others; layer by layer, the old ones serve until the new ones are loaded.

        Blocks: takes as long as reading and hashing them.

        Args:
            read_block: returns a block's bytes, verified.
            check: called before each block; what it raises ends the change, between two layers.

        Raises:
            SwarmError: a block cannot be had, or memory is short; layers that have changed stay changed.
        """
        if experts.by_layer:
            self.spec.require_experts(experts)
        for layer in self.spec.moe_layers:
            wanted = experts.by_layer.get(layer, frozenset())
            known = self._layers.get(layer)
            if wanted == (frozenset() if known is None else known.experts):
                continue
            self._put(layer, self._load(layer, wanted, read_block, check) if wanted else None)

    def _load(self, layer: int, experts: frozenset[int], read_block: ReadBlock, check: Callable[[], None]) -> _Layer:
        chosen = ExpertSet({layer: experts})
        ffn = ExpertFfn(self.spec, chosen, n_threads=self._n_threads, scratch_bytes=SCRATCH_BYTES)
        try:
            for _, expert in chosen:
                check()
                ffn.load(layer, expert, read_block(layer, expert))
        except BaseException:
            ffn.close()
            raise
        mask = np.zeros(self.spec.n_expert, np.bool_)
        mask[sorted(experts)] = True
        mask.flags.writeable = False
        stand_ins = np.where(mask, np.arange(self.spec.n_expert), min(experts)).astype(np.int32)
        return _Layer(
            experts=experts,
            mask=mask,
            left_out=np.flatnonzero(~mask),
            stand_ins=stand_ins,
            ffn=ffn,
            executor=ExpertExecutor(ffn, self.spec),
        )

    def _put(self, layer: int, new: _Layer | None) -> None:
        with self._lock:
            if self._is_closed:
                if new is not None:
                    new.ffn.close()
                raise EngineError("the local experts are closed")
            old = self._layers.pop(layer, None)
            if new is not None:
                self._layers[layer] = new
        if old is not None:
            old.ffn.close()  # waits for what it computes now

    def compute(
        self,
        layer: int,
        x: Rows,
        row_counts: npt.NDArray[np.uint8],
        expert_ids: npt.NDArray[np.integer],
        weights: Rows | None,
    ) -> Rows:
        """Return raw rows [P, D] or, with weights, partial sums [N, D], as `ExpertExecutor.run`.

        Raises:
            ExpertsNotHeld: not kept any more.
            SwarmError: ggml failed.
        """
        while True:
            found = self._layers.get(layer)
            if found is None:
                raise ExpertsNotHeld(f"no experts of layer {layer} are kept here")
            try:
                return found.executor.run(layer, x, row_counts, expert_ids, weights)
            except EngineError:
                if self._layers.get(layer) is found:
                    raise
                # closed between the look and the call: its successor may have them

    def compute_choice(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> Rows:
        """Return the sums [T, D] of x [T, D] for the choice [T, K]; what is not kept counts nothing.

        Raises:
            ExpertsNotHeld: nothing of this layer is kept.
            EngineError: ggml failed.
        """
        while True:
            found = self._layers.get(layer)
            if found is None:
                raise ExpertsNotHeld(f"no experts of layer {layer} are kept here")
            weights = np.where(found.mask[topk_ids], topk_weights, np.float32(0))
            try:
                return found.ffn.compute_choice(layer, x, found.stand_ins[topk_ids], weights)
            except (EngineError, ExpertNotLoaded):
                if self._layers.get(layer) is found:
                    raise

    @property
    def left_out(self) -> Mapping[int, npt.NDArray[np.intp]]:
        """Layer -> the ids of what is not kept of it."""
        return {layer: each.left_out for layer, each in list(self._layers.items())}

    def close(self) -> None:
        """Free everything, after what is under way; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            layers = list(self._layers.values())
            self._layers.clear()
        for each in layers:
            each.ffn.close()


class DraftExperts:
    """An `ExpertBackend` for drafts: local experts alone, computed in the caller's thread."""

    def __init__(self, local: LocalExperts) -> None:
        self._local = local

    @property
    def left_out(self) -> Mapping[int, npt.NDArray[np.intp]]:
        """Layer -> the experts that the router must do without."""
        return self._local.left_out

    def begin(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> Answer:
        """Compute x [T, D] for the choice [T, K]; the answer is there when this returns."""
        return Answer(self._local.compute_choice(layer, x, topk_ids, topk_weights), time.perf_counter())
