"""How long one step of a backbone with a star of peers takes, and what is left of it when bytes are free.

    step_s = local_s + layers x p x (RTT + transfer + peer compute + software)

with p = 1 - local share^(K T), how likely a layer leaves the backbone at all; RTT that of the slowest peer met; peer
compute that of the busiest peer. `floor_s` = layers x p x RTT is what no software and no rate removes. The shared
expert counts in local_s although it runs during the round trip, so a step may be a little shorter.

Transfer, of messages of B out and C back to n peers over access links of one rate (the backbone's is shared, each peer
has its own, packets are passed on one by one, peers answer while later batches still leave), with S of software for each peer:

    total = B + C + S + (n - 1) max(B, C, S) + one datagram each way         a flow shop of equal jobs (Johnson 1954)
    transfer = total - n S

B and C as times at the rate. The backbone's software is a stage of its own, through which the peers' batches and answers pass one
after the other: on a slow link it runs while others' bytes are under way, so that n S is not all added to them. (Measured with
synth16 and 3 peers, 100 -> 10 Mbit/s: 100 ms a step; without that stage 116 were predicted, with it 109.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.plan.calibration import Calibration
from swarm.plan.traffic import DATAGRAM_BYTES, IP_UDP_BYTES, WireCost, link_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One MoE layer that leaves the backbone, stage by stage, in seconds."""

    rtt_s: float
    transfer_s: float
    compute_s: float
    software_s: float

    @property
    def total_s(self) -> float:
        """All stages, one after the other."""
        return self.rtt_s + self.transfer_s + self.compute_s + self.software_s

    @property
    def largest(self) -> str:
        """The stage that takes longest: `rtt`, `transfer`, `compute` or `software`."""
        stages = (
            (self.rtt_s, "rtt"),
            (self.transfer_s, "transfer"),
            (self.compute_s, "compute"),
            (self.software_s, "software"),
        )
        return max(stages, key=lambda stage: stage[0])[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of all tokens.

    Attributes:
        round_trips: the expected number of layers that leave the backbone.
        floor_s: those round trips alone.
        largest_term: of a layer: `rtt`, `transfer`, `compute` or `software`; `local` where local_s exceeds them all.
        local_s, layers_s: with a calibration, local_s is everything but round trips, and a layer's compute and software
            are in it.
        source: `model`, or `calibration`.
    """

    step_s: float
    floor_s: float
    local_s: float
    layers_s: float
    round_trips: float
    layer: LayerTime
    largest_term: str
    tokens_per_s: float
    rtt_bound_tokens_per_s: float | None
    source: str


def transfer_s(size_bytes: float, rate_bit_s: float) -> float:
    """Return how long a link takes for these bytes."""
    return 8 * size_bytes / rate_bit_s


def star_transfer_s(cost: WireCost, n_destinations: float, rate_bit_s: float, software_s: float = 0.0) -> float:
    """Return what transfer adds to one layer (the module's formula) to `n_destinations` peers that are asked.

    `software_s`: of them all together, counted elsewhere.
    """
    if n_destinations <= 0 or cost.message_out_bytes <= 0:
        return 0.0
    out, back = link_bytes(cost.message_out_bytes), link_bytes(cost.message_back_bytes)
    largest_datagram = DATAGRAM_BYTES + IP_UDP_BYTES
    hops = min(out, largest_datagram) + min(back, largest_datagram)
    n = max(1.0, n_destinations)
    each_s = software_s / n
    slowest_stage_s = max(transfer_s(max(out, back), rate_bit_s), each_s)
    total_s = transfer_s(out + back + hops, rate_bit_s) + each_s + (n - 1) * slowest_stage_s
    return total_s - software_s


def slowest_rtt_s(rtts_s: Sequence[float], touch_probability: float) -> float:
    """Return the expected largest RTT among the peers that a layer meets, each met with the same probability."""
    if touch_probability >= 1 or min(rtts_s) == max(rtts_s):
        return max(rtts_s)
    expected, none_yet = 0.0, 1.0
    for rtt_s in sorted(rtts_s, reverse=True):
        expected += none_yet * touch_probability * rtt_s
        none_yet *= 1 - touch_probability
    return expected / (1 - none_yet) if none_yet < 1 else 0.0  # given that any is met


def make_step(*, layer: LayerTime, round_trips: float, local_s: float, n_tokens: int) -> Step:
    """Return the step of a layer's stages."""
    layers_s = round_trips * layer.total_s
    step_s = local_s + layers_s
    return _step(layer, round_trips, local_s, layers_s, step_s, n_tokens, "model")


def calibrated_step(
    *, calibration: Calibration, layer: LayerTime, round_trips: float, extra_s: float, n_tokens: int
) -> Step:
    """Return the step that a calibration predicts.

    Args:
        extra_s: what the model says the step costs more than the sweep's own, for its other rate or tokens; all but RTT.
    """
    local_s = calibration.step_s(0.0, round_trips) + extra_s
    layers_s = calibration.trips_per_layer * round_trips * layer.rtt_s
    known = LayerTime(rtt_s=layer.rtt_s, transfer_s=layer.transfer_s, compute_s=0.0, software_s=0.0)  # in local_s
    return _step(known, round_trips, local_s, layers_s, local_s + layers_s, n_tokens, "calibration")


def _step(
    layer: LayerTime,
    round_trips: float,
    local_s: float,
    layers_s: float,
    step_s: float,
    n_tokens: int,
    source: str,
) -> Step:
    floor_s = round_trips * layer.rtt_s
    largest_stage_s = round_trips * max(layer.rtt_s, layer.transfer_s, layer.compute_s, layer.software_s)
    return Step(
        step_s=step_s,
        floor_s=floor_s,
        local_s=local_s,
        layers_s=layers_s,
        round_trips=round_trips,
        layer=layer,
        largest_term="local" if local_s > largest_stage_s else layer.largest,
        tokens_per_s=n_tokens / step_s,
        rtt_bound_tokens_per_s=n_tokens / floor_s if floor_s else None,
        source=source,
    )
