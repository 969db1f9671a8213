"""Simulated peers compute what peers compute: each step against plain numpy, and each row through the codec it should meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from swarm.errors import ExpertUnavailable
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.gate.form_table import GateModel
from swarm.gate.simulated_peers import NotFinite, PeerPlan, SimulatedPeers, carry_rows, load_experts
from swarm.ids import ExpertSet, NodeId
from swarm.wire.rows import RowCodec, parse_wire

T = 5
Rows = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def model(gate_model: Callable[[str], GateModel]) -> GateModel:
    return gate_model("Q8_0")


@pytest.fixture(scope="module")
def ffn(model: GateModel) -> Iterator[ExpertFfn]:
    with load_experts(model.spec, model.source, model.spec.all_experts) as experts:
        yield experts


def inputs(model: GateModel, seed: int = 0) -> tuple[Rows, npt.NDArray[np.int32], Rows]:
    rng = np.random.default_rng(seed)
    spec = model.spec
    x = rng.standard_normal((T, spec.n_embd), dtype=np.float32)
    ids = rng.random((T, spec.n_expert)).argsort(axis=1)[:, : spec.n_expert_used].astype(np.int32)
    return x, ids, rng.random((T, spec.n_expert_used), dtype=np.float32)


def peers(model: GateModel, ffn: ExpertFfn, wire: str, **options: object) -> SimulatedPeers:
    plan = PeerPlan.contiguous(model.spec, 3)
    return SimulatedPeers(ExpertExecutor(ffn, model.spec), model.spec, parse_wire(wire), plan, **options)  # type: ignore[arg-type]


def pair_outputs(ffn: ExpertFfn, layer: int, x: Rows, ids: npt.NDArray[np.int32]) -> Rows:
    """Return each pair's output, [T, K, D], one expert at a time."""
    n_tokens, n_used = ids.shape
    out = np.empty((n_tokens, n_used, x.shape[1]), np.float32)
    for t in range(n_tokens):
        for k in range(n_used):
            out[t, k] = ffn.compute(layer, x[t : t + 1], np.zeros(1, np.intp), ids[t, k : k + 1])[0]
    return out


def test_exact_adds_weighted_rows_in_the_order_of_the_choice(model: GateModel, ffn: ExpertFfn) -> None:
    x, ids, weights = inputs(model)
    y = pair_outputs(ffn, 2, x, ids)
    expected = y[:, 0] * weights[:, :1]
    for k in range(1, ids.shape[1]):
        expected = expected + y[:, k] * weights[:, k : k + 1]
    np.testing.assert_array_equal(peers(model, ffn, "exact").begin(2, x, ids, weights).result(), expected)


@pytest.mark.parametrize("wire", ["f32", "f16", "q8/f16", "q8"])
def test_partial_sums_go_through_both_codecs_peer_by_peer(model: GateModel, ffn: ExpertFfn, wire: str) -> None:
    x, ids, weights = inputs(model, 1)
    out = {"f32": RowCodec.F32, "f16": RowCodec.F16}.get(wire, RowCodec.Q8_0)
    back = {"f32": RowCodec.F32, "q8": RowCodec.INT8}.get(wire, RowCodec.F16)
    y = pair_outputs(ffn, 1, carry_rows(x, out), ids) * weights[:, :, None]
    cuts = [model.spec.n_expert * i // 3 for i in range(4)]
    expected = np.zeros_like(x)
    for low, high in itertools.pairwise(cuts):
        is_here = (ids >= low) & (ids < high)
        partial = np.where(is_here[:, :, None], y, 0).sum(axis=1, dtype=np.float32)
        rows = is_here.any(axis=1)
        expected[rows] += carry_rows(partial[rows], back)
    got = peers(model, ffn, wire).compute(1, x, ids, weights)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max() if wire == "f32" else 2e-3)
    assert np.abs(expected).max() > 0.05


def test_every_row_that_leaves_or_comes_back_is_carried_once(model: GateModel, ffn: ExpertFfn) -> None:
    carried: list[tuple[int, RowCodec]] = []

    def carry(x: Rows, codec: RowCodec) -> Rows:
        carried.append((len(x), codec))
        return carry_rows(x, codec)

    x, ids, weights = inputs(model)
    cuts = np.array([model.spec.n_expert * i // 3 for i in range(1, 3)])
    owner = np.searchsorted(cuts, ids, side="right")  # [T, K]
    n_rows = sum(len(np.unique(row)) for row in owner)  # a row goes once to each peer
    peers(model, ffn, "q8/f16", carry=carry).compute(0, x, ids, weights)
    assert sum(n for n, codec in carried if codec is RowCodec.Q8_0) == n_rows
    assert sum(n for n, codec in carried if codec is RowCodec.F16) == n_rows
    carried.clear()
    peers(model, ffn, "exact", carry=carry).compute(0, x, ids, weights)
    assert sum(n for n, _ in carried) == n_rows + ids.size  # exact brings back a row for each pair


@pytest.mark.parametrize("direction", [RowCodec.F32, RowCodec.F16])
def test_a_value_that_is_not_finite_after_a_codec_ends_the_layer(
    model: GateModel, ffn: ExpertFfn, direction: RowCodec
) -> None:
    def carry(x: Rows, codec: RowCodec) -> Rows:
        rows = x.copy()
        if codec is direction:
            rows[-1, 3] = np.inf
        return rows

    with pytest.raises(NotFinite, match="form f32/f16 made a value of layer 0"):
        peers(model, ffn, "f32/f16", carry=carry).begin(0, *inputs(model))


def test_an_expert_that_nobody_holds_is_named(model: GateModel, ffn: ExpertFfn) -> None:
    x, ids, weights = inputs(model)
    backend = peers(model, ffn, "f32")
    owner = np.zeros(model.spec.n_expert, np.int64)
    owner[ids[0, 0]] = -1
    backend.plan = PeerPlan(destinations=(NodeId(bytes(32)),), owners={0: owner})
    with pytest.raises(ExpertUnavailable) as caught:
        backend.compute(0, x, ids, weights)
    assert caught.value.experts == (ids[0, 0],)


@pytest.mark.parametrize("n_peers", [1, 3, 5])
def test_contiguous_plans_give_every_expert_one_owner_in_ascending_runs(
    gate_model: Callable[[str], GateModel], n_peers: int
) -> None:
    spec = gate_model("synthetic").spec
    plan = PeerPlan.contiguous(spec, n_peers)
    assert len(plan.destinations) == n_peers
    assert list(plan.destinations) == sorted(plan.destinations)
    assert set(plan.owners) == set(spec.moe_layers)
    for owner in plan.owners.values():
        assert len(owner) == spec.n_expert
        assert (np.diff(owner) >= 0).all()
        counts = np.bincount(owner, minlength=n_peers)
        assert counts.max() - counts.min() <= 1


def test_loading_tells_its_progress_and_takes_only_what_was_asked(model: GateModel) -> None:
    seen: list[tuple[int, int]] = []
    wanted = ExpertSet.of([1, 4], [0, 7, 9])
    with load_experts(model.spec, model.source, wanted, lambda done, total: seen.append((done, total))) as ffn:
        assert ffn.loaded == wanted
    assert seen == [(i, 6) for i in range(1, 7)]
