"""Which registry nodes store what. Pure arithmetic: everybody with the same members comes to the same answer, unasked.

A *place* is what is stored and asked for together: (model, bucket). Its key and a node's position are hashes, and the place's
replicas are the N_REPLICAS members closest to its key by XOR:

    record                places                                          bucket
    ExpertAnnouncement    one for each EXPERTS_PER_BUCKET experts held    0 .. N_EXPERT_BUCKETS - 1
    ModelOffer            the model's offers, and the directory           OFFERS; DIRECTORY of NO_MODEL
    RoutingHistogram      the model's histograms                          HISTOGRAMS
    RegistryNodeRecord    none: members know each other by gossip

Node ids cost nothing, so somebody can make the ones that are closest to a key. Of one network (`rival_prefix`), therefore, only
the closest member is a replica of a place, as long as there are members of other networks to take the rest.
With at most N_REPLICAS members everything is everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from swarm.ids import ModelId, NodeId
from swarm.registry.records import NO_MODEL, ExpertAnnouncement, ModelOffer, Record, RoutingHistogram

N_REPLICAS = 5  # DESIGN section 4
# How far from a place a member may be and still store it or pass it on: views of who is a member differ for a while.
N_TOLERATED = 2 * N_REPLICAS
EXPERTS_PER_BUCKET = 16  # guessed: 128 experts in 8 places, so that a peer of 16 announces itself at 5 or 10 nodes
N_EXPERT_BUCKETS = 64  # the last one holds all experts above: a record is never in more places
MAX_KEPT_PLACES = 16_384  # answers that one ring keeps, 2 MB
OFFERS, HISTOGRAMS, DIRECTORY = 0x100, 0x101, 0x102

Place = tuple[ModelId, int]
THE_DIRECTORY: Place = (NO_MODEL, DIRECTORY)


def expert_buckets(n_expert: int) -> range:
    """Return the buckets that the experts 0 to n_expert - 1 are in."""
    return range(min(-(-n_expert // EXPERTS_PER_BUCKET), N_EXPERT_BUCKETS))


def places_of(record: Record) -> tuple[Place, ...]:
    """Return where a record is stored; nothing for a withdrawal, which goes where its record went."""
    if isinstance(record, ExpertAnnouncement):
        sets = set(record.experts.by_layer.values())
        buckets = {min(expert // EXPERTS_PER_BUCKET, N_EXPERT_BUCKETS - 1) for experts in sets for expert in experts}
        return tuple((record.model, bucket) for bucket in sorted(buckets))
    if isinstance(record, ModelOffer):
        return (record.model, OFFERS), THE_DIRECTORY
    if isinstance(record, RoutingHistogram):
        return ((record.model, HISTOGRAMS),)
    return ()


def is_place(model: ModelId, bucket: int) -> bool:
    """Return whether records can be stored there."""
    if bucket == DIRECTORY:
        return model == NO_MODEL
    return model != NO_MODEL and (0 <= bucket < N_EXPERT_BUCKETS or bucket in (OFFERS, HISTOGRAMS))


def key_of(place: Place) -> int:
    """Return the place's point in the space of 256 bits."""
    model, bucket = place
    return int.from_bytes(hashlib.sha256(b"swarm place 1\0" + model.raw + bucket.to_bytes(2, "little")).digest())


def position_of(node: NodeId) -> int:
    """Return the node's point in the same space."""
    return int.from_bytes(hashlib.sha256(b"swarm position 1\0" + node.raw).digest())


class Ring:
    """A set of members, frozen, with what follows from it kept."""

    def __init__(self, members: Mapping[NodeId, str | None], positions: Mapping[NodeId, int] | None = None) -> None:
        """`members`: node -> the network it competes in, None for none. `positions`: where the caller has them already."""
        known = positions or {}
        self.members = dict(members)
        self._points = [(known.get(node) or position_of(node), node) for node in members]
        self._closest: dict[Place, tuple[NodeId, ...]] = {}

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, node: object) -> bool:
        return node in self.members

    def closest(self, place: Place, n: int = N_REPLICAS) -> tuple[NodeId, ...]:
        """Return the `n` members, at most N_TOLERATED, that store `place`, closest first."""
        found = self._closest.get(place)
        if found is None:
            if len(self._closest) >= MAX_KEPT_PLACES:  # strangers ask for places that do not exist
                self._closest.clear()
            found = self._closest[place] = self._find(place)
        return found[:n]

    def replicas(self, places: Iterable[Place]) -> dict[NodeId, list[Place]]:
        """Return the members that store any of `places`, each with those that it stores."""
        wanted: dict[NodeId, list[Place]] = {}
        for place in places:
            for node in self.closest(place):
                wanted.setdefault(node, []).append(place)
        return wanted

    def _find(self, place: Place) -> tuple[NodeId, ...]:
        key = key_of(place)
        chosen: list[NodeId] = []
        passed_over: list[NodeId] = []
        prefixes: set[str] = set()
        for _, node in sorted([(point ^ key, node) for point, node in self._points]):
            prefix = self.members[node]
            if prefix is not None and prefix in prefixes:
                passed_over.append(node)
                continue
            if prefix is not None:
                prefixes.add(prefix)
            chosen.append(node)
            if len(chosen) == N_TOLERATED:
                break
        return tuple(chosen + passed_over)[:N_TOLERATED]
