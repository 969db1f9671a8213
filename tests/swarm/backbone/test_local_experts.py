"""Experts kept in memory: what they compute is what a slice loaded as a peer loads it does, also while the set changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from swarm.backbone.local_experts import DraftExperts, LocalExperts
from swarm.backbone.own_experts import OwnExperts
from swarm.errors import ExpertsNotHeld, ExpertUnavailable, UserError
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from tests.swarm.backbone.local_experts import SplitModel

KEPT = ExpertSet({1: frozenset({0, 3, 7}), 2: frozenset({5}), 4: frozenset({2, 3, 4, 5})})
Rows = np.ndarray


@pytest.fixture
def read_block(tiny: SplitModel) -> Iterator[Callable[[int, int], bytes]]:
    with GgufFile(tiny.file) as file:
        yield GgufSource(file).read_block


@pytest.fixture
def local(tiny: SplitModel, read_block: Callable[[int, int], bytes]) -> Iterator[LocalExperts]:
    found = LocalExperts(tiny.spec)
    found.change(KEPT, read_block)
    yield found
    found.close()


def dispatch(tiny: SplitModel, experts: tuple[int, ...], seed: int = 0) -> tuple[Rows, Rows, Rows, Rows]:
    """Return x [N, D], one to K pairs a row, and weights [P]."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, min(3, len(experts)) + 1, 5).astype(np.uint8)
    ids = np.concatenate([rng.permutation(experts)[:n] for n in counts]).astype(np.uint16)
    x = rng.standard_normal((5, tiny.spec.n_embd)).astype(np.float32)
    return x, counts, ids, rng.random(len(ids)).astype(np.float32)


@pytest.mark.parametrize("is_exact", [True, False], ids=["raw rows", "sums"])
def test_they_compute_what_a_peer_with_these_blocks_does(
    tiny: SplitModel, local: LocalExperts, read_block: Callable[[int, int], bytes], is_exact: bool
) -> None:
    for layer, experts in KEPT.by_layer.items():
        x, counts, ids, weights = dispatch(tiny, tuple(sorted(experts)), layer)
        ffn = ExpertFfn(tiny.spec, ExpertSet({layer: experts}))
        for expert in sorted(experts):
            ffn.load(layer, expert, read_block(layer, expert))
        expected = ExpertExecutor(ffn, tiny.spec).run(layer, x, counts, ids, None if is_exact else weights)
        ffn.close()
        found = local.compute(layer, x, counts, ids, None if is_exact else weights)
        assert found.tobytes() == expected.tobytes()


def test_it_tells_what_it_keeps(tiny: SplitModel, local: LocalExperts) -> None:
    assert local.experts == KEPT
    assert local.n_bytes == sum(tiny.spec.block_size_bytes(layer) for layer, _ in KEPT)
    kept = local.kept(1)
    assert kept is not None
    assert np.flatnonzero(kept).tolist() == [0, 3, 7]
    assert local.kept(0) is None
    assert local.holds(4, [5, 2])
    assert not local.holds(4, [5, 6])
    assert not local.holds(0, [0])


def test_what_is_not_kept_is_refused(tiny: SplitModel, local: LocalExperts) -> None:
    x, counts, ids, weights = dispatch(tiny, (0, 3, 6))
    assert 6 in ids
    with pytest.raises(ExpertsNotHeld):
        local.compute(1, x, counts, ids, weights)
    with pytest.raises(ExpertsNotHeld):
        local.compute(0, x, counts, ids, weights)


def test_a_change_reads_only_the_layers_that_differ(
    local: LocalExperts, read_block: Callable[[int, int], bytes]
) -> None:
    read: list[tuple[int, int]] = []

    def counted(layer: int, expert: int) -> bytes:
        read.append((layer, expert))
        return read_block(layer, expert)

    new = ExpertSet({1: KEPT.by_layer[1], 4: frozenset({9}), 5: frozenset({1, 2})})
    local.change(new, counted)
    assert local.experts == new
    assert read == [(4, 9), (5, 1), (5, 2)]
    assert local.kept(2) is None


def test_a_change_that_fails_leaves_the_old_set(local: LocalExperts, read_block: Callable[[int, int], bytes]) -> None:
    def broken(layer: int, expert: int) -> bytes:
        raise ExpertUnavailable(layer, (expert,), "gone")

    with pytest.raises(ExpertUnavailable):
        local.change(ExpertSet({1: frozenset({1})}), broken)
    assert local.experts == KEPT
    with pytest.raises(UserError):
        local.change(ExpertSet({99: frozenset({1})}), read_block)


def test_others_compute_while_the_set_changes(
    tiny: SplitModel, local: LocalExperts, read_block: Callable[[int, int], bytes]
) -> None:
    other = ExpertSet({1: frozenset({0, 3, 9}), 2: frozenset({5, 6})})  # both sets have 0 and 3 of layer 1
    x, counts, ids, weights = dispatch(tiny, (0, 3))
    expected = local.compute(1, x, counts, ids, weights).tobytes()
    wrong: list[object] = []
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            try:
                if local.compute(1, x, counts, ids, weights).tobytes() != expected:
                    wrong.append("other bits")
            except BaseException as error:
                wrong.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    for turn in range(20):
        local.change(other if turn % 2 == 0 else KEPT, read_block)
    is_over.set()
    thread.join()
    assert wrong == []


def test_a_draft_takes_what_is_kept_and_leaves_out_the_rest(tiny: SplitModel, local: LocalExperts) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, tiny.spec.n_embd)).astype(np.float32)
    ids, weights = np.array([[3, 8, 0], [7, 3, 1]], np.int32), rng.random((2, 3)).astype(np.float32)
    found = DraftExperts(local).begin(1, x, ids, weights).result()
    kept = np.isin(ids, sorted(KEPT.by_layer[1]))
    pairs = ids[kept].astype(np.uint16)
    expected = local.compute(1, x, kept.sum(axis=1).astype(np.uint8), pairs, weights[kept])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ExpertsNotHeld):
        DraftExperts(local).begin(0, x, ids, weights)


async def test_own_experts_take_the_kept_ones_from_memory_and_others_from_the_file(
    tiny: SplitModel, local: LocalExperts
) -> None:
    alone, resort = OwnExperts(None, tiny.spec, local=local), OwnExperts(tiny.file, tiny.spec, local=local)
    try:
        assert (alone.is_last_resort, resort.is_last_resort) == (False, True)
        assert alone.kept(1) is local.kept(1)
        assert alone.holds(1, [0, 3])
        assert not alone.holds(1, [0, 4])
        assert resort.holds(1, [0, 4])
        x, counts, ids, weights = dispatch(tiny, (0, 3, 7))
        expected = local.compute(1, x, counts, ids, weights)
        for own in (alone, resort):
            assert (await own.compute(1, x, counts, ids, weights)).tobytes() == expected.tobytes()
        x, counts, ids, weights = dispatch(tiny, (0, 3, 6))
        with pytest.raises(ExpertsNotHeld):
            await alone.compute(1, x, counts, ids, weights)
        mixed = await resort.compute(1, x, counts, ids, None)
        is_kept = ids != 6
        counted = np.repeat(np.arange(5), counts)[is_kept]
        same = local.compute(1, x[counted], np.ones(len(counted), np.uint8), ids[is_kept], None)
        np.testing.assert_allclose(mixed[is_kept], same, rtol=1e-5, atol=1e-6)
    finally:
        await alone.close()
        await resort.close()
