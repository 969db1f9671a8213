"""Which place of which lane a request takes, and how much of its prompt is there already. Pure.

A *lane* is a llama.cpp context with its thread; a *slot* is one of its sequences: room in its KV cache for one text. A slot that
is free keeps its last text until another needs the place. A prompt's beginning may be found

    in a free slot              it goes on there; or, where that would lose much of the text that is there, it is copied
    in a slot at work, too      copied within the lane: llama.cpp lets both use the same cells
    in the prefix cache         copied into any lane

The longest beginning wins, and where it makes little difference the emptier lane does. What a slot loses is offered to the
prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swarm.backbone.prefix_cache import Entry, PrefixCache, Tokens, common_length

# Tokens by which a longer beginning outweighs an emptier lane; guessed: about what a prefill step takes anyway.
MIN_GAIN = 32
# A free slot is gone on with, though its text is longer than what is used of it, if that loses at most this share: an answer's
# last tokens, which the next prompt of the conversation writes otherwise. Guessed.
LOSS_SHARE = 0.125
# What is shorter than this is not worth a copy in the prefix cache. Guessed.
MIN_SAVED = 32

NOTHING = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one text.

    Attributes:
        lane: index of its lane.
        sequence: llama.cpp's number of it in that lane.
        tokens: what its cache holds while it is free.
        origin: the sequence that computed them; 0: none.
        used_at: when it became free.
    """

    lane: int
    sequence: int
    tokens: Tokens = field(default_factory=lambda: NOTHING)
    origin: int = 0
    is_busy: bool = False
    used_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a request gets.

    Attributes:
        n_kept: first tokens of the prompt that need not be computed.
        source: the slot or entry that has them; None: nobody. The slot itself: they are there.
        is_saved: the slot's old text shall be offered to the prefix cache first.
    """

    slot: Slot
    n_kept: int
    source: Slot | Entry | None
    is_saved: bool


def choose_seat(
    lanes: Sequence[Sequence[Slot]], cache: PrefixCache, prompt: Tokens, texts: dict[int, Tokens]
) -> Seat | None:
    """Return where a request goes; None if all slots are taken.

    Args:
        lanes: the slots of each lane.
        texts: origin -> computed tokens of the requests at work, with which the prompt may share its beginning.
    """
    n_most = len(prompt) - 1  # the last one is computed anyway: its logits are needed
    entry, n_cached = cache.longest(prompt)
    n_cached = min(n_cached, n_most)
    options: list[tuple[int, int, int, int, Seat]] = []
    for index, slots in enumerate(lanes):
        free = [slot for slot in slots if not slot.is_busy]
        if not free:
            continue
        source: Slot | Entry | None = None
        n_kept = 0
        for slot in slots:
            tokens = texts.get(slot.origin, NOTHING) if slot.is_busy else slot.tokens
            n = min(common_length(tokens, prompt), n_most)
            if n > n_kept:
                source, n_kept = slot, n
        if n_cached > n_kept:
            source, n_kept = entry, n_cached
        slot = _victim(free, source, n_kept)
        n_lost = len(slot.tokens) - (n_kept if slot is source else 0)
        seat = Seat(slot=slot, n_kept=n_kept, source=source, is_saved=n_lost >= MIN_SAVED)
        options.append((n_kept // MIN_GAIN, len(free) - len(slots), -n_lost, -index, seat))
    return max(options, key=lambda option: option[:-1])[-1] if options else None


def _victim(free: Sequence[Slot], source: Slot | Entry | None, n_kept: int) -> Slot:
    """Return the free slot to use: the source itself if that loses little, else an empty one, else the one unused longest."""
    for slot in free:
        if slot is source and len(slot.tokens) - n_kept <= LOSS_SHARE * len(slot.tokens):
            return slot
    others = [slot for slot in free if slot is not source] or list(free)
    return min(others, key=lambda slot: (len(slot.tokens) > 0, slot.used_at, slot.sequence))
