"""A relay's word that a node can be called through it: what the node announces, and what a caller shows to the relay.

At most 512 bytes:

    offset  size  field
    0       64    ed25519 signature by the relay over b"swarm voucher 1\\0" + all that follows
    64      32    the relay's node id
    96      32    the node that can be called
    128     8     u64, little-endian: when the reservation ends, ms since 1970 by the relay's clock; for the relay alone
    136     n     ASCII: the relay's addresses, host:port with IP literals, comma list

Only the relay itself compares the time: other clocks may be wrong, and a caller learns from its refusal. Knows nothing of
reservations.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.identity import Identity, is_valid_signature
from swarm.ids import NodeId
from swarm.registry.record_fields import check_address

MAX_VOUCHER_BYTES = 512
MAX_RELAY_ADDRESSES = 4  # guessed: IPv4 and IPv6, outside and at home

_DOMAIN = b"swarm voucher 1\0"
_SIGNATURE_BYTES = 64
_HEAD = struct.Struct("<32s32sQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Voucher:
    """What a relay's voucher says. Whose relay it is, is proved by its signature, and on dialling by its key."""

    relay: NodeId
    node: NodeId
    ends_at_ms: int
    addresses: tuple[str, ...]


def sign_voucher(identity: Identity, *, node: NodeId, ends_at_ms: int, addresses: tuple[str, ...]) -> bytes:
    """Return the voucher of the relay `identity` for `node`.

    Raises:
        LocalProtocolError: no address, too many, or one that is no IP literal with a port.
    """
    _check_addresses(addresses)
    body = _HEAD.pack(identity.node_id.raw, node.raw, ends_at_ms) + ",".join(addresses).encode("ascii")
    voucher = identity.sign(_DOMAIN + body) + body
    if len(voucher) > MAX_VOUCHER_BYTES:
        raise LocalProtocolError(f"voucher too long: got {len(voucher)} bytes, expected at most {MAX_VOUCHER_BYTES}")
    return voucher


def read_voucher(data: bytes) -> Voucher:
    """Return what an untrusted voucher says, once its form and its relay's signature are found good.

    Raises:
        RemoteProtocolError: they are not.
    """
    if not _SIGNATURE_BYTES + _HEAD.size < len(data) <= MAX_VOUCHER_BYTES:
        raise RemoteProtocolError(f"voucher has a wrong size: got {len(data)} bytes")
    relay, node, ends_at_ms = _HEAD.unpack_from(data, _SIGNATURE_BYTES)
    try:
        addresses = tuple(data[_SIGNATURE_BYTES + _HEAD.size :].decode("ascii").split(","))
        _check_addresses(addresses)
    except (UnicodeDecodeError, LocalProtocolError) as error:
        raise RemoteProtocolError(f"bad voucher: {error}") from error
    if not is_valid_signature(NodeId(relay), data[:_SIGNATURE_BYTES], _DOMAIN + data[_SIGNATURE_BYTES:]):
        raise RemoteProtocolError(f"the voucher's signature is not that of relay {NodeId(relay).short}")
    return Voucher(relay=NodeId(relay), node=NodeId(node), ends_at_ms=ends_at_ms, addresses=addresses)


def _check_addresses(addresses: tuple[str, ...]) -> None:
    if not 1 <= len(addresses) <= MAX_RELAY_ADDRESSES:
        raise LocalProtocolError(
            f"a voucher names its relay's addresses: got {len(addresses)}, expected 1 to {MAX_RELAY_ADDRESSES}"
        )
    for address in addresses:
        check_address(address)
