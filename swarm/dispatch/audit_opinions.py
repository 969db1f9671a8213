"""One answer that was audited: what others say it should have been, and what follows when they disagree.

Pure. A *question* is one peer's answer for some rows of a batch. A second opinion answers it in one or more *parts*, where no
single other peer holds all of its experts. Where the opinions disagree, more is asked before anybody is judged:

    the questioned peer, for each part alone     its answers must add up to what it said first: else it contradicts itself
    who gave the second opinion, once more       the same
    a third, for each part                       two against one; this machine's own computation needs no second

What is still open then are *disputes*: of two peers one is wrong. `audit_standing` decides them, with other cases.

Opinions are asked for as float32 (one row per pair where the form is exact), added, and rounded as the answer was: so the form's
own rounding is in both, and what is left between honest peers are the kernels' differences (docs/audit.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarm.dispatch.plan import HERE, Batch
from swarm.ids import NodeId
from swarm.wire.rows import RowCodec, decode_rows, encode_rows

Rows = npt.NDArray[np.float32]

TINY = 1e-12  # rows whose norm is no greater are equal: nothing can be said of them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """One peer's answer for N rows.

    Attributes:
        batch: its rows are 0 to N-1.
        x: [N, D] float32, as the rows were before they were encoded.
        answer: [N, D], or [P, D] where the form is exact: as it was decoded.
        codec: in which the answer came.
    """

    layer: int
    node: NodeId
    batch: Batch
    x: Rows
    answer: Rows
    codec: RowCodec


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """Some pairs of a question, and who said what of them; raw rows or partial sums, float32.

    Attributes:
        is_in: bool [P], which of the question's pairs.
        node: who gives the second opinion; HERE: this process.
        rows: the second opinion; again: the same node's, asked once more.
        accused: what the questioned peer says of this part alone.
        third_node, third: another's.
    """

    is_in: npt.NDArray[np.bool_]
    batch: Batch
    node: NodeId
    rows: Rows | None = None
    again: Rows | None = None
    accused: Rows | None = None
    third_node: NodeId | None = None
    third: Rows | None = None


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far two answers are apart.

    Attributes:
        error: the largest of the rows' relative differences, |a - b| / max(|a|, |b|).
        cosine: the smallest of the rows' cosines.
    """

    error: float
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one case says.

    Attributes:
        guilty: node -> why it is wrong.
        agreements, disputes: pairs of nodes that said the same of a part, or not.
        suspects: at least one of these is wrong, and nothing else says which. Without any of all these the answer was right after
            all: asked for in float32 all say the same, and rounding had made more of a difference that devices may have.
    """

    guilty: dict[NodeId, str] = field(default_factory=dict)
    agreements: tuple[tuple[NodeId, NodeId], ...] = ()
    disputes: tuple[tuple[NodeId, NodeId], ...] = ()
    suspects: frozenset[NodeId] = frozenset()

    @property
    def clears(self) -> bool:
        """Whether nobody is wrong."""
        return not (self.guilty or self.disputes or self.suspects)


def deviation(a: Rows, b: Rows) -> Deviation:
    """Return how far [N, D] and [N, D] are apart; numbers that are not finite are infinitely far."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(wide_a).all() and np.isfinite(wide_b).all()):
        return Deviation(np.inf, -1.0)
    norm_a, norm_b = np.linalg.norm(wide_a, axis=1), np.linalg.norm(wide_b, axis=1)  # [N]
    largest = np.maximum(norm_a, norm_b)
    counts = largest > TINY
    if not counts.any():
        return Deviation(0.0, 1.0)
    wide_a, wide_b, norm_a, norm_b = wide_a[counts], wide_b[counts], norm_a[counts], norm_b[counts]
    errors = np.linalg.norm(wide_a - wide_b, axis=1) / largest[counts]
    cosines = np.einsum("nd,nd->n", wide_a, wide_b) / np.maximum(norm_a * norm_b, TINY**2)
    return Deviation(float(errors.max()), float(cosines.min()))


def as_answered(question: Question, parts: Sequence[tuple[Part, Rows]]) -> Rows:
    """Return what the whole answer would be, given each part's rows, rounded as the answer was."""
    if question.codec is RowCodec.EXACT:
        whole = np.empty_like(question.answer)  # [P, D]
        for part, rows in parts:
            whole[part.is_in] = rows
        return whole
    whole = np.zeros_like(question.answer)  # [N, D]
    for part, rows in parts:
        whole[part.batch.rows] += rows  # rows of a batch are distinct
    return decode_rows(encode_rows(whole, question.codec), len(whole), whole.shape[1], question.codec)


def first_look(question: Question, parts: Sequence[Part]) -> Deviation:
    """Return how far the answer is from the second opinion."""
    said = [(part, part.rows) for part in parts if part.rows is not None]
    return deviation(question.answer, as_answered(question, said))


def agreement(question: Question, parts: Sequence[Part]) -> Finding:
    """Return the finding where answer and second opinion are the same."""
    return Finding(agreements=tuple((question.node, part.node) for part in parts if part.node != HERE))


def judge(question: Question, parts: Sequence[Part], tolerance: float) -> Finding:
    """Return what follows where answer and second opinion differ, from all that was asked since."""
    accused = question.node
    guilty: dict[NodeId, str] = {}

    def differ(a: Rows, b: Rows) -> Deviation | None:
        found = deviation(a, b)
        return None if found.error <= tolerance else found

    own = [(part, rows) for part in parts if (rows := _own(part)) is not None]
    again = [(part, part.accused) for part in parts if part.accused is not None]
    if len(again) == len(parts):
        if found := differ(question.answer, as_answered(question, again)):
            guilty[accused] = f"{_say(found)} from what it said when it was asked again"
    elif len(own) == len(parts) and (found := differ(question.answer, as_answered(question, own))):
        guilty[accused] = f"{_say(found)} from this machine's own computation"
    for part in parts:
        truth = _own(part)
        said = part.accused if accused not in guilty else None
        if said is not None and truth is not None and (found := differ(said, truth)):
            guilty[accused] = f"{_say(found)} from this machine's own computation"
        if part.node == HERE or part.rows is None:
            continue
        if truth is not None and (found := differ(part.rows, truth)):
            guilty[part.node] = f"{_say(found)} from this machine's own computation"
        elif part.again is not None and (found := differ(part.rows, part.again)):
            guilty[part.node] = f"{_say(found)} from what it said when it was asked again"

    agreements: list[tuple[NodeId, NodeId]] = []
    disputes: list[tuple[NodeId, NodeId]] = []
    for part in parts:
        opinions = [(accused, part.accused), (part.node, part.rows), (part.third_node, part.third)]
        voices = [(node, rows) for node, rows in opinions if node not in (None, HERE, *guilty) and rows is not None]
        pairs = [(a, b) for index, a in enumerate(voices) for b in voices[:index]]
        same = [(a[0], b[0]) for a, b in pairs if differ(a[1], b[1]) is None]
        agreements += [(a, b) for a, b in same if a is not None and b is not None]
        others = [(a[0], b[0]) for a, b in pairs if (a[0], b[0]) not in same]
        if len(voices) == 3 and len(same) == 1:  # two against one
            (odd,) = [node for node, _ in voices if node not in same[0]]
            assert odd is not None
            guilty[odd] = "two others say the same, and it does not"
        else:
            disputes += [(a, b) for a, b in others if a is not None and b is not None]
    disputes = [pair for pair in disputes if not guilty.keys() & set(pair)]
    agreements = [pair for pair in agreements if not guilty.keys() & set(pair)]
    suspects: frozenset[NodeId] = frozenset()
    if not guilty and not disputes and len(again) < len(parts):
        suspects = frozenset([accused, *(part.node for part in parts)]) - {HERE}
    return Finding(guilty=guilty, agreements=tuple(agreements), disputes=tuple(disputes), suspects=suspects)


def _own(part: Part) -> Rows | None:
    """Return this machine's own computation of a part, if it was made."""
    if part.node == HERE:
        return part.rows
    return part.third if part.third_node == HERE else None


def _say(found: Deviation) -> str:
    return f"its numbers differ by {found.error:.1%} (cosine {found.cosine:.4f})"
