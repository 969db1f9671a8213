"""The operator's own experts: the numbers of a slice that was loaded as a peer loads it, and nothing read before it is needed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from swarm.backbone import own_experts
from swarm.backbone.in_process import InProcessExperts
from swarm.backbone.own_experts import OwnExperts
from swarm.errors import RemoteProtocolError
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from swarm.model.spec import ModelSpec, read_spec

LAYER = 2
HELD = ExpertSet.of((LAYER,), (3, 4, 9))


@pytest.fixture
def path(tiny_moe: Path) -> Path:
    return tiny_moe / "model-Q8_0.gguf"


@pytest.fixture
def spec(path: Path) -> ModelSpec:
    with GgufFile(path) as file:
        return read_spec(file)


@pytest_asyncio.fixture
async def own(path: Path, spec: ModelSpec) -> AsyncIterator[OwnExperts]:
    found = OwnExperts(path, spec)
    yield found
    await found.close()


def test_it_holds_what_the_model_has(own: OwnExperts, spec: ModelSpec) -> None:
    assert own.holds(LAYER, range(spec.n_expert))
    assert not own.holds(LAYER, [0, spec.n_expert])
    assert not own.holds(max(spec.moe_layers) + 1, [0])


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "sums"])
async def test_it_computes_what_a_peer_with_these_blocks_does(
    own: OwnExperts, path: Path, spec: ModelSpec, is_exact: bool
) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, spec.n_embd)).astype(np.float32)
    row_counts = np.array([2, 1, 3], np.uint8)
    ids = np.array([3, 9, 4, 9, 4, 3], np.uint16)
    weights = None if is_exact else rng.random(6).astype(np.float32)
    ffn = ExpertFfn(spec, HELD, n_threads=1)
    with GgufFile(path) as file:
        source = GgufSource(file)
        for layer, expert in HELD:
            ffn.load(layer, expert, source.read_block(layer, expert))
        expected = ExpertExecutor(ffn, spec).run(LAYER, x, row_counts, ids, weights)
    ffn.close()
    found = await own.compute(LAYER, x, row_counts, ids, weights)
    assert found.shape == ((6 if is_exact else 3), spec.n_embd)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


async def test_the_file_is_opened_once_and_not_before_it_is_needed(
    own: OwnExperts, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class Counted(InProcessExperts):
        @classmethod
        def open(cls, *arguments: object, **options: object) -> InProcessExperts:
            opened.append(1)
            return super().open(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(own_experts, "InProcessExperts", Counted)
    assert own.holds(LAYER, [0])
    assert opened == []
    x, counts, ids = np.zeros((1, spec.n_embd), np.float32), np.array([1], np.uint8), np.array([0], np.uint16)
    for _ in range(2):
        await own.compute(LAYER, x, counts, ids, None)
    assert opened == [1]


async def test_what_goes_wrong_is_raised_to_whoever_waits(own: OwnExperts, spec: ModelSpec) -> None:
    x, counts = np.zeros((1, spec.n_embd), np.float32), np.array([1], np.uint8)
    with pytest.raises(RemoteProtocolError):
        await own.compute(99, x, counts, np.array([0], np.uint16), None)


async def test_closing_leaves_the_loop_free_while_the_file_is_opened(
    path: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_opening, may_open = threading.Event(), threading.Event()
    really_open = InProcessExperts.open

    def slowly(*arguments: Any, **options: Any) -> InProcessExperts:
        is_opening.set()
        assert may_open.wait(5)
        return really_open(*arguments, **options)

    monkeypatch.setattr(InProcessExperts, "open", slowly)
    own = OwnExperts(path, spec)
    x, one = np.zeros((1, spec.n_embd), np.float32), np.ones(1, np.uint8)
    computing = asyncio.create_task(own.compute(LAYER, x, one, np.array([3], np.uint16), None))
    assert await asyncio.to_thread(is_opening.wait, 5)
    closing = asyncio.create_task(own.close())
    for _ in range(20):  # the loop goes round
        await asyncio.sleep(0)
    assert not closing.done()
    may_open.set()
    await asyncio.wait_for(closing, 5)
    assert (await computing).shape == (1, spec.n_embd)
