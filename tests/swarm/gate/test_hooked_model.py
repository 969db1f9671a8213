"""A hooked model without event loop: the same logits as stock, and a failed step leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from swarm.backbone.stock import StockModel
from swarm.errors import EngineError, ExpertUnavailable
from swarm.experts.executor import ExpertExecutor
from swarm.gate.form_table import GateModel, gate_engine
from swarm.gate.hooked_model import HookedModel
from swarm.gate.simulated_peers import PeerPlan, SimulatedPeers, load_experts
from swarm.wire.rows import parse_wire

TOKENS = [5, 77, 300, 12, 9, 1024]


class Fragile(SimulatedPeers):
    """Peers that fail at one layer, with whatever is put there."""

    failure: Exception | None = None

    def begin(self, layer, x, topk_ids, topk_weights):  # type: ignore[no-untyped-def]
        if self.failure is not None and layer == 3:
            raise self.failure
        return super().begin(layer, x, topk_ids, topk_weights)


@pytest.fixture(scope="module")
def parts(gate_model: Callable[[str], GateModel]) -> Iterator[tuple[GateModel, HookedModel, Fragile]]:
    model = gate_model("Q8_0")
    spec = model.spec
    with load_experts(spec, model.source, spec.all_experts) as ffn:
        peers = Fragile(ExpertExecutor(ffn, spec), spec, parse_wire("exact"), PeerPlan.contiguous(spec))
        with HookedModel(model.backbone_path, spec, gate_engine(64), peers) as hooked:
            yield model, hooked, peers


def test_logits_in_pieces_are_stocks(parts: tuple[GateModel, HookedModel, Fragile]) -> None:
    model, hooked, _ = parts
    with StockModel(model.path, gate_engine(64)) as stock:
        for start, end in ((0, 4), (4, 5), (5, 6)):
            expected = stock.logits(TOKENS[start:end], start)
            got = hooked.logits(TOKENS[start:end], start)
            assert got.shape == (end - start, stock.n_vocab)
            np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("failure", [ExpertUnavailable(3, [1], "a test"), ZeroDivisionError("a test")])
def test_a_failed_step_is_raised_and_not_remembered(
    parts: tuple[GateModel, HookedModel, Fragile], failure: Exception
) -> None:
    _, hooked, peers = parts
    hooked.clear()
    first = hooked.logits(TOKENS[:3], 0)
    expected = hooked.logits(TOKENS[3:], 3)
    hooked.clear()
    np.testing.assert_array_equal(hooked.logits(TOKENS[:3], 0), first)
    peers.failure = failure
    try:
        with pytest.raises(type(failure) if isinstance(failure, ExpertUnavailable) else EngineError, match="a test"):
            hooked.logits([1, 2, 3, 4], 3)
    finally:
        peers.failure = None
    np.testing.assert_array_equal(hooked.logits(TOKENS[3:], 3), expected)
