"""A layer's hidden states in the form in which they travel."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from swarm.dispatch.plan import Batch
from swarm.wire.rows import RowCodec, encode_rows


class EncodedRows:
    """A layer's hidden states, encoded once however many peers get them.

    Attributes:
        x: [T, D] float32.
        is_over_quic: some were sent over a QUIC connection.
        is_watched: `readiness` was told of the wait for their answers.
    """

    def __init__(self, layer: int, x: npt.NDArray[np.float32], codec: RowCodec) -> None:
        self.layer = layer
        self.is_over_quic = self.is_watched = False
        self.x = x
        self.codec = codec
        # In this form they are there already, and a second copy of a long prompt's would be held until its last answer.
        is_plain = codec in (RowCodec.F32, RowCodec.EXACT) and sys.byteorder == "little"
        self._data = None if is_plain else encode_rows(x, codec)
        self._rows = self._bytes_of_rows() if len(x) > 1 else None  # [T, bytes of a row]

    def _bytes_of_rows(self) -> npt.NDArray[np.uint8]:
        if self._data is None:
            return np.ascontiguousarray(self.x).view(np.uint8)
        return np.frombuffer(self._data, np.uint8).reshape(len(self.x), -1)

    def of(self, batch: Batch) -> bytes:
        """Return the bytes of a batch's rows."""
        if batch.n_rows == len(self.x) or self._rows is None:  # all of them: a batch has each row once, in order
            return encode_rows(self.x, self.codec) if self._data is None else self._data
        return self._rows[batch.rows].tobytes()
