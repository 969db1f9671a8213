"""What is kept of audits over a restart, and what is done with a file that cannot be used."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from swarm.dispatch import audit_records
from swarm.dispatch.audit_records import load_standing, save_standing
from swarm.dispatch.audit_standing import CAUGHT_S, Standing
from swarm.ids import NodeId

X = NodeId(b"x" * 32)
NOW = 1.8e9


def test_who_was_caught_is_still_caught(tmp_path: Path) -> None:
    path = tmp_path / "state" / "audits.json"
    standing = Standing()
    standing.catch(X, 7, "why", NOW)
    save_standing(path, standing.to_json())
    assert load_standing(path, NOW + 1).is_barred(X, 8, NOW + CAUGHT_S - 1)
    assert path.stat().st_mode & 0o077 == 0, "whom this backbone distrusts is nobody else's business"


def test_without_a_file_nobody_has_a_record(tmp_path: Path) -> None:
    assert load_standing(None, NOW).peers == {}
    assert load_standing(tmp_path / "audits.json", NOW).peers == {}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"format": 1, "peers": {"x": 1}}', b'{"format": 9}', b"5"]
)
def test_a_damaged_file_is_a_warning(tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "audits.json"
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert load_standing(path, NOW).peers == {}
    assert "cannot be used" in caplog.text


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit_records, "MAX_RECORD_BYTES", 10)
    path = tmp_path / "audits.json"
    save_standing(path, Standing().to_json())
    assert load_standing(path, NOW).peers == {}
    assert "too large" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        save_standing(tmp_path / "state" / "audits.json", Standing().to_json())
    assert "cannot keep" in caplog.text
