"""Answers over a vocabulary of letters."""

from __future__ import annotations

import asyncio

import pytest

from swarm.backbone.answer import Answer
from swarm.backbone.requests import FinishReason, GenerationRequest, TextDelta
from swarm.errors import ConnectionLost

END = 0
LOST = ConnectionLost("gone")


class Letters:
    """Token n is the n-th letter; 0 ends."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([96 + token])

    def is_end_of_generation(self, token: int) -> bool:
        return token == END


def answer(*, is_stream: bool = True, n_most: int = 10, stop: tuple[str, ...] = ()) -> Answer:
    return Answer(GenerationRequest(prompt="x", is_stream=is_stream, stop=stop), Letters(), n_prompt=3, n_most=n_most)


async def read_all(made: Answer) -> list[TextDelta]:
    deltas = []
    while (delta := await made.read()) is not None:
        deltas.append(delta)
    return deltas


async def test_tokens_become_deltas_and_the_last_one_says_why() -> None:
    made = answer(n_most=2)
    made.feed(1)
    assert (made.n_unread, made.is_over) == (1, False)
    made.feed(2)
    made.feed(3)  # too late
    deltas = await read_all(made)
    assert [(delta.text, delta.n_completion_tokens) for delta in deltas] == [("a", 1), ("b", 2), ("", 2)]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.LENGTH]
    assert deltas[0].n_prompt_tokens == 3


async def test_a_reader_waits_and_reading_is_told() -> None:
    made = answer()
    n_read: list[int] = []
    made.on_read = lambda: n_read.append(made.n_read)
    reading = asyncio.create_task(made.read())
    await asyncio.sleep(0)
    assert not reading.done()
    made.feed(5)
    assert (await reading).text == "e"  # type: ignore[union-attr]
    assert n_read == [1]


async def test_an_error_comes_after_what_was_there() -> None:
    made = answer()
    made.feed(1)
    made.fail(LOST)
    made.feed(2)
    assert (await made.read()).text == "a"  # type: ignore[union-attr]
    with pytest.raises(ConnectionLost):
        await made.read()


async def test_a_complete_stream_cannot_fail_any_more() -> None:
    made = answer()
    made.feed(END)
    made.fail(LOST)
    assert (await read_all(made))[-1].finish_reason is FinishReason.STOP


async def test_a_held_answer_fails_as_a_whole_even_when_it_was_complete() -> None:
    made = answer(is_stream=False)
    made.feed(1)
    made.feed(END)
    made.fail(LOST)
    with pytest.raises(ConnectionLost):
        await made.read()


@pytest.mark.parametrize("n_kept", [0, 1, 3])
async def test_a_held_answer_is_rewound_as_if_the_rest_had_never_come(n_kept: int) -> None:
    expected = answer(is_stream=False, stop=("cz",))
    made = answer(is_stream=False, stop=("cz",))
    tokens = [1, 2, 3, 4, 5, END]
    for token in [*tokens[:n_kept], 7, 26, END]:
        made.feed(token)
    assert made.is_over
    made.reopen()
    assert not made.is_over
    made.rewind(n_kept)
    for token in tokens[n_kept:]:
        made.feed(token)
    for token in tokens:
        expected.feed(token)
    assert made.n_unread == 0, "what is held does not wait for a reader"
    assert await read_all(made) == await read_all(expected)


async def test_complete_waits_for_the_end_or_a_failure() -> None:
    for end in (lambda made: made.feed(END), lambda made: made.fail(LOST)):
        made = answer(is_stream=False)
        waiting = asyncio.create_task(made.complete())
        made.feed(1)
        await asyncio.sleep(0)
        assert not waiting.done()
        end(made)
        await waiting


async def test_nothing_wanted_is_complete_at_once() -> None:
    made = answer(n_most=0)
    assert [delta.finish_reason for delta in await read_all(made)] == [FinishReason.LENGTH]
