"""How steps are shaped so that an answer has the same bits alone and among others, in a fresh context and in a resumed one.

With exact kernels, llama.cpp on a CPU computes a row the same in every batch of 2 to 63 rows, and otherwise in other ways, each
of which rounds differently (measured with xllamacpp; `tests/swarm/backbone/test_reproducible.py` tells with either engine if
that changes):

    1 row       products of one row have kernels of their own. The last layer and the output see only rows whose logits are
                asked for, so a batch of many rows may end as one
    64 or more  attention is computed in tiles (GGML_FA_TILE_Q in ggml's CPU backend)
    any         attention adds up a sequence's cells in their order, which is not that of the text where sequences share a cache

So each request has a context for itself, a step has at most 63 rows, a row that would be alone takes the row before it along,
which is computed anew, and one row's logits are never asked for alone. A text's only row is alone; it is computed anew with the
next.
"""

from __future__ import annotations

from dataclasses import replace

from swarm.backbone.engine import StepPart

MOST_ROWS = 63


def accompanied(part: StepPart, before: int | None) -> list[StepPart]:
    """Return a step's parts instead of its one part: the same rows, such that at least two or none have logits.

    Args:
        before: the token before a step's only row: it becomes the first row, and must not be in the KV cache; None: nothing.
    """
    if before is not None:
        tokens = [before, *part.tokens]
        return [replace(part, tokens=tokens, first_position=part.first_position - 1, logits="all")]
    n = len(part.tokens) - 2
    if part.logits != "last" or n < 0:
        return [part]
    ends = replace(part, tokens=part.tokens[n:], first_position=part.first_position + n, logits="all")
    return [replace(part, tokens=part.tokens[:n], logits="none"), ends] if n else [ends]
