"""A client's file of last time: written whole, read with distrust."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.registry import cache as cache_module
from swarm.registry.cache import RegistryCache
from swarm.registry.records import SignedRecord

MEMBER = SignedRecord(payload=b"member", signature=b"s" * 64)
RECORD = SignedRecord(payload=b"record", signature=b"r" * 64)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "registry.json"
    assert RegistryCache(path).load() == ([], [])
    RegistryCache(path).save([MEMBER], [RECORD, MEMBER])
    assert RegistryCache(path).load() == ([MEMBER], [RECORD, MEMBER])


GOOD = json.dumps({"members": [], "records": ["cw=="]})


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"members":[],"records":[1]}', GOOD, '{"members":[],"records":["%%"]}', "[" * 100_000, "\0\xff"],
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "registry.json"
    path.write_text(text)
    assert RegistryCache(path).load() == ([], [])
    assert "going on without" in caplog.text


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "registry.json"
    RegistryCache(path).save([MEMBER], [RECORD])
    monkeypatch.setattr(cache_module, "MAX_FILE_BYTES", path.stat().st_size - 1)
    assert RegistryCache(path).load() == ([], [])


def test_a_place_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    RegistryCache(tmp_path / "file" / "registry.json").save([MEMBER], [])
    assert "cannot write" in caplog.text
