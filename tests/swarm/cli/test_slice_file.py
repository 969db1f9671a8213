"""Slice files: what is written is read back, and what cannot be read is the user's mistake, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.cli.slice_file import MAX_BYTES, read_slice_file, write_slice_file
from swarm.errors import UserError
from swarm.ids import ExpertSet


def test_a_written_slice_is_read_back(tmp_path: Path) -> None:
    experts = ExpertSet({0: frozenset({3, 17, 20, 21, 22}), 2: frozenset({0}), 30: frozenset({5, 6})})
    write_slice_file(tmp_path / "s.json", experts)
    assert read_slice_file(tmp_path / "s.json") == experts
    assert '"0": "3,17,20-22"' in (tmp_path / "s.json").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "3",
        "[" * 100_000,
        '{"0": 3}',
        '{"0": ["3"]}',
        '{"x": "3"}',
        '{"0-1": "3"}',
        '{"0": "3", "00": "4"}',
        '{"0": "9-3"}',
        '{"0": ""}',
        '{"99999": "3"}',
        "\udcff",
    ],
)
def test_what_is_no_slice_is_the_users_mistake(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError):
        read_slice_file(path)


def test_a_missing_or_huge_file_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the slice file"):
        read_slice_file(tmp_path / "none.json")
    (tmp_path / "huge.json").write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(UserError, match="too large"):
        read_slice_file(tmp_path / "huge.json")
