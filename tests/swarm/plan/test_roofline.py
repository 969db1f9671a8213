"""Intensity is 2 n_e / b_w, and the knee is where the two times are equal."""

from __future__ import annotations

import pytest

from swarm.plan.roofline import Device, backbone_s, experts_s, roofline
from swarm.plan.shape import parse_shape

DEVICE = Device(flops_per_s=900e12, memory_bytes_per_s=3e12)
SHAPE = parse_shape("d=4096,E=8,k=2,ff=14336,b=2")


@pytest.mark.parametrize(("rows", "bound"), [(8, "memory"), (299, "memory"), (300, "arithmetic"), (1024, "arithmetic")])
def test_memory_binds_below_the_knee_and_arithmetic_above(rows: float, bound: str) -> None:
    found = roofline(SHAPE, rows, DEVICE)
    assert found.intensity == 2 * rows / 2
    assert (found.balance, found.rows_at_knee, found.bound) == (300, 300, bound)


def test_narrow_weights_reach_the_knee_with_fewer_rows() -> None:
    narrow = parse_shape("d=4096,E=8,k=2,ff=14336,b=2,bw=0.5")
    assert roofline(narrow, 8, DEVICE).intensity == 32
    assert roofline(narrow, 8, DEVICE).rows_at_knee == 75


def test_rows_are_free_below_the_knee_and_cost_in_proportion_above() -> None:
    one, at_knee, twice = (experts_s(SHAPE, DEVICE, 1, rows) for rows in (1, 300, 600))
    assert one == pytest.approx(SHAPE.expert_bytes / 3e12)
    assert at_knee == pytest.approx(one)
    assert twice == pytest.approx(2 * one)


def test_the_backbone_reads_its_weights_once_a_step() -> None:
    assert backbone_s(SHAPE, DEVICE, 1) == pytest.approx(SHAPE.backbone_bytes / 3e12)
    assert backbone_s(SHAPE, DEVICE, 600) == pytest.approx(2 * backbone_s(SHAPE, DEVICE, 1))


def test_a_device_must_do_something() -> None:
    with pytest.raises(ValueError):
        Device(flops_per_s=0, memory_bytes_per_s=1)
