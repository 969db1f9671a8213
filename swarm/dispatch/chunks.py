"""Cuts a long batch by rows, so that its peer computes while the rest is still arriving and answers while it computes.

Pure. Each chunk is a batch of its own: a dispatch on an exchange of its own, answered by itself.

    link out   |1|2.|3..|4..|3.|2|            a chunk is computed once all of it is there,
    compute      |1.|2...|3.....|4.....|3.|2|   and its answer leaves as soon as it is computed
    link back       |1|  |2.|   |3..|  |4..|3.|2|

A batch takes as long as the slowest of the three, and besides that its first chunk until it is there and its last one from
then on: so these two are small, and those between them large, since each costs an exchange. They grow and shrink by a step at
a time, so that none waits for one much larger. The transport sends long exchanges in order of opening (`net/quic_driver`);
over one that sends a packet of each in turn (qh3) all chunks arrive at the end, and only the answers overlap.
"""

from __future__ import annotations

import numpy as np

from swarm.dispatch.plan import Batch

# Bytes of the first chunk in its busier direction; a batch below three of these (98 KB, what the transport sends in its first
# flight anyway) stays whole. Measured, a prefill of synth16 in q8/f16, one peer, 20 ms, on two cores, steps whole over cut,
# medians; compare within a line, which is one run:
#   512 rows, 1.05 MB    100 Mbit/s   each twice the one before, 5 (the last is half): 1.19   4 equal 1.32   8 1.28   16 1.20
#                                     5 doubling 1.21   8 equal 1.36   12 equal 1.37   9 as here, up to PEAK: 1.38
#                        1 Gbit/s     5 doubling 1.02   as here 3: 1.10   8: 1.03   11: 1.01
#   64 rows, 131 KB      100 Mbit/s   as here 2: 1.11   3: 1.14   4: 1.09
#                        1 Gbit/s     2: 0.98   3: 0.98   4: 0.94       there the cores bind, not the link
# As it is now, 512 rows at 100 Mbit/s: 1.61 (docs/bench/prefill.json).
CHUNK_BYTES = 32 << 10
MAX_CHUNKS = 8
PEAK = 4  # the largest chunk over the first
# The first chunk over a TLS link, in multiples of the others'. Its path is short: on loopback bytes take a twentieth of the
# compute, and a row of synth16 computes 20 % longer in a chunk of 16 than in one of 64. Whole batches gain 1 to 3 % more, but
# between chunks a peer serves others, which would wait five times as long; so they wait up to 1.7 times as long.
NEAR_FACTOR = 4


def cut(batch: Batch, *, row_bytes: float, chunk_bytes: int) -> list[Batch]:
    """Return the batch in chunks, in row order; whole, if it is shorter than 3 * `chunk_bytes`.

    Args:
        row_bytes: what a row takes on the wire, in its busier direction.
        chunk_bytes: the least size of the first chunk.
    """
    n_parts = min(batch.n_rows, int(batch.n_rows * row_bytes / chunk_bytes))
    if n_parts < 3:
        return [batch]
    n_chunks = max(n for n in range(2, MAX_CHUNKS + 1) if sum(_shares(n)) <= n_parts)
    shares = np.cumsum(_shares(n_chunks))
    row_ends = (batch.n_rows * shares // shares[-1]).tolist()
    pair_ends = np.cumsum(batch.row_counts, dtype=np.int64)  # [N]
    chunks: list[Batch] = []
    row_at = pair_at = 0
    for row_end in row_ends:
        pair_end = int(pair_ends[row_end - 1])
        rows, pairs = slice(row_at, row_end), slice(pair_at, pair_end)
        chunks.append(
            Batch(
                destination=batch.destination,
                rows=batch.rows[rows],
                row_counts=batch.row_counts[rows],
                expert_ids=batch.expert_ids[pairs],
                slots=batch.slots[pairs],
                weights=batch.weights[pairs],
            )
        )
        row_at, pair_at = row_end, pair_end
    return chunks


def _shares(n_chunks: int) -> list[int]:
    """Return the relative sizes of chunks: 1, 2, 3, 4, ..., 4, 3, 2, 1."""
    return [min(k + 1, n_chunks - k, PEAK) for k in range(n_chunks)]
