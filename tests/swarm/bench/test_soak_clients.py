"""What a soak's clients ask: the same for a seed, of random length and manner."""

from __future__ import annotations

import random

from swarm.bench.soak_clients import MAX_TOKENS, question


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
