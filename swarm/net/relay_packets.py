"""What nodes and relays say to each other beside QUIC, on the same UDP ports: bytes only, no state, no clock.

A *channel* joins two *legs* at a relay: side 0 is who asked for it, side 1 who was called. The relay passes a RELAY packet on
to the other leg as it came, so channel and payload are all that it carries. Where a leg's node is, the relay learns by BIND:

    node                                relay
      BIND, RELAY or KEEPALIVE   ->             from a source that is not the leg's
                                 <-  CHALLENGE  a cookie for that source
      BIND with the cookie       ->
                                 <-  BOUND      the leg's packets go to that source from now on
      KEEPALIVE number           ->             from the leg's source
                                 <-  ALIVE number

A cookie is worth something to one source address only, for a minute or two; who is told of a leg over a QUIC connection gets
one for the address that it is seen at, so that its first BIND, and the RELAY packets right behind it, cost no round trip. The
numbers of a leg's BINDs and KEEPALIVEs rise, so that a copy of an old one does nothing. A reservation is a leg too (side 1), with
nobody at its other side: only its keepalives travel.

    type  packet      bytes
    0x21  RELAY       8 channel, a packet for the other leg
    0x24  BIND        head, u64 number, 16 cookie, 16 MAC
    0x25  CHALLENGE   head, 16 cookie                   its side is 0; never larger than what it answers
    0x26  BOUND       head, u64 number of the BIND, 16 MAC
    0x27  KEEPALIVE   head, u64 number, 16 MAC
    0x28  ALIVE       head, u64 number of the KEEPALIVE, 16 MAC

    head = 8 channel, u32 generation, u8 side           the relay's generation rises with each of its starts

Numbers are little-endian. A MAC is HMAC-SHA256 of all before it, type included, by the leg's key, cut to 16 bytes. First bytes
below 64 are never QUIC's (RFC 9443); 0x22 and 0x23 are the probes of paths. Nothing here is encrypted and nothing needs to be: a
payload is a QUIC packet or a probe.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from swarm.errors import RemoteProtocolError


class PacketType(IntEnum):
    """The first byte of a packet that is not QUIC."""

    RELAY = 0x21
    BIND = 0x24
    CHALLENGE = 0x25
    BOUND = 0x26
    KEEPALIVE = 0x27
    ALIVE = 0x28


CHANNEL_BYTES, KEY_BYTES, COOKIE_BYTES, MAC_BYTES = 8, 32, 16, 16
RELAY = int(PacketType.RELAY)
RELAY_HEAD_BYTES = 1 + CHANNEL_BYTES
NO_COOKIE = bytes(COOKIE_BYTES)
CALLER, CALLED = 0, 1  # the sides of a channel

_HEAD = struct.Struct(f"<B{CHANNEL_BYTES}sIB")
_NUMBER = struct.Struct("<Q")
SIZES: dict[PacketType, int] = {
    PacketType.BIND: _HEAD.size + _NUMBER.size + COOKIE_BYTES + MAC_BYTES,
    PacketType.CHALLENGE: _HEAD.size + COOKIE_BYTES,
    PacketType.BOUND: _HEAD.size + _NUMBER.size + MAC_BYTES,
    PacketType.KEEPALIVE: _HEAD.size + _NUMBER.size + MAC_BYTES,
    PacketType.ALIVE: _HEAD.size + _NUMBER.size + MAC_BYTES,
}
CONTROL_TYPES = frozenset(int(each) for each in SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One packet that is not RELAY, its MAC unchecked.

    Attributes:
        side: CALLER or CALLED; 0 in CHALLENGE.
        number: of all but CHALLENGE.
        cookie: of BIND and CHALLENGE, else empty.
    """

    type: PacketType
    channel: bytes
    generation: int
    side: int = 0
    number: int = 0
    cookie: bytes = b""


def relayed(channel: bytes, payload: bytes) -> bytes:
    """Return the RELAY packet that carries `payload` to the other leg."""
    return b"!" + channel + payload  # 0x21


def encode(packet: Control, key: bytes) -> bytes:
    """Return a packet's bytes, with its MAC if its type has one."""
    head = _HEAD.pack(packet.type, packet.channel, packet.generation, packet.side)
    if packet.type is PacketType.CHALLENGE:
        return head + packet.cookie
    body = head + _NUMBER.pack(packet.number) + packet.cookie
    return body + _mac(body, key)


def decode(data: bytes) -> Control:
    """Return what a packet says; its MAC is for `is_authentic`.

    Raises:
        RemoteProtocolError: it is a RELAY, of no known type, or has a wrong size or side.
    """
    try:
        kind = PacketType(data[0])
        size = SIZES[kind]
    except (ValueError, KeyError, IndexError):
        raise RemoteProtocolError(f"not a relay's control packet: got {data[:1].hex() or 'nothing'}") from None
    if len(data) != size:
        raise RemoteProtocolError(f"{kind.name} has a wrong size: got {len(data)} bytes, expected {size}")
    _, channel, generation, side = _HEAD.unpack_from(data)
    if side not in (CALLER, CALLED):
        raise RemoteProtocolError(f"{kind.name} names a wrong side: got {side}, expected {CALLER} or {CALLED}")
    number, cookie, at = 0, b"", _HEAD.size
    if kind is not PacketType.CHALLENGE:
        (number,) = _NUMBER.unpack_from(data, at)
        at += _NUMBER.size
    if kind in (PacketType.BIND, PacketType.CHALLENGE):
        cookie = data[at : at + COOKIE_BYTES]
    return Control(type=kind, channel=channel, generation=generation, side=side, number=number, cookie=cookie)


def is_authentic(data: bytes, key: bytes) -> bool:
    """Return whether a whole packet's MAC was made with `key`. A CHALLENGE has none: it is worth no more than its cookie."""
    return hmac.compare_digest(_mac(data[:-MAC_BYTES], key), data[-MAC_BYTES:])


def _mac(data: bytes, key: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")[:MAC_BYTES]
