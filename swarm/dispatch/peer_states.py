"""What became of each peer that a backbone has met, and since when: for people, who ask why somebody is not used. Pure.

A peer that is announced no more is remembered as gone for FORGET_S, so that an outage is seen as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from swarm.ids import NodeId
from swarm.registry.records import ExpertAnnouncement

FORGET_S = 24 * 3600.0  # guessed
MAX_PEERS = 1024  # those longest in their state are forgotten first; guessed: far more than one backbone uses


class PeerState(StrEnum):
    """Where a peer stands with this backbone."""

    IN_USE = "in use"
    ON_TRIAL = "on trial"  # it failed and is used again
    QUARANTINED = "quarantined"
    CAUGHT = "caught"  # an audit found that its numbers are wrong
    LEAVING = "leaving"
    SET_ASIDE = "set aside"  # it broke the protocol, cannot do what this backbone needs, or has another wire version
    UNREACHABLE = "unreachable"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One peer; times by the clock that the log was given.

    Attributes:
        record: what it announced last.
        seen_since: when this backbone first heard of it, or heard of it again after it was gone.
    """

    record: ExpertAnnouncement
    state: PeerState
    state_since: float
    seen_since: float


class PeerLog:
    """Every peer's state. Mutable, one owner."""

    def __init__(self) -> None:
        self._views: dict[NodeId, PeerView] = {}

    @property
    def views(self) -> list[PeerView]:
        """All of them, by node id."""
        return [self._views[node] for node in sorted(self._views)]

    def update(self, now: float, announced: Mapping[NodeId, tuple[ExpertAnnouncement, PeerState]]) -> None:
        """Take in where the announced peers stand; the others are gone."""
        for node, (record, state) in announced.items():
            former = self._views.get(node)
            stays = former is not None and former.state is state
            is_back = former is None or former.state is PeerState.GONE
            self._views[node] = PeerView(
                record=record,
                state=state,
                state_since=former.state_since if former is not None and stays else now,
                seen_since=now if former is None or is_back else former.seen_since,
            )
        for node in self._views.keys() - announced.keys():
            former = self._views[node]
            if former.state is not PeerState.GONE:
                self._views[node] = PeerView(
                    record=former.record, state=PeerState.GONE, state_since=now, seen_since=former.seen_since
                )
            elif now >= former.state_since + FORGET_S:
                del self._views[node]
        while len(self._views) > MAX_PEERS:
            gone_first = min(
                self._views.values(), key=lambda view: (view.state is not PeerState.GONE, view.state_since)
            )
            del self._views[gone_first.record.node]
