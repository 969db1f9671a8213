"""Sends one layer's rows to the peers that hold the chosen experts, all at once, and combines what returns.

The one asyncio shell of this package: which peer gets what is `placement` and `plan`, the order of sums is `combine`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarm.dispatch.combine import combine_exact, combine_partial
from swarm.dispatch.holders import Holders
from swarm.dispatch.plan import Batch, MissingExperts, plan_dispatch
from swarm.errors import (
    DeadlineExceeded,
    ExpertUnavailable,
    NetworkError,
    Overloaded,
    RemoteProtocolError,
    RemoteRefused,
)
from swarm.ids import ModelId, NodeId
from swarm.model.spec import ModelSpec
from swarm.wire import messages as m
from swarm.wire.rows import Wire, WireForm

# Longest wait for one batch. A dead peer is noticed far earlier, by silence (swarm.wire.session.LOST_AFTER_S); this
# bounds a peer that lives but does not finish. Guessed: 512 rows of a large model on a slow CPU.
BATCH_TIMEOUT_S = 60.0


@dataclass(slots=True)
class DispatchStats:
    """What has been dispatched so far; counts, bytes and seconds."""

    n_round_trips: int = 0  # dispatches of a layer that waited for the network
    n_token_layers: int = 0  # rows of hidden state times MoE layers
    n_assignments: int = 0  # (token, expert) pairs
    bytes_out: int = 0  # bodies of DISPATCH frames' rows, ids and weights, without QUIC's and our headers
    bytes_back: int = 0
    wait_s: float = 0.0
    assignments: dict[NodeId, int] = field(default_factory=dict)


class Dispatcher:
    """Computes a layer's routed experts on the swarm."""

    def __init__(self, model: ModelId, spec: ModelSpec, holders: Holders, wire: Wire) -> None:
        self._model_tag = model.raw[: m.MODEL_TAG_BYTES]
        self._spec = spec
        self._holders = holders
        self.wire = wire
        self.stats = DispatchStats()

    async def dispatch(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """Return the routed experts' output of one layer, [T, D] float32.

        Args:
            x: [T, D] float32, the hidden states that enter the experts.
            topk_ids: [T, K] int32; topk_weights: [T, K] float32.

        Raises:
            ExpertUnavailable: some experts have no live holder, or theirs failed.
        """
        started = time.perf_counter()
        n_tokens, n_used = topk_ids.shape
        placement = self._holders.placement
        batches = plan_dispatch(topk_ids, topk_weights, placement.owner_of(layer), placement.destinations)
        if isinstance(batches, MissingExperts):
            raise ExpertUnavailable(layer, batches.experts, "no live peer holds them")
        try:
            async with asyncio.TaskGroup() as group:  # one failure ends the layer: the other answers are of no use
                tasks = [group.create_task(self._batch(layer, x, batch)) for batch in batches]
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        parts = [(batch, task.result()) for batch, task in zip(batches, tasks, strict=True)]
        if self.wire.back is WireForm.EXACT:
            combined = combine_exact(n_tokens, n_used, self._spec.n_embd, parts, topk_weights)
        else:
            combined = combine_partial(n_tokens, n_used, self._spec.n_embd, parts)
        self._count(n_tokens, batches, parts, time.perf_counter() - started)
        return combined

    async def _batch(self, layer: int, x: npt.NDArray[np.float32], batch: Batch) -> npt.NDArray[np.float32]:
        """Return a peer's rows for one batch; any failure marks the peer down and raises ExpertUnavailable."""
        is_exact = self.wire.back is WireForm.EXACT
        message = m.Dispatch(
            model_tag=self._model_tag,
            layer=layer,
            rows_form=self.wire.out,
            result_form=self.wire.back,
            row_counts=batch.row_counts,
            expert_ids=batch.expert_ids,
            weights=None if is_exact else batch.weights,
            rows=x[batch.rows],
        )
        peer = batch.destination
        try:
            connection = await self._holders.connection(peer)
            result = await connection.request(message, timeout_s=BATCH_TIMEOUT_S)
            assert isinstance(result, m.Result)  # the session checks an answer's type
            expected = (batch.n_pairs if is_exact else batch.n_rows, x.shape[1])
            if result.form is not self.wire.back or result.rows.shape != expected:
                error = RemoteProtocolError(
                    f"wrong answer of peer {peer.short}: got {result.form} {result.rows.shape}, expected {expected}"
                )
                connection.close(error)
                raise error
            return result.rows
        except (NetworkError, RemoteProtocolError, RemoteRefused, Overloaded) as error:
            # A late or refusing peer is as useless to this request as a dead one, but a busy one is not dead.
            is_busy = isinstance(error, Overloaded) or (
                isinstance(error, RemoteRefused) and error.remote_code == m.ErrorCode.BUSY
            )
            if not is_busy:
                self._holders.mark_down(peer, error)
            experts = np.unique(batch.expert_ids).tolist()
            kind = "late" if isinstance(error, DeadlineExceeded) else "failed"
            raise ExpertUnavailable(layer, experts, f"peer {peer.short} {kind}: {error}") from error

    def _count(
        self, n_tokens: int, batches: list[Batch], parts: list[tuple[Batch, npt.NDArray[np.float32]]], wait_s: float
    ) -> None:
        stats = self.stats
        stats.n_round_trips += 1
        stats.n_token_layers += n_tokens
        stats.wait_s += wait_s
        has_weights = self.wire.back is not WireForm.EXACT
        for batch, rows in parts:
            stats.n_assignments += batch.n_pairs
            stats.bytes_out += batch.n_rows * (4 * rows.shape[1] + 1) + batch.n_pairs * (6 if has_weights else 2)
            stats.bytes_back += rows.nbytes
            stats.assignments[batch.destination] = stats.assignments.get(batch.destination, 0) + batch.n_pairs
