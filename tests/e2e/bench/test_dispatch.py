"""`swarm bench dispatch` measures a real layer over real peers, and its JSON has what scripts rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_commands import run

KEYS = [
    "bytes_out_per_token_layer",
    "bytes_back_per_token_layer",
    "bytes_all_destinations",
    "bytes_by_path",
    "destinations_per_token",
    "repair_bytes",
    "rtt_s",
    "compute_s",
    "p50_s",
    "p95_s",
    "p99_s",
    "overhead_p50_s",
    "quic_star_p50_s",
    "udp_star_p50_s",
    "tls_star_p50_s",
    "cpu_per_dispatch_s",
    "transport",
]


async def test_the_bytes_of_one_destination_are_those_of_the_codecs_and_little_more(tmp_path: Path) -> None:
    shape = ["--d-model", "3072", "--n-experts", "8", "--experts-used", "8", "--ff", "32", "--peers", "1"]
    arguments = ["-m", "swarm", "bench", "dispatch", *shape, "--wire", "q8/q8", "--dispatches", "30", "--json"]
    code, out, err = await run(*arguments, home=tmp_path)
    assert code == 0, err
    figures = json.loads(out)
    assert [key for key in KEYS if key not in figures] == []
    assert figures["destinations_per_token"] == 1
    assert figures["transport"] == "aioquic"
    assert list(figures["bytes_by_path"]) == ["direct"]
    # One row of D=3072: Q8_0 out (3264 bytes, 8 ids and weights, a count), INT8 back (3168 bytes).
    assert figures["payload_out"] == 3264 + 8 * 6 + 1
    assert figures["payload_back"] == 3168
    total = figures["bytes_out_per_token_layer"] + figures["bytes_back_per_token_layer"]
    assert 6481 < total <= 7000, "headers, acknowledgements and QUIC included"
    assert figures["bytes_all_destinations"] == pytest.approx(total)
    assert 0 < figures["compute_s"] < figures["p50_s"]


async def test_a_serial_chain_takes_the_sum_of_what_the_star_waits_for_at_once(tmp_path: Path) -> None:
    shape = ["--d-model", "64", "--n-experts", "8", "--experts-used", "4", "--ff", "32", "--peers", "2"]
    paths = ["--rtt", "20ms,40ms", "--serial", "--dispatches", "4"]
    code, out, err = await run("-m", "swarm", "bench", "dispatch", *shape, *paths, "--json", home=tmp_path)
    assert code == 0, err
    figures = json.loads(out)
    assert figures["destinations_per_token"] == 2, "only tokens that need every peer"
    assert 0.04 <= figures["slowest_rtt_s"] < 0.1
    assert figures["p50_s"] >= 0.04
    assert figures["serial_p50_s"] >= 0.06, "one after the other"
    assert figures["star_over_slowest"] == pytest.approx(figures["p50_s"] / figures["slowest_rtt_s"])
    # Both rows of one token: what the chain moved is not in the star's bytes.
    assert figures["bytes_out_per_token_layer"] < 250


async def test_with_link_auto_every_peer_is_reached_over_tls(tmp_path: Path) -> None:
    shape = ["--d-model", "64", "--n-experts", "8", "--experts-used", "8", "--ff", "32", "--peers", "2"]
    arguments = ["-m", "swarm", "bench", "dispatch", *shape, "--link", "auto", "--dispatches", "400", "--json"]
    code, out, err = await run(*arguments, home=tmp_path)
    assert code == 0, err
    figures = json.loads(out)
    assert (figures["link"], figures["n_tls_links"]) == ("auto", 2)
    assert figures["destinations_per_token"] == 2
    by_path = figures["bytes_by_path"]
    over_links = {way: sum(by_path.get(kind, {way: 0.0})[way] for kind in ("tls", "unix")) for way in ("out", "back")}
    for way in ("out", "back"):  # each destination's row, and its heads, in a TLS record
        assert figures[f"payload_{way}"] < over_links[way] < figures[f"payload_{way}"] + 200
        assert figures[f"bytes_{way}_per_token_layer"] == pytest.approx(sum(each[way] for each in by_path.values()))
    # QUIC's bytes are pings, the registry's, and what was asked of it as well because it was late: in some runs there are none.
    assert by_path.get("direct", {"out": 0.0})["out"] < figures["payload_out"] / 2
