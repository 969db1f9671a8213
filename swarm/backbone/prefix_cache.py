"""Which computed beginnings of texts are kept in memory, and which are given up when it is full. Pure: payloads are opaque.

An entry is a whole text's tokens and what llama.cpp's memory held of it. A prompt uses the longest beginning that it shares
with any entry; what it reuses is decided by tokens alone, so no text ever sees more of another than what both say.

Entries lie in order of their tokens, so that the one with the longest common beginning is a neighbour of where the prompt would
lie, and so that what an entry has for itself alone is what its neighbours do not share.

*Eviction by cost* (greedy dual): an entry's credit is the clock at its last use plus its worth, the share of its tokens that
nobody else holds, times its uses. The least credit goes first and the clock moves up to it: what is not used grows old. A
system prompt stays as long as any text that begins with it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

MAX_ENTRIES = 1024  # guessed; bytes run out first


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """Return tokens as this module compares them."""
    return np.asarray(tokens, np.int32)


def common_length(a: Tokens, b: Tokens) -> int:
    """Return how many first tokens two texts share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    at = int(differs.argmax()) if n else 0
    return at if n and differs[at] else n


@dataclass(slots=True, eq=False)
class Entry:
    """A text whose computed state is kept.

    Attributes:
        origin: the sequence that computed it.
        state: opaque here.
    """

    tokens: Tokens
    origin: int
    state: object
    size_bytes: int
    key: bytes
    n_uses: int = 0
    credit: float = 0.0


class PrefixCache:
    """Entries up to a number of bytes.

    Attributes:
        on_drop: told of each entry that goes.
    """

    def __init__(self, max_bytes: int, on_drop: Callable[[Entry], None] = lambda _: None) -> None:
        """`max_bytes`: of states; 0 keeps nothing."""
        self.max_bytes = max_bytes
        self.on_drop = on_drop
        self.size_bytes = 0
        self.n_evicted = 0
        self._entries: list[Entry] = []  # in order of their keys
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, prompt: Tokens) -> tuple[Entry | None, int]:
        """Return the entry that shares most of the prompt's beginning, and how many tokens."""
        at = bisect.bisect_left(self._entries, _key(prompt), key=lambda entry: entry.key)
        best: Entry | None = None
        n_best = 0
        for entry in self._entries[max(at - 1, 0) : at + 1]:
            n = common_length(entry.tokens, prompt)
            if n > n_best:
                best, n_best = entry, n
        return best, n_best

    def used(self, entry: Entry) -> None:
        """Note that an entry served a prompt."""
        entry.n_uses += 1
        entry.credit = self._clock + self._worth(entry)

    def add(self, tokens: Tokens, origin: int, state: object, size_bytes: int) -> bool:
        """Keep a state; return False where it is too large or not worth its place: then nobody is told of it."""
        if not len(tokens) or size_bytes > self.max_bytes:
            return False
        key = _key(tokens)
        at = bisect.bisect_left(self._entries, key, key=lambda entry: entry.key)
        if at < len(self._entries) and self._entries[at].key.startswith(key):
            return False  # it is there, perhaps as another's beginning
        n_uses = 0
        if at and key.startswith(self._entries[at - 1].key):  # the same text, before it went on
            n_uses = self._entries[at - 1].n_uses
            self._remove(at - 1)
            at -= 1
        entry = Entry(tokens=tokens.copy(), origin=origin, state=state, size_bytes=size_bytes, key=key, n_uses=n_uses)
        self._entries.insert(at, entry)
        self.size_bytes += size_bytes
        entry.credit = self._clock + self._worth(entry)
        while self.size_bytes > self.max_bytes or len(self._entries) > MAX_ENTRIES:
            if not self._evict(entry):
                return False
        return True

    def drop(self, is_bad: Callable[[Entry], bool]) -> int:
        """Give up every entry of which `is_bad` says so; return how many."""
        bad = [index for index, entry in enumerate(self._entries) if is_bad(entry)]
        for index in reversed(bad):
            self._remove(index)
        return len(bad)

    def _worth(self, entry: Entry) -> float:
        at = bisect.bisect_left(self._entries, entry.key, key=lambda each: each.key)
        neighbours = [*self._entries[max(at - 1, 0) : at], *self._entries[at + 1 : at + 2]]
        n_shared = max((common_length(entry.tokens, each.tokens) for each in neighbours), default=0)
        return (1 + entry.n_uses) * (len(entry.tokens) - n_shared) / len(entry.tokens)

    def _evict(self, newcomer: Entry) -> bool:
        """Give up the entry of least credit; return False where that is the newcomer."""
        index = min(range(len(self._entries)), key=lambda i: self._entries[i].credit)
        entry = self._entries[index]
        self._clock = entry.credit
        if entry is newcomer:
            self._entries.pop(index)
            self.size_bytes -= entry.size_bytes
            return False
        self.n_evicted += 1
        self._remove(index)
        return True

    def _remove(self, index: int) -> None:
        entry = self._entries.pop(index)
        self.size_bytes -= entry.size_bytes
        self.on_drop(entry)


def _key(tokens: Tokens) -> bytes:
    return tokens.astype(">i4").tobytes()  # bytes in the order of the numbers: token ids are not negative
