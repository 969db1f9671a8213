"""A peer that waits for a disk computes the same, later: each expert that is asked for costs its block, once a computation."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from peer.disk_bound import DiskBoundExecutor
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from tests.peer.conftest import SmallModel, dispatch


@pytest.fixture
def ffn(small: SmallModel) -> Iterator[ExpertFfn]:
    held = ExpertSet.of([0], [1, 2, 3])
    found = ExpertFfn(small.manifest.spec, held, n_threads=1)
    with GgufFile(small.path) as file:
        source = GgufSource(file)
        for layer, expert in held:
            found.load(layer, expert, source.read_block(layer, expert))
    yield found
    found.close()


@pytest.mark.parametrize(("experts", "n_blocks"), [((1,), 1), ((1, 2, 3), 3), ((2, 2, 2), 1)])
def test_it_waits_for_the_blocks_that_it_needs_and_computes_the_same(
    ffn: ExpertFfn, small: SmallModel, monkeypatch: pytest.MonkeyPatch, experts: tuple[int, ...], n_blocks: int
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    spec = small.manifest.spec
    asked = dispatch(experts=(*experts, 1)) if len(experts) == 1 else dispatch(experts=experts)
    arguments = (0, asked.rows, asked.row_counts, asked.expert_ids, asked.weights)
    found = DiskBoundExecutor(ffn, spec, bytes_per_s=1000.0).run(*arguments)
    assert waited == [pytest.approx(n_blocks * spec.block_size_bytes(0) / 1000.0)]
    assert np.array_equal(found, ExpertExecutor(ffn, spec).run(*arguments))
