"""What may stand in a record's fields: limits, checks, and reading them from untrusted JSON. Knows no kind of record.

Everything here raises LocalProtocolError for what it refuses, whoever's fault it is; `records.verify` turns that into
RemoteProtocolError, and only what a record of ours says is our own mistake.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable
from itertools import chain
from typing import Any, NoReturn

from swarm.errors import LocalProtocolError
from swarm.ids import MAX_INDEX, ExpertSet, ModelId, NodeId

MAX_SEQ = 2**63 - 1
MAX_TTL_S = 300  # DESIGN section 4: a dead node is forgotten within five minutes even if nobody notices
MAX_NAME_LENGTH = 64  # characters
MAX_ADDRESSES = 8
MAX_PAIRS = (
    131_072  # (layer, expert) pairs a record may name; guessed: 128 layers x 1,024 experts, above any known model
)
MAX_LAYERS = 1024  # as in swarm.model.spec; 350 bytes must not name 65,536 layers, each with a set of its own

MAX_PUBLIC_NAME_LENGTH = 40  # characters; guessed: fits a table's column
MAX_VOUCHERS = 4  # relays by which a node can be called; guessed: two in use, two while they change
MAX_VOUCHER_LENGTH = 684  # 512 bytes (swarm.wire.vouchers) as base64url

_BASE64URL = re.compile(r"[A-Za-z0-9_-]+={0,2}")
_RANGES = re.compile(r"[0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?)*")


def refuse(message: str) -> NoReturn:
    """Raise LocalProtocolError."""
    raise LocalProtocolError(message)


def check_range(what: str, value: int, low: int, high: int) -> None:
    """Raise LocalProtocolError unless `value` is an integer from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:  # a bool is an int to isinstance
        refuse(f"bad {what}: got {value!r:.40}, expected {low} to {high}")


def check_term(seq: int, ttl_s: int) -> None:
    """Raise LocalProtocolError unless a lease may have this number and length."""
    check_range("seq", seq, 0, MAX_SEQ)
    check_range("ttl_s", ttl_s, 1, MAX_TTL_S)


def check_lease(seq: int, ttl_s: int, model_name: str, addresses: tuple[str, ...]) -> None:
    """Raise LocalProtocolError unless what all leases of a model have in common is good."""
    check_term(seq, ttl_s)
    if not 1 <= len(model_name) <= MAX_NAME_LENGTH or not model_name.isprintable():
        refuse(f"bad model name: got {model_name[:80]!r}, expected 1 to {MAX_NAME_LENGTH} printable characters")
    check_addresses(addresses)


def check_addresses(addresses: tuple[str, ...]) -> None:
    """Raise LocalProtocolError unless these are a node's addresses, each once."""
    check_range("number of addresses", len(addresses), 1, MAX_ADDRESSES)
    if len(set(addresses)) != len(addresses):
        refuse(f"an address is named twice: got {addresses}")
    for address in addresses:
        check_address(address)


def check_vouchers(vouchers: tuple[str, ...]) -> None:
    """Raise LocalProtocolError unless these may be relays' vouchers by their size and letters; what they say is the caller's."""
    check_range("number of vouchers", len(vouchers), 0, MAX_VOUCHERS)
    for voucher in vouchers:
        if not 0 < len(voucher) <= MAX_VOUCHER_LENGTH or not _BASE64URL.fullmatch(voucher):
            refuse(f"bad voucher: got {len(voucher)} characters, expected at most {MAX_VOUCHER_LENGTH} of base64url")


def check_public_face(name: str, place: tuple[int, int] | None) -> None:
    """Raise LocalProtocolError unless a peer may show itself under this name, at this latitude and longitude in degrees."""
    if len(name) > MAX_PUBLIC_NAME_LENGTH or not name.isprintable() or name != name.strip():
        refuse(f"bad name: got {name[:80]!r}, expected at most {MAX_PUBLIC_NAME_LENGTH} printable characters")
    if place is not None:
        check_range("latitude", place[0], -90, 90)
        check_range("longitude", place[1], -180, 180)


def public_name(text: str) -> str:
    """Return a name in a form that records take: what cannot be shown is left out."""
    return "".join(each for each in text if each.isprintable()).strip()[:MAX_PUBLIC_NAME_LENGTH].strip()


def place_of(values: list[int]) -> tuple[int, int]:
    """Return a place's two numbers. Raises LocalProtocolError where there are not two."""
    if len(values) != 2:
        refuse(f"bad place: got {len(values)} numbers, expected latitude and longitude")
    return values[0], values[1]


def check_address(text: str) -> None:
    """Raise LocalProtocolError unless `text` is a port and the one canonical form of an IP literal that can be dialled."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        refuse(
            f"bad address: got {text[:64]!r}, expected an IP literal and a port like 192.0.2.1:7440 or [2001:db8::1]:7440"
        )
    canonical = f"[{address}]" if address.version == 6 else str(address)
    if canonical != host or "%" in host or address.is_multicast or address.is_unspecified:
        refuse(f"bad address: got {text[:64]!r}, expected a unicast IP literal in its shortest form, without a zone")
    if re.fullmatch(r"[1-9][0-9]{0,4}", port) is None or int(port) > 65_535:
        refuse(f"bad port: got {text[:64]!r}, expected a port from 1 to 65535")


def parse_ranges(text: str, what: str) -> list[range]:
    """Return the ranges of an untrusted canonical range text, not yet expanded: ascending, apart, without leading zeros."""
    if _RANGES.fullmatch(text) is None:
        refuse(f"cannot read {what}: got {text[:40]!r}, expected numbers and ranges like 12-19,40")
    ranges: list[range] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found = range(int(low), int(high or low) + 1)
        canonical = f"{found[0]}-{found[-1]}" if len(found) > 1 else f"{found.start}"
        if part != canonical or found.stop > MAX_INDEX + 1 or (ranges and found.start <= ranges[-1].stop):
            refuse(f"bad range of {what}: got {part!r}, expected ascending ranges, none touching, up to {MAX_INDEX}")
        ranges.append(found)
    return ranges


def expert_set(groups: Iterable[Any]) -> ExpertSet:
    """Return the set that untrusted [[layers, experts], ...] writes; counted before anything is expanded."""
    parsed: list[tuple[list[range], list[range]]] = []
    n_pairs = n_layers = 0
    for group in groups:
        if not (isinstance(group, list) and len(group) == 2 and all(isinstance(text, str) for text in group)):
            refuse("bad group of experts: expected a pair of range texts")
        layers, experts = parse_ranges(group[0], "layers"), parse_ranges(group[1], "experts")
        n_layers += sum(map(len, layers))
        check_range("number of layers", n_layers, 1, MAX_LAYERS)
        n_pairs += sum(map(len, layers)) * sum(map(len, experts))
        check_range("number of (layer, expert) pairs", n_pairs, 1, MAX_PAIRS)
        parsed.append((layers, experts))
    by_layer: dict[int, frozenset[int]] = {}
    for layers, experts in parsed:
        chosen = frozenset(chain.from_iterable(experts))  # one set, shared by the group's layers
        by_layer.update((layer, chosen) for layer in chain.from_iterable(layers))
    return ExpertSet(by_layer)


def canonical(fields: dict[str, Any]) -> bytes:
    """Return the one way to write a payload."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def parse_object(payload: bytes) -> dict[str, Any]:
    """Return the fields of an untrusted payload. Raises SwarmError, ValueError or RecursionError."""
    fields = json.loads(payload.decode("ascii"), parse_float=_not_an_integer, parse_constant=_not_an_integer)
    if not isinstance(fields, dict):
        refuse("payload is not an object")
    if canonical(fields) != payload:  # also finds duplicate keys, spaces and other escapes
        refuse("payload is not canonical JSON")
    return fields


def _not_an_integer(text: str) -> NoReturn:
    refuse(f"bad number: got {text[:40]!r}, expected an integer")


def node_field(fields: dict[str, Any]) -> NodeId:
    """Return an untrusted record's node."""
    text = field_of(fields, "node", str)
    node = NodeId.parse(text)
    if str(node) != text:  # base32 can be written in several ways, like hex below
        refuse("node id is not in its canonical form")
    return node


def key_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an untrusted record's node, model and seq."""
    text = field_of(fields, "model", str)
    model = ModelId.parse(text)
    if str(model) != text:
        refuse("model id is not in its canonical form")
    return {"node": node_field(fields), "model": model, "seq": field_of(fields, "seq", int)}


def lease_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return what untrusted leases of a model have in common."""
    return key_fields(fields) | {
        "ttl_s": field_of(fields, "ttl_s", int),
        "model_name": field_of(fields, "model_name", str),
        "addresses": tuple(list_of(fields, "addresses", str)),
    }


def field_of(fields: dict[str, Any], name: str, kind: type) -> Any:
    """Return an untrusted field, which must be exactly of type `kind`."""
    value = fields.get(name)
    if type(value) is not kind:
        refuse(f"bad field {name}: got {type(value).__name__}, expected {kind.__name__}")
    return value


def list_of(fields: dict[str, Any], name: str, kind: type) -> list[Any]:
    """Return an untrusted list, whose items must be exactly of type `kind`."""
    values: list[Any] = field_of(fields, name, list)
    for value in values:
        if type(value) is not kind:
            refuse(f"bad item of {name}: got {type(value).__name__}, expected {kind.__name__}")
    return values
