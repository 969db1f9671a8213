"""`swarm serve --local-experts auto|SIZE|none`."""

from __future__ import annotations

import pytest

from swarm.backbone.local_keeper import LocalBudget
from swarm.cli.serve import parse_local_experts
from swarm.errors import UserError


def test_it_is_a_size_or_left_to_the_machine_or_off() -> None:
    assert parse_local_experts("none") is None
    assert parse_local_experts("auto") == LocalBudget(None)
    assert parse_local_experts("2GB") == LocalBudget(2_000_000_000)


@pytest.mark.parametrize("wrong", ["2", "", "all", "GB", "-1GB"])
def test_a_size_has_a_unit(wrong: str) -> None:
    with pytest.raises(UserError, match="--local-experts"):
        parse_local_experts(wrong)
