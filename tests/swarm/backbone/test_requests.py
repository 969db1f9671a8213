"""Bounds of what may be asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swarm.backbone.requests import GenerationRequest, SamplingParams


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 100},
        {"top_k": 0},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"seed": 2**63},
        {"seed": -1},
    ],
)
def test_the_edges_are_allowed(fields: dict[str, Any]) -> None:
    assert SamplingParams(**fields) == SamplingParams(**fields)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [-2.1, 100.1, math.nan, math.inf])
def test_beyond_the_edges_is_an_error_that_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} out of range"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("top_k", -1), ("top_p", 0), ("min_p", -0.1), ("temperature", -0.1)])
def test_just_below_the_edges_is_an_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} out of range"):
        SamplingParams(**{name: value})


def test_a_request_asks_for_nothing_special_by_default() -> None:
    request = GenerationRequest(prompt="x")
    assert (request.max_tokens, request.stop, request.parse_special) == (None, (), False)
    assert request.sampling == SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
