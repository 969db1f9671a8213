"""What a process holds is judged from the end of its warm-up on, each of its lives by itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from swarm.bench.process_usage import Life, ProcessUsage, Sample, cpu_s

MIB = 1 << 20


def life(*sizes: tuple[float, int]) -> Life:
    return Life("peer0", 1, 0.0, samples=[Sample(age_s, size) for age_s, size in sizes])


def test_growth_counts_from_the_end_of_the_warm_up() -> None:
    assert life((0, 50), (10, 100), (20, 104), (30, 102)).growth(10) == pytest.approx(0.04)


def test_a_shrinking_process_does_not_grow() -> None:
    assert life((10, 100), (20, 90)).growth(10) == 0


def test_who_did_not_outlive_its_warm_up_is_not_judged() -> None:
    assert life((0, 50), (10, 100)).growth(10) is None


def test_each_process_has_a_life_of_its_own() -> None:
    usage = ProcessUsage()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        usage.look([("me", os.getpid()), ("child", child.pid)], 1.0)
        usage.look([("me", os.getpid())], 3.0)
    finally:
        child.communicate()
    usage.look([("child", child.pid)], 4.0)
    assert [sample.age_s for sample in usage.lives[os.getpid()].samples] == [0.0, 2.0]
    assert usage.lives[os.getpid()].samples[0].rss_bytes > 10 * MIB
    assert len(usage.lives[child.pid].samples) == 1, "it had ended"


def test_processor_time_adds_up() -> None:
    before = cpu_s(os.getpid())
    total = 0
    while cpu_s(os.getpid()) < before + 0.02:
        total += sum(range(1000))
    assert cpu_s(os.getpid()) > before
