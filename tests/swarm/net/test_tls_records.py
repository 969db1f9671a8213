"""The records of a TLS link: golden bytes, any cut of the stream, and damage that raises only one error."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError
from swarm.net.tls_records import (
    HEAD_BYTES,
    MAX_DATA_BYTES,
    Record,
    RecordKind,
    RecordReader,
    encode_exchange,
    encode_record,
)

GOLDEN = [
    (Record(0, RecordKind.DATA, b"ab"), "00000000000200006162"),
    (Record(0x01020304, RecordKind.END, b""), "0403020101000000"),
    (Record(6, RecordKind.RESET), "0600000002000000"),
    (Record(7, RecordKind.PING), "0700000003000000"),
    (Record(7, RecordKind.PONG), "0700000004000000"),
    (Record(8, RecordKind.COPY), "0800000005000000"),
]


@pytest.mark.parametrize(("record", "golden"), GOLDEN, ids=[record.kind.name for record, _ in GOLDEN])
def test_golden_bytes_never_change(record: Record, golden: str) -> None:
    data = encode_record(record.exchange, record.kind, len(record.data)) + record.data
    assert data.hex() == golden
    assert RecordReader().feed(bytes.fromhex(golden)) == [record]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=40), st.booleans()), max_size=12),
    st.randoms(use_true_random=False),
)
def test_records_come_out_whole_however_the_stream_is_cut(
    exchanges: list[tuple[int, bytes, bool]], rng: random.Random
) -> None:
    stream = b"".join(part for each in exchanges for part in encode_exchange(*each))
    reader, got = RecordReader(), list[Record]()
    while stream:
        n = rng.randint(1, 30)
        got += reader.feed(stream[:n])
        stream = stream[n:]
    assert [(r.exchange, r.data, r.kind is RecordKind.END) for r in got] == exchanges


def test_a_long_message_is_cut_and_only_its_last_piece_ends_it() -> None:
    data = random.Random(0).randbytes(2 * MAX_DATA_BYTES + 5)
    records = RecordReader().feed(b"".join(encode_exchange(4, data, True)))
    assert b"".join(record.data for record in records) == data
    assert [record.kind for record in records] == [RecordKind.DATA, RecordKind.DATA, RecordKind.END]


def test_a_record_that_comes_in_many_pieces_is_not_copied_with_each() -> None:
    data = random.Random(0).randbytes(1000)
    stream = b"".join(encode_exchange(4, data, True))
    reader = RecordReader()
    reader.feed(stream[:HEAD_BYTES])
    held = reader._held
    for at in range(HEAD_BYTES, len(stream) - 1):
        assert reader.feed(stream[at : at + 1]) == []
        assert reader._held is held
    assert reader.feed(stream[-1:]) == [Record(4, RecordKind.END, data)]


def test_a_size_is_judged_on_the_head_before_the_data_is_there() -> None:
    too_large = MAX_DATA_BYTES + 1
    head = bytes(4) + b"\0" + too_large.to_bytes(3, "little")
    with pytest.raises(RemoteProtocolError, match="too large"):
        RecordReader().feed(head)
    with pytest.raises(RemoteProtocolError, match="PING"):
        RecordReader().feed(bytes(4) + b"\3" + b"\1\0\0")


@pytest.mark.parametrize("code", [6, 0x80, 0xFF])
def test_an_unknown_kind_is_refused(code: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"0x{code:02x}"):
        RecordReader().feed(bytes(4) + bytes([code]) + bytes(3))


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_remote_protocol_errors(data: bytes) -> None:
    try:
        records = RecordReader().feed(data)
    except RemoteProtocolError:
        return
    assert sum(HEAD_BYTES + len(record.data) for record in records) <= len(data)
