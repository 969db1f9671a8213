"""Which ranges of a model's files bring which expert blocks. Pure.

A block is one plane of each of its layer's expert tensors; a tensor's planes lie side by side in the order of the experts. So
neighbours are had with one range per tensor instead of one each, and what is asked for at a time is bounded by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
"""(layer, expert)."""

GROUP_BYTES = (
    16_000_000  # of blocks asked for together; guessed: a second at 128 Mbit/s, what a kill loses of each connection
)
# Unwanted bytes between two planes that are read rather than asked around; guessed: at 50 Mbit/s 10 ms, less than a round trip.
MAX_GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Plane:
    """Where one tensor's part of a block lies: in which file (its name, no path), from which byte on."""

    file: str
    start: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.start + self.size_bytes


Places = Callable[[int, int], Sequence[Plane]]
"""Where a block's planes lie, in the order in which they make the block."""


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring experts of one layer, to be asked for together."""

    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """One range to ask for, `start` to `end` (exclusive) of a file."""

    file: str
    start: int
    end: int


def groups_of(pairs: Iterable[Pair], block_bytes: Callable[[int], int], *, limit: int = GROUP_BYTES) -> list[Group]:
    """Return the blocks in groups of neighbours, by layer and expert; a group takes `limit` bytes, or is one block.

    Args:
        block_bytes: the size of a layer's block.
    """
    groups: list[Group] = []
    for layer, expert in sorted(pairs):
        last = groups[-1] if groups else None
        if (
            last is None
            or (layer, expert) != (last.layer, last.experts[-1] + 1)
            or ((len(last.experts) + 1) * block_bytes(layer) > limit)
        ):
            groups.append(Group(layer, (expert,)))
        else:
            groups[-1] = Group(layer, (*last.experts, expert))
    return groups


def spans_of(planes: Iterable[Plane], *, max_gap: int = MAX_GAP_BYTES) -> list[Span]:
    """Return the fewest ranges that hold the planes, by file and position; gaps of at most `max_gap` bytes are read, too."""
    spans: list[Span] = []
    for plane in sorted(planes, key=lambda each: (each.file, each.start)):
        last = spans[-1] if spans else None
        if last is not None and last.file == plane.file and plane.start <= last.end + max_gap:
            spans[-1] = Span(last.file, last.start, max(last.end, plane.end))
        else:
            spans.append(Span(plane.file, plane.start, plane.end))
    return spans


def cut_out(plane: Plane, spans: Sequence[Span], data: Sequence[bytes | bytearray]) -> memoryview:
    """Return a plane's bytes, not copied; `data` has each span's. The plane must lie in one of them."""
    for span, part in zip(spans, data, strict=True):
        if span.file == plane.file and span.start <= plane.start and plane.end <= span.end:
            return memoryview(part)[plane.start - span.start : plane.end - span.start]
    raise AssertionError(f"no span holds {plane}")


def most_held(pairs: Iterable[Pair], places: Places) -> int:
    """Return how many bytes of unfinished blocks are held at most when the files are read from end to end, one by one."""
    ends: list[tuple[str, int, int, Pair]] = []  # (file, position, bytes that come, block)
    left: dict[Pair, int] = {}
    for pair in pairs:
        planes = places(*pair)
        left[pair] = len(planes)
        ends += [(plane.file, plane.start, plane.size_bytes, pair) for plane in planes]
    held = most = 0
    sizes: dict[Pair, int] = dict.fromkeys(left, 0)
    for _, _, size, pair in sorted(ends):
        held += size
        most = max(most, held)
        sizes[pair] += size
        left[pair] -= 1
        if not left[pair]:
            held -= sizes.pop(pair)
    return most
