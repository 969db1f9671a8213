"""Bytes that one MoE layer moves, form by form, over as many peers as asked for, with contiguous and with clustered slices.

Bytes are UDP payload as the backbone's socket counts it: frames, ids, weights, QUIC's headers, seals and acknowledgements. Copies
that the backbone sends of its own packets (repair) are counted apart; those of the peers' cannot be told from their
first copies and are in `bytes_back`, so totals are upper bounds.

The choices come from a random router whose tokens are of kinds (`bench/routing`). Slices are clustered on tokens of their own;
the same further tokens are dispatched for every form and kind of slices. The measure is `exact`, f32 rows out and every expert's
raw row back: what systems without partial sums move.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.backbone.engine import EngineConfig
from swarm.bench.dispatch import layer_model
from swarm.bench.routing import KindRouter, draw_weights
from swarm.bench.synthetic import SyntheticModel
from swarm.bench.testbed import PathOptions, Testbed, open_testbed
from swarm.dispatch.dispatcher import Dispatcher
from swarm.dispatch.fanout import clustered_shares, co_activation, contiguous_shares
from swarm.dispatch.layer_counts import LayerSpan
from swarm.errors import UserError
from swarm.ids import ExpertSet
from swarm.wire.rows import Wire, WireForm

SLICES = ("contiguous", "clustered")
MEASURE = Wire(WireForm.EXACT, WireForm.EXACT)
N_LEARNED = 4000  # tokens that slices are clustered on; as in docs/fanout.md
N_WARM_UP = 5
SETTLE_S = 0.05  # after a form's last dispatch, so that its late acknowledgements (8 ms) count as its own


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytesOptions:
    """What to measure.

    Attributes:
        n_peers: numbers of peers; one peer is measured once, whatever the slices.
        slices: of SLICES.
        wires: forms; `exact` is added if it is not among them.
        n_dispatches: of each form, each of one token.
    """

    wires: tuple[Wire, ...]
    d_model: int = 3072
    n_expert: int = 128
    n_expert_used: int = 8
    n_ff_exp: int = 32
    n_peers: tuple[int, ...] = (1, 4, 16)
    slices: tuple[str, ...] = SLICES
    n_dispatches: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.slices if kind not in SLICES]
        if unknown or not self.slices:
            raise UserError(
                f"unknown kind of slices: got {', '.join(unknown) or 'none'}, expected {' or '.join(SLICES)}"
            )
        for n_peers in self.n_peers:
            if not 1 <= n_peers <= self.n_expert:
                raise UserError(f"number of peers out of range: got {n_peers}, expected 1 to {self.n_expert}")

    @property
    def model(self) -> SyntheticModel:
        """One MoE layer of that shape."""
        return layer_model(self.d_model, self.n_expert, self.n_expert_used, self.n_ff_exp)

    @property
    def all_wires(self) -> tuple[Wire, ...]:
        """The forms, `exact` first."""
        return tuple(dict.fromkeys((MEASURE, *self.wires)))

    @property
    def layouts(self) -> list[tuple[int, str]]:
        """Numbers of peers with kinds of slices."""
        return [
            (n_peers, kind) for n_peers in self.n_peers for kind in (self.slices if n_peers > 1 else self.slices[:1])
        ]


async def measure_wire_bytes(
    options: WireBytesOptions, model_file: Path, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return the figures of `swarm bench bytes`: one row for each layout and form."""
    router = KindRouter(n_expert=options.n_expert, n_expert_used=options.n_expert_used, seed=options.seed)
    rng = np.random.default_rng(options.seed + 1)
    learned = router.draw(rng, N_LEARNED)
    topk_ids = router.draw(rng, N_WARM_UP + options.n_dispatches)  # one token each
    layouts = options.layouts
    rows: list[dict[str, Any]] = []
    for n_done, (n_peers, kind) in enumerate(layouts):
        progress(n_done, len(layouts))
        with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
            opening = open_testbed(
                Path(folder),
                model_file,
                n_peers=n_peers,
                wire=MEASURE,
                paths=PathOptions(),
                engine=EngineConfig(n_ctx=64, n_batch=32, n_ubatch=32),
                peer_options=("--exact-kernels",),  # the form `exact` goes to no others
                slices=_slices(kind, n_peers, learned, options.n_expert),
            )
            async with opening as testbed:
                found = [await _measure(testbed, wire, topk_ids, options) for wire in options.all_wires]
        exact = found[0]
        for row in found:
            row |= {
                "n_peers": n_peers,
                "slices": kind if n_peers > 1 else "all",
                "reduction_per_destination": _both_ways(exact) / _both_ways(row),
                "reduction_all_destinations": exact["bytes_all_destinations"] / row["bytes_all_destinations"],
            }
        rows += found
    progress(len(layouts), len(layouts))
    return {
        "d_model": options.d_model,
        "n_expert": options.n_expert,
        "n_expert_used": options.n_expert_used,
        "n_dispatches": options.n_dispatches,
        "router": f"{router.n_kinds} kinds of tokens, skew {router.skew}, seed {router.seed}",
        "rows": rows,
    }


def _slices(kind: str, n_peers: int, learned: npt.NDArray[np.int32], n_expert: int) -> Sequence[ExpertSet]:
    if kind == "contiguous":
        return contiguous_shares(n_expert, n_peers, [0])
    return clustered_shares(co_activation(learned, n_expert)[np.newaxis], n_peers)


async def _measure(
    testbed: Testbed, wire: Wire, topk_ids: npt.NDArray[np.int32], options: WireBytesOptions
) -> dict[str, Any]:
    """Return what one form's dispatches took; per token, layer and destination where nothing else is said."""
    running, endpoint = testbed.running, testbed.running.endpoint
    dispatcher = Dispatcher(running.manifest.model_id, running.manifest.spec, running.holders, wire)
    spans: list[LayerSpan] = []
    dispatcher.on_layer = spans.append
    rng = np.random.default_rng(options.seed + 2)
    sent = received = repaired = payload_out = payload_back = 0
    for index, ids in enumerate(topk_ids):
        if index == N_WARM_UP:
            await asyncio.sleep(SETTLE_S)
            spans.clear()
            sent, received, repaired = endpoint.bytes_sent, endpoint.bytes_received, endpoint.repair_bytes
            payload_out, payload_back = dispatcher.stats.bytes_out, dispatcher.stats.bytes_back
        x = rng.standard_normal((1, options.d_model), dtype=np.float32)
        await dispatcher.dispatch(0, x, ids[np.newaxis], draw_weights(rng, ids[np.newaxis]))
    await asyncio.sleep(SETTLE_S)
    n_batches, n_tokens = sum(span.n_destinations for span in spans), len(spans)
    sent, received = endpoint.bytes_sent - sent, endpoint.bytes_received - received
    payload = dispatcher.stats.bytes_out - payload_out + dispatcher.stats.bytes_back - payload_back
    return {
        "wire": str(wire),
        "destinations_per_token": n_batches / n_tokens,
        "payload_out": (dispatcher.stats.bytes_out - payload_out) / n_batches,
        "payload_back": (dispatcher.stats.bytes_back - payload_back) / n_batches,
        "bytes_out_per_token_layer": sent / n_batches,
        "bytes_back_per_token_layer": received / n_batches,
        "bytes_per_destination": (sent + received) / n_batches,
        "bytes_all_destinations": (sent + received) / n_tokens,
        "over_payload_share": (sent + received) / payload - 1,
        "repair_bytes": (endpoint.repair_bytes - repaired) / n_tokens,
    }


def _both_ways(row: dict[str, Any]) -> float:
    return float(row["bytes_per_destination"])
