"""What moves: assignments, logical payload, distinct destinations of a row, and bytes on the wire for each form.

Pure counting; knows nothing of time.

    A  = T K                      assignments: (token, expert) pairs of one MoE layer
    M  = T K D b                  payload each way, if every assignment moved a row of its own
    s  = 1 - 1/N                  remote share, N devices that share tokens and experts evenly
       = 1 - local gate mass      remote share of a backbone that holds some experts itself
    2 M s                         there and back

A swarm moves less than M: a row goes once to each peer however many of its experts live there, and one partial sum
returns. The distinct destinations of a row whose K experts are a uniform choice of E: the sum over peers with g
experts each of 1 - C(E - g, K) / C(E, K).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.plan.shape import ModelShape
from swarm.wire.rows import WireForm, back_codec, out_codec, parse_wire, row_bytes

# Sizes of the frames DISPATCH and RESULT without rows (byte table of wire/frames): header, fixed fields.
DISPATCH_FIXED_BYTES = 5 + 24
RESULT_FIXED_BYTES = 5 + 20
BYTES_PER_ROW = 1  # number of its pairs, u8
BYTES_PER_ID = 2  # of a pair: expert, u16
BYTES_PER_WEIGHT = 4  # of a pair: f32
# QUIC, counted on two aioquic connections in a virtual clock and checked there by tests/swarm/plan/test_traffic: a datagram
# (certificate.quic_configuration's size) carries a short header (1 + 8 + 2), a stream frame's header (7) and the seal (16). Each
# message's first one also carries the acknowledgement of what came before it; beyond, one of its own follows every eighth
# datagram (quic_driver.ACK_EVERY_PACKETS). What goes twice on lossy paths is left out.
DATAGRAM_BYTES = 1232
DATAGRAM_OVERHEAD_BYTES = 34
RIDING_ACK_BYTES = 5
ACK_BYTES = 34
DATAGRAMS_PER_ACK = 8
IP_UDP_BYTES = 20 + 8  # IPv4 and UDP headers: links carry them, byte counts of the wire leave them out

COMPARED = ("exact", "f32", "bf16", "f16", "fp8/f16", "fp8", "q8/f16", "q8")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTraffic:
    """What one MoE layer moves logically; bytes of one layer and one step of `n_tokens`."""

    n_tokens: int
    n_assignments: int
    payload_bytes: float
    remote_share: float
    remote_bytes_each_way: float
    remote_bytes_both_ways: float
    rows_per_expert: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCost:
    """What one form costs; bytes include headers, ids, QUIC and its acknowledgements.

    Attributes:
        payload_out_bytes, payload_back_bytes: of the rows alone, of one token, layer and destination.
        bytes_out_per_token_layer, bytes_back_per_token_layer: of one destination that the row goes to.
        bytes_all_destinations: both ways, of one token and layer.
        bytes_per_token: both ways, all destinations and layers.
        message_out_bytes, message_back_bytes: of one layer's batch of all tokens, to and from one destination.
    """

    wire: str
    payload_out_bytes: int
    payload_back_bytes: int
    bytes_out_per_token_layer: float
    bytes_back_per_token_layer: float
    bytes_all_destinations: float
    bytes_per_token: float
    message_out_bytes: float
    message_back_bytes: float
    round_trips_per_step: float
    round_trips_per_token: float


def symmetric_remote_share(n_devices: int) -> float:
    """Return the share of assignments whose expert lives on another of N devices: 1 - 1/N."""
    return 1 - 1 / n_devices


def logical_traffic(shape: ModelShape, n_tokens: int, remote_share: float) -> LogicalTraffic:
    """Return what one layer moves when `remote_share` (0 to 1) of its assignments leave."""
    n_assignments = n_tokens * shape.n_expert_used
    payload_bytes = n_assignments * shape.n_embd * shape.bytes_per_value
    return LogicalTraffic(
        n_tokens=n_tokens,
        n_assignments=n_assignments,
        payload_bytes=payload_bytes,
        remote_share=remote_share,
        remote_bytes_each_way=payload_bytes * remote_share,
        remote_bytes_both_ways=2 * payload_bytes * remote_share,
        rows_per_expert=n_assignments / shape.n_expert,
    )


def group_sizes(n_expert: int, n_groups: int) -> tuple[int, ...]:
    """Return how many experts each group gets when all are shared out evenly, larger groups first."""
    size, n_larger = divmod(n_expert, n_groups)
    return (size + 1,) * n_larger + (size,) * (n_groups - n_larger)


def touch_probability(n_expert: int, n_expert_used: int, group_size: int, local_share: float = 0.0) -> float:
    """Return how likely a row needs a group of experts: 1 - C(E - g, K) / C(E, K), if nothing is local.

    With `local_share` each of the K choices is served by the backbone with that probability, the others go out.
    """
    if local_share <= 0:
        return 1 - math.comb(n_expert - group_size, n_expert_used) / math.comb(n_expert, n_expert_used)
    missed = 0.0
    for n_remote in range(n_expert_used + 1):
        share = math.comb(n_expert_used, n_remote) * (1 - local_share) ** n_remote
        share *= local_share ** (n_expert_used - n_remote)
        missed += share * math.comb(n_expert - group_size, n_remote) / math.comb(n_expert, n_remote)
    return max(0.0, 1 - missed)


def fan_out(n_expert: int, n_expert_used: int, groups: Sequence[int], local_share: float = 0.0) -> float:
    """Return the expected distinct destinations of a row, uniform choice of experts."""
    chance = {size: touch_probability(n_expert, n_expert_used, size, local_share) for size in set(groups)}
    return sum(chance[size] for size in groups)


def wire_bytes(frame_bytes: float) -> float:
    """Return the UDP payload that carries a frame, with the acknowledgements that come back for it alone."""
    if frame_bytes <= 0:
        return 0.0
    n_datagrams = math.ceil((frame_bytes + RIDING_ACK_BYTES) / (DATAGRAM_BYTES - DATAGRAM_OVERHEAD_BYTES))
    n_acks = n_datagrams // DATAGRAMS_PER_ACK
    return frame_bytes + RIDING_ACK_BYTES + n_datagrams * DATAGRAM_OVERHEAD_BYTES + n_acks * ACK_BYTES


def link_bytes(message_bytes: float) -> float:
    """Return what a link carries for `wire_bytes` of a message: its datagrams with their IP and UDP headers."""
    return message_bytes + math.ceil(message_bytes / DATAGRAM_BYTES) * IP_UDP_BYTES


def wire_cost(
    shape: ModelShape, n_tokens: int, wire: str, groups: Sequence[int], local_share: float, round_trips_per_step: float
) -> WireCost:
    """Return what a form costs a step of `n_tokens` whose experts live in `groups`, one peer each."""
    forms = parse_wire(wire)
    is_exact = forms.back is WireForm.EXACT
    n_destinations = fan_out(shape.n_expert, shape.n_expert_used, groups, local_share)
    n_remote = shape.n_expert_used * (1 - local_share)
    pairs = n_remote / n_destinations if n_destinations else 0.0  # of a row, at one destination
    row_out = row_bytes(shape.n_embd, out_codec(forms.out, shape.n_embd, shape.ggml_types))
    row_back = row_bytes(shape.n_embd, back_codec(forms.back))
    # Mean rows of one destination that is asked at all; the messages' fixed bytes are shared by these rows.
    touched = sum(1 - (1 - n_destinations / len(groups)) ** n_tokens for _ in groups)
    rows = n_tokens * n_destinations / touched if touched else 0.0
    rows_back = pairs if is_exact else 1.0
    pair_bytes = (
        BYTES_PER_ID if is_exact else BYTES_PER_ID + BYTES_PER_WEIGHT
    )  # exact sends no weights: the backbone combines
    message_out = wire_bytes(DISPATCH_FIXED_BYTES + rows * (row_out + BYTES_PER_ROW + pairs * pair_bytes))
    message_back = wire_bytes(RESULT_FIXED_BYTES + rows * rows_back * row_back)
    if not rows:
        message_out = message_back = 0.0
    bytes_out = message_out / rows if rows else 0.0
    bytes_back = message_back / rows if rows else 0.0
    bytes_all = (bytes_out + bytes_back) * n_destinations
    return WireCost(
        wire=wire,
        payload_out_bytes=row_out,
        payload_back_bytes=round(rows_back * row_back),
        bytes_out_per_token_layer=bytes_out,
        bytes_back_per_token_layer=bytes_back,
        bytes_all_destinations=bytes_all,
        bytes_per_token=bytes_all * shape.n_layers,
        message_out_bytes=message_out,
        message_back_bytes=message_back,
        round_trips_per_step=round_trips_per_step,
        round_trips_per_token=round_trips_per_step / n_tokens,
    )
