"""The latency benchmark runs and counts right over real sockets. Its figures are not judged here but in `swarm bench`."""

from __future__ import annotations

import json

import pytest

from swarm.bench.latency import N_CONTROL, LatencyOptions, measure_latency


@pytest.mark.alone
async def test_fresh_connections_are_measured_beside_the_round_trip() -> None:
    told: list[tuple[int, int]] = []
    options = LatencyOptions(size_bytes=3300, rtt_s=0.02, silence_s=0.1, n_fresh=2, n_lossy=0)
    report = await measure_latency(options, lambda *each: told.append(each))
    assert told == [(i, 4) for i in range(1, 5)]
    for seconds in (report.rtt_s, report.first_s, report.after_silence_s):
        assert 0.02 <= seconds < 0.2
    assert report.lossy is report.control is None
    assert report.as_json()["first_rtt"] == report.first_s / report.rtt_s
    json.dumps(report.as_json())


@pytest.mark.alone
async def test_lossy_dispatches_are_shared_by_connections_and_their_copies_are_counted() -> None:
    options = LatencyOptions(
        size_bytes=12_288, rtt_s=0.02, loss=0.2, silence_s=0, n_fresh=1, n_lossy=30, n_connections=3
    )
    report = await measure_latency(options, lambda *each: None)
    assert report.lossy is not None
    assert report.control is not None
    assert report.lossy.n + report.lossy.n_failed == 30
    assert report.control.n == 3 * N_CONTROL
    assert report.lossy.repair_share > 0.2 > 0.01 > report.control.repair_share
    assert report.lossy.p99_s >= report.lossy.p50_s >= 0.02
