"""Who is in a step with how many rows, over hand-made requests and times."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.backbone.scheduler import (
    FIRST_RETRY_S,
    MAX_AHEAD,
    MIN_CHUNK,
    SLOWDOWN,
    LaneSchedule,
    LiveRequest,
    StepCost,
    WaitingLine,
)
from swarm.errors import Overloaded

N_BATCH = 512


def live(origin: int, n_prompt: int, *, n_computed: int = 0, n_drawn: int = 0, **options: int) -> LiveRequest:
    return LiveRequest(
        origin=origin,
        sequence=origin,
        tokens=list(range(n_prompt + n_drawn)),
        n_prompt=n_prompt,
        n_computed=n_computed,
        **({"n_most": 100} | options),
    )


def decoding(origin: int, **options: int) -> LiveRequest:
    """Return a request that has drawn one token, which is to be computed."""
    return live(origin, 10, n_computed=10, n_drawn=1, **options)


def schedule(*requests: LiveRequest, **options: Any) -> LaneSchedule:
    made = LaneSchedule(n_slots=8, n_batch=N_BATCH, **options)
    for request in requests:
        made.join(request)
    return made


def rows(made: LaneSchedule) -> dict[int, int]:
    return {share.request.origin: share.n_rows for share in made.plan()}


def costing(made: LaneSchedule, base_s: float, row_s: float) -> LaneSchedule:
    """Let it have seen steps that cost so much."""
    for n_rows in (1, 2, 64, 256, 1, 128):
        made.cost.add(n_rows, base_s + n_rows * row_s)
    return made


def test_everybody_who_decodes_is_in_every_step() -> None:
    made = schedule(*(decoding(origin) for origin in range(5)))
    assert rows(made) == dict.fromkeys(range(5), 1)
    assert all(share.draws for share in made.plan())


def test_a_lone_prompt_fills_the_batch_and_draws_with_its_last_chunk() -> None:
    request = live(1, 1200)
    made = schedule(request)
    seen = []
    while request.n_computed < 1200:
        (share,) = made.plan()
        seen.append((share.n_rows, share.draws))
        request.n_computed += share.n_rows
    assert seen == [(512, False), (512, False), (176, True)]


def test_a_prompt_beside_decoding_lengthens_their_step_by_half() -> None:
    made = costing(schedule(decoding(1), decoding(2), live(3, 1000)), base_s=0.5, row_s=0.005)
    planned = rows(made)
    assert planned[1] == planned[2] == 1
    assert planned[3] == pytest.approx(SLOWDOWN * 0.51 / 0.005, abs=1)


def test_a_prompt_beside_decoding_goes_on_however_dear_its_rows_are() -> None:
    made = costing(schedule(decoding(1), live(2, 1000)), base_s=0.01, row_s=1.0)
    assert rows(made) == {1: 1, 2: MIN_CHUNK}


def test_prompts_share_a_chunk_half_for_the_oldest_and_the_rest_for_the_shortest() -> None:
    made = schedule(live(1, 5000), live(2, 5000), live(3, 20))
    assert rows(made) == {1: 256, 2: 236, 3: 20}


def test_prompts_have_no_more_rows_than_there_is_room_for_and_who_decodes_needs_none() -> None:
    made = schedule(decoding(1), live(2, 1000), live(3, 50), room=lambda: 100)
    assert rows(made) == {1: 1, 2: 50, 3: 50}
    assert [share.n_prompt_rows for share in made.plan()] == [0, 50, 50]
    assert rows(schedule(live(1, 1000), room=lambda: 2000)) == {1: N_BATCH}


def test_what_short_prompts_leave_goes_back_to_the_oldest() -> None:
    made = schedule(live(1, 5000), live(2, 30))
    assert rows(made) == {1: 482, 2: 30}


def test_a_prompts_last_token_alone_counts_as_decoding() -> None:
    """What a prefix cache leaves of a prompt that it has seen: it must not wait for others' chunks."""
    made = costing(schedule(live(1, 1000, n_computed=999), live(2, 1000)), base_s=0.01, row_s=1.0)
    assert rows(made) == {1: 1, 2: MIN_CHUNK}


@pytest.mark.parametrize(("n_most", "n_draft"), [(100, 8), (6, 4), (2, 0)])
def test_no_more_is_drafted_than_is_wanted(n_most: int, n_draft: int) -> None:
    (share,) = schedule(decoding(1, n_draft=8, n_most=n_most)).plan()
    assert share.n_draft == n_draft


def test_drafts_leave_a_row_for_each_that_follows() -> None:
    made = LaneSchedule(n_slots=4, n_batch=6)
    for origin in range(4):
        made.join(decoding(origin, n_draft=8))
    shares = made.plan()
    assert [1 + share.n_draft for share in shares] == [3, 1, 1, 1]


def test_who_is_gone_or_has_enough_or_is_not_read_sits_out() -> None:
    gone, done, unread = decoding(1), decoding(2, n_most=1), decoding(3, n_unread=MAX_AHEAD)
    gone.is_gone = True
    made = schedule(gone, done, unread, decoding(4))
    assert rows(made) == {4: 1}
    made.leave(made.requests[3])
    assert made.plan() == []
    assert made.starts_at(0.0) is None
    unread.n_unread -= 1
    assert rows(made) == {3: 1}


def test_isolated_requests_have_a_step_each_and_then_all_go_on() -> None:
    requests = [decoding(origin) for origin in range(3)]
    made = schedule(*requests)
    made.isolate(requests)
    made.leave(requests[1])  # it ended meanwhile
    assert [rows(made) for _ in range(3)] == [{0: 1}, {2: 1}, {0: 1, 2: 1}]


def test_a_step_begins_at_once_unless_it_is_told_to_wait_for_more() -> None:
    assert schedule(decoding(1)).starts_at(5.0) == 5.0
    waiting = schedule(decoding(1), fill_wait_s=0.02)
    assert waiting.starts_at(5.0) == 5.02
    assert waiting.starts_at(5.01) == 5.02, "the wait is bounded: another look does not begin it anew"
    for origin in range(2, 9):
        waiting.join(decoding(origin))
    assert waiting.starts_at(5.015) == 5.0, "all slots are taken: nobody else can come"
    waiting.ended(8, 0.5)
    assert waiting.starts_at(6.0) == 6.0


def test_the_cost_of_a_row_is_learned_and_old_steps_fade() -> None:
    cost = StepCost()
    assert cost.seconds(100) == 0.0
    for n_rows in (1, 100, 3, 50):
        cost.add(n_rows, 0.5 + 0.002 * n_rows)
    assert cost.row_s == pytest.approx(0.002)
    assert cost.seconds(10) == pytest.approx(0.52)
    for n_rows in (1, 100, 3, 50) * 40:
        cost.add(n_rows, 1.0 + 0.01 * n_rows)
    assert cost.row_s == pytest.approx(0.01, rel=0.01)


def test_equal_steps_say_nothing_about_a_row() -> None:
    cost = StepCost()
    for seconds in (0.5, 0.4, 0.6):
        cost.add(4, seconds)
    assert cost.row_s == 0.0


def test_the_line_is_bounded_and_says_when_to_come_back() -> None:
    line = WaitingLine(2, n_slots=4)
    line.enter(0)
    line.enter(0)
    with pytest.raises(Overloaded) as caught:
        line.enter(0)
    assert caught.value.retry_after_s == FIRST_RETRY_S
    line.served(20.0)
    with pytest.raises(Overloaded) as caught:
        line.enter(0)
    assert caught.value.retry_after_s == 5.0
    line.leave()
    line.enter(0)


def test_who_is_on_the_way_to_a_free_slot_takes_no_place_of_those_who_wait() -> None:
    line = WaitingLine(1, n_slots=4)
    for _ in range(4):
        line.enter(3)
    with pytest.raises(Overloaded):
        line.enter(3)
    nobody = WaitingLine(0, n_slots=1)
    nobody.enter(1)
    with pytest.raises(Overloaded):
        nobody.enter(0)
