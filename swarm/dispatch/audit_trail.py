"""What a peer has had a part in since it was last known to be honest: which sequences, and from which position on.

Pure. Each answer of a peer has a number. Of each sequence the positions it went into are kept as *marks*, (position, number of
the last answer from which that position depends on it), both ascending:

    touch    an answer went into rows of sequences              a mark, or a later number on the last one
    pass     an audit found an answer right                     marks up to its number fall away
    taint    the peer was caught                                the first mark left of each sequence: nothing after it holds

An answer that passed says nothing of an earlier one whose audit is still under way, nor of any while the peer is suspected: until
then nothing falls away.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.ids import NodeId

MAX_SEQUENCES = 4096  # of one peer, the oldest forgotten first: for callers that never release; guessed
MAX_MARKS = (
    4096  # of one sequence and peer; then the oldest two become one, which taints more rather than less; guessed
)

MAX_PEERS = 1024  # four times as many as a backbone uses at a time; of others nothing is left that could depend on them

_Marks = deque[tuple[int, int]]


@dataclass(slots=True)
class _Peer:
    n_answers: int = 0
    n_passed: int = 0  # all answers below this number count as passed
    best: int = 0  # the highest number that passed, and one
    under_way: set[int] = field(default_factory=set)
    is_held: bool = False
    marks: OrderedDict[int, _Marks] = field(default_factory=OrderedDict)  # sequence -> ascending


class Trail:
    """Every peer's marks. Mutable, one owner."""

    def __init__(self) -> None:
        self._peers: OrderedDict[NodeId, _Peer] = OrderedDict()  # who answered last comes last
        self._n_before = 0  # above all numbers of peers that were forgotten: an audit of one may still be under way

    def touch(self, node: NodeId, firsts: Mapping[int, int]) -> int:
        """Note one answer of a peer; return its number.

        Args:
            firsts: sequence -> its first position that the answer went into.
        """
        peer = self._peer(node)
        number = peer.n_answers
        peer.n_answers += 1
        for sequence, position in firsts.items():
            marks = peer.marks.get(sequence)
            if marks is None:
                marks = peer.marks[sequence] = deque()
                if len(peer.marks) > MAX_SEQUENCES:
                    peer.marks.popitem(last=False)
            while marks and marks[-1][0] >= position:
                marks.pop()  # the new one begins no later and holds for longer
            marks.append((position, number))
            if len(marks) > MAX_MARKS:
                first, _ = marks.popleft()
                _, last = marks.popleft()
                marks.appendleft((first, last))
        return number

    def begin(self, node: NodeId, number: int) -> None:
        """An audit of this answer is under way."""
        if (peer := self._peers.get(node)) is not None:
            peer.under_way.add(number)

    def end(self, node: NodeId, number: int, *, has_passed: bool) -> None:
        """An audit is over: the answer was right, or nobody can say."""
        peer = self._peers.get(node)
        if peer is None:
            return
        peer.under_way.discard(number)
        if has_passed:
            peer.best = max(peer.best, number + 1)
        self._advance(peer)

    def hold(self, node: NodeId, *, is_held: bool = True) -> None:
        """Nothing of this peer falls away, whatever passes; or again."""
        peer = self._peer(node)
        peer.is_held = is_held
        self._advance(peer)

    def _peer(self, node: NodeId) -> _Peer:
        peer = self._peers.get(node)
        if peer is not None:
            self._peers.move_to_end(node)
            return peer
        if len(self._peers) >= MAX_PEERS:
            idle = (other for other, each in self._peers.items() if not (each.marks or each.under_way or each.is_held))
            self._drop(next(idle, next(iter(self._peers))))
        peer = self._peers[node] = _Peer(n_answers=self._n_before)
        return peer

    def _drop(self, node: NodeId) -> _Peer | None:
        peer = self._peers.pop(node, None)
        if peer is not None:
            self._n_before = max(self._n_before, peer.n_answers)
        return peer

    def _advance(self, peer: _Peer) -> None:
        if peer.is_held:
            return
        n_passed = min(peer.best, min(peer.under_way, default=peer.best))
        if n_passed <= peer.n_passed:
            return
        peer.n_passed = n_passed
        for sequence in list(peer.marks):
            marks = peer.marks[sequence]
            while marks and marks[0][1] < n_passed:
                marks.popleft()
            if not marks:
                del peer.marks[sequence]

    def has_touched(self, node: NodeId, sequence: int) -> bool:
        """Return whether a sequence depends on answers of this peer that are not known to be right."""
        peer = self._peers.get(node)
        return peer is not None and sequence in peer.marks

    def taint(self, node: NodeId) -> dict[int, int]:
        """Return sequence -> the first position that is not to be trusted, and forget the peer."""
        peer = self._drop(node)
        return {} if peer is None else {sequence: marks[0][0] for sequence, marks in peer.marks.items()}

    def adopt(self, child: int, parent: int, n_tokens: int) -> None:
        """Sequence `child` begins with the first tokens of `parent`: what was had a part in of these, was in both."""
        for peer in self._peers.values():
            marks = [mark for mark in peer.marks.get(parent, ()) if mark[0] < n_tokens]
            if marks:
                peer.marks[child] = deque(marks)

    def release(self, sequence: int) -> None:
        """Nothing depends on this sequence any more."""
        for peer in self._peers.values():
            peer.marks.pop(sequence, None)
