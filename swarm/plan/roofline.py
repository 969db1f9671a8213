"""Does memory or arithmetic bind? The roofline of one device and the grouped product of a layer's experts.

    intensity = 2 n_e / b_w      FLOP per byte of weights, n_e rows per expert, b_w bytes per weight
    balance   = flops / memory   FLOP per byte at which a device is kept busy on both sides

Below the balance memory binds: each further row is free; above it arithmetic binds. (Williams, Waterman, Patterson,
"Roofline", CACM 2009; the rows' own traffic is left out: it is small beside the weights unless n_e nears D.)
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.plan.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one machine does at best: floating-point operations and bytes of memory read, each per second."""

    flops_per_s: float
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.memory_bytes_per_s > 0):
            raise ValueError(f"a device must do something: got {self}")

    @property
    def balance(self) -> float:
        """FLOP per byte at the roofline's knee."""
        return self.flops_per_s / self.memory_bytes_per_s

    def time_s(self, read_bytes: float, flops: float) -> float:
        """Return how long work takes that reads and computes at the same time."""
        return max(read_bytes / self.memory_bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Where a layer's experts stand.

    Attributes:
        intensity: FLOP per byte of weights.
        bound: `memory` or `arithmetic`.
        rows_at_knee: rows per expert from which arithmetic binds.
    """

    rows_per_expert: float
    intensity: float
    balance: float
    bound: str
    rows_at_knee: float


def roofline(shape: ModelShape, rows_per_expert: float, device: Device) -> Roofline:
    """Return where `rows_per_expert` rows (of an expert that is read at all) stand on a device."""
    intensity = 2 * rows_per_expert / shape.bytes_per_weight
    return Roofline(
        rows_per_expert=rows_per_expert,
        intensity=intensity,
        balance=device.balance,
        bound="memory" if intensity < device.balance else "arithmetic",
        rows_at_knee=device.balance * shape.bytes_per_weight / 2,
    )


def experts_s(shape: ModelShape, device: Device, n_experts: float, n_assignments: float) -> float:
    """Return the time of one layer's grouped product: `n_experts` are read, `n_assignments` rows computed."""
    return device.time_s(n_experts * shape.expert_bytes, n_assignments * shape.flops_per_assignment)


def backbone_s(shape: ModelShape, device: Device, n_tokens: int) -> float:
    """Return the time of everything but routed experts in one step; attention over the context is left out."""
    n_weights = shape.backbone_bytes / shape.bytes_per_weight
    return device.time_s(shape.backbone_bytes, 2 * n_weights * n_tokens)
