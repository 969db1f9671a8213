"""Names of things: nodes, models, and sets of experts. Pure values; nothing here touches a key, a file or a socket."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from swarm.errors import UserError

MAX_INDEX = 65_535  # layers and experts travel as u16 (swarm/wire/frames.py)


@dataclass(frozen=True, slots=True, order=True)
class NodeId:
    """A node's raw ed25519 public key, 32 bytes. Written as base32, lower case, no padding (52 characters)."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != 32:
            raise ValueError(f"node id has a wrong length: got {len(self.raw)} bytes, expected 32")

    # A dispatch compares and hashes node ids some thirty times; those that a dataclass gets make a tuple each time.

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, NodeId) and self.raw == other.raw)

    def __hash__(self) -> int:
        return hash(self.raw)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the id that `text` writes; raises UserError."""
        try:
            node = cls(base64.b32decode(text.upper() + "=" * (-len(text) % 8)))
        except (binascii.Error, ValueError) as error:
            raise UserError(f"not a node id: got {text[:80]!r}, expected 52 characters of base32") from error
        if str(node) != text.lower():  # the last character has four bits to spare: one spelling for each node
            raise UserError(f"not a node id: got {text[:80]!r}, did you mean {node}?")
        return node

    def __str__(self) -> str:
        return base64.b32encode(self.raw).decode().rstrip("=").lower()

    @property
    def short(self) -> str:
        """The first eight characters, for people."""
        return str(self)[:8]


@dataclass(frozen=True, slots=True, order=True)
class ModelId:
    """sha256 of a model's manifest as canonical JSON, 32 bytes. Written as 64 hex digits."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != 32:
            raise ValueError(f"model id has a wrong length: got {len(self.raw)} bytes, expected 32")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the id that `text` writes; raises UserError."""
        try:
            return cls(bytes.fromhex(text))
        except ValueError as error:
            raise UserError(f"not a model id: got {text[:80]!r}, expected 64 hex digits") from error

    def __str__(self) -> str:
        return self.raw.hex()

    @property
    def short(self) -> str:
        """The first eight hex digits, as in `name@8hex`."""
        return self.raw.hex()[:8]


def parse_index_set(text: str, what: str = "experts") -> frozenset[int]:
    """Return the numbers of a comma list of 0-based, inclusive ranges: `12-19,40`. Raises UserError."""
    numbers: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not _is_number(low) or (dash and not _is_number(high)):
            raise UserError(f"cannot read {what}: got {part.strip()[:80]!r}, expected numbers and ranges like 12-19,40")
        first, last = int(low), int(high) if dash else int(low)
        if last < first or last > MAX_INDEX:
            raise UserError(f"bad range of {what}: got {part.strip()!r}, expected low-high up to {MAX_INDEX}")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10  # int() raises ValueError beyond 4,300 digits


def format_index_set(numbers: Iterable[int]) -> str:
    """Return the shortest comma list of ranges that `parse_index_set` reads back; empty for no numbers."""
    parts: list[str] = []
    run: list[int] = []
    for number in [*sorted(set(numbers)), None]:
        if run and number != run[-1] + 1:
            parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
            run = []
        if number is not None:
            run.append(number)
    return ",".join(parts)


@dataclass(frozen=True, slots=True)
class ExpertSet:
    """Which experts of which layers: layer (the N of `blk.N`) -> expert ids. Layers with no experts are left out."""

    by_layer: Mapping[int, frozenset[int]]

    def __post_init__(self) -> None:
        clean = {layer: frozenset(experts) for layer, experts in sorted(self.by_layer.items()) if experts}
        object.__setattr__(self, "by_layer", clean)

    @classmethod
    def of(cls, layers: Iterable[int], experts: Iterable[int]) -> Self:
        """Return the same experts in each of the layers."""
        chosen = frozenset(experts)
        return cls(dict.fromkeys(layers, chosen))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (layer, expert), ascending."""
        for layer, experts in self.by_layer.items():
            for expert in sorted(experts):
                yield layer, expert

    def __len__(self) -> int:
        return sum(len(experts) for experts in self.by_layer.values())

    def __contains__(self, pair: object) -> bool:
        return isinstance(pair, tuple) and len(pair) == 2 and pair[1] in self.by_layer.get(pair[0], ())

    def __hash__(self) -> int:
        return hash(tuple(self.by_layer.items()))

    def grouped(self) -> list[tuple[str, str]]:
        """Return (layers, experts) range texts, one for each distinct set of experts: the form that records carry."""
        groups: dict[frozenset[int], list[int]] = {}
        for layer, experts in self.by_layer.items():
            groups.setdefault(experts, []).append(layer)
        return [(format_index_set(layers), format_index_set(experts)) for experts, layers in groups.items()]

    def __str__(self) -> str:
        return "; ".join(f"experts {experts} of layers {layers}" for layers, experts in self.grouped()) or "nothing"
