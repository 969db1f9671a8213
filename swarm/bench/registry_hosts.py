"""Who takes part in the registry's simulation, and what one look-up came to. Plain values: `registry_network` moves them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.registry.records import ExpertAnnouncement, SignedRecord
from swarm.registry.replica import Replica
from swarm.registry.ring import Place, Ring


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """What to simulate. Shares are of 1; churn is the share of nodes and of peers that leave in an hour, each replaced."""

    n_nodes: int = 200
    n_peers: int = 10_000
    n_models: int = 40
    churn_per_hour: float = 0.2
    loss: float = 0.05
    withholding: float = 0.1
    duration_s: float = 900.0
    lookups_per_s: float = 15.0
    cut_s: float = 400.0
    seed: int = 1


@dataclass(eq=False)
class Host:
    """Somebody with an address and a place on the plane."""

    node: NodeId
    address: str
    where: tuple[float, float]
    is_up: bool = True
    side: int = 0  # only hosts of the same side reach each other

    @property
    def ip(self) -> str:
        return self.address.rpartition(":")[0]


@dataclass(eq=False, kw_only=True)
class SimNode(Host):
    """A registry node."""

    identity: Identity
    replica: Replica
    withholds: bool = False
    n_bytes: Counter[str] = field(default_factory=Counter)  # by what it was for, both directions
    wakes_at: float = math.inf
    up_since: float = 0.0


@dataclass(eq=False)
class Client:
    """A view of the ring, kept as RegistryClient keeps it."""

    host: Host
    ring: Ring
    tags: tuple[bytes, ...]
    refresh_s: float
    avoid: dict[NodeId, float] = field(default_factory=dict)

    def avoided(self, now: float) -> set[NodeId]:
        if not self.avoid:
            return set()
        self.avoid = {node: until for node, until in self.avoid.items() if until > now}
        return set(self.avoid)


@dataclass(eq=False)
class SimPeer:
    """A volunteer that announces itself."""

    client: Client
    record: ExpertAnnouncement
    head: bytes  # of its payload, before and after the digits of the seq
    tail: bytes
    places: tuple[Place, ...]
    first_seq: int = 0
    published_at: float = math.inf  # when the first announcement of this life was taken by all it could reach
    ended_at: float = math.inf  # when its withdrawal was, or its last lease runs out
    targets: list[NodeId] = field(default_factory=list)  # in order: a run must not depend on how a set hashes
    last: tuple[ExpertAnnouncement, SignedRecord] | None = None


@dataclass(eq=False)
class LookupOutcome:
    """One look-up, its truth when it began, and how it ended."""

    began_at: float
    place: Place
    must_have: dict[NodeId, int] = field(default_factory=dict)
    must_not_have: set[NodeId] = field(default_factory=set)
    ended_at: float = math.inf
    n_rounds: int = 0
    rtt_s: float = 0.0
    n_found: int = 0
    missing: list[NodeId] = field(default_factory=list)
    wrong: list[NodeId] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return self.ended_at < math.inf and not self.missing and not self.wrong

    def judge(self, found: list[Any]) -> None:
        """Compare what was found with the truth."""
        seqs = {record.node: record.seq for record in found}
        self.n_found = len(seqs)
        self.missing = [node for node, seq in self.must_have.items() if seqs.get(node, -1) < seq]
        self.wrong = [node for node in seqs if node in self.must_not_have]
