"""Every frame: golden bytes, a round trip, and damage that may raise only RemoteProtocolError."""

from __future__ import annotations

import dataclasses
import random
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.ids import ModelId, NodeId
from swarm.wire import messages as m
from swarm.wire.frames import (
    FRAME_TYPE_OF,
    HEADER,
    IGNORABLE_FROM,
    LIMITS,
    FrameType,
    decode,
    decode_frame,
    encode,
    frame_type_of,
    printable,
)
from swarm.wire.rows import RowCodec, decode_rows, encode_rows

LOSSLESS = (RowCodec.EXACT, RowCodec.F32)
COUNT_32 = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
NODE = NodeId(bytes.fromhex(COUNT_32))
MODEL = ModelId(bytes.fromhex(COUNT_32))
ROWS = np.array([[1.0, -2.5], [0.0, 0.5]], np.float32)  # 0000803f 000020c0 / 00000000 0000003f

LEG = m.Leg(
    channel=b"CCCCCCCC",
    generation=258,
    side=1,
    key=b"K" * 32,
    cookie=b"c" * 16,
    idle_ms=60_000,
    rate_kbit_s=50_000,
)
LEG_HEX = "4343434343434343 02010000 01" + "4b" * 32 + "63" * 16 + "60ea0000 50c30000"


def f32_dispatch() -> m.Dispatch:
    return m.Dispatch(
        model_tag=bytes.fromhex("a1a2a3a4a5a6a7a8"),
        layer=3,
        rows_codec=RowCodec.F32,
        result_codec=RowCodec.F32,
        row_counts=np.array([1, 2], np.uint8),
        expert_ids=np.array([5, 6, 258], np.uint16),
        weights=np.array([1.0, 0.25, 0.75], np.float32),
        rows=ROWS,
    )


def exact_dispatch() -> m.Dispatch:
    return m.Dispatch(
        model_tag=bytes.fromhex("a1a2a3a4a5a6a7a8"),
        layer=260,
        rows_codec=RowCodec.EXACT,
        result_codec=RowCodec.EXACT,
        row_counts=np.array([2], np.uint8),
        expert_ids=np.array([7, 65535], np.uint16),
        weights=None,
        rows=ROWS[:1],
    )


# Written from the byte table in swarm/wire/frames.py by hand. They never change: a new layout takes a new type.
GOLDEN: dict[str, tuple[m.Message, str]] = {
    "challenge": (
        m.Challenge(nonce=bytes.fromhex(COUNT_32), versions=(1, 258), observed_address="192.0.2.1:7440"),
        "01 35000000" + COUNT_32 + "02 0100 0201" + "0e00 3139322e302e322e313a37343430",
    ),
    "hello": (
        m.Hello(node_id=NODE, versions=(1,), signature=b"\xee" * 64),
        "02 63000000" + COUNT_32 + "01 0100" + "ee" * 64,
    ),
    "welcome": (m.Welcome(version=1), "03 02000000 0100"),
    "busy": (m.Busy(retry_after_ms=200, detail="full"), "05 0a000000 c8000000 0400 66756c6c"),
    "refusal": (m.Refusal(code=0x11, detail="busy é"), "04 0b000000 1100 0700 6275737920c3a9"),
    "dispatch f32": (
        f32_dispatch(),
        "10 3c000000 a1a2a3a4a5a6a7a8 0300 01 01 02000000 02000000 03000000"
        "0102 0500 0600 0201 0000803f 0000803e 0000403f"
        "0000803f 000020c0 00000000 0000003f",
    ),
    "dispatch exact": (
        exact_dispatch(),
        "10 25000000 a1a2a3a4a5a6a7a8 0401 00 00 02000000 01000000 02000000 02 0700 ffff 0000803f 000020c0",
    ),
    "dispatch q8": (
        m.Dispatch(
            model_tag=bytes.fromhex("a1a2a3a4a5a6a7a8"),
            layer=3,
            rows_codec=RowCodec.Q8_0,
            result_codec=RowCodec.INT8,
            row_counts=np.array([1], np.uint8),
            expert_ids=np.array([5], np.uint16),
            weights=np.array([0.5], np.float32),
            rows=np.array([[127, -2, *[0] * 30]], np.float32),
        ),
        "10 41000000 a1a2a3a4a5a6a7a8 0300 04 06 20000000 01000000 01000000 01 0500 0000003f 003c 7ffe" + "00" * 30,
    ),
    "result fp8": (
        m.Result(codec=RowCodec.FP8, rows=np.array([[448, -1]], np.float32), compute_us=1000, queue_us=2),
        "11 18000000 07 000000 01000000 02000000 e8030000 02000000 803f 7eb8",
    ),
    "result": (
        m.Result(codec=RowCodec.F32, rows=ROWS, compute_us=1000, queue_us=2),
        "11 24000000 01 000000 02000000 02000000 e8030000 02000000 0000803f 000020c0 00000000 0000003f",
    ),
    "announce": (m.Announce(record=b"record"), "20 06000000 7265636f7264"),
    "accepted": (m.Accepted(is_new=True, highest_seq=0x0102030405060708), "21 09000000 01 0807060504030201"),
    "lookup": (m.Lookup(model_id=MODEL), "22 20000000" + COUNT_32),
    "lookup of models": (m.Lookup(model_id=None), "22 00000000"),
    "records": (
        m.Records(records=((300_000, b"ab"), (1, b""))),
        "23 14000000 0200 e0930400 02000000 6162 01000000 00000000",
    ),
    "find": (m.Find(places=((MODEL, 3), (MODEL, 258))), "24 46000000 0200" + (COUNT_32 + "0300") + (COUNT_32 + "0201")),
    "get members": (m.GetMembers(known=(b"AAAAAAAA",)), "25 0a000000 0100 4141414141414141"),
    "members": (
        m.Members(gone=(b"AAAAAAAA",), records=((1, b"ab"),)),
        "26 16000000 0100 4141414141414141 0100 01000000 02000000 6162",
    ),
    "watch": (m.Watch(model_id=MODEL, cursor=258), "27 28000000" + COUNT_32 + "0201000000000000"),
    "changes": (
        m.Changes(cursor=258, records=((1, b"ab"),)),
        "28 14000000 0201000000000000 0100 01000000 02000000 6162",
    ),
    "gossip": (m.Gossip(summary=((b"AAAAAAAA", 258),)), "29 12000000 0100 4141414141414141 0201000000000000"),
    "news": (
        m.News(wanted=(b"AAAAAAAA",), records=((1, b"ab"),)),
        "2a 16000000 0100 4141414141414141 0100 01000000 02000000 6162",
    ),
    "sync": (m.Sync(digests=(((MODEL, 3), b"DDDDDDDD"),)), "2b 2c000000 0100" + COUNT_32 + "0300 4444444444444444"),
    "differences": (
        m.Differences(places=((5, ((b"AAAAAAAA", 258),)), (6, ()))),
        "2c 1a000000 0200 0500 0100 4141414141414141 0201000000000000 0600 0000",
    ),
    "push": (
        m.Push(records=((1, b"ab"),), wanted=(((MODEL, 3), b"AAAAAAAA"),)),
        "2d 38000000 0100" + COUNT_32 + "0300 4141414141414141 0100 01000000 02000000 6162",
    ),
    "get manifest": (m.GetManifest(model_id=MODEL), "30 20000000" + COUNT_32),
    "manifest": (m.ManifestBytes(data=b"{}"), "31 02000000 7b7d"),
    "get block": (m.GetBlock(model_id=MODEL, layer=3, expert=258), "32 24000000" + COUNT_32 + "0300 0201"),
    "block": (m.BlockBytes(data=b"\xff\x00"), "33 02000000 ff00"),
    "get status": (m.GetStatus(), "40 00000000"),
    "status": (m.Status(data=b"{}"), "41 02000000 7b7d"),
    "reserve": (m.Reserve(lifetime_ms=60_000), "50 04000000 60ea0000"),
    "reserved": (
        m.Reserved(ttl_ms=258, n_channels=64, leg=LEG, observed_address="a:1", voucher=b"ab"),
        "51 52000000 02010000 4000" + LEG_HEX + "0300 613a31 6162",
    ),
    "connect": (m.Connect(node_id=NODE, voucher=b"ab"), "52 22000000" + COUNT_32 + "6162"),
    "channel": (m.Channel(leg=LEG), "53 45000000" + LEG_HEX),
    "incoming": (m.Incoming(caller=NODE, leg=LEG), "54 65000000" + COUNT_32 + LEG_HEX),
    "release": (m.Release(channel=b"CCCCCCCC"), "55 08000000 4343434343434343"),
    "notice": (m.Notice(kind=1, in_ms=258, detail="hi"), "56 09000000 01 02010000 0200 6869"),
    "done": (m.Done(), "57 00000000"),
    "offer paths": (m.OfferPaths(addresses=("a:1", "b:2"), mapping=2), "58 0c000000 02 02 0300 613a31 0300 623a32"),
    "paths": (m.Paths(addresses=("a:1",), mapping=3), "59 07000000 03 01 0300 613a31"),
    "check reach": (m.CheckReach(port=258, nonce=b"N" * 16), "5a 12000000 0201" + "4e" * 16),
    "checked": (m.Checked(n_asked=2, n_reached=1), "5b 02000000 02 01"),
    "dial back": (
        m.DialBack(node_id=NODE, nonce=b"N" * 16, address="a:1"),
        "5c 35000000" + COUNT_32 + "4e" * 16 + "0300 613a31",
    ),
    "reached": (m.Reached(nonce=b"N" * 16), "5d 10000000" + "4e" * 16),
}


OPEN_ENDED = ("announce", "manifest", "block", "status", "reserved", "connect")  # their last field takes what is there


def assert_same(left: m.Message, right: m.Message) -> None:
    """Compare all fields, arrays bit by bit."""
    assert type(left) is type(right)
    for name in left.__dataclass_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name
        else:
            assert a == b, name


def decodes_or_refuses(data: bytes) -> None:
    try:
        message = decode_frame(data)
    except RemoteProtocolError:
        return
    assert isinstance(message, m.Message)


def test_there_are_golden_bytes_for_every_frame_type() -> None:
    assert {FRAME_TYPE_OF[type(message)] for message, _ in GOLDEN.values()} == set(FrameType)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_never_change(name: str) -> None:
    message, golden = GOLDEN[name]
    assert encode(message).hex() == golden.replace(" ", "")
    assert_same(decode_frame(bytes.fromhex(golden)), message)


NODES = st.binary(min_size=32, max_size=32).map(NodeId)
MODELS = st.binary(min_size=32, max_size=32).map(ModelId)
VERSIONS = st.lists(st.integers(0, 65535), max_size=20).map(tuple)
TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=80)
INDEX = st.integers(0, 65535)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TAG = st.binary(min_size=8, max_size=8)


def some(items: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(items, max_size=5).map(tuple)


LEGS = st.builds(
    m.Leg,
    channel=TAG,
    generation=U32,
    side=st.integers(0, 1),
    key=st.binary(min_size=32, max_size=32),
    cookie=st.binary(min_size=16, max_size=16),
    idle_ms=U32,
    rate_kbit_s=U32,
)
PLACE = st.tuples(MODELS, INDEX)
TOLD = some(st.tuples(U32, st.binary(max_size=50)))


@st.composite
def row_arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6))
    return draw(hnp.arrays(np.uint32, shape)).view(np.float32)  # any bits, NaN and infinities too


@st.composite
def dispatches(draw: st.DrawFn) -> m.Dispatch:
    rows = draw(row_arrays())
    row_counts = draw(hnp.arrays(np.uint8, len(rows), elements=st.integers(1, 255)))
    n_pairs = int(row_counts.sum(dtype=int))
    codec = draw(st.sampled_from(LOSSLESS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return m.Dispatch(
        model_tag=draw(st.binary(min_size=8, max_size=8)),
        layer=draw(INDEX),
        rows_codec=draw(st.sampled_from(LOSSLESS)),
        result_codec=codec,
        row_counts=row_counts,
        expert_ids=rng.integers(0, 65536, n_pairs).astype(np.uint16),
        weights=None if codec is RowCodec.EXACT else rng.random(n_pairs, np.float32),
        rows=rows,
    )


CANDIDATES = st.lists(st.text("0123456789abcdef.:[]", max_size=50), max_size=m.MAX_CANDIDATES).map(tuple)
NONCES = st.binary(min_size=m.NONCE_BYTES, max_size=m.NONCE_BYTES)
MESSAGES: dict[type[m.Message], st.SearchStrategy[m.Message]] = {
    m.Challenge: st.builds(
        m.Challenge, nonce=st.binary(min_size=32, max_size=32), versions=VERSIONS, observed_address=TEXTS
    ),
    m.Hello: st.builds(m.Hello, node_id=NODES, versions=VERSIONS, signature=st.binary(min_size=64, max_size=64)),
    m.Welcome: st.builds(m.Welcome, version=INDEX),
    m.Refusal: st.builds(m.Refusal, code=INDEX, detail=TEXTS),
    m.Busy: st.builds(m.Busy, retry_after_ms=st.integers(0, 2**32 - 1), detail=TEXTS),
    m.Dispatch: dispatches(),
    m.Result: st.builds(m.Result, codec=st.sampled_from(LOSSLESS), rows=row_arrays(), compute_us=U32, queue_us=U32),
    m.Announce: st.builds(m.Announce, record=st.binary(max_size=300)),
    m.Accepted: st.builds(m.Accepted, is_new=st.booleans(), highest_seq=st.integers(0, 2**64 - 1)),
    m.Lookup: st.builds(m.Lookup, model_id=st.none() | MODELS),
    m.Records: st.builds(m.Records, records=st.lists(st.tuples(U32, st.binary(max_size=50)), max_size=5).map(tuple)),
    m.Find: st.builds(m.Find, places=some(PLACE)),
    m.GetMembers: st.builds(m.GetMembers, known=some(TAG)),
    m.Members: st.builds(m.Members, gone=some(TAG), records=TOLD),
    m.Watch: st.builds(m.Watch, model_id=MODELS, cursor=U64),
    m.Changes: st.builds(m.Changes, cursor=U64, records=TOLD),
    m.Gossip: st.builds(m.Gossip, summary=some(st.tuples(TAG, U64))),
    m.News: st.builds(m.News, wanted=some(TAG), records=TOLD),
    m.Sync: st.builds(m.Sync, digests=some(st.tuples(PLACE, TAG))),
    m.Differences: st.builds(m.Differences, places=some(st.tuples(INDEX, some(st.tuples(TAG, U64))))),
    m.Push: st.builds(m.Push, records=TOLD, wanted=some(st.tuples(PLACE, TAG))),
    m.GetManifest: st.builds(m.GetManifest, model_id=MODELS),
    m.ManifestBytes: st.builds(m.ManifestBytes, data=st.binary(max_size=300)),
    m.GetBlock: st.builds(m.GetBlock, model_id=MODELS, layer=INDEX, expert=INDEX),
    m.BlockBytes: st.builds(m.BlockBytes, data=st.binary(max_size=300)),
    m.GetStatus: st.just(m.GetStatus()),
    m.Status: st.builds(m.Status, data=st.binary(max_size=300)),
    m.Reserve: st.builds(m.Reserve, lifetime_ms=U32),
    m.Reserved: st.builds(
        m.Reserved,
        ttl_ms=U32,
        n_channels=INDEX,
        leg=LEGS,
        observed_address=TEXTS,
        voucher=st.binary(max_size=300),
    ),
    m.Connect: st.builds(m.Connect, node_id=NODES, voucher=st.binary(max_size=300)),
    m.Channel: st.builds(m.Channel, leg=LEGS),
    m.Incoming: st.builds(m.Incoming, caller=NODES, leg=LEGS),
    m.Release: st.builds(m.Release, channel=TAG),
    m.Notice: st.builds(m.Notice, kind=st.integers(0, 255), in_ms=U32, detail=TEXTS),
    m.Done: st.just(m.Done()),
    m.OfferPaths: st.builds(m.OfferPaths, addresses=CANDIDATES, mapping=st.integers(0, 255)),
    m.Paths: st.builds(m.Paths, addresses=CANDIDATES, mapping=st.integers(0, 255)),
    m.CheckReach: st.builds(m.CheckReach, port=INDEX, nonce=NONCES),
    m.Checked: st.builds(m.Checked, n_asked=st.integers(0, 255), n_reached=st.integers(0, 255)),
    m.DialBack: st.builds(m.DialBack, node_id=NODES, nonce=NONCES, address=st.text("0123456789.:[]", max_size=60)),
    m.Reached: st.builds(m.Reached, nonce=NONCES),
}


def test_every_message_type_has_a_strategy() -> None:
    assert set(MESSAGES) == set(FRAME_TYPE_OF)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.one_of(*MESSAGES.values()))
def test_a_message_reads_back_as_it_was(message: m.Message) -> None:
    data = encode(message)
    assert len(data) - HEADER.size <= LIMITS[FRAME_TYPE_OF[type(message)]]
    assert_same(decode_frame(data), message)


@pytest.mark.parametrize("codec", RowCodec)
def test_rows_travel_as_their_codec_writes_them(codec: RowCodec) -> None:
    rows = np.random.default_rng(9).standard_normal((3, 256)).astype(np.float32)
    sent = m.Dispatch(
        model_tag=bytes(8),
        layer=1,
        rows_codec=codec,
        result_codec=RowCodec.F16,
        row_counts=np.array([1, 1, 1], np.uint8),
        expert_ids=np.array([1, 2, 3], np.uint16),
        weights=np.ones(3, np.float32),
        rows=rows,
    )
    expected = decode_rows(encode_rows(rows, codec), 3, 256, codec).tobytes()
    for message in (sent, m.Result(codec=codec, rows=rows, compute_us=0, queue_us=0)):
        back = decode_frame(encode(message))
        assert isinstance(back, m.Dispatch | m.Result)
        assert back.rows.tobytes() == expected
        assert (back.rows_codec if isinstance(back, m.Dispatch) else back.codec) is codec


# Damage


@pytest.mark.parametrize("name", GOLDEN)
def test_a_cut_frame_is_refused(name: str) -> None:
    data = encode(GOLDEN[name][0])
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode_frame(data[:size])


@pytest.mark.parametrize("name", GOLDEN)
def test_a_cut_body_raises_only_remote_protocol_errors(name: str) -> None:
    """The header says what is there, so that the body's own checks are the ones that look."""
    data = encode(GOLDEN[name][0])
    for size in range(len(data) - HEADER.size):
        decodes_or_refuses(HEADER.pack(data[0], size) + data[HEADER.size : HEADER.size + size])


@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in OPEN_ENDED])
def test_a_byte_too_many_is_refused(name: str) -> None:
    data = encode(GOLDEN[name][0])
    with pytest.raises(RemoteProtocolError):
        decode_frame(data + b"\0")
    with pytest.raises(RemoteProtocolError):
        decode_frame(HEADER.pack(data[0], len(data) - HEADER.size + 1) + data[HEADER.size :] + b"\0")


@pytest.mark.parametrize("name", GOLDEN)
def test_a_flipped_bit_raises_only_remote_protocol_errors(name: str) -> None:
    data = bytearray(encode(GOLDEN[name][0]))
    for position in range(8 * len(data)):
        data[position // 8] ^= 1 << position % 8
        decodes_or_refuses(bytes(data))
        data[position // 8] ^= 1 << position % 8


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.sampled_from(FrameType), st.binary(max_size=120))
def test_random_bodies_raise_only_remote_protocol_errors(frame_type: FrameType, body: bytes) -> None:
    decodes_or_refuses(HEADER.pack(frame_type, len(body)) + body)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=60))
def test_random_bytes_raise_only_remote_protocol_errors(data: bytes) -> None:
    decodes_or_refuses(data)


def test_long_random_bodies_raise_only_remote_protocol_errors() -> None:
    rng = random.Random(2)
    for frame_type in FrameType:
        for _ in range(20):
            size = min(LIMITS[frame_type], rng.randrange(5000))
            decodes_or_refuses(HEADER.pack(frame_type, size) + rng.randbytes(size))


# What each check refuses


def dispatch_body(
    n_embd: int, n_rows: int, n_pairs: int, rest: bytes = b"", forms: tuple[int, int] = (0, 0)
) -> memoryview:
    return memoryview(struct.pack("<8sHBBIII", bytes(8), 0, *forms, n_embd, n_rows, n_pairs) + rest)


@pytest.mark.parametrize(
    "body",
    [
        dispatch_body(2, 0, 0),
        dispatch_body(0, 1, 1, b"\1\0\0"),
        dispatch_body(1, 2, 1, b"\1\1" + bytes(2 + 8)),  # fewer pairs than rows
        dispatch_body(1, 1, 256, b"\xff" + bytes(512 + 4)),  # more pairs than a u8 count can say
        dispatch_body(1, 2, 3, b"\1\1" + bytes(6 + 8)),  # the counts add up to 2, not 3
        dispatch_body(1, 2, 3, b"\0\3" + bytes(6 + 8)),  # a row that meets no expert
        dispatch_body(1, 1, 1, b"\1" + bytes(2 + 4), forms=(9, 0)),
        dispatch_body(1, 1, 1, b"\1" + bytes(2 + 4), forms=(0, 9)),
        dispatch_body(2**32 - 1, 2**32 - 1, 2**32 - 1),
    ],
)
def test_a_dispatch_whose_numbers_do_not_fit_is_refused(body: memoryview) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(FrameType.DISPATCH, body)


def test_an_accepted_flag_is_0_or_1() -> None:
    with pytest.raises(RemoteProtocolError, match="flag"):
        decode(FrameType.ACCEPTED, memoryview(bytes([2]) + bytes(8)))


def test_text_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="UTF-8"):
        decode_frame(bytes.fromhex("0406000000 1100 0200 c328"))


def test_text_is_cut_at_1000_bytes_between_characters() -> None:
    back = decode_frame(encode(m.Refusal(code=1, detail="é" * 600)))
    assert isinstance(back, m.Refusal)
    assert back.detail == "é" * 500
    back = decode_frame(encode(m.Refusal(code=1, detail="a" + "é" * 600)))
    assert isinstance(back, m.Refusal)
    assert back.detail == "a" + "é" * 499


def test_a_remote_text_cannot_steer_a_terminal() -> None:
    back = decode_frame(encode(m.Refusal(code=1, detail="\x1b[2Jgone\n\u202eevil")))
    assert isinstance(back, m.Refusal)
    assert back.detail == "?[2Jgone??evil"
    assert printable("plain é 漢") == "plain é 漢"


@pytest.mark.parametrize("code", [0x00, 0x06, 0x12, 0x42, IGNORABLE_FROM - 1])
def test_an_unknown_type_is_refused(code: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"0x{code:02x}"):
        frame_type_of(code)


@pytest.mark.parametrize("frame_type", FrameType)
def test_a_body_above_its_limit_is_refused_before_it_is_read(frame_type: FrameType) -> None:
    body = memoryview(bytes(1)) if not LIMITS[frame_type] else memoryview(bytearray(LIMITS[frame_type] + 1))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="too large"):
            decode(frame_type, body)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_count_in_a_small_body_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(FrameType.DISPATCH, dispatch_body(2**32 - 1, 2**31, 2**32 - 1, bytes(100)))
        with pytest.raises(RemoteProtocolError):
            decode(FrameType.RESULT, memoryview(struct.pack("<B3xIIII", 0, 2**32 - 1, 2**32 - 1, 0, 0)))
        with pytest.raises(RemoteProtocolError):
            decode(FrameType.RECORDS, memoryview(b"\xff\xff" + struct.pack("<II", 0, 2**32 - 1)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_rows_that_are_encoded_already_give_the_same_frame() -> None:
    message = f32_dispatch()
    encoded = encode_rows(message.rows, message.rows_codec)
    assert encode(dataclasses.replace(message, encoded_rows=encoded)) == encode(message)
    assert decode_frame(encode(message)).encoded_rows is None  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match="another size"):
        encode(dataclasses.replace(message, encoded_rows=encoded[:-1]))


def test_sending_a_body_above_its_limit_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="too large"):
        encode(m.Announce(record=bytes(LIMITS[FrameType.ANNOUNCE] + 1)))


@pytest.mark.parametrize("index", [-1, 65536])
def test_an_index_beyond_u16_is_our_own_mistake(index: int) -> None:
    with pytest.raises(LocalProtocolError, match="index"):
        encode(m.GetBlock(model_id=MODEL, layer=index, expert=0))


def test_arrays_of_a_dispatch_cannot_be_written() -> None:
    back = decode_frame(encode(f32_dispatch()))
    assert isinstance(back, m.Dispatch)
    assert not back.expert_ids.flags.writeable
    assert not back.row_counts.flags.writeable


def test_too_many_rows_are_refused_on_the_head_alone() -> None:
    head = bytes(8) + struct.pack("<HBBIII", 0, RowCodec.FP8, RowCodec.F32, 256, 4097, 4097)
    with pytest.raises(RemoteProtocolError, match="too many rows in one DISPATCH: got 4097, expected at most 4096"):
        decode(FrameType.DISPATCH, memoryview(head))
