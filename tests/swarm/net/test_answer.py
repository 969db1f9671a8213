"""An answer's one taker hears of it at once, and of everything else as any callback does."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import ConnectionLost
from swarm.net.answer import Answer
from swarm.wire import messages as m


class Taker:
    """Notes what it was told; a callback must be equal to itself to be removed, as bound methods are."""

    def __init__(self) -> None:
        self.heard: list[asyncio.Future[m.Response]] = []

    def take(self, answer: asyncio.Future[m.Response]) -> None:
        self.heard.append(answer)


def awaited(taker: Taker) -> Answer:
    answer = Answer(loop=asyncio.get_running_loop())
    answer.taker = taker.take
    answer.add_done_callback(taker.take)
    return answer


async def test_the_taker_has_the_answer_before_the_next_round_and_once() -> None:
    taker = Taker()
    answer = awaited(taker)
    answer.give(m.Done())
    assert taker.heard == [answer]
    assert answer.result() == m.Done()
    await asyncio.sleep(0)
    assert taker.heard == [answer]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_failure_is_told_in_the_next_round(is_cancelled: bool) -> None:
    taker = Taker()
    answer = awaited(taker)
    if is_cancelled:
        answer.cancel()
    else:
        answer.set_exception(ConnectionLost("gone"))
    assert taker.heard == []
    await asyncio.sleep(0)
    assert taker.heard == [answer]
    assert is_cancelled or isinstance(answer.exception(), ConnectionLost)


async def test_without_a_taker_it_is_a_future_as_any_other() -> None:
    answer, heard = Answer(loop=asyncio.get_running_loop()), Taker()
    answer.add_done_callback(heard.take)
    asyncio.get_running_loop().call_soon(answer.give, m.Done())
    assert await answer == m.Done()
    assert heard.heard == [answer]
