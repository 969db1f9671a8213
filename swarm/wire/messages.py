"""What two nodes say to each other, as frozen values. How they become bytes is `frames`; when they may be said is `session`.

A link starts with three greetings on exchange 1, opened by the server:

    server                         client
      CHALLENGE nonce, versions  ->
                                 <-  HELLO node id, versions, signature
      WELCOME version            ->

After that either side opens exchanges: one request, one answer (or a REFUSAL).

    ANNOUNCE -> ACCEPTED     LOOKUP -> RECORDS          (registry)
    FIND -> RECORDS          GET_MEMBERS -> MEMBERS
    WATCH -> CHANGES
    GOSSIP -> NEWS           SYNC -> DIFFERENCES        (among registry nodes)
    PUSH -> RECORDS
    GET_MANIFEST -> MANIFEST GET_BLOCK -> BLOCK         (a backbone that offers its model)
    DISPATCH -> RESULT       GET_STATUS -> STATUS       (a peer)
    RESERVE -> RESERVED      CONNECT -> CHANNEL         (a relay)
    RELEASE -> DONE
    INCOMING -> DONE         NOTICE -> DONE             (a relay's client, whom the relay asks)
    OFFER_PATHS -> PATHS                                (two nodes that a relay has brought together)
    CHECK_REACH -> CHECKED   DIAL_BACK -> DONE          (who wants to know whether others reach it, a relay, its helpers)
    REACHED -> DONE
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from swarm.ids import ModelId, NodeId
from swarm.wire.rows import RowCodec

TAG_BYTES = 8  # of a record or a registry node, and of a digest, in what registry nodes tell each other
MAX_CANDIDATES = 8  # addresses that a node offers for direct paths
NONCE_BYTES = 16  # of a CHECK_REACH
MODEL_TAG_BYTES = 8  # enough to tell the models of one peer apart; the link itself is authenticated


class ErrorCode(IntEnum):
    """Why a request was refused. Numbers below 0x10 also close links and belong to RemoteProtocolError classes."""

    PROTOCOL = 0x01
    VERSION = 0x02
    IDENTITY = 0x03
    NOT_FOUND = 0x10
    BUSY = 0x11
    INTERNAL = 0x12
    NOT_ALLOWED = 0x13
    SHUTTING_DOWN = 0x14


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """The server's first word: a fresh nonce (32 bytes), its wire versions, and the address it sees the client at."""

    nonce: bytes
    versions: tuple[int, ...]
    observed_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The client proves which node it is: see `greetings.hello_statement` for what is signed."""

    node_id: NodeId
    versions: tuple[int, ...]
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The wire version that both sides use from here on."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An answer that is an error. `detail` is for people, at most 1,000 bytes of UTF-8."""

    code: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy(Refusal):
    """The refusal of a node that has too much to do, with the milliseconds after which to try again."""

    code: int = ErrorCode.BUSY
    retry_after_ms: int


# These two are made for each layer: frozen, each would take 1 to 1.5 us more to make (docs/performance.md). Nobody changes one.
@dataclass(slots=True, kw_only=True, eq=False)
class Dispatch:
    """Hidden-state rows for the experts of one layer at one peer. A row travels once however many experts it meets.

    Attributes:
        model_tag: the first 8 bytes of the model id.
        layer: the N of `blk.N`.
        rows_codec: how `rows` travels; `result_codec` how the answer is wanted: EXACT asks for raw per-expert rows,
            every other codec for weighted partial sums.
        row_counts: [N] uint8, pairs of each row, at least 1.
        expert_ids: [P] uint16, global ids, in row order; P = sum of row_counts.
        weights: [P] float32, or None with result_codec EXACT, whose weighting the backbone does.
        rows: [N, D] float32.
        encoded_rows: what `encode_rows(rows, rows_codec)` gives, where the sender has it already: it encodes a token
            once for all peers. None in what was received.
    """

    model_tag: bytes
    layer: int
    rows_codec: RowCodec
    result_codec: RowCodec
    row_counts: npt.NDArray[np.uint8]
    expert_ids: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float32] | None
    rows: npt.NDArray[np.float32]
    encoded_rows: bytes | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Result:
    """A peer's answer: raw rows [P, D] (codec EXACT) or partial sums [N, D], float32, with what it spent on them.

    Attributes:
        compute_us, queue_us: microseconds in the experts' compute and in the peer's queue before it.
    """

    codec: RowCodec
    rows: npt.NDArray[np.float32]
    compute_us: int
    queue_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """A signed record (swarm.registry.records) for the registry to keep."""

    record: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The registry's answer to ANNOUNCE.

    Attributes:
        is_new: false when it already held this record, or one with a higher seq.
        highest_seq: the highest it knows of that node, kind and model: an announcer that has lost its count goes above.
    """

    is_new: bool
    highest_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Asks for the records of one model, or, with None, for the models on offer."""

    model_id: ModelId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Signed records with the milliseconds each has left."""

    records: tuple[tuple[int, bytes], ...]


Told = tuple[int, bytes]  # the milliseconds that a signed record has left, and the record
Place = tuple[ModelId, int]  # a model and a bucket: see swarm.registry.ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """Asks a registry node for what it stores at these places, withdrawals included. Answered with RECORDS."""

    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GetMembers:
    """Asks who stores records. `known`: tags (8 bytes) of the registry-node records that the asker has."""

    known: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Registry nodes.

    Attributes:
        gone: of the tags that were known: those that no longer hold.
        records: signed registry-node records that the asker lacks.
    """

    gone: tuple[bytes, ...]
    records: tuple[Told, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Waits for changes of a model's records at one registry node; answered at once if there were any since `cursor`."""

    model_id: ModelId
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What has come, changed or been withdrawn since a cursor; nothing if the wait has ended without.

    Attributes:
        cursor: for the next WATCH.
    """

    cursor: int
    records: tuple[Told, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gossip:
    """Which registry nodes the sender knows: (first 8 bytes of the node id, seq of its record)."""

    summary: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The registry-node records that a GOSSIP lacks, and the tags of those that this side lacks: they are to be pushed."""

    wanted: tuple[bytes, ...]
    records: tuple[Told, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """What one replica has at places that both store: (place, digest of 8 bytes)."""

    digests: tuple[tuple[Place, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The places of a SYNC whose digests differ: (its index there, all entries here as (tag of 8 bytes, seq))."""

    places: tuple[tuple[int, tuple[tuple[bytes, int], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Records that one registry node passes on to another, and those it wants back, with RECORDS: (place, tag)."""

    records: tuple[Told, ...]
    wanted: tuple[tuple[Place, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GetManifest:
    """Asks for a model's manifest."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestBytes:
    """A manifest as canonical JSON; its sha256 is the model id that was asked for, which the receiver checks."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GetBlock:
    """Asks for the bytes of one (layer, expert)."""

    model_id: ModelId
    layer: int
    expert: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """The bytes of one (layer, expert): its tensors' planes in name order. The receiver checks them by the manifest."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStatus:
    """Asks a node how it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A node's state as one JSON object in UTF-8; `receipts` among it are for who asks, or what a peer presents."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One side's part of a channel at a relay; see swarm.net.relay_packets.

    Attributes:
        channel: 8 random bytes; `generation`: the relay's; `side`: 0 for who connects, 1 for who is called.
        key: 32 bytes, known to the relay and this side only.
        cookie: 16 bytes, for a first BIND from the address that the relay sees this side at; zero where it has none.
        idle_ms: after as long without a packet of either side the relay forgets the channel.
        rate_kbit_s: what the relay lets through in each direction; more is dropped.
    """

    channel: bytes
    generation: int
    side: int
    key: bytes
    cookie: bytes
    idle_ms: int
    rate_kbit_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Asks a relay to accept calls for the sender, for so many milliseconds; said again, it renews."""

    lifetime_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A reservation, the same one when it is renewed.

    Attributes:
        ttl_ms: from now on; at most what was asked for.
        n_channels: that the node may have at a time.
        leg: the reservation's own, for its keepalives.
        observed_address: `host:port` that the relay sees the node at.
        voucher: what the relay signed (swarm.wire.vouchers): who has it may CONNECT to the node.
    """

    ttl_ms: int
    n_channels: int
    leg: Leg
    observed_address: str
    voucher: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Asks a relay for a channel to a node that has a reservation there."""

    node_id: NodeId
    voucher: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """The caller's leg of a new channel; the called node has said that it wants it."""

    leg: Leg


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """The relay asks a node that has a reservation to take a call: it answers DONE or refuses."""

    caller: NodeId
    leg: Leg


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Gives up a channel, or by its leg's channel a reservation. Answered with DONE, also if it is gone already."""

    channel: bytes


class NoticeKind(IntEnum):
    """What a relay tells its clients."""

    DRAINING = 1  # it restarts: nothing new, and what there is ends in `in_ms`
    REPLACED = 2  # another connection with the same key has the reservation now


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A relay tells a client of it what happens. `kind` is a NoticeKind, or of a later version."""

    kind: int
    in_ms: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Yes, and nothing more."""


class Mapping(IntEnum):
    """What is between a node and the others, as far as it can tell from where others see it."""

    UNKNOWN = 0
    NONE = 1  # seen at an address of its own
    SAME = 2  # a NAT that gives one address for all destinations: a hole can be punched
    VARYING = 3  # a NAT that gives another address for each destination ("symmetric")
    BLOCKED = 4  # no UDP gets through


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferPaths:
    """Tells the other side of a relayed connection where its packets may reach the sender directly, and asks the same.

    Attributes:
        addresses: `host:port` with IP literals, at most MAX_CANDIDATES; probed by both sides at once.
        mapping: a Mapping, or of a later version.
    """

    addresses: tuple[str, ...]
    mapping: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The answer to OFFER_PATHS: the same of the other side."""

    addresses: tuple[str, ...]
    mapping: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReach:
    """Asks a relay to let other nodes dial the sender, at the address that the relay sees it at and this port.

    `nonce`: 16 bytes, which they show in REACHED.
    """

    port: int
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How many nodes were asked to dial, and how many of them say that they got through. Only REACHED proves it."""

    n_asked: int
    n_reached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBack:
    """A relay asks a node that is connected to it to dial another one and show it the nonce. Answered with DONE if it worked."""

    node_id: NodeId
    nonce: bytes
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Shows the nonce of a CHECK_REACH to who asked: this connection was dialled from outside."""

    nonce: bytes


Greeting = Challenge | Hello | Welcome
RegistryRequest = Announce | Lookup | Find | GetMembers | Watch | Gossip | Sync | Push
RegistryResponse = Accepted | Records | Members | Changes | News | Differences
RelayRequest = Reserve | Connect | Incoming | Release | Notice
RelayResponse = Reserved | Channel | Done
PathRequest = OfferPaths | CheckReach | DialBack | Reached
PathResponse = Paths | Checked
Request = Dispatch | RegistryRequest | GetManifest | GetBlock | GetStatus | RelayRequest | PathRequest
Response = Result | RegistryResponse | ManifestBytes | BlockBytes | Status | RelayResponse | PathResponse
Message = Greeting | Request | Response | Refusal

RESPONSE_TO: dict[type[Request], type[Response]] = {
    Dispatch: Result,
    Announce: Accepted,
    Lookup: Records,
    Find: Records,
    GetMembers: Members,
    Watch: Changes,
    Gossip: News,
    Sync: Differences,
    Push: Records,
    GetManifest: ManifestBytes,
    GetBlock: BlockBytes,
    GetStatus: Status,
    Reserve: Reserved,
    Connect: Channel,
    Incoming: Done,
    Release: Done,
    Notice: Done,
    OfferPaths: Paths,
    CheckReach: Checked,
    DialBack: Done,
    Reached: Done,
}
