"""What joining will take: shown to a volunteer before anything large is fetched. Pure.

Traffic is an estimate: routers that choose each expert equally often, rows as f32 both ways, which is the most that a backbone
sends. What really goes is counted while it serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from swarm.ids import ExpertSet
from swarm.model.manifest import Manifest
from swarm.model.spec import ModelSpec
from swarm.plan.traffic import (
    BYTES_PER_ID,
    BYTES_PER_ROW,
    BYTES_PER_WEIGHT,
    DISPATCH_FIXED_BYTES,
    RESULT_FIXED_BYTES,
    touch_probability,
    wire_bytes,
)
from swarm.registry.records import ModelOffer, RoutingHistogram
from swarm.wire.rows import RowCodec, row_bytes

DAY_S = 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """One volunteer's join, before it begins.

    Attributes:
        node: this peer's id.
        publisher: the node whose offer names the model; empty: the experts come from a file of one's own.
        experts, n_blocks: what is to be held; a block is one expert of one layer.
        slice_bytes: of all blocks, in memory and, where they are fetched, on disk.
        fetch_bytes, n_fetch: of the blocks that are not here yet; 0 from a file.
        memory_bytes: the process, its slice with it; free_memory_bytes: what is free now, None: the system does not say.
        free_disk_bytes: where fetched blocks are kept; None: nothing is kept.
        up_bytes_per_token, down_bytes_per_token: of the text that a backbone reads or writes, as UDP payload.
        tokens_per_s: of all backbones that tell, lately; None: none does.
        max_upload_bytes_s, max_download_bytes_s: the caps that were given.
    """

    node: str
    model: str
    publisher: str
    experts: str
    n_blocks: int
    slice_bytes: int
    n_fetch: int
    fetch_bytes: int
    memory_bytes: int
    free_memory_bytes: int | None
    free_disk_bytes: int | None
    up_bytes_per_token: float
    down_bytes_per_token: float
    tokens_per_s: float | None
    max_upload_bytes_s: float | None
    max_download_bytes_s: float | None

    @property
    def up_bytes_per_day(self) -> float | None:
        """Bytes to send in a day at the present demand, the cap kept; None: nobody tells the demand."""
        return _per_day(self.up_bytes_per_token, self.tokens_per_s, self.max_upload_bytes_s)

    @property
    def down_bytes_per_day(self) -> float | None:
        """Bytes to receive in a day, as `up_bytes_per_day`."""
        return _per_day(self.down_bytes_per_token, self.tokens_per_s, self.max_download_bytes_s)

    def as_json(self) -> dict[str, Any]:
        """Return it for scripts; bytes, per token, per second or per day as the names say."""
        return {
            **asdict(self),
            "up_bytes_per_token": round(self.up_bytes_per_token),
            "down_bytes_per_token": round(self.down_bytes_per_token),
            "up_bytes_per_day": _rounded(self.up_bytes_per_day),
            "down_bytes_per_day": _rounded(self.down_bytes_per_day),
        }


def traffic_per_token(spec: ModelSpec, experts: ExpertSet) -> tuple[float, float]:
    """Return the bytes up and down that a peer with these experts sends and receives for each token, in expectation."""
    up = down = 0.0
    for layer, chosen in experts.by_layer.items():
        n_held, n_used = len(chosen), spec.n_used(layer)
        chance = touch_probability(spec.n_expert, n_used, n_held)
        n_pairs = n_used * n_held / spec.n_expert / chance  # of a row that comes here
        row = row_bytes(spec.n_embd, RowCodec.F32)
        pair = BYTES_PER_ID + BYTES_PER_WEIGHT
        down += chance * wire_bytes(DISPATCH_FIXED_BYTES + row + BYTES_PER_ROW + n_pairs * pair)
        up += chance * wire_bytes(RESULT_FIXED_BYTES + row)
    return up, down


def tokens_per_s(histograms: Iterable[RoutingHistogram]) -> float | None:
    """Return the tokens that all backbones which tell have routed in a second, lately; None: none tells."""
    rates = [each.n_tokens / each.window_s for each in histograms]
    return sum(rates) if rates else None


def make_prospect(
    *,
    node: str,
    manifest: Manifest,
    name: str,
    offer: ModelOffer | None,
    experts: ExpertSet,
    missing: Iterable[tuple[int, int]],
    overhead_bytes: int,
    free_memory_bytes: int | None,
    free_disk_bytes: int | None,
    histograms: Iterable[RoutingHistogram],
    max_upload_bytes_s: float | None,
    max_download_bytes_s: float | None,
) -> Prospect:
    """Return what joining takes.

    Args:
        offer: whose word names the model; None: it is a file's.
        missing: the (layer, expert) that have to be fetched.
        overhead_bytes: what a peer takes beside its slice.
    """
    spec = manifest.spec
    to_fetch = [spec.block_size_bytes(layer) for layer, _ in missing]
    slice_bytes = sum(spec.block_size_bytes(layer) * len(chosen) for layer, chosen in experts.by_layer.items())
    up, down = traffic_per_token(spec, experts)
    return Prospect(
        node=node,
        model=f"{name}@{manifest.model_id.short}",
        publisher="" if offer is None else str(offer.node),
        experts=str(experts),
        n_blocks=len(experts),
        slice_bytes=slice_bytes,
        n_fetch=len(to_fetch),
        fetch_bytes=sum(to_fetch),
        memory_bytes=slice_bytes + overhead_bytes,
        free_memory_bytes=free_memory_bytes,
        free_disk_bytes=free_disk_bytes,
        up_bytes_per_token=up,
        down_bytes_per_token=down,
        tokens_per_s=tokens_per_s(histograms),
        max_upload_bytes_s=max_upload_bytes_s,
        max_download_bytes_s=max_download_bytes_s,
    )


def _per_day(bytes_per_token: float, rate: float | None, cap_bytes_s: float | None) -> float | None:
    if rate is None:
        return None
    wanted = bytes_per_token * rate
    return DAY_S * (wanted if cap_bytes_s is None else min(wanted, cap_bytes_s))


def _rounded(number: float | None) -> int | None:
    return None if number is None else round(number)
