"""What a soak's clients ask: the same for a seed, of random length and manner."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Self, cast

import aiohttp
import pytest

from swarm.bench.soak_clients import MAX_TOKENS, SoakClients, is_error, question


def test_questions_are_the_seeds_and_differ_in_length_and_manner() -> None:
    rng = random.Random(1)
    asked = [question(rng) for _ in range(200)]
    again = random.Random(1)
    assert asked == [question(again) for _ in range(200)]
    assert {body["stream"] for body in asked} == {True, False}
    assert {body["temperature"] for body in asked} == {0, 1}
    lengths = [body["max_tokens"] for body in asked]
    assert 1 <= min(lengths) < 10
    assert MAX_TOKENS - 10 < max(lengths) < MAX_TOKENS


def test_an_error_is_told_from_a_text_that_says_error() -> None:
    assert is_error(b'data: {"error": {"message": "no peer", "code": "expert_unavailable"}}\n')
    assert is_error(b"event: error\n")
    assert not is_error(b'data: {"choices": [{"text": "error"}]}\n')
    assert not is_error(b"data: [DONE]\n")
    assert not is_error(b"\n")


class _Silent:
    """A session whose every question stays unanswered for aiohttp's own time."""

    n_asked = 0

    def post(self, *_: object, **__: object) -> Self:
        self.n_asked += 1
        return self

    async def __aenter__(self) -> None:
        raise TimeoutError

    async def __aexit__(self, *_: object) -> None: ...


async def test_a_question_that_is_never_answered_is_a_failure_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = _Silent()
    monkeypatch.setattr("swarm.bench.soak_clients.LEAVING_SHARE", 0.0)
    monkeypatch.setattr("swarm.bench.soak_clients.time", SimpleNamespace(monotonic=lambda: session.n_asked))
    clients = SoakClients("http://nowhere/v1", 1, think_s=0, seed=1)
    await clients._one(cast(aiohttp.ClientSession, session), random.Random(1), until=2)
    assert len(clients.failures) == 2
