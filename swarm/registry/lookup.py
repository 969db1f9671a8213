"""One look at some places, without I/O: whom to ask, when the answers so far may stand, and what they say together.

All replicas of a place are asked at once. A place is settled when N_ENOUGH of them have replied, or all that can; or after
two smoothed round trips, if at least N_AT_LEAST have. Those that are asked in place of a replica that fails may not have its
records yet: they count, but N_AT_LEAST must be replicas proper, as long as there are so many that can. So neither a dead
replica nor a lost packet costs a reader more than one round trip more, and one that withholds is outvoted by any that does not:
a record counts if anybody has it.
Of each slot the highest seq counts; a withdrawal takes away what is below it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from swarm.ids import ModelId, NodeId
from swarm.registry.records import Lease, Record, RecordKind, Withdrawal
from swarm.registry.ring import N_REPLICAS, N_TOLERATED, Place, Ring

N_ENOUGH = 4  # of five: DESIGN section 4
N_AT_LEAST = 2  # so that a single one that withholds is not the whole answer
N_RTTS = 2.0
UNKNOWN_RTT_S = 0.5  # of a replica that was never asked: a handshake comes first; guessed
MIN_PATIENCE_S = 0.05  # a busy replica on a short path is not a dead one; guessed
TIMEOUT_S = 5.0  # then what there is must do


@dataclass(slots=True)
class _Asked:
    """How one place stands."""

    n_targets: int = 0
    n_replied: int = 0
    n_failed: int = 0
    proper: set[NodeId] = field(default_factory=set)  # of the five closest, those that may still reply or have
    n_proper_replied: int = 0
    spare: list[NodeId] = field(default_factory=list)  # the next closest, to ask in place of one that failed


class Reading:
    """Drive it: ask `first`, tell it every outcome, until `is_done`."""

    def __init__(
        self,
        ring: Ring,
        places: Collection[Place],
        *,
        now: float,
        rtt_s: Callable[[NodeId], float | None] = lambda node: None,
        avoid: Collection[NodeId] = (),
    ) -> None:
        """`rtt_s`: a node's smoothed round trip, None: unknown. `avoid`: nodes that did not answer lately, asked last."""
        self._asked: dict[Place, _Asked] = {}
        self._of_node: dict[NodeId, list[Place]] = {}
        self.n_rounds = 1
        for place in places:
            near = ring.closest(place, N_TOLERATED)
            ranked = [node for node in near if node not in avoid] + [node for node in near if node in avoid]
            targets = ranked[:N_REPLICAS]
            proper = set(near[:N_REPLICAS]).intersection(targets).difference(avoid)
            self._asked[place] = _Asked(n_targets=len(targets), proper=proper, spare=ranked[N_REPLICAS:])
            for node in targets:
                self._of_node.setdefault(node, []).append(place)
        self.first = {node: tuple(asked) for node, asked in self._of_node.items()}
        rtts = [rtt if (rtt := rtt_s(node)) is not None else UNKNOWN_RTT_S for node in self.first if node not in avoid]
        self._patient_until = now + max(N_RTTS * max(rtts, default=UNKNOWN_RTT_S), MIN_PATIENCE_S)
        self._give_up_at = now + TIMEOUT_S

    def answered(self, node: NodeId) -> None:
        """A node has replied."""
        for place in self._of_node.pop(node, ()):
            asked = self._asked[place]
            asked.n_replied += 1
            asked.n_proper_replied += node in asked.proper

    def failed(self, node: NodeId) -> dict[NodeId, tuple[Place, ...]]:
        """A node will not reply; return whom to ask instead, for what."""
        instead: dict[NodeId, list[Place]] = {}
        for place in self._of_node.pop(node, ()):
            asked = self._asked[place]
            asked.n_failed += 1
            asked.proper.discard(node)
            spare = next((node for node in asked.spare if node not in self._of_node), None)
            if spare is not None and asked.n_replied < N_ENOUGH:
                asked.spare.remove(spare)
                asked.n_targets += 1
                instead.setdefault(spare, []).append(place)
        self._of_node |= instead
        if instead:
            self.n_rounds = 2
        return {node: tuple(places) for node, places in instead.items()}

    def is_done(self, now: float) -> bool:
        """Return whether the answers so far may stand."""
        return now >= self._give_up_at or all(self._is_settled(asked, now) for asked in self._asked.values())

    def next_deadline(self, now: float) -> float:
        """Return when `is_done` may change without another answer."""
        return self._patient_until if now < self._patient_until else self._give_up_at

    def has_waited(self, now: float) -> bool:
        """Return whether the time is over after which those that have not replied are done without."""
        return now >= self._patient_until

    def _is_settled(self, asked: _Asked, now: float) -> bool:
        n_possible = asked.n_targets - asked.n_failed
        if asked.n_proper_replied < min(N_AT_LEAST, len(asked.proper)):
            return False
        if asked.n_replied >= min(N_ENOUGH, n_possible):
            return True
        return now >= self._patient_until and asked.n_replied >= min(N_AT_LEAST, n_possible)


def writers(ring: Ring, places: Iterable[Place], avoid: Collection[NodeId] = ()) -> set[NodeId]:
    """Return the nodes to tell a record of these places: each one's replicas, others in place of those in `avoid`."""
    chosen: set[NodeId] = set()
    for place in places:
        near = ring.closest(place, N_TOLERATED) if avoid else ring.closest(place)
        chosen.update([node for node in near if node not in avoid][:N_REPLICAS])
    return chosen


def newest(records: Iterable[Record]) -> list[Lease]:
    """Return the live records among what several replicas said, one for each slot, ordered by node, kind and model."""
    best: dict[tuple[NodeId, RecordKind, ModelId], Record] = {}
    for record in records:
        kind = record.withdraws if isinstance(record, Withdrawal) else record.kind
        key = (record.node, kind, record.model)
        if key not in best or record.seq > best[key].seq:
            best[key] = record
    return [record for _, record in sorted(best.items()) if not isinstance(record, Withdrawal)]
