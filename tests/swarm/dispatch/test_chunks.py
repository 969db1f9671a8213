"""Cutting batches: every pair once, in order, and never a short batch."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.dispatch.chunks import CHUNK_BYTES, MAX_CHUNKS, cut
from swarm.dispatch.plan import Batch
from swarm.emulation.path import PathSpec
from swarm.ids import NodeId
from tests.virtual_link import VirtualWorld

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


@pytest.mark.parametrize(
    ("size_kb", "n_chunks"),
    [(1, 1), (29, 1), (30, 2), (39, 2), (40, 3), (59, 3), (60, 4), (90, 5), (120, 6), (160, 7), (199, 7), (200, 8)],
)
def test_the_first_chunk_has_at_least_the_least_size_so_a_short_batch_stays_whole(size_kb: int, n_chunks: int) -> None:
    chunks = cut(batch(size_kb), row_bytes=KB, chunk_bytes=10 * KB)
    assert len(chunks) == n_chunks
    assert min(chunk.n_rows * KB for chunk in chunks) >= min(10, size_kb) * KB


def test_chunks_grow_and_shrink_by_a_step_at_a_time_and_are_bounded() -> None:
    assert [chunk.n_rows for chunk in cut(batch(160), row_bytes=KB, chunk_bytes=10 * KB)] == [
        10,
        20,
        30,
        40,
        30,
        20,
        10,
    ]
    assert [chunk.n_rows for chunk in cut(batch(800), row_bytes=KB, chunk_bytes=KB)] == [
        *(40, 80, 120, 160),
        *(160, 120, 80, 40),
    ]
    assert len(cut(batch(5000), row_bytes=8 * KB, chunk_bytes=1)) == MAX_CHUNKS


def test_a_pipeline_of_three_stages_takes_little_more_than_its_slowest() -> None:
    """Out, compute and back of 512 rows, each a multiple of a row's time, whichever is the slowest."""
    for stages in ((88, 207, 164), (88, 60, 164), (200, 100, 100)):
        whole, chunks = batch(512), cut(batch(512), row_bytes=2 * KB, chunk_bytes=32 << 10)
        free_at = [0, 0, 0]
        for chunk in chunks:
            at = 0
            for stage, row_time in enumerate(stages):
                at = free_at[stage] = max(at, free_at[stage]) + chunk.n_rows * row_time
        assert whole.n_rows * max(stages) < free_at[-1] < 1.15 * whole.n_rows * max(stages)


def test_a_few_large_rows_are_not_cut_below_a_row() -> None:
    for n_rows in range(1, 40):
        chunks = cut(batch(n_rows), row_bytes=10_000 * KB, chunk_bytes=1)
        assert all(chunk.n_rows >= 1 for chunk in chunks)
        assert sum(chunk.n_rows for chunk in chunks) == n_rows


OUT_BYTES, BACK_BYTES = 1_130, 2_048  # of a row of synth16 in q8/f16, with its ids and weights
ROW_S = 0.0002  # to compute one, measured: 512 rows in 0.103 s


def layer_s(chunks: list[Batch], rate_bit_s: float) -> float:
    """Return how long a layer takes with a peer that computes one chunk after the other: the third one over a new path."""
    world = VirtualWorld(seed=1)
    link = world.link(PathSpec(delay_s=0.010, rate_bit_s=rate_bit_s))
    link.open()
    n_rows: dict[int, int] = {}
    free_at = world.now

    def asked(stream: int, size: int, is_end: bool) -> None:
        nonlocal free_at
        if is_end:
            free_at = max(free_at, world.now) + n_rows[stream] * ROW_S
            world.call_in(free_at - world.now, lambda: link.server.send(stream, n_rows[stream] * BACK_BYTES))

    link.server.on_data = asked
    client = link.client.driver
    assert client is not None
    for _ in range(3):
        start = world.now
        for chunk in chunks:
            stream = client.quic.get_next_available_stream_id()
            n_rows[stream] = chunk.n_rows
            client.quic.send_stream_data(stream, bytes(chunk.n_rows * OUT_BYTES), True)
        link.client.pump(has_data=True)
        world.run_until(lambda: len(link.done) == len(n_rows))
    return max(link.done.values()) - start


@pytest.mark.parametrize(("rate_bit_s", "n_rows", "least"), [(100e6, 512, 1.5), (100e6, 64, 1.2), (1e9, 512, 1.1)])
def test_over_an_emulated_path_chunks_hide_what_is_not_the_slowest_stage(
    rate_bit_s: float, n_rows: int, least: float
) -> None:
    whole = batch(n_rows)
    chunks = cut(whole, row_bytes=BACK_BYTES, chunk_bytes=CHUNK_BYTES)
    whole_s, cut_s = layer_s([whole], rate_bit_s), layer_s(chunks, rate_bit_s)
    assert whole_s > 0.020 + n_rows * (ROW_S + 8 * (OUT_BYTES + BACK_BYTES) / rate_bit_s), (
        "the path does what it should"
    )
    assert cut_s > 0.020 + n_rows * ROW_S
    assert whole_s / cut_s > least
