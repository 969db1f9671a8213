"""Messages to bytes and back. Knows nothing of links, order or time. All numbers are little-endian.

    frame          u8 type, u32 length of the body, body

    type  message       body
    0x01  CHALLENGE     32 nonce, versions, text observed address
    0x02  HELLO         32 node id, versions, 64 signature
    0x03  WELCOME       u16 version
    0x04  REFUSAL       u16 code, text detail
    0x05  BUSY          u32 ms to wait before trying again, text detail: a refusal with the code BUSY
    0x10  DISPATCH      8 model tag, u16 layer, u8 codec of the rows, u8 codec wanted back, u32 D, u32 N, u32 P,
                        N x u8 pairs of each row, P x u16 expert id, P x f32 weight (absent if exact is wanted back),
                        N rows
    0x11  RESULT        u8 codec, 3 zero, u32 rows, u32 D, u32 compute us, u32 queue us, rows
    0x20  ANNOUNCE      signed record
    0x21  ACCEPTED      u8 is new (0 or 1), u64 highest seq
    0x22  LOOKUP        32 model id, or nothing: which models are there?
    0x23  RECORDS       u16 n, n x (u32 ms left, u32 length, signed record)
    0x24  FIND          u16 n, n x place
    0x25  GET_MEMBERS   u16 n, n x 8 tag
    0x26  MEMBERS       u16 n, n x 8 tag, records
    0x27  WATCH         32 model id, u64 cursor
    0x28  CHANGES       u64 cursor, records
    0x29  GOSSIP        u16 n, n x (8 tag, u64 seq)
    0x2a  NEWS          u16 n, n x 8 tag, records
    0x2b  SYNC          u16 n, n x (place, 8 digest)
    0x2c  DIFFERENCES   u16 n, n x (u16 index, u16 k, k x (8 tag, u64 seq))
    0x2d  PUSH          u16 n, n x (place, 8 tag), records
    0x30  GET_MANIFEST  32 model id
    0x31  MANIFEST      canonical JSON
    0x32  GET_BLOCK     32 model id, u16 layer, u16 expert
    0x33  BLOCK         bytes of the tensors' planes, in name order
    0x40  GET_STATUS    nothing
    0x41  STATUS        one JSON object
    0x50  RESERVE       u32 ms
    0x51  RESERVED      u32 ms, u16 channels, leg, text observed address, signed voucher
    0x52  CONNECT       32 node id, signed voucher
    0x53  CHANNEL       leg
    0x54  INCOMING      32 caller's node id, leg
    0x55  RELEASE       8 channel
    0x56  NOTICE        u8 kind, u32 ms, text detail
    0x57  DONE          nothing
    0x58  OFFER_PATHS   u8 mapping, u8 n, n x text address
    0x59  PATHS         u8 mapping, u8 n, n x text address
    0x5a  CHECK_REACH   u16 port, 16 nonce
    0x5b  CHECKED       u8 asked, u8 reached
    0x5c  DIAL_BACK     32 node id, 16 nonce, text address
    0x5d  REACHED       16 nonce

    versions = u8 n, n x u16        text = u16 length, UTF-8
    place = 32 model id, u16 bucket  records = as the body of RECORDS
    leg = 8 channel, u32 generation, u8 side, 32 key, 16 cookie, u32 ms until idle, u32 kbit/s

Types from 0x80 on may be ignored by whoever does not know them; below, an unknown type is an error.
Each type has a largest body (LIMITS), checked on the header, before any memory is taken for the body.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

import numpy as np

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.ids import MAX_INDEX, ModelId, NodeId
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec, decode_rows, encode_rows, row_bytes

HEADER = struct.Struct("<BI")
IGNORABLE_FROM = 0x80
KB, MB = 1 << 10, 1 << 20


class FrameType(IntEnum):
    """The first byte of a frame."""

    CHALLENGE = 0x01
    HELLO = 0x02
    WELCOME = 0x03
    REFUSAL = 0x04
    BUSY = 0x05
    DISPATCH = 0x10
    RESULT = 0x11
    ANNOUNCE = 0x20
    ACCEPTED = 0x21
    LOOKUP = 0x22
    RECORDS = 0x23
    FIND = 0x24
    GET_MEMBERS = 0x25
    MEMBERS = 0x26
    WATCH = 0x27
    CHANGES = 0x28
    GOSSIP = 0x29
    NEWS = 0x2A
    SYNC = 0x2B
    DIFFERENCES = 0x2C
    PUSH = 0x2D
    GET_MANIFEST = 0x30
    MANIFEST = 0x31
    GET_BLOCK = 0x32
    BLOCK = 0x33
    GET_STATUS = 0x40
    STATUS = 0x41
    RESERVE = 0x50
    RESERVED = 0x51
    CONNECT = 0x52
    CHANNEL = 0x53
    INCOMING = 0x54
    RELEASE = 0x55
    NOTICE = 0x56
    DONE = 0x57
    OFFER_PATHS = 0x58
    PATHS = 0x59
    CHECK_REACH = 0x5A
    CHECKED = 0x5B
    DIAL_BACK = 0x5C
    REACHED = 0x5D


# Largest bodies, bytes. 96 MB holds one expert of DeepSeek-V3 in F16 (3 x 7168 x 2048 x 2 = 88 MB), the largest block in
# sight, and 2,048 rows of D=8192 in f32 (67 MB). The small ones are the byte table's own sums, or guessed with room.
LIMITS: dict[FrameType, int] = {
    FrameType.CHALLENGE: KB,
    FrameType.HELLO: KB,
    FrameType.WELCOME: 2,
    FrameType.REFUSAL: 2 * KB,
    FrameType.BUSY: 2 * KB,
    FrameType.DISPATCH: 96 * MB,
    FrameType.RESULT: 96 * MB,
    FrameType.ANNOUNCE: 20 * KB,
    FrameType.ACCEPTED: 9,
    FrameType.LOOKUP: 32,
    FrameType.RECORDS: 16 * MB,
    FrameType.FIND: 16 * KB,
    FrameType.GET_MEMBERS: 64 * KB,
    FrameType.MEMBERS: 4 * MB,
    FrameType.WATCH: 40,
    FrameType.CHANGES: 4 * MB,
    FrameType.GOSSIP: 128 * KB,
    FrameType.NEWS: MB,
    FrameType.SYNC: 64 * KB,
    FrameType.DIFFERENCES: MB,
    FrameType.PUSH: MB,
    FrameType.GET_MANIFEST: 32,
    FrameType.MANIFEST: 16 * MB,
    FrameType.GET_BLOCK: 36,
    FrameType.BLOCK: 96 * MB,
    FrameType.GET_STATUS: 0,
    FrameType.STATUS: 4 * MB,
    FrameType.RESERVE: 4,
    FrameType.RESERVED: 2 * KB,
    FrameType.CONNECT: KB,
    FrameType.CHANNEL: 69,
    FrameType.INCOMING: 101,
    FrameType.RELEASE: 8,
    FrameType.NOTICE: 2 * KB,
    FrameType.DONE: 0,
    FrameType.OFFER_PATHS: KB,
    FrameType.PATHS: KB,
    FrameType.CHECK_REACH: 18,
    FrameType.CHECKED: 2,
    FrameType.DIAL_BACK: 128,
    FrameType.REACHED: 16,
}
FRAME_TYPE_OF: dict[type[m.Message], FrameType] = {
    m.Challenge: FrameType.CHALLENGE,
    m.Hello: FrameType.HELLO,
    m.Welcome: FrameType.WELCOME,
    m.Refusal: FrameType.REFUSAL,
    m.Busy: FrameType.BUSY,
    m.Dispatch: FrameType.DISPATCH,
    m.Result: FrameType.RESULT,
    m.Announce: FrameType.ANNOUNCE,
    m.Accepted: FrameType.ACCEPTED,
    m.Lookup: FrameType.LOOKUP,
    m.Records: FrameType.RECORDS,
    m.Find: FrameType.FIND,
    m.GetMembers: FrameType.GET_MEMBERS,
    m.Members: FrameType.MEMBERS,
    m.Watch: FrameType.WATCH,
    m.Changes: FrameType.CHANGES,
    m.Gossip: FrameType.GOSSIP,
    m.News: FrameType.NEWS,
    m.Sync: FrameType.SYNC,
    m.Differences: FrameType.DIFFERENCES,
    m.Push: FrameType.PUSH,
    m.GetManifest: FrameType.GET_MANIFEST,
    m.ManifestBytes: FrameType.MANIFEST,
    m.GetBlock: FrameType.GET_BLOCK,
    m.BlockBytes: FrameType.BLOCK,
    m.GetStatus: FrameType.GET_STATUS,
    m.Status: FrameType.STATUS,
    m.Reserve: FrameType.RESERVE,
    m.Reserved: FrameType.RESERVED,
    m.Connect: FrameType.CONNECT,
    m.Channel: FrameType.CHANNEL,
    m.Incoming: FrameType.INCOMING,
    m.Release: FrameType.RELEASE,
    m.Notice: FrameType.NOTICE,
    m.Done: FrameType.DONE,
    m.OfferPaths: FrameType.OFFER_PATHS,
    m.Paths: FrameType.PATHS,
    m.CheckReach: FrameType.CHECK_REACH,
    m.Checked: FrameType.CHECKED,
    m.DialBack: FrameType.DIAL_BACK,
    m.Reached: FrameType.REACHED,
}
_FRAME_TYPES = {int(frame_type): frame_type for frame_type in FrameType}
REQUEST_TYPES = frozenset(FRAME_TYPE_OF[request] for request in m.RESPONSE_TO)

# Rows of one DISPATCH; eight times llama.cpp's default ubatch. In compressed forms 96 MB hold 100,000 rows, which grow
# fourfold when decoded and again by every expert that they meet.
MAX_ROWS = 4096

_DISPATCH = struct.Struct(f"<{m.MODEL_TAG_BYTES}sHBBIII")
_RESULT = struct.Struct("<B3xIIII")
# With their headers.
_DISPATCH_FRAME = struct.Struct(f"<BI{m.MODEL_TAG_BYTES}sHBBIII")
_RESULT_FRAME = struct.Struct("<BIB3xIIII")
_ENTRY = struct.Struct(f"<{m.TAG_BYTES}sQ")
_PLACE = struct.Struct("<32sH")
_PLACED = struct.Struct(f"<32sH{m.TAG_BYTES}s")
_LEG = struct.Struct("<8sIB32s16sII")
_DISPATCH_BYTES, RESULT_HEAD_BYTES = _DISPATCH.size, _RESULT.size
_U1, _U2, _F4 = np.dtype("u1"), np.dtype("<u2"), np.dtype("<f4")
_MAX_TEXT_BYTES = 1000
_U32 = (1 << 32) - 1


def encode(message: m.Message) -> bytes:
    """Return the whole frame of `message`.

    Raises:
        LocalProtocolError: the body is larger than its type allows.
    """
    if type(message) is m.Dispatch:  # these two are of every layer: in two thirds of the time
        return _encode_dispatch(message)
    if type(message) is m.Result:
        return _encode_result(message)
    frame_type = FRAME_TYPE_OF[type(message)]
    parts = _ENCODERS[frame_type](message)
    size = sum(map(len, parts))
    if size > LIMITS[frame_type]:
        raise _no_room(frame_type, size)
    return b"".join((HEADER.pack(frame_type, size), *parts))


def _no_room(frame_type: FrameType, size: int) -> LocalProtocolError:
    limit = LIMITS[frame_type]
    return LocalProtocolError(f"{frame_type.name} too large: got {size} bytes, expected at most {limit}")


def decode(frame_type: FrameType, body: memoryview) -> m.Message:
    """Return the message of one whole body. Its row_counts, expert_ids and weights share the body's memory, read-only.

    Raises:
        RemoteProtocolError: whatever else the bytes are.
    """
    if len(body) > LIMITS[frame_type]:
        raise RemoteProtocolError(
            f"{frame_type.name} too large: got {len(body)} bytes, expected at most {LIMITS[frame_type]}"
        )
    if frame_type is FrameType.DISPATCH:  # these two are of every layer: without a reader, in half of the time
        return _decode_dispatch(body)
    if frame_type is FrameType.RESULT:
        return _decode_result(body)
    reader = _Reader(body, frame_type.name)
    message = _DECODERS[frame_type](reader)
    reader.expect_end()
    return message


def decode_frame(data: bytes) -> m.Message:
    """Return the message of exactly one frame, header included; raises RemoteProtocolError."""
    if len(data) < HEADER.size:
        raise RemoteProtocolError(f"frame cut short: got {len(data)} bytes, expected at least {HEADER.size}")
    code, size = HEADER.unpack_from(data)
    if size != len(data) - HEADER.size:
        raise RemoteProtocolError(f"frame length is wrong: got {len(data) - HEADER.size} bytes, header says {size}")
    return decode(frame_type_of(code), memoryview(data)[HEADER.size :])


def frame_type_of(code: int) -> FrameType:
    """Return the known type; raises RemoteProtocolError."""
    frame_type = _FRAME_TYPES.get(code)  # a tenth of what the enum's own look-up takes
    if frame_type is None:
        raise RemoteProtocolError(f"unknown frame type: got 0x{code:02x}")
    return frame_type


def printable(text: str) -> str:
    """Return an untrusted text with `?` for what a terminal or a log would act on: control and format characters."""
    return "".join(character if character.isprintable() else "?" for character in text)


class _Reader:
    """Takes typed pieces off one body; every shortage is a RemoteProtocolError."""

    def __init__(self, body: memoryview, name: str) -> None:
        self._body = body
        self._at = 0
        self._name = name

    @property
    def n_left(self) -> int:
        return len(self._body) - self._at

    def take(self, size: int) -> memoryview:
        if size > self.n_left:
            raise RemoteProtocolError(f"{self._name} cut short: got {self.n_left} bytes, expected {size} more")
        piece = self._body[self._at : self._at + size]
        self._at += size
        return piece

    def rest(self) -> bytes:
        return bytes(self.take(self.n_left))

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def number(self, code: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0])

    def versions(self) -> tuple[int, ...]:
        n = self.number("B")
        return struct.unpack(f"<{n}H", self.take(2 * n))

    def text(self) -> str:
        raw = bytes(self.take(self.number("H")))
        try:
            return printable(raw.decode())
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(f"{self._name} holds text that is not UTF-8") from error

    def expect_end(self) -> None:
        if self.n_left:
            raise RemoteProtocolError(f"{self._name} too long: got {self.n_left} bytes after its end")


def _versions(versions: tuple[int, ...]) -> bytes:
    return struct.pack(f"<B{len(versions)}H", len(versions), *versions)


def _text(text: str) -> bytes:
    raw = text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore").encode()
    return struct.pack("<H", len(raw)) + raw


def _encode_dispatch(d: m.Dispatch) -> bytes:
    """Return the whole frame."""
    n_rows, n_embd = d.rows.shape
    if n_rows > MAX_ROWS:
        raise LocalProtocolError(f"too many rows in one DISPATCH: got {n_rows}, expected at most {MAX_ROWS}")
    row_counts = d.row_counts.astype(_U1, copy=False).tobytes()
    expert_ids = d.expert_ids.astype(_U2, copy=False).tobytes()
    weights = b"" if d.weights is None else d.weights.astype(_F4, copy=False).tobytes()
    rows = d.encoded_rows
    if rows is None:
        rows = encode_rows(d.rows, d.rows_codec)
    assert len(rows) == n_rows * row_bytes(n_embd, d.rows_codec), "encoded rows of another size"
    size = _DISPATCH_BYTES + len(row_counts) + len(expert_ids) + len(weights) + len(rows)
    if size > LIMITS[FrameType.DISPATCH]:
        raise _no_room(FrameType.DISPATCH, size)
    codes, n_pairs = (d.rows_codec, d.result_codec), len(d.expert_ids)
    head = _DISPATCH_FRAME.pack(FrameType.DISPATCH, size, d.model_tag, d.layer, *codes, n_embd, n_rows, n_pairs)
    return b"".join((head, row_counts, expert_ids, weights, rows))


def _cut_short(name: str, body: memoryview, expected: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"{name} cut short: got {len(body)} bytes, expected at least {expected}")


def _decode_dispatch(body: memoryview) -> m.Dispatch:
    if len(body) < _DISPATCH_BYTES:
        raise _cut_short("DISPATCH", body, _DISPATCH_BYTES)
    tag, layer, code_out, code_back, n_embd, n_rows, n_pairs = _DISPATCH.unpack_from(body)
    rows_codec, result_codec = RowCodec.from_code(code_out), RowCodec.from_code(code_back)
    if n_rows > MAX_ROWS:
        raise RemoteProtocolError(f"too many rows in one DISPATCH: got {n_rows}, expected at most {MAX_ROWS}")
    if not n_rows or not n_embd or not n_rows <= n_pairs <= n_rows * 255:
        raise RemoteProtocolError(f"DISPATCH counts do not fit: got {n_rows} rows of {n_embd}, {n_pairs} pairs")
    ids_at = _DISPATCH_BYTES + n_rows
    weights_at = ids_at + 2 * n_pairs
    rows_at = weights_at if result_codec is RowCodec.EXACT else weights_at + 4 * n_pairs
    if len(body) < rows_at:
        raise _cut_short("DISPATCH", body, rows_at)
    row_counts = np.frombuffer(body, _U1, n_rows, _DISPATCH_BYTES)
    expert_ids = np.frombuffer(body, _U2, n_pairs, ids_at)
    weights = np.frombuffer(body, _F4, n_pairs, weights_at) if rows_at > weights_at else None
    if n_rows == 1:  # a decoded token: the reductions would take a third of the decoding
        is_whole = body[_DISPATCH_BYTES] == n_pairs
    else:
        is_whole = bool(row_counts.all()) and int(row_counts.sum(dtype=np.int64)) == n_pairs
    if not is_whole:
        raise RemoteProtocolError(f"DISPATCH row counts do not add up: expected {n_pairs} pairs, each row at least one")
    rows = decode_rows(body[rows_at:], n_rows, n_embd, rows_codec)
    return m.Dispatch(
        model_tag=tag,
        layer=layer,
        rows_codec=rows_codec,
        result_codec=result_codec,
        row_counts=row_counts,
        expert_ids=expert_ids,
        weights=weights,
        rows=rows,
    )


def _encode_result(result: m.Result) -> bytes:
    """Return the whole frame."""
    n_rows, n_embd = result.rows.shape
    rows = encode_rows(result.rows, result.codec)
    size = RESULT_HEAD_BYTES + len(rows)
    if size > LIMITS[FrameType.RESULT]:
        raise _no_room(FrameType.RESULT, size)
    compute_us, queue_us = min(result.compute_us, _U32), min(result.queue_us, _U32)
    return _RESULT_FRAME.pack(FrameType.RESULT, size, result.codec, n_rows, n_embd, compute_us, queue_us) + rows


def _decode_result(body: memoryview) -> m.Result:
    if len(body) < _RESULT.size:
        raise _cut_short("RESULT", body, _RESULT.size)
    code, n_rows, n_embd, compute_us, queue_us = _RESULT.unpack_from(body)
    codec = RowCodec.from_code(code)
    rows = decode_rows(body[_RESULT.size :], n_rows, n_embd, codec)
    return m.Result(codec=codec, rows=rows, compute_us=compute_us, queue_us=queue_us)


def _told(records: tuple[m.Told, ...]) -> list[bytes]:
    parts = [struct.pack("<H", len(records))]
    for left_ms, record in records:
        parts += [struct.pack("<II", left_ms, len(record)), record]
    return parts


def _read_told(r: _Reader) -> tuple[m.Told, ...]:
    records = []
    for _ in range(r.number("H")):
        left_ms, size = r.number("I"), r.number("I")
        records.append((left_ms, bytes(r.take(size))))
    return tuple(records)


def _tags(tags: tuple[bytes, ...]) -> list[bytes]:
    return [struct.pack("<H", len(tags)), *tags]


def _read_tags(r: _Reader) -> tuple[bytes, ...]:
    return tuple(bytes(r.take(m.TAG_BYTES)) for _ in range(r.number("H")))


def _entries(entries: tuple[tuple[bytes, int], ...]) -> list[bytes]:
    return [struct.pack("<H", len(entries)), *(_ENTRY.pack(tag, seq) for tag, seq in entries)]


def _read_entries(r: _Reader) -> tuple[tuple[bytes, int], ...]:
    return tuple(_ENTRY.iter_unpack(r.take(_ENTRY.size * r.number("H"))))


def _at_places(items: tuple[tuple[m.Place, bytes], ...]) -> list[bytes]:
    return [struct.pack("<H", len(items)), *(_PLACED.pack(model.raw, bucket, tag) for (model, bucket), tag in items)]


def _read_at_places(r: _Reader) -> tuple[tuple[m.Place, bytes], ...]:
    items = _PLACED.iter_unpack(r.take(_PLACED.size * r.number("H")))
    return tuple(((ModelId(model), bucket), tag) for model, bucket, tag in items)


def _encode_find(find: m.Find) -> list[bytes]:
    return [struct.pack("<H", len(find.places)), *(_PLACE.pack(model.raw, bucket) for model, bucket in find.places)]


def _decode_find(r: _Reader) -> m.Find:
    places = _PLACE.iter_unpack(r.take(_PLACE.size * r.number("H")))
    return m.Find(places=tuple((ModelId(model), bucket) for model, bucket in places))


def _encode_differences(differences: m.Differences) -> list[bytes]:
    parts = [struct.pack("<H", len(differences.places))]
    for index, entries in differences.places:
        parts += [struct.pack("<H", index), *_entries(entries)]
    return parts


def _decode_differences(r: _Reader) -> m.Differences:
    return m.Differences(places=tuple((r.number("H"), _read_entries(r)) for _ in range(r.number("H"))))


def _decode_accepted(r: _Reader) -> m.Accepted:
    value = r.number("B")
    if value > 1:
        raise RemoteProtocolError(f"ACCEPTED flag is wrong: got {value}, expected 0 or 1")
    return m.Accepted(is_new=bool(value), highest_seq=r.number("Q"))


def _decode_lookup(r: _Reader) -> m.Lookup:
    return m.Lookup(model_id=ModelId(bytes(r.take(32))) if r.n_left else None)


def _leg(leg: m.Leg) -> bytes:
    return _LEG.pack(
        leg.channel, leg.generation, leg.side, leg.key, leg.cookie, min(leg.idle_ms, _U32), min(leg.rate_kbit_s, _U32)
    )


def _read_leg(r: _Reader) -> m.Leg:
    channel, generation, side, key, cookie, idle_ms, rate_kbit_s = _LEG.unpack(r.take(_LEG.size))
    if side > 1:
        raise RemoteProtocolError(f"a leg's side is wrong: got {side}, expected 0 or 1")
    return m.Leg(
        channel=channel,
        generation=generation,
        side=side,
        key=key,
        cookie=cookie,
        idle_ms=idle_ms,
        rate_kbit_s=rate_kbit_s,
    )


def _decode_reserved(r: _Reader) -> m.Reserved:
    return m.Reserved(
        ttl_ms=r.number("I"),
        n_channels=r.number("H"),
        leg=_read_leg(r),
        observed_address=r.text(),
        voucher=r.rest(),
    )


def _candidates(mapping: int, addresses: tuple[str, ...]) -> list[bytes]:
    return [struct.pack("<BB", mapping, len(addresses)), *(_text(each) for each in addresses)]


def _read_candidates(r: _Reader) -> tuple[str, ...]:
    n = r.number("B")
    if n > m.MAX_CANDIDATES:
        raise RemoteProtocolError(f"too many addresses: got {n}, expected at most {m.MAX_CANDIDATES}")
    return tuple(r.text() for _ in range(n))


def _index(value: int) -> int:
    if not 0 <= value <= MAX_INDEX:
        raise LocalProtocolError(f"index out of range: got {value}, expected 0 to {MAX_INDEX}")
    return value


# Lambdas, since each is one line of the byte table above.
_ENCODERS: dict[FrameType, Callable[..., list[bytes]]] = {
    FrameType.CHALLENGE: lambda x: [x.nonce, _versions(x.versions), _text(x.observed_address)],
    FrameType.HELLO: lambda x: [x.node_id.raw, _versions(x.versions), x.signature],
    FrameType.WELCOME: lambda x: [struct.pack("<H", x.version)],
    FrameType.REFUSAL: lambda x: [struct.pack("<H", x.code), _text(x.detail)],
    FrameType.BUSY: lambda x: [struct.pack("<I", x.retry_after_ms), _text(x.detail)],
    FrameType.ANNOUNCE: lambda x: [x.record],
    FrameType.ACCEPTED: lambda x: [struct.pack("<BQ", x.is_new, x.highest_seq)],
    FrameType.LOOKUP: lambda x: [x.model_id.raw] if x.model_id else [],
    FrameType.RECORDS: lambda x: _told(x.records),
    FrameType.FIND: _encode_find,
    FrameType.GET_MEMBERS: lambda x: _tags(x.known),
    FrameType.MEMBERS: lambda x: [*_tags(x.gone), *_told(x.records)],
    FrameType.WATCH: lambda x: [x.model_id.raw, struct.pack("<Q", x.cursor)],
    FrameType.CHANGES: lambda x: [struct.pack("<Q", x.cursor), *_told(x.records)],
    FrameType.GOSSIP: lambda x: _entries(x.summary),
    FrameType.NEWS: lambda x: [*_tags(x.wanted), *_told(x.records)],
    FrameType.SYNC: lambda x: _at_places(x.digests),
    FrameType.DIFFERENCES: _encode_differences,
    FrameType.PUSH: lambda x: [*_at_places(x.wanted), *_told(x.records)],
    FrameType.GET_MANIFEST: lambda x: [x.model_id.raw],
    FrameType.MANIFEST: lambda x: [x.data],
    FrameType.GET_BLOCK: lambda x: [x.model_id.raw, struct.pack("<HH", _index(x.layer), _index(x.expert))],
    FrameType.BLOCK: lambda x: [x.data],
    FrameType.GET_STATUS: lambda x: [],
    FrameType.STATUS: lambda x: [x.data],
    FrameType.RESERVE: lambda x: [struct.pack("<I", min(x.lifetime_ms, _U32))],
    FrameType.RESERVED: lambda x: [
        struct.pack("<IH", min(x.ttl_ms, _U32), x.n_channels),
        _leg(x.leg),
        _text(x.observed_address),
        x.voucher,
    ],
    FrameType.CONNECT: lambda x: [x.node_id.raw, x.voucher],
    FrameType.CHANNEL: lambda x: [_leg(x.leg)],
    FrameType.INCOMING: lambda x: [x.caller.raw, _leg(x.leg)],
    FrameType.RELEASE: lambda x: [x.channel],
    FrameType.NOTICE: lambda x: [struct.pack("<BI", x.kind, min(x.in_ms, _U32)), _text(x.detail)],
    FrameType.DONE: lambda x: [],
    FrameType.OFFER_PATHS: lambda x: _candidates(x.mapping, x.addresses),
    FrameType.PATHS: lambda x: _candidates(x.mapping, x.addresses),
    FrameType.CHECK_REACH: lambda x: [struct.pack("<H", x.port), x.nonce],
    FrameType.CHECKED: lambda x: [struct.pack("<BB", min(x.n_asked, 255), min(x.n_reached, 255))],
    FrameType.DIAL_BACK: lambda x: [x.node_id.raw, x.nonce, _text(x.address)],
    FrameType.REACHED: lambda x: [x.nonce],
}
_DECODERS: dict[FrameType, Callable[[_Reader], m.Message]] = {
    FrameType.CHALLENGE: lambda r: m.Challenge(
        nonce=bytes(r.take(32)), versions=r.versions(), observed_address=r.text()
    ),
    FrameType.HELLO: lambda r: m.Hello(
        node_id=NodeId(bytes(r.take(32))), versions=r.versions(), signature=bytes(r.take(64))
    ),
    FrameType.WELCOME: lambda r: m.Welcome(version=r.number("H")),
    FrameType.REFUSAL: lambda r: m.Refusal(code=r.number("H"), detail=r.text()),
    FrameType.BUSY: lambda r: m.Busy(retry_after_ms=r.number("I"), detail=r.text()),
    FrameType.ANNOUNCE: lambda r: m.Announce(record=r.rest()),
    FrameType.ACCEPTED: _decode_accepted,
    FrameType.LOOKUP: _decode_lookup,
    FrameType.RECORDS: lambda r: m.Records(records=_read_told(r)),
    FrameType.FIND: _decode_find,
    FrameType.GET_MEMBERS: lambda r: m.GetMembers(known=_read_tags(r)),
    FrameType.MEMBERS: lambda r: m.Members(gone=_read_tags(r), records=_read_told(r)),
    FrameType.WATCH: lambda r: m.Watch(model_id=ModelId(bytes(r.take(32))), cursor=r.number("Q")),
    FrameType.CHANGES: lambda r: m.Changes(cursor=r.number("Q"), records=_read_told(r)),
    FrameType.GOSSIP: lambda r: m.Gossip(summary=_read_entries(r)),
    FrameType.NEWS: lambda r: m.News(wanted=_read_tags(r), records=_read_told(r)),
    FrameType.SYNC: lambda r: m.Sync(digests=_read_at_places(r)),
    FrameType.DIFFERENCES: _decode_differences,
    FrameType.PUSH: lambda r: m.Push(wanted=_read_at_places(r), records=_read_told(r)),
    FrameType.GET_MANIFEST: lambda r: m.GetManifest(model_id=ModelId(bytes(r.take(32)))),
    FrameType.MANIFEST: lambda r: m.ManifestBytes(data=r.rest()),
    FrameType.GET_BLOCK: lambda r: m.GetBlock(
        model_id=ModelId(bytes(r.take(32))), layer=r.number("H"), expert=r.number("H")
    ),
    FrameType.BLOCK: lambda r: m.BlockBytes(data=r.rest()),
    FrameType.GET_STATUS: lambda r: m.GetStatus(),
    FrameType.STATUS: lambda r: m.Status(data=r.rest()),
    FrameType.RESERVE: lambda r: m.Reserve(lifetime_ms=r.number("I")),
    FrameType.RESERVED: _decode_reserved,
    FrameType.CONNECT: lambda r: m.Connect(node_id=NodeId(bytes(r.take(32))), voucher=r.rest()),
    FrameType.CHANNEL: lambda r: m.Channel(leg=_read_leg(r)),
    FrameType.INCOMING: lambda r: m.Incoming(caller=NodeId(bytes(r.take(32))), leg=_read_leg(r)),
    FrameType.RELEASE: lambda r: m.Release(channel=bytes(r.take(8))),
    FrameType.NOTICE: lambda r: m.Notice(kind=r.number("B"), in_ms=r.number("I"), detail=r.text()),
    FrameType.DONE: lambda r: m.Done(),
    FrameType.OFFER_PATHS: lambda r: m.OfferPaths(mapping=r.number("B"), addresses=_read_candidates(r)),
    FrameType.PATHS: lambda r: m.Paths(mapping=r.number("B"), addresses=_read_candidates(r)),
    FrameType.CHECK_REACH: lambda r: m.CheckReach(port=r.number("H"), nonce=bytes(r.take(m.NONCE_BYTES))),
    FrameType.CHECKED: lambda r: m.Checked(n_asked=r.number("B"), n_reached=r.number("B")),
    FrameType.DIAL_BACK: lambda r: m.DialBack(
        node_id=NodeId(bytes(r.take(32))), nonce=bytes(r.take(m.NONCE_BYTES)), address=r.text()
    ),
    FrameType.REACHED: lambda r: m.Reached(nonce=bytes(r.take(m.NONCE_BYTES))),
}
