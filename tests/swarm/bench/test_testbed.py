"""What the paths really delivered to a layer, read from the emulator's stamps."""

from __future__ import annotations

import numpy as np

from swarm.bench.testbed import drawn_round_trips_s
from swarm.dispatch.layer_counts import LayerSpan
from swarm.emulation.hub import EmulatorStats, WayStats

MS = 1_000_000


def span(began_ms: float, returned_ms: float) -> LayerSpan:
    return LayerSpan(
        layer=0,
        n_tokens=1,
        n_destinations=1,
        n_batches=1,
        began_ns=round(began_ms * MS),
        planned_ns=round(began_ms * MS),
        returned_ns=round(returned_ms * MS),
        ended_ns=round(returned_ms * MS),
        compute_s=0.0,
        queue_s=0.0,
    )


def stats(**ways: list[tuple[float, float, int]]) -> EmulatorStats:
    """Return stamps (entered ms, left ms, bytes) by path and direction, `a_forth` for `a/forth`."""
    made = {}
    for name, packets in ways.items():
        records = np.array([(int(i * MS), int(o * MS), int(o * MS), size) for i, o, size in packets], np.int64)
        key = name.replace("_", "/")
        made[key] = WayStats(
            name=key,
            n_offered=len(packets),
            bytes_offered=0,
            n_delivered=len(packets),
            bytes_delivered=0,
            drops={},
            records=records.reshape(-1, 4),
        )
    return EmulatorStats(ways=made, cpu_s=0, wall_s=1, is_real_time=True, n_missed=0, n_socket_overflow=0)


def test_a_layer_waits_for_the_slowest_path_there_and_back() -> None:
    found = stats(a_forth=[(0, 10, 1200)], a_back=[(11, 22, 1200)], b_forth=[(0, 14, 1200)], b_back=[(15, 28, 1200)])
    assert drawn_round_trips_s([span(0, 30)], found, ["a", "b"]) == [0.027]


def test_acknowledgements_and_other_layers_packets_do_not_count() -> None:
    found = stats(a_forth=[(0, 10, 1200), (1, 90, 70), (50, 80, 1200)], a_back=[(11, 21, 1200)])
    assert drawn_round_trips_s([span(0, 30), span(100, 120)], found, ["a"]) == [0.020, 0.0]


def test_of_a_burst_the_slowest_packet_counts_but_its_copies_do_not() -> None:
    burst = [(11, 21, 1260), (11.1, 23.1, 900)]
    copies = [(12.2, 27, 1260), (12.2, 27, 900)]
    found = stats(a_forth=[(0, 10, 1200), (1, 16, 1200)], a_back=burst + copies)
    assert drawn_round_trips_s([span(0, 30)], found, ["a"]) == [0.022]
