"""Signed records: what a node says about itself, in bytes that anybody can check and nobody else can make.

Knows nothing of storage, expiry clocks or the network: who keeps a record is `table`, who carries it is the service.

A signed record on the wire, at most 16,384 bytes:

    offset  size  field
    0       64    ed25519 signature by the record's own node over b"swarm record 1\\0" + payload
    64      n     payload: canonical JSON (ASCII, keys sorted, no spaces, integers only, no duplicate keys)

The payload is an object with `kind` and that kind's fields:

    kind "experts"     node seq ttl_s model model_name experts addresses exact_kernels wire_versions
    kind "model"       node seq ttl_s model model_name n_expert n_expert_used moe_layers n_embd size_bytes addresses
                       offers_blocks
    kind "withdrawal"  node seq model withdraws

A reader refuses an unknown kind and ignores unknown keys, so that a later version may add fields to a kind. That opens no
second way to write a record: every payload must be canonical as a whole, unknown keys included, and the signature covers
its bytes as they came. So records are stored and passed on as the bytes received, never written anew.

`seq` orders the records of one (node, kind, model); an announcer takes it from its clock in milliseconds (or above the
last one it used), so that a restart is always higher. A graceful leave is a `Withdrawal` with a higher seq.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any, NoReturn, Self

from swarm.errors import LocalProtocolError, RemoteProtocolError, SwarmError
from swarm.identity import Identity, is_valid_signature
from swarm.ids import MAX_INDEX, ExpertSet, ModelId, NodeId

MAX_SIGNED_BYTES = 16_384  # measured: a different random half of 128 experts in each of 48 layers takes 8 KB
SIGNATURE_BYTES = 64
MAX_SEQ = 2**63 - 1
MAX_TTL_S = 300  # DESIGN section 4: a dead node is forgotten within five minutes even if nobody notices
MAX_NAME_LENGTH = 64  # characters
MAX_ADDRESSES = 8
MAX_WIRE_VERSIONS = 16
MAX_WIRE_VERSION = 255
MAX_PAIRS = (
    131_072  # (layer, expert) pairs a record may name; guessed: 128 layers x 1,024 experts, above any known model
)
MAX_LAYERS = 1024  # as in swarm.model.spec; 350 bytes must not name 65,536 layers, each with a set of its own
MAX_N_EMBD = 1 << 20  # guessed: far above any known model

_DOMAIN = b"swarm record 1\0"
_RANGES = re.compile(r"[0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?)*")


class RecordKind(StrEnum):
    """The `kind` of a payload."""

    EXPERTS = "experts"
    MODEL = "model"
    WITHDRAWAL = "withdrawal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAnnouncement:
    """A peer's word that it holds these experts of a model and answers dispatches at these addresses.

    Attributes:
        addresses: `host:port` with an IP literal, IPv6 in brackets; the first is preferred.
        exact_kernels: started with `--exact-kernels`, so the form `exact` may be asked of it.
        wire_versions: ascending.
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

    @property
    def kind(self) -> RecordKind:
        """Which payload kind writes this record."""
        return RecordKind.EXPERTS

    def __post_init__(self) -> None:
        _check_lease(self.seq, self.ttl_s, self.model_name, self.addresses)
        _check_range("number of (layer, expert) pairs", len(self.experts), 1, MAX_PAIRS)
        for layer, experts in self.experts.by_layer.items():
            _check_range("layer", layer, 0, MAX_INDEX)
            _check_range("expert", min(experts), 0, MAX_INDEX)
            _check_range("expert", max(experts), 0, MAX_INDEX)
        _check_range("number of wire versions", len(self.wire_versions), 1, MAX_WIRE_VERSIONS)
        for version in self.wire_versions:
            _check_range("wire version", version, 1, MAX_WIRE_VERSION)
        if list(self.wire_versions) != sorted(set(self.wire_versions)):
            _refuse(f"wire versions are out of order: got {self.wire_versions}, expected ascending, each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOffer:
    """A backbone's word that it serves a model's manifest and, with `offers_blocks`, the experts' tensors.

    Attributes:
        moe_layers: the layers that have routed experts, as a range text like `1-27`.
        size_bytes: of the whole model file.
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

    @property
    def kind(self) -> RecordKind:
        """Which payload kind writes this record."""
        return RecordKind.MODEL

    def __post_init__(self) -> None:
        _check_lease(self.seq, self.ttl_s, self.model_name, self.addresses)
        _check_range("n_expert", self.n_expert, 1, MAX_INDEX + 1)
        _check_range("n_expert_used", self.n_expert_used, 1, min(self.n_expert, 255))  # slots travel as u8
        _check_range("n_embd", self.n_embd, 1, MAX_N_EMBD)
        _check_range("size_bytes", self.size_bytes, 1, MAX_SEQ)
        n_layers = sum(map(len, _parse_ranges(self.moe_layers, "moe_layers")))
        _check_range("number of layers", n_layers, 1, MAX_LAYERS)
        _check_range("number of (layer, expert) pairs", n_layers * self.n_expert, 1, MAX_PAIRS)


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
        _check_range("seq", self.seq, 0, MAX_SEQ)
        if self.withdraws is RecordKind.WITHDRAWAL:
            _refuse("bad withdrawal: got a withdrawal of a withdrawal, expected one of experts or model")


Record = ExpertAnnouncement | ModelOffer | Withdrawal


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRecord:
    """A payload with its node's signature. Not yet checked: only `verify` says what it is worth."""

    payload: bytes
    signature: bytes

    def __post_init__(self) -> None:
        if len(self.signature) != SIGNATURE_BYTES:
            _refuse(f"signature has a wrong length: got {len(self.signature)} bytes, expected {SIGNATURE_BYTES}")
        _check_range("signed record's size in bytes", self.size_bytes, SIGNATURE_BYTES + 1, MAX_SIGNED_BYTES)

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
        _refuse(f"record speaks for another node: got {record.node.short}, expected {identity.node_id.short}")
    payload = _canonical(_fields_of(record))
    return SignedRecord(payload=payload, signature=identity.sign(_DOMAIN + payload))


def verify(signed: SignedRecord) -> Record:
    """Return what an untrusted record says, once its form and its node's signature are found good.

    Raises:
        RemoteProtocolError: not canonical JSON, an unknown kind, a bad field, or another signature than the node's.
    """
    try:
        record = _parse(signed.payload)
    except (SwarmError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"bad record: {error}") from error
    if not is_valid_signature(record.node, signed.signature, _DOMAIN + signed.payload):
        raise RemoteProtocolError(f"bad record: the signature is not that of node {record.node.short}")
    return record


def printable_name(text: str) -> str:
    """Return `text` cut and cleaned so that a record's `model_name` may be it; a GGUF file's own name may hold anything."""
    clean = "".join(character for character in text if character.isprintable()).strip()[:MAX_NAME_LENGTH].strip()
    return clean or "unnamed"


def _refuse(message: str) -> NoReturn:
    raise LocalProtocolError(message)


def _check_range(what: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:  # a bool is an int to isinstance
        _refuse(f"bad {what}: got {value!r:.40}, expected {low} to {high}")


def _check_lease(seq: int, ttl_s: int, model_name: str, addresses: tuple[str, ...]) -> None:
    _check_range("seq", seq, 0, MAX_SEQ)
    _check_range("ttl_s", ttl_s, 1, MAX_TTL_S)
    if not 1 <= len(model_name) <= MAX_NAME_LENGTH or not model_name.isprintable():
        _refuse(f"bad model name: got {model_name[:80]!r}, expected 1 to {MAX_NAME_LENGTH} printable characters")
    _check_range("number of addresses", len(addresses), 1, MAX_ADDRESSES)
    if len(set(addresses)) != len(addresses):
        _refuse(f"an address is named twice: got {addresses}")
    for address in addresses:
        _check_address(address)


def _check_address(text: str) -> None:
    """Raise LocalProtocolError unless `text` is a port and the one canonical form of an IP literal that can be dialled."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        _refuse(
            f"bad address: got {text[:64]!r}, expected an IP literal and a port like 192.0.2.1:7440 or [2001:db8::1]:7440"
        )
    canonical = f"[{address}]" if address.version == 6 else str(address)
    if canonical != host or "%" in host or address.is_multicast or address.is_unspecified:
        _refuse(f"bad address: got {text[:64]!r}, expected a unicast IP literal in its shortest form, without a zone")
    if re.fullmatch(r"[1-9][0-9]{0,4}", port) is None or int(port) > 65_535:
        _refuse(f"bad port: got {text[:64]!r}, expected a port from 1 to 65535")


def _parse_ranges(text: str, what: str) -> list[range]:
    """Return the ranges of an untrusted canonical range text, not yet expanded: ascending, apart, without leading zeros."""
    if _RANGES.fullmatch(text) is None:
        _refuse(f"cannot read {what}: got {text[:40]!r}, expected numbers and ranges like 12-19,40")
    ranges: list[range] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found = range(int(low), int(high or low) + 1)
        canonical = f"{found[0]}-{found[-1]}" if len(found) > 1 else f"{found.start}"
        if part != canonical or found.stop > MAX_INDEX + 1 or (ranges and found.start <= ranges[-1].stop):
            _refuse(f"bad range of {what}: got {part!r}, expected ascending ranges, none touching, up to {MAX_INDEX}")
        ranges.append(found)
    return ranges


def _expert_set(groups: Iterable[Any]) -> ExpertSet:
    """Return the set that untrusted [[layers, experts], ...] writes; counted before anything is expanded."""
    parsed: list[tuple[list[range], list[range]]] = []
    n_pairs = n_layers = 0
    for group in groups:
        if not (isinstance(group, list) and len(group) == 2 and all(isinstance(text, str) for text in group)):
            _refuse("bad group of experts: expected a pair of range texts")
        layers, experts = _parse_ranges(group[0], "layers"), _parse_ranges(group[1], "experts")
        n_layers += sum(map(len, layers))
        _check_range("number of layers", n_layers, 1, MAX_LAYERS)
        n_pairs += sum(map(len, layers)) * sum(map(len, experts))
        _check_range("number of (layer, expert) pairs", n_pairs, 1, MAX_PAIRS)
        parsed.append((layers, experts))
    by_layer: dict[int, frozenset[int]] = {}
    for layers, experts in parsed:
        chosen = frozenset(chain.from_iterable(experts))  # one set, shared by the group's layers
        by_layer.update((layer, chosen) for layer in chain.from_iterable(layers))
    return ExpertSet(by_layer)


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def _fields_of(record: Record) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "kind": record.kind.value,
        "node": str(record.node),
        "seq": record.seq,
        "model": str(record.model),
    }
    if isinstance(record, Withdrawal):
        return fields | {"withdraws": record.withdraws.value}
    fields |= {"ttl_s": record.ttl_s, "model_name": record.model_name, "addresses": list(record.addresses)}
    if isinstance(record, ExpertAnnouncement):
        return fields | {
            "experts": [list(group) for group in record.experts.grouped()],
            "exact_kernels": record.exact_kernels,
            "wire_versions": list(record.wire_versions),
        }
    return fields | {
        "n_expert": record.n_expert,
        "n_expert_used": record.n_expert_used,
        "moe_layers": record.moe_layers,
        "n_embd": record.n_embd,
        "size_bytes": record.size_bytes,
        "offers_blocks": record.offers_blocks,
    }


def _not_an_integer(text: str) -> NoReturn:
    _refuse(f"bad number: got {text[:40]!r}, expected an integer")


def _parse(payload: bytes) -> Record:
    """Return the record of an untrusted payload. Raises SwarmError, ValueError or RecursionError."""
    fields = json.loads(payload.decode("ascii"), parse_float=_not_an_integer, parse_constant=_not_an_integer)
    if not isinstance(fields, dict):
        _refuse("payload is not an object")
    if _canonical(fields) != payload:  # also finds duplicate keys, spaces and other escapes
        _refuse("payload is not canonical JSON")
    kind = _get(fields, "kind", str)
    parser = _PARSERS.get(kind)
    if parser is None:
        _refuse(f"unknown kind: got {kind[:40]!r}, expected one of {', '.join(_PARSERS)}")
    return parser(fields)


def _parse_experts(fields: dict[str, Any]) -> ExpertAnnouncement:
    record = ExpertAnnouncement(
        **_lease_fields(fields),
        experts=_expert_set(_get(fields, "experts", list)),
        exact_kernels=_get(fields, "exact_kernels", bool),
        wire_versions=tuple(_get_list(fields, "wire_versions", int)),
    )
    if [list(group) for group in record.experts.grouped()] != fields["experts"]:
        _refuse("groups of experts are not canonical: expected one per distinct set, by lowest layer")
    return record


def _parse_offer(fields: dict[str, Any]) -> ModelOffer:
    return ModelOffer(
        **_lease_fields(fields),
        n_expert=_get(fields, "n_expert", int),
        n_expert_used=_get(fields, "n_expert_used", int),
        moe_layers=_get(fields, "moe_layers", str),
        n_embd=_get(fields, "n_embd", int),
        size_bytes=_get(fields, "size_bytes", int),
        offers_blocks=_get(fields, "offers_blocks", bool),
    )


def _parse_withdrawal(fields: dict[str, Any]) -> Withdrawal:
    return Withdrawal(**_key_fields(fields), withdraws=RecordKind(_get(fields, "withdraws", str)))


_PARSERS: dict[str, Callable[[dict[str, Any]], Record]] = {
    RecordKind.EXPERTS.value: _parse_experts,
    RecordKind.MODEL.value: _parse_offer,
    RecordKind.WITHDRAWAL.value: _parse_withdrawal,
}


def _key_fields(fields: dict[str, Any]) -> dict[str, Any]:
    node_text, model_text = _get(fields, "node", str), _get(fields, "model", str)
    node, model = NodeId.parse(node_text), ModelId.parse(model_text)
    if str(node) != node_text or str(model) != model_text:  # base32 and hex can be written in several ways
        _refuse("node or model id is not in its canonical form")
    return {"node": node, "model": model, "seq": _get(fields, "seq", int)}


def _lease_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return _key_fields(fields) | {
        "ttl_s": _get(fields, "ttl_s", int),
        "model_name": _get(fields, "model_name", str),
        "addresses": tuple(_get_list(fields, "addresses", str)),
    }


def _get(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        _refuse(f"bad field {name}: got {type(value).__name__}, expected {kind.__name__}")
    return value


def _get_list(fields: dict[str, Any], name: str, kind: type) -> list[Any]:
    values: list[Any] = _get(fields, name, list)
    for value in values:
        if type(value) is not kind:
            _refuse(f"bad item of {name}: got {type(value).__name__}, expected {kind.__name__}")
    return values
