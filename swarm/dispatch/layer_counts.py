"""What dispatching layers has come to: counts, and each layer's times.

A layer is counted after its output is on its way (`EndedLayer`): that takes as long as combining it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from swarm.dispatch.attempts import AttemptStats, Order
from swarm.dispatch.origin import Origin
from swarm.dispatch.plan import HERE
from swarm.ids import NodeId
from swarm.wire import messages as m

MAX_COUNTED = 1024  # nodes of `DispatchStats.assignments`: four times as many as one backbone uses at a time


# Spans are not frozen, as all that is made for each layer: in `swarm bench dispatch` making them is a part of the layer.
@dataclass(slots=True, kw_only=True)
class BatchSpan:
    """One answer of a layer; `queue_s`, `compute_s`: what the peer says of itself."""

    node: NodeId
    n_rows: int
    answered_ns: int
    queue_s: float
    compute_s: float


@dataclass(slots=True, kw_only=True)
class LayerSpan:
    """One layer's dispatch, stage by stage; nanoseconds of `time.monotonic_ns`.

    Attributes:
        began_ns, planned_ns, returned_ns, ended_ns: the call; batches packed, about to leave; all answers there; combined.
        compute_s, queue_s: of the batch that computed longest; what peers say of themselves, so it may be wrong.
        n_batches: requests sent; more than destinations where batches were cut into chunks.
        sequences: whose rows they are, where that is known.
        batches: the answers that made up the layer.
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
    sequences: tuple[int, ...] = ()
    batches: tuple[BatchSpan, ...] = ()


@dataclass(slots=True)
class DispatchStats:
    """What has been dispatched so far; counts, bytes and seconds."""

    n_round_trips: int = 0  # dispatches of a layer that waited for the network
    n_skipped_trips: int = 0  # dispatches of a layer that did not: all of its pairs were computed here
    n_local_assignments: int = 0  # of n_assignments: computed here
    n_rows_sent: int = 0  # rows of hidden state, once for each peer that got one
    n_token_layers: int = 0  # rows of hidden state times MoE layers
    n_assignments: int = 0  # (token, expert) pairs
    bytes_out: int = 0  # bodies of DISPATCH frames' rows, ids and weights, without QUIC's and our headers
    bytes_back: int = 0
    wait_s: float = 0.0
    attempts: AttemptStats = field(default_factory=AttemptStats)
    assignments: dict[NodeId, int] = field(default_factory=dict)  # of the MAX_COUNTED nodes used last

    def count_pairs(self, node: NodeId, n_pairs: int) -> None:
        """Add to a node's assignments; who was used longest ago is forgotten."""
        self.assignments[node] = self.assignments.pop(node, 0) + n_pairs  # and it is the last one now
        if len(self.assignments) > MAX_COUNTED:
            del self.assignments[next(iter(self.assignments))]


class EndedLayer(NamedTuple):
    """A layer that is not counted yet; `times_ns`: when it began, was planned, had all answers, and was combined."""

    layer: int
    n_tokens: int
    n_batches: int
    times_ns: tuple[int, int, int, int]
    answers: list[tuple[Order, m.Result]]
    origin: Origin | None

    def span(self) -> LayerSpan:
        """Return what it took."""
        began_ns, planned_ns, returned_ns, ended_ns = self.times_ns
        results = (result for _, result in self.answers)
        slowest = max(results, key=lambda result: result.compute_us, default=None)  # None: a layer without rows
        return LayerSpan(
            layer=self.layer,
            n_tokens=self.n_tokens,
            n_destinations=len({order.batch.destination for order, _ in self.answers} - {HERE}),
            n_batches=self.n_batches,
            began_ns=began_ns,
            planned_ns=planned_ns,
            returned_ns=returned_ns,
            ended_ns=ended_ns,
            compute_s=0.0 if slowest is None else slowest.compute_us / 1e6,
            queue_s=0.0 if slowest is None else slowest.queue_us / 1e6,
            sequences=() if self.origin is None else tuple(self.origin.firsts()),
            batches=tuple(
                BatchSpan(
                    node=order.node,
                    n_rows=order.batch.n_rows,
                    answered_ns=order.answered_ns,
                    queue_s=result.queue_us / 1e6,
                    compute_s=result.compute_us / 1e6,
                )
                for order, result in self.answers
            ),
        )
