"""The transport's benchmark runs and counts right. Its figures are not judged here but in `swarm bench`."""

from __future__ import annotations

import pytest

from swarm.bench.transport import measure_star


@pytest.mark.alone
async def test_a_star_is_measured_three_ways() -> None:
    n_beside = 0

    async def beside() -> None:
        nonlocal n_beside
        n_beside += 1

    report = await measure_star(
        n_members=2, size_out=2200, size_back=2200, n_rounds=5, n_repetitions=2, compute_s=0.002, beside=beside
    )
    assert report.n_rounds == 10
    assert min(report.endpoint_p50_s, report.quic_star_p50_s, report.udp_star_p50_s) > 0
    assert report.udp_star_p50_s < report.quic_star_p50_s
    assert report.compute_s == 0.002
    assert report.quic_beyond_p50_s is not None
    assert report.udp_beyond_p50_s is not None
    assert min(report.udp_beyond_p50_s, report.quic_beyond_p50_s) > 0
    assert report.beside_p50_s is not None
    assert report.beside_p50_s < report.udp_star_p50_s
    assert n_beside >= 10
    # 2,200 bytes, two packets' headers, and at most an acknowledgement and a share of the pings.
    assert 2200 < report.bytes_out_per_member < 2400
    assert 2200 < report.bytes_back_per_member < 2400
    assert set(report.as_json()) >= {"ratio", "endpoint_p50_s", "quic_star_p50_s", "udp_star_p50_s"}
