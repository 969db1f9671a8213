"""Which peers are shut out for a while because their answers failed, and when they are tried again.

Pure; `now` is given. Knows nothing of why a peer failed, nor of connections.

    state      what happens                     next
    TRUSTED    fail                          -> SHUT for a time
    SHUT       its time is over              -> HALF_OPEN: on trial, one batch at a time where others hold the experts too
    HALF_OPEN  succeed                       -> TRUSTED
    HALF_OPEN  fail                          -> SHUT for twice the time

A peer's count of failures outlives its recovery by FORGET_S, so that one that fails again and again is shut out for longer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto

from swarm.ids import NodeId

FIRST_S = 1.0  # guessed: a restart of a process takes about that
LONGEST_S = 300.0  # guessed: as long as the longest lease
FORGET_S = 60.0  # guessed
# A connection that is lost fails everything that was asked on it at once: that is one failure. Guessed: one tick of a busy loop.
SAME_MOMENT_S = 0.1
MAX_NODES = 1024  # oldest dropped first; guessed: far more than one backbone uses


class State(Enum):
    """Where a peer stands."""

    TRUSTED = auto()
    SHUT = auto()
    HALF_OPEN = auto()


@dataclass(slots=True)
class _Entry:
    n_failures: int = 0
    is_proved: bool = False  # it has succeeded since it failed last
    failed_at: float = -math.inf
    until: float = 0.0  # end of its time
    proved_at: float = 0.0


class Quarantine:
    """Every peer that failed lately."""

    def __init__(self) -> None:
        self._entries: OrderedDict[NodeId, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def fail(self, node: NodeId, now: float, *, n_free: int = 0, longest_s: float = LONGEST_S) -> float:
        """Shut a peer out; return for how many seconds, 0 if not at all.

        A failure while it is shut (a second batch of the same moment) changes nothing; nor does, of those that may be free, one
        of the same moment as the last.

        Args:
            n_free: so many failures cost nothing: for what may happen to an honest peer, like a lost connection;
                longest_s: and no more than this.
        """
        entry = self._entries.pop(node, None)
        if entry is None or (entry.is_proved and now >= entry.proved_at + FORGET_S):
            entry = _Entry()
        self._entries[node] = entry  # at the end: the newest
        if len(self._entries) > MAX_NODES:
            self._entries.popitem(last=False)
        if now < entry.until:
            return entry.until - now
        if n_free and now < entry.failed_at + SAME_MOMENT_S:
            return 0.0
        entry.failed_at = now
        entry.n_failures += 1
        entry.is_proved = False
        n_costly = entry.n_failures - n_free
        shut_s = min(longest_s, FIRST_S * 2.0 ** min(n_costly - 1, 30)) if n_costly > 0 else 0.0
        entry.until = now + shut_s
        return shut_s

    def succeed(self, node: NodeId, now: float) -> None:
        """A peer has answered well; one that is shut stays shut: the answer belongs to an earlier question."""
        entry = self._entries.get(node)
        if entry is None or now < entry.until:
            return
        if not entry.is_proved:
            entry.is_proved, entry.proved_at = True, now
        elif now >= entry.proved_at + FORGET_S:
            del self._entries[node]

    def state(self, node: NodeId, now: float) -> State:
        """Return where a peer stands."""
        entry = self._entries.get(node)
        if entry is None or entry.is_proved:
            return State.TRUSTED
        return State.SHUT if now < entry.until else State.HALF_OPEN

    def on_trial(self, now: float) -> list[NodeId]:
        """Return those that are half open."""
        return [node for node, entry in self._entries.items() if not entry.is_proved and now >= entry.until]

    def next_opening(self, now: float) -> float | None:
        """Return when the next peer is tried again; None: nobody is shut."""
        return min((entry.until for entry in self._entries.values() if entry.until > now), default=None)
