"""Receipts: a backbone's signed word on what a peer has computed for it, which anybody can check and only that backbone can make.

Always 164 bytes; in JSON and in files as 219 characters of base64url without padding:

    offset  size  field
    0       64    ed25519 signature by the backbone over b"swarm receipt 1\\0" + all that follows
    64      32    the backbone's node id
    96      32    the peer's node id
    128     8     of the period: random, new whenever the backbone starts to count anew
    136     4     u32, little-endian like the rest: the day, since 1970-01-01 UTC, by the backbone's clock
    140     8     u64: rows of hidden state that the peer computed and the backbone used
    148     8     u64: (row, expert) pairs of them
    156     8     u64: the pairs' weight in thousandths: each 1,000 over the number of peers that held its expert then

The three counts are of the whole period so far, not since the last receipt. So of the receipts of one (backbone, peer, day,
period) the highest stands for all others, an old one adds nothing, and the same one twice no more than once. Receipts of
different periods add up. Knows nothing of whom to trust, of time, or of where receipts are kept (docs/contributions.md).
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.identity import Identity, is_valid_signature
from swarm.ids import NodeId

RECEIPT_BYTES = 164
RECEIPT_CHARACTERS = 219
PERIOD_BYTES = 8
DAY_S = 86_400
MAX_DAY = 10_000_000  # some 27,000 years; a receipt beyond is damaged
MAX_PAIRS = 2**53  # so that JSON's numbers hold it; at a billion pairs a second, a hundred days
MAX_PAIRS_PER_ROW = 255  # row counts travel as u8 (`frames`)
FULL_WEIGHT = 1000  # of a pair whose expert only one peer held

_DOMAIN = b"swarm receipt 1\0"
_SIGNATURE_BYTES = 64
_BODY = struct.Struct(f"<32s32s{PERIOD_BYTES}sIQQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What was computed: rows of hidden state, (row, expert) pairs, and the pairs' weight in thousandths."""

    n_rows: int = 0
    n_pairs: int = 0
    weight: int = 0

    @property
    def points(self) -> int:
        """The weight in whole pairs whose expert nobody else held."""
        return self.weight // FULL_WEIGHT

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            n_rows=self.n_rows + other.n_rows, n_pairs=self.n_pairs + other.n_pairs, weight=self.weight + other.weight
        )


Key = tuple[NodeId, NodeId, int, bytes]  # backbone, peer, day, period


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a receipt says. `data`: the 164 bytes that prove it; two of one key are compared by `rank`."""

    backbone: NodeId
    peer: NodeId
    period: bytes
    day: int
    totals: Totals
    data: bytes

    @property
    def key(self) -> Key:
        """What it counts; of several receipts with one key only the highest holds."""
        return self.backbone, self.peer, self.day, self.period

    @property
    def rank(self) -> tuple[int, int, int, bytes]:
        """Orders the receipts of one key. The bytes decide last, so that everybody keeps the same of two with equal counts."""
        return self.totals.n_pairs, self.totals.n_rows, self.totals.weight, self.data

    @property
    def text(self) -> str:
        """The form for JSON and files."""
        return base64.urlsafe_b64encode(self.data).decode().rstrip("=")


def day_of(wall_s: float) -> int:
    """Return the day, since 1970-01-01 UTC, of a time in seconds since then."""
    return int(wall_s // DAY_S)


def sign_receipt(identity: Identity, *, peer: NodeId, period: bytes, day: int, totals: Totals) -> Receipt:
    """Return the receipt of the backbone `identity` for `peer`.

    Raises:
        LocalProtocolError: the counts cannot be.
    """
    why = _fault(period, day, totals)
    if why:
        raise LocalProtocolError(f"bad receipt: {why}")
    backbone = identity.node_id
    body = _BODY.pack(backbone.raw, peer.raw, period, day, totals.n_rows, totals.n_pairs, totals.weight)
    data = identity.sign(_DOMAIN + body) + body
    return Receipt(backbone=backbone, peer=peer, period=period, day=day, totals=totals, data=data)


def peek_receipt(data: bytes) -> Receipt:
    """Return what an untrusted receipt claims, its signature unchecked: whether it is worth checking.

    Raises:
        RemoteProtocolError: it has not the form of one.
    """
    if len(data) != RECEIPT_BYTES:
        raise RemoteProtocolError(f"receipt has a wrong size: got {len(data)} bytes, expected {RECEIPT_BYTES}")
    backbone, peer, period, day, n_rows, n_pairs, weight = _BODY.unpack_from(data, _SIGNATURE_BYTES)
    totals = Totals(n_rows=n_rows, n_pairs=n_pairs, weight=weight)
    why = _fault(period, day, totals)
    if why:
        raise RemoteProtocolError(f"bad receipt: {why}")
    return Receipt(
        backbone=NodeId(backbone), peer=NodeId(peer), period=period, day=day, totals=totals, data=bytes(data)
    )


def require_signed(receipt: Receipt) -> Receipt:
    """Return the receipt if its backbone signed it; raises RemoteProtocolError."""
    body = receipt.data[_SIGNATURE_BYTES:]
    if not is_valid_signature(receipt.backbone, receipt.data[:_SIGNATURE_BYTES], _DOMAIN + body):
        raise RemoteProtocolError(f"the receipt's signature is not that of backbone {receipt.backbone.short}")
    return receipt


def read_receipt(data: bytes) -> Receipt:
    """Return what an untrusted receipt says, once its form and its backbone's signature are found good.

    Raises:
        RemoteProtocolError: they are not.
    """
    return require_signed(peek_receipt(data))


def receipt_bytes(text: object) -> bytes:
    """Return the bytes of an untrusted receipt's text form, not looked at any further. Raises RemoteProtocolError."""
    if not isinstance(text, str) or len(text) != RECEIPT_CHARACTERS:
        raise RemoteProtocolError(f"receipt is no text of {RECEIPT_CHARACTERS} characters")
    try:
        data = base64.b64decode(text.encode("ascii") + b"=", altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise RemoteProtocolError(f"receipt is not base64url: {error}") from error
    if base64.urlsafe_b64encode(data).decode().rstrip("=") != text:  # two bits to spare: one spelling for each receipt
        raise RemoteProtocolError("receipt is not in its canonical form")
    return data


def highest(receipts: Iterable[Receipt]) -> dict[Key, Receipt]:
    """Return the one receipt that holds of each key; the order and repetitions make no difference."""
    kept: dict[Key, Receipt] = {}
    for receipt in receipts:
        known = kept.get(receipt.key)
        if known is None or receipt.rank > known.rank:
            kept[receipt.key] = receipt
    return kept


def total(receipts: Iterable[Receipt]) -> Totals:
    """Return what receipts add up to; of those of one key, only the highest counts."""
    return sum((receipt.totals for receipt in highest(receipts).values()), Totals())


def _fault(period: bytes, day: int, totals: Totals) -> str:
    """Return why these cannot stand in a receipt; empty if they can."""
    if len(period) != PERIOD_BYTES:
        return f"period of {len(period)} bytes, expected {PERIOD_BYTES}"
    if not 0 <= day <= MAX_DAY:
        return f"got day {day}, expected 0 to {MAX_DAY}"
    n_rows, n_pairs, weight = totals.n_rows, totals.n_pairs, totals.weight
    if not 1 <= n_rows <= n_pairs <= min(n_rows * MAX_PAIRS_PER_ROW, MAX_PAIRS):
        return f"got {n_rows} rows and {n_pairs} pairs, expected 1 to {MAX_PAIRS_PER_ROW} pairs for each row"
    if not 0 <= weight <= n_pairs * FULL_WEIGHT:
        return f"got a weight of {weight} for {n_pairs} pairs, expected at most {FULL_WEIGHT} for each"
    return ""
