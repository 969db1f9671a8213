import pytest

from swarm.net.patience import (
    COPY_BURST,
    COPY_SHARE,
    LEAST_LATE_S,
    MOST_LATE,
    MOST_LATE_S,
    UNSEEN_S,
    Patience,
    size_of,
)
from swarm.wire import messages as m
from tests.sample_messages import dispatch


def test_before_anything_was_answered_nobody_knows_what_is_late() -> None:
    assert Patience().asked(4) == (UNSEEN_S, UNSEEN_S)


def test_an_answer_is_late_by_what_its_like_took() -> None:
    patience = Patience()
    for _ in range(200):
        patience.answered(4, 0.002)
    late_s, overdue_s = patience.asked(4)
    assert late_s == pytest.approx(0.002 + LEAST_LATE_S, abs=1e-6), "without deviations"
    assert overdue_s == pytest.approx(0.002 + MOST_LATE_S, abs=1e-6)
    assert patience.asked(9) == (UNSEEN_S, UNSEEN_S), "of other work nothing is known"


def test_who_varies_gets_more_time_but_never_more_than_is_overdue() -> None:
    patience = Patience()
    for turn in range(400):
        patience.answered(4, 0.1 if turn % 2 else 0.5)
    late_s, overdue_s = patience.asked(4)
    assert 0.5 < late_s <= overdue_s
    assert overdue_s == pytest.approx(MOST_LATE * 0.3, rel=0.1)
    patience.answered(5, 2.0)
    late_s, overdue_s = patience.asked(5)
    assert late_s == pytest.approx(2.0 + 2 * 1.0), "after one answer its deviation is half of it"
    assert overdue_s == pytest.approx(MOST_LATE * 2.0)


def test_copies_are_a_share_of_what_is_asked_saved_up_to_a_burst() -> None:
    patience = Patience()
    patience.n_copies = 0.0
    for _ in range(5):
        patience.asked(4)
    assert patience.n_copies == pytest.approx(5 * COPY_SHARE)
    for _ in range(1000):
        patience.asked(4)
    assert patience.n_copies == COPY_BURST


def test_work_is_told_apart_by_powers_of_two_of_its_pairs() -> None:
    assert [size_of(dispatch(n)) for n in (1, 2, 3, 4, 7, 8)] == [1, 2, 2, 3, 3, 4]
    assert size_of(m.GetStatus()) == 0
