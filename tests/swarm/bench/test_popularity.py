"""Replicas stand where volunteers would choose them, and loads count every peer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swarm.bench.popularity import max_over_mean_load, replica_slices
from swarm.dispatch.layer_counts import DispatchStats
from swarm.dispatch.plan import HERE
from swarm.dispatch.popularity import Popularity
from swarm.ids import ExpertSet, NodeId
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import ModelSpec, read_spec

A, B, C = (NodeId(bytes([n]) * 32) for n in (1, 2, 3))


@pytest.fixture
def spec(tiny_moe: Path) -> ModelSpec:
    with GgufFile(tiny_moe / "model-Q8_0.gguf") as file:
        return read_spec(file)


def test_replicas_hold_what_is_chosen_most(spec: ModelSpec) -> None:
    hot = {layer: np.random.default_rng(layer).permutation(spec.n_expert)[:8] for layer in spec.moe_layers}
    popularity = Popularity(spec.moe_layers, spec.n_expert, now=0.0)
    for layer in spec.moe_layers:
        popularity.add(layer, np.tile(np.arange(spec.n_expert), (1, 2)))
        popularity.add(layer, np.tile(hot[layer], (1, 50)))
    slices = [ExpertSet.of(spec.moe_layers, range(start, start + 8)) for start in range(0, spec.n_expert, 8)]
    (first,) = replica_slices(spec, popularity, slices, 1)
    assert first.by_layer == {layer: frozenset(ids.tolist()) for layer, ids in hot.items()}
    both = replica_slices(spec, popularity, slices, 2)
    assert len(both) == 2
    assert both[0] == first
    assert all(len(each) == len(slices[0]) for each in both)


def test_the_busiest_peer_is_measured_against_all_of_them() -> None:
    stats = [DispatchStats(assignments={A: 30, B: 10, HERE: 500}), DispatchStats(assignments={A: 30, B: 10})]
    assert max_over_mean_load(stats, 2) == pytest.approx(1.5)
    assert max_over_mean_load(stats, 4) == pytest.approx(3.0), "two of them got nothing"
    assert max_over_mean_load([DispatchStats()], 3) == 0
