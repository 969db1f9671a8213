"""Shows that the table's shortcut is honest: simulated peers compute the bits that real peers do, in every form.

The same tokens go through both: a prompt in one call, then some more one at a time. The simulation takes over who holds
what from the running swarm, because partial sums are added in the order of node ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarm.backbone.assembly import RunningBackbone
from swarm.backbone.moe_hook import ExpertBackend, LayerResult
from swarm.dispatch.dispatcher import Dispatcher
from swarm.experts.executor import ExpertExecutor
from swarm.gate.form_table import WINDOW_TOKENS, GateModel, gate_engine
from swarm.gate.hooked_model import HookedModel
from swarm.gate.simulated_peers import NotFinite, PeerPlan, SimulatedPeers, load_experts
from swarm.wire.rows import Wire

N_PROMPT = 48  # several rows for nearly every expert; guessed
N_SINGLE = 4  # then one row at a time, as in decode

Rows = npt.NDArray[np.float32]


class _RealPeers(ExpertBackend):
    """Takes a layer from this thread to a dispatcher on the event loop, which bounds its time."""

    def __init__(self, dispatcher: Dispatcher, loop: asyncio.AbstractEventLoop) -> None:
        self._dispatcher = dispatcher
        self._loop = loop

    def begin(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> LayerResult:
        return asyncio.run_coroutine_threadsafe(self._dispatcher.dispatch(layer, x, topk_ids, topk_weights), self._loop)


class _Either(ExpertBackend):
    """Whichever of the two is to compute."""

    def __init__(self, first: ExpertBackend) -> None:
        self.current = first

    def begin(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> LayerResult:
        return self.current.begin(layer, x, topk_ids, topk_weights)


async def check_shortcut(
    running: RunningBackbone, model: GateModel, wires: Sequence[Wire], tokens: Sequence[int]
) -> dict[Wire, int | None]:
    """Return, for each form, how many rows of logits differ between simulated and real peers.

    Expected is 0: both use exact kernels, and every other step is the same code. None: the form cannot carry the rows
    (`NotFinite`), so real peers were not asked.

    Args:
        tokens: at least N_PROMPT + N_SINGLE.

    Raises:
        ExpertUnavailable, EngineError: the swarm or llama.cpp failed.
    """
    return await asyncio.to_thread(_check, running, asyncio.get_running_loop(), model, wires, tokens)


def _check(
    running: RunningBackbone,
    loop: asyncio.AbstractEventLoop,
    model: GateModel,
    wires: Sequence[Wire],
    tokens: Sequence[int],
) -> dict[Wire, int | None]:
    spec = model.spec
    placement = running.holders.placement
    plan = PeerPlan(
        destinations=placement.destinations, owners={layer: placement.owner_of(layer) for layer in spec.moe_layers}
    )
    counts: dict[Wire, int | None] = {}
    with load_experts(spec, model.source, spec.all_experts) as ffn:
        simulated = SimulatedPeers(ExpertExecutor(ffn, spec), spec, wires[0], plan)
        experts = _Either(simulated)
        with HookedModel(model.backbone_path, spec, gate_engine(WINDOW_TOKENS), experts) as hooked:
            for wire in wires:
                simulated.wire, experts.current = wire, simulated
                try:
                    expected = _logits(hooked, tokens)
                except NotFinite:
                    counts[wire] = None
                    continue
                dispatcher = Dispatcher(running.manifest.model_id, spec, running.holders, wire)
                experts.current = _RealPeers(dispatcher, loop)
                counts[wire] = count_different_rows(_logits(hooked, tokens), expected)
    return counts


def _logits(hooked: HookedModel, tokens: Sequence[int]) -> Rows:
    """Return the logits of a prompt in one call and of single tokens after it, [N_PROMPT + N_SINGLE, V]."""
    hooked.clear()
    parts = [hooked.logits(tokens[:N_PROMPT], 0)]
    parts += [hooked.logits(tokens[i : i + 1], i) for i in range(N_PROMPT, N_PROMPT + N_SINGLE)]
    return np.concatenate(parts)


def count_different_rows(got: Rows, expected: Rows) -> int:
    """Return how many rows are not equal bit for bit; raises ValueError when they do not cover the same."""
    if got.shape != expected.shape:
        raise ValueError(f"logits do not match: got {got.shape}, expected {expected.shape}")
    return int((got.view(np.uint32) != expected.view(np.uint32)).any(axis=1).sum())
