"""What the records of packets say. The emulator itself is tested with real sockets, in tests/e2e/emulation."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.emulation.hub import EmulatedPaths, EmulatorStats, WayStats
from swarm.emulation.path import PathSpec
from swarm.errors import LocalProtocolError

MS = 1_000_000


def stats_of(*records: tuple[int, int, int]) -> WayStats:
    """From (entered, due, left) in milliseconds."""
    rows = np.array([[e * MS, d * MS, left * MS, 1000] for e, d, left in records], np.int64).reshape(-1, 4)
    return WayStats(
        name="a/forth",
        n_offered=len(rows),
        bytes_offered=0,
        n_delivered=len(rows),
        bytes_delivered=0,
        drops={},
        records=rows,
    )


def test_delays_and_lateness_come_from_the_stamps() -> None:
    way = stats_of((0, 20, 20), (10, 30, 33))
    assert way.delays_s.tolist() == [0.020, 0.023]
    assert way.lateness_s.tolist() == [0.0, 0.003]


def test_the_slowest_packet_is_that_of_the_window() -> None:
    way = stats_of((0, 20, 20), (10, 35, 35), (20, 60, 60))
    assert way.slowest_s(0, 20 * MS) == 0.025
    assert way.slowest_s(10 * MS, 21 * MS) == 0.040
    assert way.slowest_s(30 * MS, 40 * MS) == 0.0


def test_the_summary_joins_all_paths_and_holds_when_nothing_was_sent() -> None:
    def summary(*ways: WayStats) -> dict[str, float]:
        return EmulatorStats(
            ways={str(i): way for i, way in enumerate(ways)},
            cpu_s=0.5,
            wall_s=10.0,
            is_real_time=False,
            n_missed=0,
            n_socket_overflow=0,
        ).summary()

    both = summary(stats_of((0, 20, 20), (0, 20, 21)), stats_of((0, 20, 25)))
    assert (both["n_delivered"], both["lateness_p50_s"], both["lateness_max_s"]) == (3, 0.001, 0.005)
    assert both["cpu_share"] == 0.05
    assert summary(stats_of())["lateness_max_s"] == 0.0


async def test_an_emulator_that_does_not_run_takes_no_commands() -> None:
    with pytest.raises(LocalProtocolError, match="not running"):
        await EmulatedPaths().front(spec=PathSpec())
