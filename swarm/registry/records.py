"""Signed records: what a node says about itself, in bytes that anybody can check and nobody else can make.

Knows nothing of storage, expiry clocks or the network: who keeps a record is `table`, who carries it is the service.

A signed record on the wire, at most 16,384 bytes:

    offset  size  field
    0       64    ed25519 signature by the record's own node over b"swarm record 1\\0" + payload
    64      n     payload: canonical JSON (ASCII, keys sorted, no spaces, integers only, no duplicate keys)

The payload is an object with `kind` and that kind's fields:

    kind "experts"     node seq ttl_s model model_name experts addresses exact_kernels wire_versions
                       [is_loading] [is_choosing] [is_public] [vouchers] [name] [place] [upload_bytes_s]
    kind "model"       node seq ttl_s model model_name n_expert n_expert_used moe_layers n_embd size_bytes addresses
                       offers_blocks [is_public] [vouchers]
    kind "registry"    node seq ttl_s addresses
    kind "histogram"   node seq ttl_s model n_tokens window_s loads
    kind "withdrawal"  node seq model withdraws

A "model" may also carry `sources`, where the file can be had from others; it is left out when there are none. An "experts"
carries `is_loading` while it is only a claim: true, or left out; so with `is_choosing`. A "registry"
belongs to no model: wherever a model is named for it, that is NO_MODEL. `loads` is [[layer, levels], ...], ascending;
`levels` has one hex digit for each expert: 0 for never chosen, else 15 for the layer's most chosen one and one less for each
factor of the square root of two below it. So 58 layers of 256 experts fit, and scarcity needs no more precision.

A reader refuses an unknown kind and ignores unknown keys, so that a later version may add fields to a kind. That opens no
second way to write a record: every payload must be canonical as a whole, unknown keys included, and the signature covers
its bytes as they came. So records are stored and passed on as the bytes received, never written anew.

`seq` orders the records of one (node, kind, model); an announcer takes it from its clock in milliseconds (or above the
last one it used), so that a restart is always higher. A graceful leave is a `Withdrawal` with a higher seq.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from swarm.errors import RemoteProtocolError, SwarmError
from swarm.identity import Identity, is_valid_signature
from swarm.ids import MAX_INDEX, ExpertSet, ModelId, NodeId
from swarm.registry.record_fields import MAX_ADDRESSES as MAX_ADDRESSES
from swarm.registry.record_fields import MAX_LAYERS as MAX_LAYERS
from swarm.registry.record_fields import MAX_NAME_LENGTH as MAX_NAME_LENGTH
from swarm.registry.record_fields import MAX_PAIRS as MAX_PAIRS
from swarm.registry.record_fields import MAX_SEQ as MAX_SEQ
from swarm.registry.record_fields import MAX_TTL_S as MAX_TTL_S
from swarm.registry.record_fields import (
    canonical,
    check_addresses,
    check_lease,
    check_public_face,
    check_range,
    check_term,
    check_vouchers,
    expert_set,
    field_of,
    key_fields,
    lease_fields,
    list_of,
    node_field,
    parse_object,
    parse_ranges,
    place_of,
    refuse,
)

MAX_SIGNED_BYTES = 16_384  # measured: a different random half of 128 experts in each of 48 layers takes 8 KB
MAX_MEMBER_BYTES = 1_024  # of a registry node's record: eight of the longest addresses take 600
SIGNATURE_BYTES = 64
MAX_WIRE_VERSIONS = 16
MAX_WIRE_VERSION = 255
MAX_N_EMBD = 1 << 20  # guessed: far above any known model
MAX_SOURCES = 8
MAX_SOURCE_LENGTH = 300  # characters
MAX_WINDOW_S = 30 * 24 * 3600
TOP_LEVEL = 15  # of a histogram's most chosen expert
NO_MODEL = ModelId(bytes(32))  # no manifest has this hash

_DOMAIN = b"swarm record 1\0"
_SOURCE = re.compile(r"(?:https|hf)://[\x21-\x7e]+")
_LEVELS = re.compile(r"[0-9a-f]+")


class RecordKind(StrEnum):
    """The `kind` of a payload."""

    EXPERTS = "experts"
    MODEL = "model"
    REGISTRY = "registry"
    HISTOGRAM = "histogram"
    WITHDRAWAL = "withdrawal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAnnouncement:
    """A peer's word that it holds these experts of a model and answers dispatches at these addresses.

    Attributes:
        addresses: `host:port` with an IP literal, IPv6 in brackets; the first is preferred.
        exact_kernels: started with `--exact-kernels`, so the form `exact` may be asked of it.
        wire_versions: ascending.
        is_loading: it will hold them, but answers nothing yet: said so that two who choose at once choose differently.
        is_choosing: it may still choose others, as newcomers do who find that several have come at once.
        is_public: others have reached its addresses unasked; if not, they may still be right, and a relay is the surer way.
        vouchers: of relays through which it can be called (`swarm.wire.vouchers`), base64url.
        name: what its owner calls it in public; empty for most.
        place: whole degrees of latitude and longitude, for the map, where its owner tells it.
        upload_bytes_s: the most that it sends in a second, where its owner has set a cap; None: no cap.
    """

    node: NodeId
    seq: int
    ttl_s: int
    model: ModelId
    model_name: str
    experts: ExpertSet
    addresses: tuple[str, ...]
    exact_kernels: bool
    wire_versions: tuple[int, ...]
    is_loading: bool = False
    is_choosing: bool = False
    is_public: bool = True
    vouchers: tuple[str, ...] = ()
    name: str = ""
    place: tuple[int, int] | None = None
    upload_bytes_s: int | None = None

    @property
    def kind(self) -> RecordKind:
        """Which payload kind writes this record."""
        return RecordKind.EXPERTS

    def __post_init__(self) -> None:
        check_lease(self.seq, self.ttl_s, self.model_name, self.addresses)
        check_vouchers(self.vouchers)
        check_public_face(self.name, self.place)
        if self.upload_bytes_s is not None:
            check_range("upload_bytes_s", self.upload_bytes_s, 1, MAX_SEQ)
        check_range("number of (layer, expert) pairs", len(self.experts), 1, MAX_PAIRS)
        for layer, experts in self.experts.by_layer.items():
            check_range("layer", layer, 0, MAX_INDEX)
            check_range("expert", min(experts), 0, MAX_INDEX)
            check_range("expert", max(experts), 0, MAX_INDEX)
        check_range("number of wire versions", len(self.wire_versions), 1, MAX_WIRE_VERSIONS)
        for version in self.wire_versions:
            check_range("wire version", version, 1, MAX_WIRE_VERSION)
        if list(self.wire_versions) != sorted(set(self.wire_versions)):
            refuse(f"wire versions are out of order: got {self.wire_versions}, expected ascending, each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOffer:
    """A backbone's word that it serves a model's manifest and, with `offers_blocks`, the experts' tensors.

    Attributes:
        moe_layers: the layers that have routed experts, as a range text like `1-27`.
        size_bytes: of the whole model file.
        sources: `https://` and `hf://` names of the same file, for those who would rather not load this node.
        is_public, vouchers: as in an `ExpertAnnouncement`.
    """

    node: NodeId
    seq: int
    ttl_s: int
    model: ModelId
    model_name: str
    n_expert: int
    n_expert_used: int
    moe_layers: str
    n_embd: int
    size_bytes: int
    addresses: tuple[str, ...]
    offers_blocks: bool
    sources: tuple[str, ...] = ()
    is_public: bool = True
    vouchers: tuple[str, ...] = ()

    @property
    def kind(self) -> RecordKind:
        """Which payload kind writes this record."""
        return RecordKind.MODEL

    def __post_init__(self) -> None:
        check_lease(self.seq, self.ttl_s, self.model_name, self.addresses)
        check_vouchers(self.vouchers)
        check_range("n_expert", self.n_expert, 1, MAX_INDEX + 1)
        check_range("n_expert_used", self.n_expert_used, 1, min(self.n_expert, 255))  # slots travel as u8
        check_range("n_embd", self.n_embd, 1, MAX_N_EMBD)
        check_range("size_bytes", self.size_bytes, 1, MAX_SEQ)
        n_layers = sum(map(len, parse_ranges(self.moe_layers, "moe_layers")))
        check_range("number of layers", n_layers, 1, MAX_LAYERS)
        check_range("number of (layer, expert) pairs", n_layers * self.n_expert, 1, MAX_PAIRS)
        check_range("number of sources", len(self.sources), 0, MAX_SOURCES)
        for source in self.sources:
            if len(source) > MAX_SOURCE_LENGTH or _SOURCE.fullmatch(source) is None:
                refuse(
                    f"bad source: got {source[:80]!r}, expected https:// or hf:// and at most 300 printable characters"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryNodeRecord:
    """A registry node's word that it stores records and answers at these addresses."""

    node: NodeId
    seq: int
    ttl_s: int
    addresses: tuple[str, ...]

    @property
    def kind(self) -> RecordKind:
        """Which payload kind writes this record."""
        return RecordKind.REGISTRY

    @property
    def model(self) -> ModelId:
        """NO_MODEL: it belongs to none."""
        return NO_MODEL

    def __post_init__(self) -> None:
        check_term(self.seq, self.ttl_s)
        check_addresses(self.addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHistogram:
    """A backbone's word on how often its model's router chose each expert: the demand that volunteers can meet.

    Attributes:
        n_tokens: that were counted, in the last `window_s` seconds.
        loads: (layer, levels), by layer; see the module's docstring.
    """

    node: NodeId
    seq: int
    ttl_s: int
    model: ModelId
    n_tokens: int
    window_s: int
    loads: tuple[tuple[int, str], ...]

    @property
    def kind(self) -> RecordKind:
        """Which payload kind writes this record."""
        return RecordKind.HISTOGRAM

    def __post_init__(self) -> None:
        check_term(self.seq, self.ttl_s)
        check_range("n_tokens", self.n_tokens, 0, MAX_SEQ)
        check_range("window_s", self.window_s, 1, MAX_WINDOW_S)
        check_range("number of layers", len(self.loads), 1, MAX_LAYERS)
        last = -1
        for layer, levels in self.loads:
            check_range("layer", layer, last + 1, MAX_INDEX)
            check_range("number of experts", len(levels), 1, MAX_INDEX + 1)
            if _LEVELS.fullmatch(levels) is None:
                refuse(f"bad levels: got {levels[:40]!r}, expected one hex digit for each expert")
            last = layer

    def shares(self, layer: int) -> tuple[float, ...]:
        """Return each expert's share of the layer's choices, as far as levels tell; empty for a layer that is not there."""
        levels = dict(self.loads).get(layer, "")
        weights = [2.0 ** ((int(digit, 16) - TOP_LEVEL) / 2) if digit != "0" else 0.0 for digit in levels]
        total = sum(weights)
        return tuple(weight / total if total else 0.0 for weight in weights)


def levels_of(counts: Sequence[int]) -> str:
    """Return the hex digits that a histogram carries for one layer: `counts[e]` is how often expert e was chosen."""
    top = max(counts, default=0)
    digits = (max(1, TOP_LEVEL - round(2 * math.log2(top / count))) if count > 0 else 0 for count in counts)
    return "".join(f"{digit:x}" for digit in digits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """A node's word that its record of that kind for that model no longer holds. It needs a higher seq than the record."""

    node: NodeId
    seq: int
    model: ModelId
    withdraws: RecordKind

    @property
    def kind(self) -> RecordKind:
        """Which payload kind writes this record."""
        return RecordKind.WITHDRAWAL

    def __post_init__(self) -> None:
        check_range("seq", self.seq, 0, MAX_SEQ)
        if self.withdraws is RecordKind.WITHDRAWAL:
            refuse("bad withdrawal: got a withdrawal of a withdrawal, expected another kind")


Lease = ExpertAnnouncement | ModelOffer | RegistryNodeRecord | RoutingHistogram
Record = Lease | Withdrawal


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRecord:
    """A payload with its node's signature. Not yet checked: only `verify` says what it is worth."""

    payload: bytes
    signature: bytes

    def __post_init__(self) -> None:
        if len(self.signature) != SIGNATURE_BYTES:
            refuse(f"signature has a wrong length: got {len(self.signature)} bytes, expected {SIGNATURE_BYTES}")
        check_range("signed record's size in bytes", self.size_bytes, SIGNATURE_BYTES + 1, MAX_SIGNED_BYTES)

    @property
    def size_bytes(self) -> int:
        """The length of `to_bytes()`."""
        return SIGNATURE_BYTES + len(self.payload)

    def to_bytes(self) -> bytes:
        """Return the form that travels and that `from_bytes` reads."""
        return self.signature + self.payload

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Return the record that untrusted `data` holds, copied, its signature unchecked. Raises RemoteProtocolError."""
        if not SIGNATURE_BYTES < len(data) <= MAX_SIGNED_BYTES:
            raise RemoteProtocolError(
                f"signed record has a wrong size: got {len(data)} bytes, expected {SIGNATURE_BYTES + 1} to {MAX_SIGNED_BYTES}"
            )
        return cls(signature=bytes(data[:SIGNATURE_BYTES]), payload=bytes(data[SIGNATURE_BYTES:]))


def sign(record: Record, identity: Identity) -> SignedRecord:
    """Return `record` signed by its own node.

    Raises:
        LocalProtocolError: the record speaks for another node, or is over 16 KB (a set of experts in very many ranges).
    """
    if record.node != identity.node_id:
        refuse(f"record speaks for another node: got {record.node.short}, expected {identity.node_id.short}")
    payload = canonical(_fields_of(record))
    return SignedRecord(payload=payload, signature=identity.sign(_DOMAIN + payload))


def verify(signed: SignedRecord) -> Record:
    """Return what an untrusted record says, once its form and its node's signature are found good.

    Raises:
        RemoteProtocolError: not canonical JSON, an unknown kind, a bad field, or another signature than the node's.
    """
    try:
        fields = parse_object(signed.payload)
        node = node_field(fields)
        # Before the fields: 404 bytes can name 131,072 experts, which take 16 ms to read (measured).
        if not is_valid_signature(node, signed.signature, _DOMAIN + signed.payload):
            refuse(f"the signature is not that of node {node.short}")
        return _parse(fields)
    except (SwarmError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"bad record: {error}") from error


def speaks_of_a_member(data: bytes) -> bool:
    """Return whether an untrusted signed record claims to be a registry node's, or its withdrawal: cheap, nothing is verified.

    What only members' records may stand in is passed through this first, so that it cannot bring what is dear to read.
    """
    if not SIGNATURE_BYTES < len(data) <= MAX_MEMBER_BYTES:
        return False
    try:
        fields = parse_object(bytes(data[SIGNATURE_BYTES:]))
    except (SwarmError, ValueError, RecursionError):
        return False
    kind = fields.get("withdraws") if fields.get("kind") == RecordKind.WITHDRAWAL.value else fields.get("kind")
    return bool(kind == RecordKind.REGISTRY.value)


def printable_name(text: str) -> str:
    """Return `text` cut and cleaned so that a record's `model_name` may be it; a GGUF file's own name may hold anything."""
    clean = "".join(character for character in text if character.isprintable()).strip()[:MAX_NAME_LENGTH].strip()
    return clean or "unnamed"


def _fields_of(record: Record) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": record.kind.value, "node": str(record.node), "seq": record.seq}
    if isinstance(record, RegistryNodeRecord):
        return fields | {"ttl_s": record.ttl_s, "addresses": list(record.addresses)}
    fields["model"] = str(record.model)
    if isinstance(record, Withdrawal):
        return fields | {"withdraws": record.withdraws.value}
    if isinstance(record, RoutingHistogram):
        loads = [[layer, levels] for layer, levels in record.loads]
        return fields | {
            "ttl_s": record.ttl_s,
            "n_tokens": record.n_tokens,
            "window_s": record.window_s,
            "loads": loads,
        }
    fields |= {"ttl_s": record.ttl_s, "model_name": record.model_name, "addresses": list(record.addresses)}
    if not record.is_public:
        fields["is_public"] = False
    if record.vouchers:
        fields["vouchers"] = list(record.vouchers)
    if isinstance(record, ExpertAnnouncement):
        if record.is_loading:
            fields["is_loading"] = True
        if record.is_choosing:
            fields["is_choosing"] = True
        if record.name:
            fields["name"] = record.name
        if record.place is not None:
            fields["place"] = list(record.place)
        if record.upload_bytes_s is not None:
            fields["upload_bytes_s"] = record.upload_bytes_s
        return fields | {
            "experts": [list(group) for group in record.experts.grouped()],
            "exact_kernels": record.exact_kernels,
            "wire_versions": list(record.wire_versions),
        }
    if record.sources:
        fields["sources"] = list(record.sources)
    return fields | {
        "n_expert": record.n_expert,
        "n_expert_used": record.n_expert_used,
        "moe_layers": record.moe_layers,
        "n_embd": record.n_embd,
        "size_bytes": record.size_bytes,
        "offers_blocks": record.offers_blocks,
    }


def _parse(fields: dict[str, Any]) -> Record:
    """Return the record of an untrusted payload's fields. Raises SwarmError, ValueError or RecursionError."""
    kind = field_of(fields, "kind", str)
    parser = _PARSERS.get(kind)
    if parser is None:
        refuse(f"unknown kind: got {kind[:40]!r}, expected one of {', '.join(_PARSERS)}")
    return parser(fields)


def _parse_experts(fields: dict[str, Any]) -> ExpertAnnouncement:
    record = ExpertAnnouncement(
        **lease_fields(fields),
        experts=expert_set(field_of(fields, "experts", list)),
        exact_kernels=field_of(fields, "exact_kernels", bool),
        wire_versions=tuple(list_of(fields, "wire_versions", int)),
        is_loading="is_loading" in fields and field_of(fields, "is_loading", bool),
        is_choosing="is_choosing" in fields and field_of(fields, "is_choosing", bool),
        **_reach_fields(fields),
        name=field_of(fields, "name", str) if "name" in fields else "",
        place=place_of(list_of(fields, "place", int)) if "place" in fields else None,
        upload_bytes_s=field_of(fields, "upload_bytes_s", int) if "upload_bytes_s" in fields else None,
    )
    if [list(group) for group in record.experts.grouped()] != fields["experts"]:
        refuse("groups of experts are not canonical: expected one per distinct set, by lowest layer")
    return record


def _reach_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "is_public": "is_public" not in fields or field_of(fields, "is_public", bool),
        "vouchers": tuple(list_of(fields, "vouchers", str)) if "vouchers" in fields else (),
    }


def _parse_offer(fields: dict[str, Any]) -> ModelOffer:
    return ModelOffer(
        **lease_fields(fields),
        n_expert=field_of(fields, "n_expert", int),
        n_expert_used=field_of(fields, "n_expert_used", int),
        moe_layers=field_of(fields, "moe_layers", str),
        n_embd=field_of(fields, "n_embd", int),
        size_bytes=field_of(fields, "size_bytes", int),
        offers_blocks=field_of(fields, "offers_blocks", bool),
        sources=tuple(list_of(fields, "sources", str)) if "sources" in fields else (),
        **_reach_fields(fields),
    )


def _parse_registry_node(fields: dict[str, Any]) -> RegistryNodeRecord:
    return RegistryNodeRecord(
        node=node_field(fields),
        seq=field_of(fields, "seq", int),
        ttl_s=field_of(fields, "ttl_s", int),
        addresses=tuple(list_of(fields, "addresses", str)),
    )


def _parse_histogram(fields: dict[str, Any]) -> RoutingHistogram:
    loads = []
    for item in list_of(fields, "loads", list):
        if len(item) != 2 or type(item[0]) is not int or type(item[1]) is not str:
            refuse("bad item of loads: expected a layer and its levels")
        loads.append((item[0], item[1]))
    return RoutingHistogram(
        **key_fields(fields),
        ttl_s=field_of(fields, "ttl_s", int),
        n_tokens=field_of(fields, "n_tokens", int),
        window_s=field_of(fields, "window_s", int),
        loads=tuple(loads),
    )


def _parse_withdrawal(fields: dict[str, Any]) -> Withdrawal:
    return Withdrawal(**key_fields(fields), withdraws=RecordKind(field_of(fields, "withdraws", str)))


_PARSERS: dict[str, Callable[[dict[str, Any]], Record]] = {
    RecordKind.EXPERTS.value: _parse_experts,
    RecordKind.MODEL.value: _parse_offer,
    RecordKind.REGISTRY.value: _parse_registry_node,
    RecordKind.HISTOGRAM.value: _parse_histogram,
    RecordKind.WITHDRAWAL.value: _parse_withdrawal,
}
