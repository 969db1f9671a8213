"""Messages as a backbone sends them, of as few numbers as may be."""

from __future__ import annotations

import numpy as np

from swarm.wire import messages as m
from swarm.wire.rows import RowCodec


def dispatch(n_pairs: int = 1) -> m.Dispatch:
    """Return the DISPATCH of one row of 8 values, each 0.5, to that many experts with weight 1."""
    return m.Dispatch(
        model_tag=bytes(m.MODEL_TAG_BYTES),
        layer=0,
        rows_codec=RowCodec.F32,
        result_codec=RowCodec.F32,
        row_counts=np.array([n_pairs], np.uint8),
        expert_ids=np.arange(n_pairs, dtype=np.uint16),
        weights=np.ones(n_pairs, np.float32),
        rows=np.full((1, 8), 0.5, np.float32),
    )
