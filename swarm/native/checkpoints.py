"""The way back of a memory that cannot forget its last tokens: the state before the latest step, kept beside it.

Recurrent and hybrid models (Mamba, linear attention, short convolutions) hold one state for all tokens of a sequence: llama.cpp
cannot remove the last of them. Before each step that goes on with a sequence, its recurrent part is copied out (llama.cpp's
*partial* state: attention stays where it is); to take the step back, it is copied in again. That costs a copy for each step: by
its shape 75 MB for Qwen3-Next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swarm.errors import EngineError
from swarm.native.bindings import llama

PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class Checkpoints:
    """At most one checkpoint for each sequence of a context."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}  # sequence -> (its next position, state)

    def take(self, context: int, sequence: int, position: int) -> None:
        """Keep the sequence's state; `position` is that of its next token. At 0 there is nothing to keep.

        Raises:
            EngineError: llama.cpp cannot copy it out.
        """
        old = self._states.pop(sequence, None)
        if position == 0:
            return
        size = int(llama().partial_size(context, sequence, PARTIAL_ONLY))
        state = old[1] if old is not None and len(old[1]) == size else np.empty(size, np.uint8)
        if llama().partial_get(context, state.ctypes.data, size, sequence, PARTIAL_ONLY) != size:
            raise EngineError(f"llama.cpp cannot copy the state of sequence {sequence} out of its memory")
        self._states[sequence] = (position, state)

    def restore(self, context: int, sequence: int, position: int) -> bool:
        """Set the sequence's state back to where its next token is at `position`; return False if that was not kept."""
        kept = self._states.get(sequence)
        if kept is None or kept[0] != position:
            return False
        state = kept[1]
        return bool(llama().partial_set(context, state.ctypes.data, len(state), sequence, PARTIAL_ONLY))

    def forget(self, sequence: int | None = None) -> None:
        """Drop a sequence's checkpoint, or all."""
        if sequence is None:
            self._states.clear()
        else:
            self._states.pop(sequence, None)
