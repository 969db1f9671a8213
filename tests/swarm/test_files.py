"""A file is the old one or the new one, never half; and where the folders are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from swarm.files import Folders, replacing, write_atomically


def test_a_new_file_has_its_content_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_atomically(path, b"secret", mode=0o600)
    assert path.read_bytes() == b"secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["key"]


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"old")
    with replacing(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
        assert temporary.parent == tmp_path, "a rename is atomic only within one file system"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["data"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"old")

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["data"]


def test_the_content_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (steps.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda old, new: (steps.append("replace"), replace(old, new)))
    write_atomically(tmp_path / "data", b"x")
    assert steps[:2] == ["fsync", "replace"]


def test_swarm_home_puts_all_folders_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    folders = Folders.from_environment()
    assert (folders.config, folders.state, folders.cache) == (
        tmp_path / "config",
        tmp_path / "state",
        tmp_path / "cache",
    )


@pytest.mark.parametrize("home", [None, ""])
def test_without_swarm_home_the_folders_are_the_users_own(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if home is None:
        monkeypatch.delenv("SWARM_HOME", raising=False)
    else:
        monkeypatch.setenv("SWARM_HOME", home)
    folders = Folders.from_environment()
    assert all("swarm" in path.parts for path in (folders.config, folders.state, folders.cache))
    assert folders.cache != folders.state
