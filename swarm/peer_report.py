"""How a running peer stands, for the person who runs it. Plain values, and how scarce its experts are. Pure.

Whoever shows it: `swarm.cli.join_status`. What it says to other nodes is `PeerDaemon.status`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from swarm.ids import ExpertSet, NodeId
from swarm.registry.records import ExpertAnnouncement


class Standing(StrEnum):
    """What a peer does now."""

    JOINING = "joining"
    SERVING = "serving"
    RESTING = "resting"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneView:
    """One node that is connected to this peer to use it.

    Attributes:
        path: `direct 192.0.2.1:7440` or `relay 192.0.2.2:7440`.
        rtt_s: smoothed, seconds; None: not measured yet.
    """

    node: str
    path: str
    is_relayed: bool
    rtt_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scarcity:
    """Who else holds what a peer holds: blocks (one expert of one layer).

    Attributes:
        n_alone: that nobody else holds.
        n_others_least, n_others_most: others that hold the scarcest block, and the most common one.
    """

    n_blocks: int
    n_alone: int
    n_others_least: int
    n_others_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """A peer's state.

    Attributes:
        why: of its standing, for people; empty: there is nothing to say.
        reach: how others reach it: a value of `swarm.net.reachability.Reach`; why_reach: what is between
            us and others: the name of a `swarm.wire.messages.Mapping`, small letters.
        n_rows, n_pairs: computed since the start; n_in_line: dispatches that wait or are computed now.
        bytes_by_path: payload of UDP and of TLS links since the start, (sent, received), copies of lost packets included, by what
            carried them: `swarm.net.byte_counts.PathKind`.
        scarcity: None while it is not known.
        points: the contribution of today as backbones have signed it; None: nothing is counted.
    """

    standing: Standing
    why: str
    uptime_s: float
    reach: str
    why_reach: str
    backbones: tuple[BackboneView, ...]
    n_rows: int
    n_pairs: int
    n_in_line: int
    bytes_by_path: Mapping[str, tuple[int, int]]
    scarcity: Scarcity | None
    points: float | None

    @property
    def bytes_sent(self) -> int:
        """By all paths together."""
        return sum(sent for sent, _ in self.bytes_by_path.values())

    @property
    def bytes_received(self) -> int:
        """By all paths together."""
        return sum(received for _, received in self.bytes_by_path.values())


def scarcity_of(experts: ExpertSet, announcements: Iterable[ExpertAnnouncement], me: NodeId) -> Scarcity | None:
    """Return who else holds these experts, loading ones counted; None: there are none."""
    n_others: dict[int, Counter[int]] = {layer: Counter() for layer in experts.by_layer}
    for record in announcements:
        if record.node != me:  # layer by layer: a few hundred bytes of a stranger's can name 131,072 blocks
            for layer, theirs in record.experts.by_layer.items():
                if layer in n_others:
                    n_others[layer].update(experts.by_layer[layer] & theirs)
    counts = [n_others[layer][expert] for layer, expert in experts]
    if not counts:
        return None
    return Scarcity(
        n_blocks=len(counts), n_alone=counts.count(0), n_others_least=min(counts), n_others_most=max(counts)
    )
