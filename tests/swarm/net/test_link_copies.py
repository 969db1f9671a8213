"""What a server makes of dispatches that come twice: one computation, one answer on both links, never another request's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from swarm.ids import NodeId
from swarm.net import link_copies
from swarm.net.link_copies import MAX_COPIED_BYTES, LinkCopies, is_copied
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec

NODE, OTHER_NODE = NodeId(bytes([1]) * 32), NodeId(bytes([2]) * 32)
NUMBER = 8


class Link:
    """Keeps what it is to answer."""

    def __init__(self, remote: NodeId = NODE) -> None:
        self.remote = remote
        self.answers: list[tuple[int, m.Response | m.Refusal]] = []

    def respond(self, exchange: int, message: m.Response | m.Refusal) -> None:
        self.answers.append((exchange, message))


def dispatch(value: float = 0.5, n_embd: int = 8) -> m.Dispatch:
    return m.Dispatch(
        model_tag=bytes(8),
        layer=0,
        rows_codec=RowCodec.F32,
        result_codec=RowCodec.F32,
        row_counts=np.array([1], np.uint8),
        expert_ids=np.array([0], np.uint16),
        weights=np.ones(1, np.float32),
        rows=np.full((1, n_embd), value, np.float32),
    )


def result(value: float = 1.0, n_embd: int = 8) -> m.Result:
    return m.Result(codec=RowCodec.F32, rows=np.full((1, n_embd), value, np.float32), compute_us=0, queue_us=0)


def test_a_copy_that_comes_before_the_answer_waits_for_it() -> None:
    copies, first, second = LinkCopies(), Link(), Link()
    assert copies.is_first(first, 4, NUMBER, dispatch())
    assert not copies.is_first(second, 6, NUMBER, dispatch())
    assert second.answers == []
    answer = result()
    copies.answered(first, 4, answer)
    assert second.answers == [(6, answer)]
    assert first.answers == [], "whoever serves it answers it there"
    assert len(copies) == 0


def test_a_copy_that_comes_after_the_answer_gets_what_was_answered_whatever_became_of_the_buffer() -> None:
    copies, first, second = LinkCopies(), Link(), Link()
    assert copies.is_first(first, 4, NUMBER, dispatch())
    answer = result(1.0)
    copies.answered(first, 4, answer)
    answer.rows[:] = 7.0
    assert not copies.is_first(second, 6, NUMBER, dispatch())
    ((exchange, got),) = second.answers
    assert isinstance(got, m.Result)
    assert (exchange, got.rows[0, 0]) == (6, 1.0)
    assert len(copies) == 0


def test_a_refusal_is_the_copys_too() -> None:
    copies, first, second = LinkCopies(), Link(), Link()
    assert copies.is_first(first, 4, NUMBER, dispatch())
    busy = m.Busy(retry_after_ms=5, detail="busy")
    copies.answered(first, 4, busy)
    assert not copies.is_first(second, 6, NUMBER, dispatch())
    assert second.answers == [(6, busy)]


@pytest.mark.parametrize(
    "other",
    [
        dispatch(0.25),
        dispatch(n_embd=4),
        dataclasses.replace(dispatch(), layer=1),
        dataclasses.replace(dispatch(), weights=None),
        dataclasses.replace(dispatch(), expert_ids=np.array([1], np.uint16)),
    ],
    ids=["rows", "width", "layer", "weights", "experts"],
)
def test_another_request_with_the_same_number_is_served_by_itself(other: m.Dispatch) -> None:
    copies, first, second = LinkCopies(), Link(), Link()
    assert copies.is_first(first, 4, NUMBER, dispatch())
    copies.answered(first, 4, result())
    assert copies.is_first(second, 6, NUMBER, other)
    copies.answered(second, 6, result(9.0))
    assert second.answers == []


def test_other_nodes_other_numbers_and_the_same_link_do_not_meet() -> None:
    copies, first = LinkCopies(), Link()
    assert copies.is_first(first, 4, NUMBER, dispatch())
    assert copies.is_first(Link(OTHER_NODE), 4, NUMBER, dispatch())
    assert copies.is_first(Link(), 4, NUMBER + 2, dispatch())
    assert copies.is_first(first, 6, NUMBER, dispatch())


def test_a_copy_is_served_if_the_first_is_cancelled_or_its_link_ends() -> None:
    for end in ("cancelled", "gone"):
        copies, first, second = LinkCopies(), Link(), Link()
        request = dispatch()
        assert copies.is_first(first, 4, NUMBER, request)
        assert not copies.is_first(second, 6, NUMBER, dispatch())
        begin = copies.cancelled(first, 4) if end == "cancelled" else copies.gone(first)
        assert begin == [(second, 6, request)], end
        assert len(copies) == 0


def test_a_copy_that_is_cancelled_or_whose_link_ends_is_not_answered() -> None:
    for end in ("cancelled", "gone"):
        copies, first, second = LinkCopies(), Link(), Link()
        assert copies.is_first(first, 4, NUMBER, dispatch())
        assert not copies.is_first(second, 6, NUMBER, dispatch())
        assert (copies.cancelled(second, 6) if end == "cancelled" else copies.gone(second)) == []
        copies.answered(first, 4, result())
        assert second.answers == [], end
        assert copies.gone(first) == []
        assert len(copies) == 0


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_copies, "MAX_KEPT", 3)
    copies, first, second = LinkCopies(), Link(), Link()
    for number in range(5):
        assert copies.is_first(first, number, number, dispatch())
        copies.answered(first, number, result(float(number)))
    assert len(copies) == 3
    assert copies.is_first(second, 0, 1, dispatch()), "the oldest are forgotten, and computed again"
    assert not copies.is_first(second, 2, 4, dispatch())
    assert copies.is_first(first, 6, 6, dispatch())
    copies.answered(first, 6, result(n_embd=MAX_COPIED_BYTES // 4 + 1))
    assert copies.is_first(second, 8, 6, dispatch()), "a large answer is not kept"


def test_only_small_dispatches_go_twice() -> None:
    n_pair_bytes = 1 + 2 + 4
    assert is_copied(dispatch(n_embd=(MAX_COPIED_BYTES - n_pair_bytes) // 4))
    assert not is_copied(dispatch(n_embd=(MAX_COPIED_BYTES - n_pair_bytes) // 4 + 1))
    assert not is_copied(m.GetStatus())


@pytest.mark.parametrize("has_weights", [True, False])
def test_short_rows_of_very_many_pairs_are_not_small(has_weights: bool) -> None:
    """Kept until their copies come, 256 of these would be gigabytes."""
    pairs = np.zeros(255 * 1000, np.uint16)
    many = dataclasses.replace(
        dispatch(),
        row_counts=np.full(1000, 255, np.uint8),
        expert_ids=pairs,
        weights=pairs.astype(np.float32) if has_weights else None,
        rows=np.zeros((1000, 1), np.float32),
    )
    assert many.rows.nbytes < MAX_COPIED_BYTES
    assert not is_copied(many)
