"""Members of a star that pass time: as long as they are told, and at no cost where they are told nothing."""

from __future__ import annotations

import time

import pytest

from swarm.bench import busy
from swarm.bench.busy import Busy


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "MEMORY_BYTES", 4 * busy.STEP_BYTES)


def test_it_keeps_the_core_busy_for_as_long_as_it_is_told() -> None:
    member = Busy()
    began, began_cpu = time.perf_counter(), time.thread_time()
    member.compute(5_000)
    assert time.perf_counter() - began >= 0.005
    assert time.thread_time() > began_cpu
    assert member._at < 4, "it begins again at the memory's end"


def test_nothing_to_compute_takes_no_memory() -> None:
    member = Busy()
    member.compute(0)
    assert member._memory is None


def test_the_memory_is_real_pages_and_not_one_page_of_zeros() -> None:
    member = Busy()
    member.compute(1)
    assert member._memory is not None
    assert member._memory.all()
