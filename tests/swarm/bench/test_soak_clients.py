"""What a soak's clients ask: the same for a seed, of random length and manner."""

from __future__ import annotations

import random

from swarm.bench.soak_clients import MAX_TOKENS, is_error, question


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
