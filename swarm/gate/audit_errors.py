"""How far two honest peers' answers may be apart: what an audit's tolerance is made of (`swarm.dispatch.audit_opinions`).

The backbone runs one window of a text with one layer's experts in memory at a time, once as they are stored and once interleaved
as stock llama.cpp keeps them (`CPU_REPACK`): the two sets of kernels that peers of one model may have. At the sampled layers some
rows are answered by the one in each form, by batches of simulated peers, and asked of the other as an audit asks: whole, and in
two parts; several rows at once, and singly. The largest relative difference of a row is the figure.

What it cannot say: other processors' kernels are not here. The tolerance leaves room for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarm.dispatch.audit_opinions import Part, Question, as_answered, deviation
from swarm.dispatch.codecs import codecs_of
from swarm.dispatch.plan import Batch, MissingExperts, part_of, plan_dispatch
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.gate.form_table import (
    WINDOW_TOKENS,
    GateModel,
    cut_windows,
    gate_engine,
    leading_bos,
    text_tokens,
    window_tokens,
)
from swarm.gate.hooked_model import HookedModel
from swarm.gate.layer_samples import N_SAMPLED, spread
from swarm.gate.simulated_peers import N_PEERS, PeerPlan, Ready, SimulatedPeers, carry_rows
from swarm.ids import ExpertSet
from swarm.wire.rows import RowCodec, Wire, WireForm

ROWS = 32  # of each sampled layer; guessed: some 300 answers of each form over 8 layers, each in three ways
AT_ONCE = 8  # rows of a question, as audits ask (`auditor.MAX_ROWS`)
SEED = 1

F32 = Wire(WireForm.F32, WireForm.F32)

Rows = npt.NDArray[np.float32]


@dataclass(slots=True)
class _Streamed:
    """An `ExpertBackend` that loads a layer's experts twice when the graph comes to it, and frees them."""

    model: GateModel
    sampled: frozenset[int]
    errors: dict[Wire, float]
    plan: PeerPlan
    progress: Callable[[], None]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED))

    def begin(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> Ready:
        if layer > max(self.sampled):
            return Ready(np.zeros_like(x))
        spec = self.model.spec
        with self._load(layer, repacks=False) as plain:
            executor = ExpertExecutor(plain, spec)
            output = SimulatedPeers(executor, spec, F32, self.plan).compute(layer, x, topk_ids, topk_weights)
            if layer in self.sampled:
                rows = self.rng.choice(len(x), min(ROWS, len(x)), replace=False)
                with self._load(layer, repacks=True) as repacked:
                    other = ExpertExecutor(repacked, spec)
                    for wire in self.errors:
                        for at in range(0, len(rows), AT_ONCE):
                            some = rows[at : at + AT_ONCE]
                            for asked in (some, *some[:, np.newaxis]):
                                self._compare(
                                    wire, layer, executor, other, x[asked], topk_ids[asked], topk_weights[asked]
                                )
        self.progress()
        return Ready(output)

    def _load(self, layer: int, *, repacks: bool) -> ExpertFfn:
        spec = self.model.spec
        experts = ExpertSet.of([layer], range(spec.n_expert))
        ffn = ExpertFfn(spec, experts, repacks=repacks)
        try:
            for _, expert in experts:
                ffn.load(layer, expert, self.model.source.read_block(layer, expert))
        except BaseException:
            ffn.close()
            raise
        return ffn

    def _compare(
        self,
        wire: Wire,
        layer: int,
        executor: ExpertExecutor,
        other: ExpertExecutor,
        x: Rows,
        topk_ids: npt.NDArray[np.int32],
        topk_weights: Rows,
    ) -> None:
        out, back = codecs_of(wire, self.model.spec, layer)
        batches = plan_dispatch(topk_ids, topk_weights, self.plan.owners[layer], self.plan.destinations)
        assert not isinstance(batches, MissingExperts)
        for planned in batches:
            batch = dataclasses.replace(planned, rows=np.arange(planned.n_rows))
            arrived = carry_rows(x[planned.rows], out)
            answer = carry_rows(_run(executor, layer, arrived, batch, back), back)
            question = Question(
                layer=layer, node=planned.destination, batch=batch, x=arrived, answer=answer, codec=back
            )
            whole = np.ones(batch.n_pairs, np.bool_)
            half = batch.expert_ids < int(np.median(batch.expert_ids)) + 0.5
            for masks in ([whole], [half, ~half]):
                if not all(mask.any() for mask in masks):
                    continue
                parts = [Part(is_in=mask, batch=part_of(batch, mask), node=planned.destination) for mask in masks]
                said = [(part, _run(other, layer, arrived[part.batch.rows], part.batch, back)) for part in parts]
                found = deviation(answer, as_answered(question, said))
                self.errors[wire] = max(self.errors[wire], found.error)


def _run(executor: ExpertExecutor, layer: int, x: Rows, batch: Batch, back: RowCodec) -> Rows:
    weights = None if back is RowCodec.EXACT else batch.weights
    return executor.run(layer, x, batch.row_counts, batch.expert_ids, weights)


def measure_audit_errors(
    model: GateModel,
    wires: Sequence[Wire],
    text: str,
    *,
    layers: Collection[int] = (),
    n_tokens: int = WINDOW_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Wire, float]:
    """Return for each form the largest relative difference of a row between two honest answers.

    Args:
        layers: which to sample; empty: N_SAMPLED of them, evenly spread.
        n_tokens: of the text, at most; one window is used.

    Raises:
        UserError: the text is too short.
        EngineError: llama.cpp failed.
    """
    spec = model.spec
    sampled = frozenset(layers) or spread(spec.moe_layers, N_SAMPLED)
    n_read, n_done = sum(layer <= max(sampled) for layer in spec.moe_layers), 0

    def advance() -> None:
        nonlocal n_done
        n_done += 1
        progress(n_done, n_read)

    errors = dict.fromkeys(wires, 0.0)
    plan = PeerPlan.contiguous(spec, min(N_PEERS, spec.n_expert))
    experts = _Streamed(model, sampled, errors, plan, advance)
    with HookedModel(model.backbone_path, spec, gate_engine(WINDOW_TOKENS), experts) as hooked:
        size = min(n_tokens, window_tokens(hooked.model.n_vocab) - 1)
        tokens = text_tokens(hooked.model, text, size)
        (window,) = cut_windows(tokens, size + 1, leading_bos(hooked.model))
        hooked.logits(window.tokens, 0)  # of all tokens, else the last layer sees but one
    return errors
