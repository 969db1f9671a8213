"""A file written in a thread: what came last is there in the end, nobody waits, and a failure is told and forgotten."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from swarm import latest_file
from swarm.files import write_atomically
from swarm.latest_file import LatestFile, until_written

WAIT_S = 60.0  # for a thread, on any machine


class Disk:
    """Stands in for `write_atomically`: each write waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[bytes] = []
        self.threads: list[threading.Thread] = []
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        monkeypatch.setattr(latest_file, "write_atomically", self._write)

    def _write(self, path: Path, data: bytes, **options: Any) -> None:
        self.threads.append(threading.current_thread())
        self.begun.release()
        assert self.go.acquire(timeout=WAIT_S)
        self.written.append(data)
        if data == b"too much":
            raise OSError(28, "No space left on device")
        write_atomically(path, data, **options)

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=WAIT_S)


def test_what_is_written_is_there_with_its_folder(tmp_path: Path) -> None:
    file = LatestFile(tmp_path / "state" / "file", mode=0o600)
    file.write(b"one").result(WAIT_S)
    assert file.path.read_bytes() == b"one"
    assert file.path.stat().st_mode & 0o777 == 0o600
    file.write(b"two").result(WAIT_S)
    assert file.path.read_bytes() == b"two"
    assert [each.name for each in file.path.parent.iterdir()] == ["file"]


def test_nobody_waits_and_of_what_came_meanwhile_only_the_last_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    file = LatestFile(tmp_path / "file")
    first = file.write(b"first")
    disk.wait_begun()
    later = [file.write(b"%d" % number) for number in range(100)]
    assert not first.done()
    disk.go.release()
    first.result(WAIT_S)
    assert file.path.read_bytes() == b"first"
    assert not any(each.done() for each in later)
    disk.go.release()
    for each in later:
        each.result(WAIT_S)
    assert file.path.read_bytes() == b"99"
    assert disk.written == [b"first", b"99"]
    assert len(set(disk.threads)) == 1
    assert disk.threads[0].daemon, "a disk that hangs keeps no process from ending"
    disk.threads[0].join(WAIT_S)
    assert not disk.threads[0].is_alive(), "no thread idles"


def test_what_cannot_be_written_is_told_and_the_next_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    errors: list[Exception] = []
    file = LatestFile(tmp_path / "file", on_failure=errors.append)
    failed = file.write(b"too much")
    disk.wait_begun()
    next_one = file.write(b"less")
    disk.go.release()
    disk.go.release()
    with pytest.raises(OSError, match="No space left"):
        failed.result(WAIT_S)
    assert errors == [failed.exception()]
    next_one.result(WAIT_S)
    assert file.path.read_bytes() == b"less"


def test_whoever_waits_no_more_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    file = LatestFile(tmp_path / "file")
    first = file.write(b"first")
    disk.wait_begun()
    assert not first.cancel(), "it is being written"
    second = file.write(b"second")
    assert second.cancel()
    third = file.write(b"third")
    assert third.cancel()
    disk.go.release()
    disk.go.release()
    first.result(WAIT_S)
    disk.threads[0].join(WAIT_S)
    assert disk.written == [b"first", b"third"]
    last = file.write(b"last")
    disk.go.release()
    last.result(WAIT_S)


def test_where_no_thread_can_be_had_it_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    file = LatestFile(tmp_path / "file")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        file.write(b"one").result(WAIT_S)
        file.write(b"two").result(WAIT_S)
    assert file.path.read_bytes() == b"two"
    file.write(b"three").result(WAIT_S)
    assert file.path.read_bytes() == b"three"


async def test_who_leaves_waits_for_the_disk_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    file = LatestFile(tmp_path / "file")
    writing = file.write(b"too much")
    disk.wait_begun()
    await until_written(writing, 0.0)
    assert not writing.done()
    disk.go.release()
    await until_written(writing, WAIT_S)
    assert isinstance(writing.exception(0.0), OSError)


def test_writes_from_many_threads_end_with_one_of_the_last(tmp_path: Path) -> None:
    file = LatestFile(tmp_path / "file")

    def write(name: bytes) -> None:
        for number in range(50):
            file.write(name + b"%d" % number)

    threads = [threading.Thread(target=write, args=(name,)) for name in (b"a", b"b", b"c")]
    for each in threads:
        each.start()
    for each in threads:
        each.join(WAIT_S)
    file.write(b"last").result(WAIT_S)
    assert file.path.read_bytes() == b"last"
