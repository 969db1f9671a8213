"""Whose turn it is at a peer that is only busy: the order among a backbone's own dispatches to it.

Pure; `now` is given. Knows nothing of messages and layers: a *key* is something to be asked of a peer, a *flow* is whose it is.

    nobody waits for a peer    everybody asks it at once; `lines` is empty, and nothing here is called
    wait(key, until)           it has a place in the peer's line, and asks not before `until`, which is the peer's hint
    may_ask(key)               whether its turn has come; those behind wait without asking
    taken(key) | leave(key)    its turn is over, the next one's begins: `wake` tells
    dissolve(peer)             the peer is not only busy: everybody asks at once, and sees

*Order.* A place is for some size (pairs), and stands by its *tag*: the size that had been taken when it came, and its own, after
those of its flow that wait already (virtual finish times: Golestani, "A self-clocked fair queueing scheme", 1994). So equals go
first come, first served, flows share by size, and a small one goes before a huge one, but not before more than its share: what
passes a place after it came is no more than its own size for each flow that waits, whoever comes and however often.

*Turns.* The first asks; one more may ask beside it with each that was taken, as TCP begins (RFC 5681), since a peer may have room
for many. Whoever waits for the time that it was told closes the line behind it, who was refused at its turn until it is taken:
else a peer might have room for what is behind again and again, and never for it.
A question that is silent for TAKEN_S is no longer waited for: a peer that is too busy says so at once.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from swarm.ids import NodeId

# After so long without an answer a question is taken to be accepted, and the next one asks. Guessed: a refusal takes a round trip
# and the way out of the rows, 0.1 MB a chunk.
TAKEN_S = 1.0
# Places in all lines. Guessed: eight chunks for each of 64 lanes at eight peers. Who finds no room tries again as a newcomer.
MAX_PLACES = 4096


@dataclass(slots=True, eq=False)
class _Place:
    """One in line.

    Attributes:
        tag: what it stands by: its finish, then how old its flow is, then a number.
        not_before: when the peer said to come back.
        asked_at: when it was last asked and not answered yet; -inf: it waits.
        is_refused: it had its turn, and was told to come back.
    """

    key: Hashable
    node: NodeId
    flow: Hashable
    tag: tuple[int, float, int]
    wake: Callable[[float], None] | None
    not_before: float
    asked_at: float = -math.inf
    is_refused: bool = False

    @property
    def is_asking(self) -> bool:
        return self.asked_at > -math.inf


@dataclass(slots=True, eq=False)
class _Line:
    """Who waits for one peer.

    Attributes:
        places: by tag.
        n_taken: the finish of what was taken, the largest.
        width: how many may ask at once.
        retry_s: what the peer said last.
    """

    places: list[_Place] = field(default_factory=list)
    n_taken: int = 0
    width: int = 1
    retry_s: float = 0.0

    def tag(self, flow: Hashable, size: int, since: float, number: int) -> tuple[int, float, int]:
        """Return what a newcomer stands by."""
        before = (place.tag[0] for place in self.places if place.flow == flow)
        return max(self.n_taken, max(before, default=0)) + size, since, number

    def asks_at(self, tag: tuple[int, float, int], now: float) -> float:
        """Return when who stands by `tag` may ask, its own hint aside; inf: not before somebody's turn ends."""
        n_before, free_at = 0, math.inf
        for place in self.places:
            if place.tag >= tag:
                break
            until = place.asked_at + TAKEN_S
            if place.is_asking and until <= now:
                continue
            n_before += 1
            free_at = min(free_at, until if place.is_asking else math.inf)
            if place.is_refused or place.not_before > now:
                n_before = max(n_before, self.width)
        return now if n_before < self.width else free_at


class Turns:
    """The lines of one backbone. Mutable, one owner.

    Attributes:
        lines: of the peers for which somebody waits. Empty: nobody does; look before anything is called.
    """

    def __init__(self) -> None:
        self.lines: dict[NodeId, _Line] = {}
        self._places: dict[Hashable, _Place] = {}  # by key
        self._numbers = itertools.count()

    def may_ask(self, key: Hashable, node: NodeId, now: float, *, flow: Hashable, size: int, since: float) -> bool:
        """Return whether something may be asked of a peer now; then it is taken to be asked.

        Args:
            flow: whose it is; since: how old that is: of equals the oldest goes first.
            size: what it asks for, at least 1.
        """
        line = self.lines.get(node)
        if line is None:
            return True
        place = self._places.get(key)
        if place is not None:
            if now < place.not_before or line.asks_at(place.tag, now) > now:
                return False
        else:
            tag = line.tag(flow, size, since, next(self._numbers))
            if line.asks_at(tag, now) > now or len(self._places) >= MAX_PLACES:
                return False
            place = self._join(line, _Place(key, node, flow, tag, None, now))
        place.asked_at = now
        self._tell(line, now)
        return True

    def wait(
        self,
        key: Hashable,
        node: NodeId,
        until: float,
        now: float,
        *,
        flow: Hashable,
        size: int,
        since: float,
        wake: Callable[[float], None],
    ) -> None:
        """A place in a peer's line, the one it has or a new one, and not before `until`; none where all are taken.

        Args:
            wake: called with `now` when its turn may have come, or the line has gone: ask `may_ask`; not within this call.
        """
        place = self._places.get(key)
        line = self.lines.get(node)
        if line is None or place is None:
            if len(self._places) >= MAX_PLACES:
                return
            if line is None:
                line = self.lines[node] = _Line()
            tag = line.tag(flow, size, since, next(self._numbers))
            place = self._join(line, _Place(key, node, flow, tag, None, now))
        if place.is_asking:
            place.asked_at, place.is_refused = -math.inf, True
            line.width = 1
        place.not_before = until
        if until > now:
            line.retry_s = until - now
        place.wake = wake

    def has(self, key: Hashable) -> bool:
        """Return whether something has a place in line."""
        return key in self._places

    def look_at(self, key: Hashable, now: float) -> float:
        """Return when something that waits may ask, as far as is known; inf: not before another's turn ends, or no place."""
        place = self._places.get(key)
        if place is None:
            return math.inf
        return max(place.not_before, self.lines[place.node].asks_at(place.tag, now))

    def free_at(self, node: NodeId, now: float) -> float:
        """Return when a newcomer's turn may come, a guess: each of those before it waits as long as the last was told to."""
        line = self.lines.get(node)
        return now if line is None else now + len(line.places) * line.retry_s

    def taken(self, key: Hashable, now: float) -> bool:
        """The peer has answered; return whether it had a place in line."""
        place = self._places.get(key)
        if place is None:
            return False
        line = self.lines[place.node]
        line.n_taken = max(line.n_taken, place.tag[0])
        line.width += 1
        self.leave(key, now)
        return True

    def leave(self, key: Hashable, now: float) -> None:
        """It waits no more; nothing if it does not."""
        place = self._places.pop(key, None)
        if place is None:
            return
        line = self.lines[place.node]
        line.places.remove(place)
        if line.places:
            self._tell(line, now)
        else:
            del self.lines[place.node]

    def leave_all(self, flow: Hashable, now: float) -> None:
        """Nothing of a flow waits any more."""
        for key in [key for key, place in self._places.items() if place.flow == flow]:
            self.leave(key, now)

    def dissolve(self, node: NodeId, now: float) -> None:
        """End a peer's line: who waits for it is woken, and may ask."""
        line = self.lines.pop(node, None)
        if line is None:
            return
        for place in line.places:
            del self._places[place.key]
        for place in line.places:
            if not place.is_asking and place.wake is not None:
                place.wake(now)

    def _join(self, line: _Line, place: _Place) -> _Place:
        bisect.insort(line.places, place, key=lambda each: each.tag)
        self._places[place.key] = place
        return place

    def _tell(self, line: _Line, now: float) -> None:
        """Wake those who wait and need not wait for others' turns to end, up to the first that does."""
        for place in list(line.places):
            if place.is_asking or place.wake is None:
                continue
            if math.isinf(line.asks_at(place.tag, now)):
                return
            place.wake(now)
