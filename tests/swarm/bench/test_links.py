"""How the policy's choice is judged."""

from __future__ import annotations

import pytest

from swarm.bench.links import judge


def test_the_policy_is_compared_with_whichever_fixed_choice_is_better_at_each_figure() -> None:
    seconds = {"quic": [0.002] * 99 + [0.003], "tls": [0.001] * 98 + [0.2] * 2, "auto": [0.0011] * 98 + [0.004] * 2}
    figures = judge(seconds)
    assert (figures["quic_p50_s"], figures["tls_p50_s"]) == (0.002, 0.001)
    assert figures["p50_over_better"] == pytest.approx(1.1)
    assert figures["p99_over_better"] == pytest.approx(figures["auto_p99_s"] / figures["quic_p99_s"])
