"""`swarm bench overhead` over real processes and TLS links, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.test_commands import run

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model-Q8_0.gguf"


async def test_every_point_is_measured_on_both_sides(tmp_path: Path) -> None:
    arguments = [
        "--models",
        str(MODEL),
        "--rows",
        "1,4",
        "--repetitions",
        "2",
        "--turn",
        "10ms",
        "--wire",
        "f32",
        "--json",
    ]
    code, out, err = await run("-m", "swarm", "bench", "overhead", *arguments, home=tmp_path)
    assert code == 0, err
    figures = json.loads(out)
    assert (figures["link"], figures["n_tls_links"]) == ("tls", [1])
    assert [(each["n_streams"], each["n_rows"]) for each in figures["points"]] == [(1, 1), (1, 4), (4, 4)]
    for point in figures["points"]:
        assert 0 < point["experts_s"] < point["layer_s"]
        assert len(point["overheads"]) == 2
        assert min(point["overheads"]) <= point["overhead"] <= max(point["overheads"])
        assert point["in_process_tokens_per_s"] > 0
        assert point["tokens_per_s"] > 0
        assert point["n_batches"] == 1
        assert (point["overlapped_overhead"] is None) == (point["overlapped_extra_s"] is None)
    for curve in figures["curves"]:
        assert (curve["under_from_s"] is None) == (curve["how"] == "never")
