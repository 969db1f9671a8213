"""Whose namespaces may be removed. What needs root is in tests/e2e/emulation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.emulation import namespaces


def test_only_namespaces_of_ended_processes_are_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    monkeypatch.setattr(namespaces, "_FOLDER", tmp_path)
    monkeypatch.setattr(namespaces, "remove", removed.append)
    mine = namespaces.name(0)
    ended = f"{namespaces.PREFIX}4194305-123-0"  # above the greatest pid of Linux
    recycled = f"{namespaces.PREFIX}{os.getpid()}-1-0"  # a process with our pid, started just after boot
    for name in (mine, ended, recycled, "somebody-else", "swarm"):
        (tmp_path / name).touch()
    assert sorted(namespaces.remove_stale()) == sorted([ended, recycled])
    assert sorted(removed) == sorted([ended, recycled])


@pytest.mark.parametrize("call", [namespaces.create, namespaces.remove, namespaces.open_tun])
def test_other_names_are_never_touched(call: object) -> None:
    with pytest.raises(AssertionError):
        call("somebody-else")  # type: ignore[operator]
