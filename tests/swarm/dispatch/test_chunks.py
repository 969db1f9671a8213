"""Cutting batches: every pair once, in order, and never a short batch."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.dispatch.chunks import MAX_CHUNKS, cut
from swarm.dispatch.plan import Batch
from swarm.ids import NodeId

NODE = NodeId(b"n" * 32)
KB = 1000


def batch(n_rows: int, seed: int = 1) -> Batch:
    rng = np.random.default_rng(seed)
    row_counts = rng.integers(1, 6, n_rows).astype(np.uint8)
    n_pairs = int(row_counts.sum())
    return Batch(
        destination=NODE,
        rows=np.sort(rng.permutation(3 * n_rows)[:n_rows]),
        row_counts=row_counts,
        expert_ids=rng.integers(0, 64, n_pairs).astype(np.uint16),
        slots=rng.integers(0, 8, n_pairs).astype(np.uint8),
        weights=rng.random(n_pairs, dtype=np.float32),
    )


@pytest.mark.parametrize("n_rows", [3, 7, 31, 100, 512, 513])
def test_the_chunks_of_a_batch_are_the_batch(n_rows: int) -> None:
    whole = batch(n_rows)
    chunks = cut(whole, row_bytes=KB, chunk_bytes=KB)
    assert len(chunks) > 1
    for name in ("rows", "row_counts", "expert_ids", "slots", "weights"):
        joined = np.concatenate([getattr(chunk, name) for chunk in chunks])
        assert joined.dtype == getattr(whole, name).dtype
        assert joined.tobytes() == getattr(whole, name).tobytes()
    assert {chunk.destination for chunk in chunks} == {NODE}


@pytest.mark.parametrize(("size_kb", "n_chunks"), [(1, 1), (29, 1), (30, 2), (69, 2), (70, 3), (150, 4), (310, 5)])
def test_the_first_chunk_has_at_least_the_least_size_so_a_short_batch_stays_whole(size_kb: int, n_chunks: int) -> None:
    chunks = cut(batch(size_kb), row_bytes=KB, chunk_bytes=10 * KB)
    assert len(chunks) == n_chunks
    assert min(chunk.n_rows * KB for chunk in chunks) >= min(10, size_kb) * KB


def test_chunks_double_and_are_bounded() -> None:
    sizes = [chunk.n_rows for chunk in cut(batch(31 * 40), row_bytes=KB, chunk_bytes=KB)]
    assert sizes == [40, 80, 160, 320, 640]
    assert len(cut(batch(5000), row_bytes=8 * KB, chunk_bytes=1)) == MAX_CHUNKS


def test_a_few_large_rows_are_not_cut_below_a_row() -> None:
    for n_rows in range(1, 40):
        chunks = cut(batch(n_rows), row_bytes=10_000 * KB, chunk_bytes=1)
        assert all(chunk.n_rows >= 1 for chunk in chunks)
        assert sum(chunk.n_rows for chunk in chunks) == n_rows
