"""`swarm bench bytes` on a small layer: real peers with slices of both kinds, and bytes that are those of the codecs."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.bench.synthetic import write_synthetic
from swarm.bench.wire_bytes import WireBytesOptions, measure_wire_bytes
from swarm.plan.traffic import fan_out, group_sizes
from swarm.wire.rows import parse_wire


async def test_rows_are_counted_form_by_form_and_layout_by_layout(tmp_path: Path) -> None:
    options = WireBytesOptions(
        wires=(parse_wire("q8/f16"),), d_model=512, n_expert=32, n_expert_used=8, n_peers=(1, 4), n_dispatches=40
    )
    model = write_synthetic(tmp_path / "layer.gguf", options.model)
    figures = await measure_wire_bytes(options, model, lambda done, total: None)
    rows = {(row["n_peers"], row["slices"], row["wire"]): row for row in figures["rows"]}
    assert list(rows) == [
        (n_peers, kind, wire)
        for n_peers, kind in ((1, "all"), (4, "contiguous"), (4, "clustered"))
        for wire in ("exact", "q8/f16")
    ]
    one = rows[1, "all", "exact"]
    # A row of D=512 out in f32, a count and eight ids; eight raw rows back.
    assert (one["payload_out"], one["payload_back"]) == (4 * 512 + 1 + 16, 8 * 4 * 512)
    assert 0 < one["over_payload_share"] < 0.06
    small = rows[1, "all", "q8/f16"]
    assert (small["payload_out"], small["payload_back"]) == (512 // 32 * 34 + 1 + 48, 2 * 512)
    assert small["reduction_all_destinations"] == pytest.approx(
        one["bytes_all_destinations"] / small["bytes_all_destinations"]
    )
    spread = {kind: rows[4, kind, "q8/f16"]["destinations_per_token"] for kind in ("contiguous", "clustered")}
    assert spread["clustered"] < spread["contiguous"] < fan_out(32, 8, group_sizes(32, 4)) + 0.4
    for row in figures["rows"]:
        assert row["bytes_all_destinations"] == pytest.approx(
            row["bytes_per_destination"] * row["destinations_per_token"]
        )
