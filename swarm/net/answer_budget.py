"""How many bytes of answers an endpoint holds for all who asked, and who takes theirs too slowly for the others.

An answer is held until the other side's QUIC has acknowledged it. Whoever asks and does not read would hold it for ever, and a
few of these would hold all there is. So, when others wait for room, those are *slow* that at their pace of the last seconds
would not have taken what they hold within a minute.
Knows nothing of connections or clocks; `Key` is whatever stands for a connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")

# Held for one asker, as a share of all: one that has asked for much does not fill it alone.
MAX_SHARE = 0.5
PACE_S = 5.0  # over which a pace is measured; guessed: ten round trips of 500 ms
DRAIN_S = 60.0  # guessed: an 88 MB block at 12 Mbit/s
SMALL_BYTES = 64 << 10  # less is never worth ending a connection for: it may be on its way


@dataclass(slots=True)
class _Held:
    n_held: int = 0
    n_taken: int = 0  # by the other side, since the start
    mark: int = 0  # n_taken when its pace began to be measured
    mark_at: float | None = None


class AnswerBudget(Generic[Key]):
    """What is held, by connection."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.n_bytes = 0  # held now, in all
        self._held: dict[Key, _Held] = {}

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be made, for anybody."""
        return self.n_bytes >= self.limit_bytes

    def has_room(self, key: Key) -> bool:
        """Return whether something more may be made for this one."""
        if self.n_bytes >= self.limit_bytes:
            return False
        held = self._held.get(key)
        return held is None or held.n_held < self.limit_bytes * MAX_SHARE

    def update(self, key: Key, *, n_given: int, n_held: int) -> None:
        """Learn that of `n_given` bytes since the start, `n_held` are not taken yet."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held()
        self.n_bytes += n_held - held.n_held
        held.n_held, held.n_taken = n_held, n_given - n_held

    def forget(self, key: Key) -> None:
        """Count one no longer: it is gone, and all it held."""
        held = self._held.pop(key, None)
        if held is not None:
            self.n_bytes -= held.n_held

    def slow(self, now: float) -> list[Key]:
        """Return who is slow. To be asked repeatedly while others wait: a pace is measured from one call to a later one."""
        slow = []
        for key, held in self._held.items():
            if held.n_held < SMALL_BYTES:
                held.mark_at = None
            elif held.mark_at is None:
                held.mark, held.mark_at = held.n_taken, now
            elif now >= held.mark_at + PACE_S:
                pace = (held.n_taken - held.mark) / (now - held.mark_at)
                if pace * DRAIN_S < held.n_held:
                    slow.append(key)
                held.mark, held.mark_at = held.n_taken, now
        return slow
