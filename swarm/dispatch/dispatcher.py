"""Sends one layer's rows to the peers that hold the chosen experts, all at once, and combines what returns.

The one asyncio shell of this package: which peer gets what is `placement` and `plan`, the order of sums is `combine`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarm.dispatch.chunks import CHUNK_BYTES, cut
from swarm.dispatch.codecs import codecs_of
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
from swarm.wire.frames import RESULT_HEAD_BYTES
from swarm.wire.rows import RowCodec, Wire, back_codec, encode_rows, row_bytes

# Longest wait for one batch. A dead peer is noticed far earlier, by silence (swarm.wire.session.LOST_AFTER_S); this
# bounds a peer that lives but does not finish. Guessed: 512 rows of a large model on a slow CPU.
BATCH_TIMEOUT_S = 60.0
# Largest value taken from a peer. Hidden states reach some 1e4; sums of what passes here stay finite in float32, so that one
# peer cannot turn a whole answer into NaN, which would come out as text without any error.
MAX_MAGNITUDE = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpan:
    """One layer's dispatch, stage by stage; nanoseconds of `time.monotonic_ns`.

    Attributes:
        began_ns, planned_ns, returned_ns, ended_ns: the call; batches packed, about to leave; all answers there; combined.
        compute_s, queue_s: of the batch that computed longest; what peers say of themselves, so it may be wrong.
        n_batches: requests sent; more than destinations where batches were cut into chunks.
    """

    layer: int
    n_tokens: int
    n_destinations: int
    n_batches: int
    began_ns: int
    planned_ns: int
    returned_ns: int
    ended_ns: int
    compute_s: float
    queue_s: float


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


class _EncodedRows:
    """A layer's hidden states, encoded once however many peers get them.

    Attributes:
        x: [T, D] float32.
    """

    def __init__(self, x: npt.NDArray[np.float32], codec: RowCodec) -> None:
        self.x = x
        self.codec = codec
        self._data = encode_rows(x, codec)
        self._rows = np.frombuffer(self._data, np.uint8).reshape(len(x), -1) if len(x) else None  # [T, bytes of a row]

    def of(self, batch: Batch) -> bytes:
        """Return the bytes of a batch's rows."""
        if batch.n_rows == len(self.x) or self._rows is None:
            return self._data  # all of them: a batch has each row once, in order
        return self._rows[batch.rows].tobytes()


class Dispatcher:
    """Computes a layer's routed experts on the swarm.

    Attributes:
        chunk_bytes: see `swarm.dispatch.chunks`; 0 never cuts. May be changed between dispatches.
    """

    def __init__(
        self, model: ModelId, spec: ModelSpec, holders: Holders, wire: Wire, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._model_tag = model.raw[: m.MODEL_TAG_BYTES]
        self._spec = spec
        self._holders = holders
        self.wire = wire
        self.chunk_bytes = chunk_bytes
        self._codec_back = back_codec(wire.back)
        self._codec_out: dict[int, RowCodec] = {}  # layer -> codec
        self.stats = DispatchStats()
        self.on_layer: Callable[[LayerSpan], None] | None = None
        """Told of each layer that succeeded; for benchmarks."""

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
        began_ns = time.monotonic_ns()
        n_tokens, n_used = topk_ids.shape
        placement = self._holders.placement
        batches = plan_dispatch(topk_ids, topk_weights, placement.owner_of(layer), placement.destinations)
        if isinstance(batches, MissingExperts):
            raise ExpertUnavailable(layer, batches.experts, "no live peer holds them")
        n_destinations = len(batches)
        codec = self._rows_codec(layer)
        if self.chunk_bytes:
            batches = [
                chunk
                for batch in batches
                for chunk in cut(batch, row_bytes=self._bytes_per_row(batch, codec), chunk_bytes=self.chunk_bytes)
            ]
        rows = _EncodedRows(x, codec)
        planned_ns = time.monotonic_ns()
        results = await self._ask(layer, batches, rows)
        returned_ns = time.monotonic_ns()
        parts = [(batch, result.rows) for batch, result in zip(batches, results, strict=True)]
        if self._codec_back is RowCodec.EXACT:
            combined = combine_exact(n_tokens, n_used, self._spec.n_embd, parts, topk_weights)
        else:
            combined = combine_partial(n_tokens, n_used, self._spec.n_embd, parts)
        ended_ns = time.monotonic_ns()
        self._count(layer, n_tokens, parts, (ended_ns - began_ns) / 1e9)
        if self.on_layer is not None:
            slowest = max(results, key=lambda result: result.compute_us)
            self.on_layer(
                LayerSpan(
                    layer=layer,
                    n_tokens=n_tokens,
                    n_destinations=n_destinations,
                    n_batches=len(batches),
                    began_ns=began_ns,
                    planned_ns=planned_ns,
                    returned_ns=returned_ns,
                    ended_ns=ended_ns,
                    compute_s=slowest.compute_us / 1e6,
                    queue_s=slowest.queue_us / 1e6,
                )
            )
        return combined

    async def _ask(self, layer: int, batches: list[Batch], rows: _EncodedRows) -> list[m.Result]:
        """Return the answers of all batches; the first failure ends the layer, for the other answers are of no use."""
        if len(batches) == 1:
            return [await self._batch(layer, batches[0], rows)]
        try:
            # Tasks cost 3 us each more than bare futures (uvloop, measured): not worth another interface of connections.
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._batch(layer, batch, rows)) for batch in batches]
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        return [task.result() for task in tasks]

    async def _batch(self, layer: int, batch: Batch, rows: _EncodedRows) -> m.Result:
        """Return a peer's answer to one batch; any failure marks the peer down and raises ExpertUnavailable."""
        is_exact = self._codec_back is RowCodec.EXACT
        message = m.Dispatch(
            model_tag=self._model_tag,
            layer=layer,
            rows_codec=rows.codec,
            result_codec=self._codec_back,
            row_counts=batch.row_counts,
            expert_ids=batch.expert_ids,
            weights=None if is_exact else batch.weights,
            rows=rows.x[batch.rows],
            encoded_rows=rows.of(batch),
        )
        peer = batch.destination
        try:
            connection = await self._holders.connection(peer)
            expected = (batch.n_pairs if is_exact else batch.n_rows, rows.x.shape[1])
            size = RESULT_HEAD_BYTES + expected[0] * row_bytes(expected[1], self._codec_back)
            result = await connection.request(message, timeout_s=BATCH_TIMEOUT_S, max_answer_bytes=size)
            assert isinstance(result, m.Result)  # the session checks an answer's type
            if not (np.abs(result.rows) <= MAX_MAGNITUDE).all():  # a NaN is not, either
                error = RemoteProtocolError(f"peer {peer.short} sent numbers that are not finite, or absurdly large")
                connection.close(error)
                raise error
            if result.codec is not self._codec_back or result.rows.shape != expected:
                error = RemoteProtocolError(
                    f"wrong answer of peer {peer.short}: got {result.codec.name} {result.rows.shape}, "
                    f"expected {self._codec_back.name} {expected}"
                )
                connection.close(error)
                raise error
            return result
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

    def _bytes_per_row(self, batch: Batch, codec: RowCodec) -> float:
        """Return what a row of this batch takes on its way out or back, whichever is more."""
        back = row_bytes(self._spec.n_embd, self._codec_back)
        if self._codec_back is RowCodec.EXACT:
            back = back * batch.n_pairs // batch.n_rows
        return max(row_bytes(self._spec.n_embd, codec), back)

    def _rows_codec(self, layer: int) -> RowCodec:
        codec = self._codec_out.get(layer)
        if codec is None:
            codec = self._codec_out[layer] = codecs_of(self.wire, self._spec, layer)[0]
        return codec

    def _count(
        self, layer: int, n_tokens: int, parts: list[tuple[Batch, npt.NDArray[np.float32]]], wait_s: float
    ) -> None:
        stats = self.stats
        stats.n_round_trips += 1
        stats.n_token_layers += n_tokens
        stats.wait_s += wait_s
        pair_bytes = 2 if self._codec_back is RowCodec.EXACT else 6  # the expert's id, and its weight
        out_bytes = 1 + row_bytes(self._spec.n_embd, self._rows_codec(layer))  # how many pairs, and the row
        back_bytes = row_bytes(self._spec.n_embd, self._codec_back)
        for batch, rows in parts:
            stats.n_assignments += batch.n_pairs
            stats.bytes_out += batch.n_rows * out_bytes + batch.n_pairs * pair_bytes
            stats.bytes_back += len(rows) * back_bytes
            stats.assignments[batch.destination] = stats.assignments.get(batch.destination, 0) + batch.n_pairs
