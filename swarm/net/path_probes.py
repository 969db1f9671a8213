"""The probes of a connection's paths: bytes only. Who holds the connection's key can make them, and nobody else.

    type  packet   bytes
    0x22  PROBE    8 tag, u64 number, u8 flags, 16 MAC      flags bit 0: the sender leads and uses this path
    0x23  PONG     8 tag, u64 number, u8 flags, 16 MAC      flags bit 0: the sender sends on this path too

Numbers are little-endian; the MAC is HMAC-SHA256 of all before it, type included, cut to 16 bytes. The tag tells the receiver
which of its connections is meant; the two directions have different ones, so nothing can be reflected. Key and tags are made of
the nonce of the greetings, which travels inside the encrypted connection only: no message of their own is needed.

What comes can be a replay: a PONG counts once, for a probe that waits; of PROBEs that say which path is used the highest number
counts. An answer is as long as its probe, so nobody is flooded by ours.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from swarm.errors import RemoteProtocolError
from swarm.ids import NodeId

PROBE, PONG = 0x22, 0x23
TAG_BYTES, MAC_BYTES = 8, 16
_BODY = struct.Struct(f"<B{TAG_BYTES}sQB")
PROBE_BYTES = _BODY.size + MAC_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One packet, authentic or not.

    Attributes:
        is_pong: PONG, else PROBE.
        flag: see the byte table.
    """

    is_pong: bool
    tag: bytes
    number: int
    flag: bool


def decode_probe(data: bytes) -> Probe:
    """Return what a packet says; its MAC is for `PathKey.is_authentic`. Raises RemoteProtocolError."""
    if len(data) != PROBE_BYTES or data[0] not in (PROBE, PONG):
        raise RemoteProtocolError(f"not a probe: got {len(data)} bytes, expected {PROBE_BYTES}")
    kind, tag, number, flags = _BODY.unpack_from(data)
    return Probe(is_pong=kind == PONG, tag=tag, number=number, flag=bool(flags & 1))


class PathKey:
    """What both ends of one connection know for their probes.

    Attributes:
        tag: on what comes to this side.
    """

    def __init__(self, nonce: bytes, *, server: NodeId, client: NodeId, is_client: bool) -> None:
        """`nonce`: of the greetings (`Session.nonce`)."""
        self._key = hmac.digest(nonce, b"swarm paths 1\0" + server.raw + client.raw, "sha256")
        tags = [hmac.digest(self._key, label, "sha256")[:TAG_BYTES] for label in (b"to server", b"to client")]
        self.tag = tags[is_client]
        self._their_tag = tags[not is_client]

    def encode(self, *, is_pong: bool, number: int, flag: bool) -> bytes:
        """Return a packet for the other side."""
        body = _BODY.pack(PONG if is_pong else PROBE, self._their_tag, number, flag)
        return body + self._mac(body)

    def is_authentic(self, data: bytes) -> bool:
        """Return whether the other side made this packet, whose tag is ours."""
        return hmac.compare_digest(self._mac(data[:-MAC_BYTES]), data[-MAC_BYTES:])

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:MAC_BYTES]
