"""The whole plan: every figure of `swarm plan`, from explicit inputs. Formulas live in the modules beside this one.

`Plan.to_json()` has these keys; they are stable. Units end the names; `_s` seconds, shares run from 0 to 1.

    model            name, n_embd, n_expert, n_expert_used, n_ff_exp, n_layers, bytes_per_value, bytes_per_weight,
                     expert_bytes, backbone_bytes, ggml_types
    inputs           n_tokens, n_peers, n_devices, experts_per_peer, rtts_s, rate_bit_s, wire, local_share, n_draft,
                     draft_s, software_s, device {flops_per_s, memory_bytes_per_s}, here_memory_bytes, ssd_bytes_per_s
    traffic          n_tokens, n_assignments, payload_bytes, remote_share, remote_bytes_each_way,
                     remote_bytes_both_ways, rows_per_expert        (backbone and peers; one layer)
    expert_parallel  null without --devices, else: traffic {...}, bytes_per_device, transfer_s_per_device,
                     rows_imbalance, skipping {...}
    roofline         rows_per_expert, intensity, balance, bound (`memory`, `arithmetic`), rows_at_knee
    spread           fan_out, n_groups, replicas, peers_asked, rows_imbalance, peer_imbalance, rows_busiest_expert,
                     active_experts
    memory           experts_per_peer, slice_bytes, slice_transfer_s, backbone_bytes, model_bytes
    wires            list: wire, payload_out_bytes, payload_back_bytes, bytes_out_per_token_layer,
                     bytes_back_per_token_layer, bytes_all_destinations, bytes_per_token, message_out_bytes,
                     message_back_bytes, round_trips_per_step, round_trips_per_token
    wire             the one of them that was asked for
    step             step_s, floor_s, local_s, layers_s, round_trips, layer {rtt_s, transfer_s, compute_s, software_s},
                     largest_term, tokens_per_s, rtt_bound_tokens_per_s, source (`model`, `calibration`)
    left             payload_bytes, payload_s (bytes of a token and layer at the rate), slice_bytes, slice_s, rtt_s, name
    by_rate          list: rate_bit_s, transfer_s, step_s, lengthens_by_s (against the first), tokens_per_s
    by_link          list: link (`quic`, `tls`), software_s, step_s, tokens_per_s: what each kind of link costs of its own
    drafts           n_draft, plain_step_s, verify_step_s, draft_s, break_even_accept_length, pays_at_all
    verdict          skipping {dense_s, ideal_s, saved_s, movement_s, small_batches_s, imbalance_s, ideal_speedup,
                     speedup, pays}, swarm_step_s, here_memory_step_s, here_paged_step_s, here_step_s,
                     here_memory_bytes, model_bytes, is_in_memory_here, beats_memory, beats_paged, answer, reason
    calibration      null without --calibrate, else: a_s, trips_per_layer, layers, n_tokens, rate_bit_s,
                     points [{rtt_s, measured_step_s, fitted_step_s, error_share}], max_error_share
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from swarm.errors import UserError
from swarm.plan import load, traffic
from swarm.plan.calibration import Calibration
from swarm.plan.roofline import Device, Roofline, backbone_s, experts_s, roofline
from swarm.plan.shape import ModelShape
from swarm.plan.step import (
    LayerTime,
    Step,
    calibrated_step,
    make_step,
    slowest_rtt_s,
    star_transfer_s,
    transfer_s,
)
from swarm.plan.traffic import LogicalTraffic, WireCost
from swarm.plan.verdict import Skipping, Verdict, decide, paged_s, weigh_skipping
from swarm.wire.rows import parse_wire

# A desktop: guessed, 8 cores of AVX2 at half their 0.8 TFLOP/s, two channels of DDR4-3200 at 60 % of 51 GB/s.
DEFAULT_DEVICE = Device(flops_per_s=400e9, memory_bytes_per_s=30e9)
DEFAULT_SOFTWARE_S = 1.4e-3  # measured: a bare aioquic star of three, 2.2 KB each way, on loopback (two cores)
# Of a layer by kind of link: the above, and what `swarm bench dispatch --link tls` has beyond the peers' compute, one token and
# three peers on two cores (docs/performance.md).
LINK_SOFTWARE_S = {"quic": DEFAULT_SOFTWARE_S, "tls": 0.65e-3}
TLS_MAX_RTT_S = 0.015  # a longer path is reached over QUIC alone: `net/link_choice` (a test compares)
DEFAULT_HERE_MEMORY_BYTES = 16e9  # guessed: what a desktop has free
DEFAULT_SSD_BYTES_PER_S = 2e9  # guessed: NVMe, reads of one expert (megabytes) at a time
FREE_RATE_BIT_S = 1e18  # so fast that transfer costs nothing
RATES_BIT_S = (1000e6, 100e6, 10e6)
MAX_TOKENS = 10_000_000
MAX_NODES = 100_000
MAX_DRAFT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What a plan is made for. A contradiction raises UserError.

    Attributes:
        n_tokens: T of one step: of a prompt, or one for each sequence that is decoded.
        n_devices: for symmetric expert parallelism; None leaves that part out.
        experts_per_peer: of each layer; None shares all experts out evenly.
        rtts_s: one for all peers, or one for each.
        local_share: gate mass of the experts that the backbone holds itself.
        draft_s: cost of drafting `n_draft` tokens.
        software_s: of one layer's dispatch and combine, beyond compute and transfer.
        here_memory_bytes: memory of this machine, for running the model without a swarm.
    """

    shape: ModelShape
    n_tokens: int = 1
    n_peers: int = 3
    n_devices: int | None = None
    experts_per_peer: int | None = None
    rtts_s: tuple[float, ...] = (0.03,)
    rate_bit_s: float = 100e6
    wire: str = "f32"
    local_share: float = 0.0
    n_draft: int = 4
    draft_s: float = 0.0
    software_s: float = DEFAULT_SOFTWARE_S
    device: Device = DEFAULT_DEVICE
    here_memory_bytes: float = DEFAULT_HERE_MEMORY_BYTES
    ssd_bytes_per_s: float = DEFAULT_SSD_BYTES_PER_S

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n_tokens", 1, MAX_TOKENS),
            ("n_peers", 1, MAX_NODES),
            ("n_draft", 1, MAX_DRAFT),
        ):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"{name} out of range: got {getattr(self, name)}, expected {low} to {high}")
        if self.n_devices is not None and not 1 <= self.n_devices <= MAX_NODES:
            raise UserError(f"n_devices out of range: got {self.n_devices}, expected 1 to {MAX_NODES}")
        if not 0 <= self.local_share <= 1:
            raise UserError(f"local share out of range: got {self.local_share:g}, expected 0 to 1")
        if len(self.rtts_s) not in (1, self.n_peers):
            raise UserError(
                f"wrong number of RTTs: got {len(self.rtts_s)}, expected one, or one for each of {self.n_peers} peers"
            )
        if not (self.rate_bit_s > 0 and self.ssd_bytes_per_s > 0):
            raise UserError("a rate must be above 0")
        n_expert, held = self.shape.n_expert, self.experts_per_peer
        if held is not None and not 1 <= held <= n_expert:
            raise UserError(f"experts per peer out of range: got {held}, expected 1 to {n_expert}")
        if held is not None and held * self.n_peers < n_expert and self.local_share == 0:
            raise UserError(
                f"experts without a holder: {self.n_peers} peers with {held} experts each hold "
                f"{held * self.n_peers} of {n_expert}; raise --peers or --experts-per-peer, or set --local"
            )
        parse_wire(self.wire)

    @property
    def held_per_peer(self) -> int:
        """Experts of each layer at one peer."""
        return self.experts_per_peer or math.ceil(self.shape.n_expert / self.n_peers)

    @property
    def groups(self) -> tuple[int, ...]:
        """Experts of each destination; peers beyond the groups are replicas."""
        n_groups = min(self.n_peers, math.ceil(self.shape.n_expert / self.held_per_peer))
        return traffic.group_sizes(self.shape.n_expert, n_groups)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, without the shape."""
        plain = asdict(self)
        del plain["shape"]
        return plain | {"experts_per_peer": self.held_per_peer, "rtts_s": list(self.rtts_s)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel:
    """N devices that share tokens and experts evenly; one layer, its skipping over all layers."""

    traffic: LogicalTraffic
    bytes_per_device: float
    transfer_s_per_device: float
    rows_imbalance: float
    skipping: Skipping


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a step's rows spread over experts and peers, under a uniform router.

    Attributes:
        fan_out: distinct destinations of one row.
        peers_asked: distinct destinations of all rows of a step, in one layer.
        rows_imbalance, peer_imbalance: max over mean of the rows per expert, and per peer.
    """

    fan_out: float
    n_groups: int
    replicas: float
    peers_asked: float
    rows_imbalance: float
    peer_imbalance: float
    rows_busiest_expert: float
    active_experts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Where the weights live. `slice_bytes` are one peer's, of all layers."""

    experts_per_peer: int
    slice_bytes: float
    slice_transfer_s: float
    backbone_bytes: float
    model_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left when bytes move at the given rate.

    Attributes:
        payload_bytes: a token's rows in one layer, both ways, all destinations, without overhead.
        name: the larger of a layer's round trip and its transfer: `RTT` or `transfer`.
    """

    payload_bytes: float
    payload_s: float
    slice_bytes: float
    slice_s: float
    rtt_s: float
    name: str


def usual_link(rtts_s: Sequence[float]) -> str:
    """Return the kind of link that paths of these round trips get: `tls` if all are short, else `quic`."""
    return "tls" if max(rtts_s) <= TLS_MAX_RTT_S else "quic"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByLink:
    """A step over one kind of link."""

    link: str
    software_s: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRate:
    """A step at another rate; `lengthens_by_s` against the first of the list."""

    rate_bit_s: float
    transfer_s: float
    step_s: float
    lengthens_by_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """When drafts pay: a verified step may yield `accept_length` tokens, n_accepted + 1, of each sequence.

    Attributes:
        break_even_accept_length: (verify_step_s + draft_s) / plain_step_s.
        pays_at_all: whether a draft that is wholly accepted would pay.
    """

    n_draft: int
    plain_step_s: float
    verify_step_s: float
    draft_s: float
    break_even_accept_length: float
    pays_at_all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every figure; the module's docstring lists the keys of its JSON."""

    inputs: PlanInputs
    traffic: LogicalTraffic
    expert_parallel: ExpertParallel | None
    roofline: Roofline
    spread: Spread
    memory: Memory
    wires: tuple[WireCost, ...]
    wire: WireCost
    step: Step
    left: Left
    by_rate: tuple[AtRate, ...]
    by_link: tuple[ByLink, ...]
    drafts: Drafts
    verdict: Verdict
    calibration: Calibration | None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plain = {name: asdict(getattr(self, name)) for name in _SECTIONS if getattr(self, name) is not None}
        return {
            "model": asdict(self.inputs.shape),
            "inputs": self.inputs.to_json(),
            "expert_parallel": None,
            "calibration": None,
            **plain,
            "wires": [asdict(cost) for cost in self.wires],
            "by_rate": [asdict(each) for each in self.by_rate],
            "by_link": [asdict(each) for each in self.by_link],
        }


_SECTIONS = (
    "traffic",
    "expert_parallel",
    "roofline",
    "spread",
    "memory",
    "wire",
    "step",
    "left",
    "drafts",
    "verdict",
    "calibration",
)


def make_plan(inputs: PlanInputs, calibration: Calibration | None = None) -> Plan:
    """Return the plan; with a calibration, the steps come from it instead of from the device's figures."""
    shape = inputs.shape
    step = step_of(inputs, calibration)
    spread = _spread(inputs)
    slice_bytes = inputs.held_per_peer * shape.n_layers * shape.expert_bytes
    slice_s = transfer_s(slice_bytes, inputs.rate_bit_s)
    wire = _wire_cost(inputs, inputs.wire)
    payload_bytes = (wire.payload_out_bytes + wire.payload_back_bytes) * spread.fan_out
    payload_s = transfer_s(payload_bytes, inputs.rate_bit_s)
    # Rows of an expert that is read at all: at one token an expert that is not picked is not read either.
    rows_when_read = inputs.n_tokens * shape.n_expert_used / spread.active_experts
    model_bytes = shape.experts_bytes + shape.backbone_bytes
    return Plan(
        inputs=inputs,
        traffic=traffic.logical_traffic(shape, inputs.n_tokens, 1 - inputs.local_share),
        expert_parallel=_expert_parallel(inputs),
        roofline=roofline(shape, rows_when_read, inputs.device),
        spread=spread,
        memory=Memory(
            experts_per_peer=inputs.held_per_peer,
            slice_bytes=slice_bytes,
            slice_transfer_s=slice_s,
            backbone_bytes=shape.backbone_bytes,
            model_bytes=model_bytes,
        ),
        wires=tuple(_wire_cost(inputs, name) for name in traffic.COMPARED),
        wire=wire,
        step=step,
        left=Left(
            payload_bytes=payload_bytes,
            payload_s=payload_s,
            slice_bytes=slice_bytes,
            slice_s=slice_s,
            rtt_s=step.layer.rtt_s,
            name="RTT" if step.layer.rtt_s >= step.layer.transfer_s else "transfer",
        ),
        by_rate=_by_rate(inputs, calibration),
        by_link=_by_link(inputs),
        drafts=_drafts(inputs, calibration, step),
        verdict=_verdict(inputs, step, model_bytes),
        calibration=calibration,
    )


def step_of(inputs: PlanInputs, calibration: Calibration | None = None) -> Step:
    """Return the predicted step alone."""
    step = _modelled_step(inputs)
    if calibration is None:
        return step
    then = _modelled_step(
        replace(inputs, n_tokens=calibration.n_tokens, rate_bit_s=calibration.rate_bit_s or FREE_RATE_BIT_S)
    )
    return calibrated_step(
        calibration=calibration,
        layer=step.layer,
        round_trips=step.round_trips,
        extra_s=(step.step_s - step.floor_s) - (then.step_s - then.floor_s),
        n_tokens=inputs.n_tokens,
    )


def _modelled_step(inputs: PlanInputs) -> Step:
    shape, n_tokens = inputs.shape, inputs.n_tokens
    touch, asked = _asked(inputs)
    layer = LayerTime(
        rtt_s=slowest_rtt_s(inputs.rtts_s if len(inputs.rtts_s) > 1 else inputs.rtts_s * len(inputs.groups), touch),
        transfer_s=star_transfer_s(_wire_cost(inputs, inputs.wire), asked, inputs.rate_bit_s, inputs.software_s),
        compute_s=_busiest_s(inputs, len(inputs.groups), inputs.local_share),
        software_s=inputs.software_s,
    )
    local_s = backbone_s(shape, inputs.device, n_tokens) + shape.n_layers * _local_experts_s(inputs)
    return make_step(layer=layer, round_trips=_round_trips(inputs), local_s=local_s, n_tokens=n_tokens)


def _round_trips(inputs: PlanInputs) -> float:
    """Return layers x p: all of a step's choices in a layer are local with local_share^(K T)."""
    return inputs.shape.n_layers * (1 - inputs.local_share ** (inputs.shape.n_expert_used * inputs.n_tokens))


def _asked(inputs: PlanInputs) -> tuple[float, float]:
    """Return how likely a peer is asked in a layer that goes out at all, and how many are."""
    shape, groups = inputs.shape, inputs.groups
    fan_out = traffic.fan_out(shape.n_expert, shape.n_expert_used, groups, inputs.local_share)
    touch = 1 - (1 - min(1.0, fan_out / len(groups))) ** inputs.n_tokens
    goes_out = _round_trips(inputs) / shape.n_layers
    asked = min(float(len(groups)), touch * len(groups) / goes_out) if goes_out else 0.0
    return touch, asked


def _wire_cost(inputs: PlanInputs, wire: str) -> WireCost:
    return traffic.wire_cost(
        inputs.shape, inputs.n_tokens, wire, inputs.groups, inputs.local_share, _round_trips(inputs)
    )


def _busiest_s(inputs: PlanInputs, n_groups: int, local_share: float) -> float:
    """Return one layer's expert compute at the busiest of `n_groups` devices."""
    shape = inputs.shape
    what = (shape.n_expert, shape.n_expert_used, inputs.n_tokens, n_groups, local_share)
    return experts_s(shape, inputs.device, load.most_active_experts(*what), load.most_assignments(*what))


def _even_s(inputs: PlanInputs, n_groups: int) -> float:
    """Return one layer's expert compute if `n_groups` devices shared it evenly."""
    shape, n_tokens = inputs.shape, inputs.n_tokens
    active = load.active_experts(shape.n_expert, shape.n_expert_used, n_tokens)
    return experts_s(shape, inputs.device, active / n_groups, n_tokens * shape.n_expert_used / n_groups)


def _local_experts_s(inputs: PlanInputs) -> float:
    """Return one layer's compute of the experts that the backbone holds itself."""
    shape, share = inputs.shape, inputs.local_share
    if not share:
        return 0.0
    active = load.active_experts(shape.n_expert, shape.n_expert_used * share, inputs.n_tokens)
    return experts_s(shape, inputs.device, active, inputs.n_tokens * shape.n_expert_used * share)


def _spread(inputs: PlanInputs) -> Spread:
    shape, groups, n_tokens = inputs.shape, inputs.groups, inputs.n_tokens
    imbalance = load.rows_imbalance(shape.n_expert, shape.n_expert_used, n_tokens)
    return Spread(
        fan_out=traffic.fan_out(shape.n_expert, shape.n_expert_used, groups, inputs.local_share),
        n_groups=len(groups),
        replicas=inputs.held_per_peer * inputs.n_peers / shape.n_expert,
        peers_asked=_asked(inputs)[1],
        rows_imbalance=imbalance,
        peer_imbalance=load.peer_imbalance(shape.n_expert, shape.n_expert_used, n_tokens, len(groups)),
        rows_busiest_expert=imbalance * n_tokens * shape.n_expert_used / shape.n_expert,
        active_experts=load.active_experts(shape.n_expert, shape.n_expert_used, n_tokens),
    )


def _by_link(inputs: PlanInputs) -> tuple[ByLink, ...]:
    """Return the modelled step over each kind of link: a calibration was of one of them."""
    steps = {link: step_of(replace(inputs, software_s=software_s)) for link, software_s in LINK_SOFTWARE_S.items()}
    return tuple(
        ByLink(link=link, software_s=LINK_SOFTWARE_S[link], step_s=step.step_s, tokens_per_s=step.tokens_per_s)
        for link, step in steps.items()
    )


def _by_rate(inputs: PlanInputs, calibration: Calibration | None) -> tuple[AtRate, ...]:
    rates = dict.fromkeys((*RATES_BIT_S, inputs.rate_bit_s))
    steps = {rate: step_of(replace(inputs, rate_bit_s=rate), calibration) for rate in rates}
    first = steps[RATES_BIT_S[0]]
    return tuple(
        AtRate(
            rate_bit_s=rate,
            transfer_s=step.layer.transfer_s,
            step_s=step.step_s,
            lengthens_by_s=step.step_s - first.step_s,
            tokens_per_s=step.tokens_per_s,
        )
        for rate, step in steps.items()
    )


def _drafts(inputs: PlanInputs, calibration: Calibration | None, plain: Step) -> Drafts:
    n_verified = min(MAX_TOKENS, inputs.n_tokens * (inputs.n_draft + 1))
    verify = step_of(replace(inputs, n_tokens=n_verified), calibration)
    break_even = (verify.step_s + inputs.draft_s) / plain.step_s
    return Drafts(
        n_draft=inputs.n_draft,
        plain_step_s=plain.step_s,
        verify_step_s=verify.step_s,
        draft_s=inputs.draft_s,
        break_even_accept_length=break_even,
        pays_at_all=break_even < inputs.n_draft + 1,
    )


def _skipping(inputs: PlanInputs, n_devices: int, movement_s: float) -> Skipping:
    """Return the terms of skipping experts on `n_devices` devices, all layers."""
    shape = inputs.shape
    share = shape.n_expert / n_devices
    dense_s = experts_s(shape, inputs.device, share, inputs.n_tokens * share)
    even_s = _even_s(inputs, n_devices)
    return weigh_skipping(
        dense_s=shape.n_layers * dense_s,
        expert_share=shape.n_expert_used / shape.n_expert,
        even_s=shape.n_layers * even_s,
        busiest_s=shape.n_layers * max(even_s, _busiest_s(inputs, n_devices, 0.0)),
        movement_s=movement_s,
    )


def _expert_parallel(inputs: PlanInputs) -> ExpertParallel | None:
    if inputs.n_devices is None:
        return None
    shape, n_devices = inputs.shape, inputs.n_devices
    moved = traffic.logical_traffic(shape, inputs.n_tokens, traffic.symmetric_remote_share(n_devices))
    bytes_per_device = moved.remote_bytes_both_ways / n_devices
    each_s = transfer_s(bytes_per_device, inputs.rate_bit_s)
    rtt_s = max(inputs.rtts_s) if n_devices > 1 else 0.0
    return ExpertParallel(
        traffic=moved,
        bytes_per_device=bytes_per_device,
        transfer_s_per_device=each_s,
        rows_imbalance=load.rows_imbalance(shape.n_expert, shape.n_expert_used, inputs.n_tokens),
        skipping=_skipping(inputs, min(n_devices, shape.n_expert), shape.n_layers * (rtt_s + each_s)),
    )


def _verdict(inputs: PlanInputs, step: Step, model_bytes: float) -> Verdict:
    shape, n_tokens = inputs.shape, inputs.n_tokens
    layer = step.layer
    movement_s = step.round_trips * (layer.rtt_s + layer.transfer_s + inputs.software_s)
    memory_s = backbone_s(shape, inputs.device, n_tokens) + shape.n_layers * _even_s(inputs, 1)
    active = load.active_experts(shape.n_expert, shape.n_expert_used, n_tokens)
    return decide(
        skipping=_skipping(inputs, len(inputs.groups), movement_s),
        swarm_step_s=step.step_s,
        here_memory_step_s=memory_s,
        here_paged_step_s=memory_s
        + paged_s(
            read_bytes=shape.n_layers * active * shape.expert_bytes,
            experts_bytes=shape.experts_bytes,
            memory_bytes=inputs.here_memory_bytes - shape.backbone_bytes,
            ssd_bytes_per_s=inputs.ssd_bytes_per_s,
        ),
        here_memory_bytes=inputs.here_memory_bytes,
        model_bytes=model_bytes,
    )
