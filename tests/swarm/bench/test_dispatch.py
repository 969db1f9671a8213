"""The choices that the dispatch benchmark draws."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.bench.dispatch import DispatchOptions, draw_choices
from swarm.bench.testbed import PathOptions
from swarm.errors import UserError
from swarm.wire.rows import parse_wire


@pytest.mark.parametrize(("skew", "hottest"), [(0.0, 8 / 64), (1.0, 0.85)])
def test_rows_choose_distinct_experts_by_the_law_asked_for(skew: float, hottest: float) -> None:
    options = DispatchOptions(wire=parse_wire("q8/f16"), n_tokens=4096, skew=skew)
    ids, weights = draw_choices(np.random.default_rng(0), options)
    assert ids.shape == weights.shape == (4096, 8)
    assert ids.dtype == np.int32
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert (ids >= 0).all()
    assert (ids < 64).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    share = (ids == 0).any(axis=1).mean()  # of rows that meet the hottest expert
    assert share == pytest.approx(hottest, abs=0.06)


@pytest.mark.parametrize("bad", [{"n_tokens": 2}, {"n_peers": 9}])
def test_a_serial_chain_needs_one_token_that_can_meet_every_peer(bad: dict[str, int]) -> None:
    wire = parse_wire("q8/f16")
    assert DispatchOptions(wire=wire, compares_serial=True, n_peers=8).compares_serial
    with pytest.raises(UserError, match="a serial chain is measured with one token that needs every peer"):
        DispatchOptions(wire=wire, compares_serial=True, **bad)


def test_tls_links_are_not_measured_over_paths_that_carry_udp_alone() -> None:
    wire = parse_wire("q8/f16")
    assert DispatchOptions(wire=wire, link="auto").link == "auto"
    with pytest.raises(UserError, match="UDP alone"):
        DispatchOptions(wire=wire, link="auto", paths=PathOptions(rtts_s=(0.003,)))
