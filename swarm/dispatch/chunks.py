"""Cuts a long batch by rows, so that its peer computes while the rest is still arriving and answers while it computes.

Pure. Each chunk is a batch of its own: a dispatch on an exchange of its own, answered by itself.

    link out   |1|2.|3...|4.......|           a chunk is computed once all of it is there,
    compute      |1|2.|3...|4.......|         and its answer leaves as soon as it is computed
    link back      |1|2.|3...|4.......|

Each chunk is twice the one before. A link may carry its exchanges in turns, packet by packet (aioquic does), and equal ones
would then all be there only at the end; these are there one after another, of four when 27, 47, 73 and 100 % of all bytes
are. On a link that carries exchanges in order the first is there after 7 %.
"""

from __future__ import annotations

import numpy as np

from swarm.dispatch.plan import Batch

# Bytes of the first chunk in its busier direction; a batch below three of these (98 KB, what the transport sends in its first
# flight anyway) stays whole. Measured: one layer of synth16's shape, 3 peers, 20 ms, all on two cores, whole over cut (p50):
#                  first chunk of 16 KiB          64 KiB
#   100 Mbit/s     q8/f16 1.1-1.2, f32 1.3        1.1-1.2, f32 1.3    256 and 512 rows; below 64 rows 1.0
#   1 Gbit/s       q8/f16 0.86-0.97               0.95-1.0            there the cores bind, not the link
CHUNK_BYTES = 32 << 10
MAX_CHUNKS = 5  # the first is then a 31st of the batch: a sixth would win at most half of that


def cut(batch: Batch, *, row_bytes: float, chunk_bytes: int) -> list[Batch]:
    """Return the batch in chunks, in row order; whole, if it is shorter than 3 * `chunk_bytes`.

    Args:
        row_bytes: what a row takes on the wire, in its busier direction.
        chunk_bytes: the least size of the first chunk.
    """
    n_chunks = min(int(batch.n_rows * row_bytes / chunk_bytes + 1).bit_length() - 1, MAX_CHUNKS)  # 1 + 2 + 4 + ...
    n_chunks = min(n_chunks, (batch.n_rows + 1).bit_length() - 1)  # the first has a row at least
    if n_chunks < 2:
        return [batch]
    n_parts = (1 << n_chunks) - 1
    row_ends = [batch.n_rows * ((1 << k) - 1) // n_parts for k in range(1, n_chunks + 1)]
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
