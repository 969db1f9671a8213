"""Counting: the worked example, distinct destinations against simulation, and bytes of every wire form."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.emulation.path import PathSpec
from swarm.errors import UserError
from swarm.net.certificate import quic_configuration
from swarm.net.quic_driver import ACK_EVERY_PACKETS
from swarm.plan import traffic
from swarm.plan.shape import parse_shape
from swarm.plan.traffic import (
    WireCost,
    fan_out,
    group_sizes,
    logical_traffic,
    symmetric_remote_share,
    wire_bytes,
    wire_cost,
)
from swarm.wire import messages as m
from swarm.wire.frames import encode
from swarm.wire.rows import RowCodec, WireForm, row_bytes
from tests.virtual_link import CERTIFICATE, IDENTITY, VirtualWorld

MIXTRAL = parse_shape("d=4096,E=8,k=2,ff=14336,b=2")
WIDE = parse_shape("d=3072,E=256,k=8,ff=1536,b=4,layers=62")


def cost_of(wire: str, n_tokens: int = 1, n_peers: int = 1, local_share: float = 0.0) -> WireCost:
    return wire_cost(WIDE, n_tokens, wire, group_sizes(256, n_peers), local_share, 62.0)


def test_the_worked_example_of_prefill() -> None:
    moved = logical_traffic(MIXTRAL, 4096, symmetric_remote_share(8))
    assert moved.n_assignments == 8192
    assert moved.payload_bytes == 64 * 2**20
    assert moved.remote_share == 7 / 8
    assert moved.remote_bytes_each_way == 56 * 2**20
    assert moved.remote_bytes_both_ways == 112 * 2**20
    assert moved.rows_per_expert == 1024


def test_the_worked_example_of_decode() -> None:
    moved = logical_traffic(MIXTRAL, 32, symmetric_remote_share(8))
    assert (moved.n_assignments, moved.rows_per_expert) == (64, 8)


def test_eight_of_128_experts_over_16_peers_meet_six_and_a_half() -> None:
    assert fan_out(128, 8, group_sizes(128, 16)) == pytest.approx(
        6.6, abs=0.005
    )  # 6.45 if the eight were drawn with repetition


@pytest.mark.parametrize(("n_expert", "n_used", "n_groups"), [(6, 2, 3), (7, 3, 2), (8, 8, 4), (5, 1, 5)])
def test_fan_out_is_the_mean_over_all_choices_of_experts(n_expert: int, n_used: int, n_groups: int) -> None:
    groups = group_sizes(n_expert, n_groups)
    owner = [number for number, size in enumerate(groups) for _ in range(size)]
    counts = [len({owner[expert] for expert in chosen}) for chosen in combinations(range(n_expert), n_used)]
    assert fan_out(n_expert, n_used, groups) == pytest.approx(float(np.mean(counts)))


def test_local_choices_are_taken_out_of_the_fan_out_as_a_simulation_does() -> None:
    rng, groups, share = np.random.default_rng(5), group_sizes(32, 4), 0.4
    met = 0
    for _ in range(20_000):
        chosen = rng.permutation(32)[:6]
        met += len(np.unique(chosen[rng.random(6) >= share] // 8))
    assert fan_out(32, 6, groups, share) == pytest.approx(met / 20_000, rel=0.02)
    assert fan_out(32, 6, groups, 1.0) == 0


@given(
    st.integers(1, 64).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e), st.integers(1, e))), st.floats(0, 1)
)
def test_fan_out_is_at_most_the_experts_and_the_peers(sizes: tuple[int, int, int], local: float) -> None:
    n_expert, n_used, n_groups = sizes
    found = fan_out(n_expert, n_used, group_sizes(n_expert, n_groups), local)
    assert 0 <= found <= min(n_used, n_groups) + 1e-9
    assert found <= fan_out(n_expert, n_used, group_sizes(n_expert, n_groups)) + 1e-9
    assert sum(group_sizes(n_expert, n_groups)) == n_expert


@given(st.integers(1, 100_000), st.integers(1, 10_000))
def test_payload_grows_with_the_tokens_and_shares_stay_between_zero_and_one(n_tokens: int, n_devices: int) -> None:
    share = symmetric_remote_share(n_devices)
    assert 0 <= share < 1
    one, many = logical_traffic(MIXTRAL, 1, share), logical_traffic(MIXTRAL, n_tokens, share)
    assert many.payload_bytes == n_tokens * one.payload_bytes
    assert many.remote_bytes_both_ways == pytest.approx(n_tokens * one.remote_bytes_both_ways)


def test_exact_carries_what_systems_like_this_carry_today() -> None:
    cost = cost_of("exact")
    assert (cost.payload_out_bytes, cost.payload_back_bytes) == (12_288, 98_304)  # 12.3 and 98.3 KB
    total = cost.bytes_out_per_token_layer + cost.bytes_back_per_token_layer
    assert total == pytest.approx(110_592, rel=0.06)


@pytest.mark.parametrize(("wire", "limit"), [("q8", 7000), ("q8/f16", 10_000)])
def test_compressed_forms_stay_within_the_issues_bounds(wire: str, limit: float) -> None:
    cost = cost_of(wire)
    payload = cost.payload_out_bytes + cost.payload_back_bytes
    assert payload < cost.bytes_out_per_token_layer + cost.bytes_back_per_token_layer <= limit


# The constants are those of the real frames and packets


@pytest.mark.parametrize("codec_back", [RowCodec.F16, RowCodec.EXACT])
@pytest.mark.parametrize("codec_out", [RowCodec.Q8_0, RowCodec.F32])
def test_a_dispatch_and_its_result_are_as_long_as_planned(codec_out: RowCodec, codec_back: RowCodec) -> None:
    n_rows, n_pairs, d = 3, 7, 256
    is_exact = codec_back is RowCodec.EXACT
    dispatch = m.Dispatch(
        model_tag=bytes(8),
        layer=0,
        rows_codec=codec_out,
        result_codec=codec_back,
        row_counts=np.array([2, 2, 3], np.uint8),
        expert_ids=np.arange(n_pairs, dtype=np.uint16),
        weights=None if is_exact else np.full(n_pairs, 0.5, np.float32),
        rows=np.zeros((n_rows, d), np.float32),
    )
    pair = traffic.BYTES_PER_ID + (0 if is_exact else traffic.BYTES_PER_WEIGHT)
    planned = n_rows * (row_bytes(d, codec_out) + traffic.BYTES_PER_ROW) + n_pairs * pair
    assert len(encode(dispatch)) == traffic.DISPATCH_FIXED_BYTES + planned
    result = m.Result(codec=codec_back, rows=np.zeros((n_rows, d), np.float32), compute_us=0, queue_us=0)
    assert len(encode(result)) == traffic.RESULT_FIXED_BYTES + n_rows * row_bytes(d, codec_back)


def test_datagrams_and_acknowledgements_are_those_of_the_transport() -> None:
    assert quic_configuration(IDENTITY, CERTIFICATE, is_client=True).max_datagram_size == traffic.DATAGRAM_BYTES
    assert traffic.DATAGRAMS_PER_ACK == ACK_EVERY_PACKETS


@pytest.mark.parametrize(
    ("out", "back"),
    [
        pytest.param(1134, 2073, id="q8/f16, D=1024"),
        pytest.param(1180, 1300, id="one datagram, two"),
        pytest.param(3342, 3193, id="q8, D=3072"),
        pytest.param(3342, 6169, id="q8/f16, D=3072"),
        pytest.param(12_334, 98_329, id="exact, D=3072"),
    ],
)
def test_real_quic_connections_send_the_bytes_planned(out: int, back: int) -> None:
    """Both ways together: an acknowledgement of its own travels against the message that it is counted with."""
    link = VirtualWorld(seed=1).link(PathSpec(delay_s=0.015))
    link.open()
    for _ in range(20):  # stream numbers get long
        link.dispatch(out, back)
    before = link.client.bytes_sent + link.server.bytes_sent
    for _ in range(30):
        link.dispatch(out, back)
    sent = (link.client.bytes_sent + link.server.bytes_sent - before) / 30
    assert wire_bytes(out) + wire_bytes(back) == pytest.approx(sent, rel=0.005)


def test_round_trips_are_shared_by_the_tokens_of_a_step() -> None:
    cost = cost_of("f32", n_tokens=4)
    assert (cost.round_trips_per_step, cost.round_trips_per_token) == (62, 15.5)


def test_bytes_of_all_peers_grow_with_the_fan_out_but_exact_rows_back_do_not() -> None:
    one, many = cost_of("q8"), cost_of("q8", n_peers=16)
    assert many.bytes_all_destinations / one.bytes_all_destinations == pytest.approx(6.5, rel=0.02)
    exact = cost_of("exact", n_peers=16)
    assert exact.payload_back_bytes * 6.523 == pytest.approx(98_304, rel=0.001)


def test_nothing_leaves_when_everything_is_local() -> None:
    cost = cost_of("f32", n_peers=3, local_share=1.0)
    assert cost.bytes_per_token == 0 == cost.message_out_bytes


@pytest.mark.parametrize("wire", traffic.COMPARED)
def test_every_compared_form_is_one_that_the_wire_has(wire: str) -> None:
    assert cost_of(wire).payload_out_bytes > 0


def test_every_form_of_the_wire_is_compared() -> None:
    assert {form for wire in traffic.COMPARED for form in wire.split("/")} == {form.value for form in WireForm}


def test_an_unknown_form_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="unknown wire form"):
        cost_of("q3")
