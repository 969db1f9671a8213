"""What honest peers with other kernels differ by: far below what a cheat of 5 % noise does, in every form."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.errors import UserError
from swarm.gate import audit_errors
from swarm.gate.audit_errors import measure_audit_errors
from swarm.gate.form_table import GateModel, all_wires
from swarm.gate.stored import MOST_TOLERANCE
from swarm.wire.rows import parse_wire


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M", "synthetic"])
def test_honest_peers_stay_far_below_the_largest_tolerance(
    gate_model: Callable[[str], GateModel], heldout: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_errors, "ROWS", 8)
    seen: list[tuple[int, int]] = []
    errors = measure_audit_errors(
        gate_model(name), all_wires(), heldout, n_tokens=64, progress=lambda done, total: seen.append((done, total))
    )
    assert set(errors) == set(all_wires())
    assert max(errors.values()) < MOST_TOLERANCE / 2
    assert seen[-1][0] == seen[-1][1] > 0


def test_two_kinds_of_kernels_are_compared(gate_model: Callable[[str], GateModel], heldout: str) -> None:
    """Q4_K weights are interleaved by ggml on x86-64 and arm64: their sums differ, and so does what follows."""
    (error,) = measure_audit_errors(gate_model("Q4_K_M"), [parse_wire("f32")], heldout, n_tokens=64).values()
    assert 0 < error < 0.01


def test_a_text_that_is_too_short_is_the_users_mistake(gate_model: Callable[[str], GateModel]) -> None:
    with pytest.raises(UserError, match="too short"):
        measure_audit_errors(gate_model("synthetic"), [parse_wire("f32")], "a", n_tokens=64)
