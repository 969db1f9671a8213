"""Exchanges multiplexed on one stream: the records of a TLS link. Pure: bytes in, records out.

    record   u32 exchange, u8 kind, u24 size of the data, data       little-endian

    kind  meaning
    0     data of the exchange
    1     data, the last of it
    2     the exchange is abandoned; no data
    3     ping: the exchange field is any number, no data
    4     pong: the same number
    5     the next record is a request that comes twice: the exchange field is its number, the same on both links; no data
          (`link_copies`; sent only where COPIES_ALPN was agreed upon)

A record's data is at most MAX_DATA_BYTES, checked on its head before memory is taken; what belongs to a frame of `wire/frames` is
the session's business.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from swarm.errors import RemoteProtocolError

_HEAD = struct.Struct("<IBBH")  # exchange, kind, low byte and upper two of the size
HEAD_BYTES = _HEAD.size
MAX_DATA_BYTES = 256 << 10  # a long message is cut, so that others can pass between; guessed
COPIES_ALPN = "swarm/1 copies"  # of a side that knows COPY; offered beside the session's own
MAX_EXCHANGE = (1 << 32) - 1  # the link is given up before its numbers are used up


class RecordKind(IntEnum):
    """What a record says."""

    DATA = 0
    END = 1
    RESET = 2
    PING = 3
    PONG = 4
    COPY = 5


class Record(NamedTuple):
    """One record."""

    exchange: int
    kind: RecordKind
    data: bytes = b""


_KINDS = {int(kind): kind for kind in RecordKind}
_END = RecordKind.END


def encode_record(exchange: int, kind: RecordKind, size: int = 0) -> bytes:
    """Return the head of a record; its data, of this size, follows."""
    assert 0 <= exchange <= MAX_EXCHANGE
    assert 0 <= size <= MAX_DATA_BYTES
    return _HEAD.pack(exchange, kind, size & 0xFF, size >> 8)


def encode_exchange(exchange: int, data: bytes, is_end: bool) -> list[bytes]:
    """Return the records that carry an exchange's next bytes, in pieces to be written one after the other."""
    size = len(data)
    if size <= MAX_DATA_BYTES:
        assert 0 <= exchange <= MAX_EXCHANGE
        return [_HEAD.pack(exchange, _END if is_end else RecordKind.DATA, size & 0xFF, size >> 8), data]
    parts: list[bytes] = []
    for at in range(0, len(data), MAX_DATA_BYTES):
        piece = data[at : at + MAX_DATA_BYTES]
        is_last = is_end and at + len(piece) == len(data)
        parts += [encode_record(exchange, RecordKind.END if is_last else RecordKind.DATA, len(piece)), piece]
    return parts


class RecordReader:
    """Cuts a stream into records; holds at most one that is not whole."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._n_wanted = 0  # bytes of the record that is not whole, as far as is known

    def feed(self, data: bytes) -> list[Record]:
        """Return the records that are whole now; raises RemoteProtocolError, after which it is of no use."""
        if self._held:
            self._held += data
            if len(self._held) < self._n_wanted:  # else a record that comes byte by byte is copied as often
                return []
            data = bytes(self._held)
        records: list[Record] = []
        at, n = 0, len(data)
        self._n_wanted = HEAD_BYTES
        while n - at >= HEAD_BYTES:
            exchange, code, low, high = _HEAD.unpack_from(data, at)
            kind = _KINDS.get(code)
            if kind is None:
                raise RemoteProtocolError(f"unknown kind of record: got 0x{code:02x}")
            size = low | high << 8
            if size and (kind > _END or size > MAX_DATA_BYTES):
                raise RemoteProtocolError(f"a record of {kind.name} is too large: got {size} bytes")
            begin = at + HEAD_BYTES
            end = begin + size
            if end > n:
                self._n_wanted = end - at
                break
            records.append(Record(exchange, kind, data[begin:end]))
            at = end
        if at < n or self._held:
            self._held = bytearray(data[at:])
        return records
