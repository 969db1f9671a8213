"""What the system says of free memory."""

from __future__ import annotations

from swarm.memory import free_memory_bytes


def test_free_memory_is_told_in_bytes() -> None:
    free = free_memory_bytes()
    assert free is not None
    assert 2**20 < free < 2**50
