"""The routed experts as a swarm would compute them in a wire form, in this process: what peers do to numbers, without peers.

    x [T, D] -> plan by destination -> rows out through the codec -> executor (weighted sums) -> rows back through the
    codec -> combine

Every step is the code that the backbone and a peer run; only frames, sockets and time are left out. `swarm verify` shows
it honest: a short pass over real peers gives the same logits, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm.dispatch.codecs import codecs_of
from swarm.dispatch.combine import combine_exact, combine_partial
from swarm.dispatch.plan import Batch, MissingExperts, plan_dispatch
from swarm.errors import EngineError, ExpertUnavailable
from swarm.experts.device_ffn import DeviceFfn, reserve_slice
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet, NodeId
from swarm.model.source import BlockSource
from swarm.model.spec import ModelSpec
from swarm.native.devices import CPU
from swarm.wire.rows import RowCodec, Wire, WireForm, decode_rows, encode_rows

N_PEERS = 3  # what the thresholds were set with; more peers round more partial sums for each token

Rows = npt.NDArray[np.float32]
Carry = Callable[[Rows, RowCodec], Rows]


class NotFinite(EngineError):
    """A form made a value that is not finite: a scale that overflowed, for example. Peers refuse such rows."""


def carry_rows(x: Rows, codec: RowCodec) -> Rows:
    """Return rows as the other side of a wire reads them."""
    return decode_rows(encode_rows(x, codec), len(x), x.shape[1], codec)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerPlan:
    """Who holds what: destinations and, for each MoE layer, every expert's index into them, int [E]."""

    destinations: Sequence[NodeId]
    owners: Mapping[int, npt.NDArray[np.integer]]

    @classmethod
    def contiguous(cls, spec: ModelSpec, n_peers: int = N_PEERS) -> PeerPlan:
        """Return the plan of `n_peers` that hold equal runs of experts, the same in every layer."""
        cuts = [spec.n_expert * i // n_peers for i in range(n_peers + 1)]
        owner = np.repeat(np.arange(n_peers), [high - low for low, high in itertools.pairwise(cuts)])  # [E]
        names = tuple(NodeId(i.to_bytes(32, "big")) for i in range(n_peers))
        return cls(destinations=names, owners=dict.fromkeys(spec.moe_layers, owner))


class Ready:
    """A `LayerResult` that is there already: [T, D] float32."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def result(self) -> Rows:
        """Return it."""
        return self._rows


class SimulatedPeers:
    """An `ExpertBackend` whose wire form can be changed between steps.

    Attributes:
        wire: the form of the steps to come.
        plan: who holds what.
    """

    def __init__(
        self, executor: ExpertExecutor, spec: ModelSpec, wire: Wire, plan: PeerPlan, carry: Carry = carry_rows
    ) -> None:
        """`carry` stands for the wire; tests pass a worse one."""
        self._executor = executor
        self._spec = spec
        self._carry = carry
        self.wire = wire
        self.plan = plan

    def begin(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> Ready:
        """Return the layer's output, computed at once.

        Raises:
            NotFinite: the form cannot carry these rows.
        """
        return Ready(self.compute(layer, x, topk_ids, topk_weights))

    def compute(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> Rows:
        """Return the routed experts' output of one layer, [T, D]; raises as `begin`."""
        n_tokens, n_used = topk_ids.shape
        batches = plan_dispatch(topk_ids, topk_weights, self.plan.owners[layer], self.plan.destinations)
        if isinstance(batches, MissingExperts):
            raise ExpertUnavailable(layer, batches.experts, "no simulated peer holds them")
        parts = [(batch, self._at_peer(layer, x[batch.rows], batch)) for batch in batches]
        if self.wire.back is WireForm.EXACT:
            return combine_exact(n_tokens, n_used, self._spec.n_embd, parts, topk_weights)
        return combine_partial(n_tokens, n_used, self._spec.n_embd, parts)

    def _at_peer(self, layer: int, rows: Rows, batch: Batch) -> Rows:
        out, back = codecs_of(self.wire, self._spec, layer)
        arrived = _require_finite(self._carry(rows, out), layer, self.wire)
        weights = None if self.wire.back is WireForm.EXACT else batch.weights
        answer = self._executor.run(layer, arrived, batch.row_counts, batch.expert_ids, weights)
        return _require_finite(self._carry(answer, back), layer, self.wire)


def _require_finite(rows: Rows, layer: int, wire: Wire) -> Rows:
    if not np.isfinite(rows).all():
        raise NotFinite(f"form {wire} made a value of layer {layer} that is not finite")
    return rows


def load_experts(
    spec: ModelSpec,
    source: BlockSource,
    experts: ExpertSet,
    progress: Callable[[int, int], None] | None = None,
    *,
    device: str = CPU,
) -> ExpertFfn | DeviceFfn:
    """Return these experts in ggml tensors on a device; the caller closes them.

    Raises:
        UserError: there is no such device.
        EngineError, UnsupportedModel, ExpertUnavailable: memory, ggml, or the source.
    """
    ffn = reserve_slice(spec, experts, device=device, n_threads=1)
    try:
        for n_done, (layer, expert) in enumerate(experts):
            ffn.load(layer, expert, source.read_block(layer, expert))
            if progress is not None:
                progress(n_done + 1, len(experts))
    except BaseException:
        ffn.close()
        raise
    return ffn
