"""Short digests by which nodes and clients see at a glance whether they know the same. Pure; they prove nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b

from swarm.ids import NodeId
from swarm.wire import messages as m


def member_tag(node: NodeId, addresses: Iterable[str]) -> bytes:
    """Return what a client's view of a member is told by: its id and its addresses."""
    return blake2b(node.raw + "\0".join(addresses).encode(), digest_size=m.TAG_BYTES).digest()


def digest_of(entries: Mapping[bytes, int]) -> bytes:
    """Return a digest of (tag, seq) pairs, whatever their order. Replicas trust each other this far: it only steers repair."""
    digest = 0
    for tag, seq in entries.items():
        digest ^= int.from_bytes(blake2b(tag + seq.to_bytes(8, "little"), digest_size=m.TAG_BYTES).digest(), "little")
    return digest.to_bytes(m.TAG_BYTES, "little")
