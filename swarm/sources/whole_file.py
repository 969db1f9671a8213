"""A whole model from the web, for who serves it: in parts over several connections, going on where it stopped.

    <cache>/models/<where and which version>/<name>.part     the file, with holes
                                             <name>.parts    a byte for each part that is on the disk: 1
                                             <name>          once all of it is
                                             <name>.version  of a shard but the first: where it is and which version

A part is synced before its byte is written, so that a power cut loses parts and invents none. A file without a strong ETag may
change unseen between two runs: it is begun anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from rich.filesize import decimal

from swarm.errors import NetworkError, Overloaded, RemoteProtocolError, SourceUnusable, SwarmError, UserError
from swarm.files import write_atomically
from swarm.model.gguf_file import SHARD_COUNT_KEY, GgufFile, shard_paths
from swarm.sources.locations import Location
from swarm.sources.web import Web
from swarm.sources.web_file import WebFile

logger = logging.getLogger(__name__)

PART_BYTES = 16 << 20  # guessed: a second at 128 Mbit/s, what a kill loses of each connection
N_CONNECTIONS = 4
N_ATTEMPTS = 6  # of a part; with their rests a minute in all
FIRST_REST_S, MAX_REST_S = 1.0, 30.0
MAX_WAIT_S = 600.0  # as long a Retry-After is waited for: nobody else has the file
SPARE_DISK_BYTES = 64_000_000  # left free; guessed

Progress = Callable[[int, int], None]


async def fetch_model(web: Web, location: Location, cache_dir: Path, progress: Progress) -> Path:
    """Return the path of a model's file here, of shards the first; `progress`: (bytes there, bytes of this file).

    Raises:
        SourceUnusable: it is not there, or not for us.
        NetworkError, RemoteProtocolError, Overloaded: again and again.
        UserError: the disk, or it is no model.
    """
    first = await _fetch(WebFile(web, location), cache_dir, progress)
    with GgufFile(first, is_shard=True) as file:
        n_shards = file.integer(SHARD_COUNT_KEY) or 0
    if n_shards > 1:
        for path in shard_paths(first, n_shards)[1:]:
            await _fetch(WebFile(web, location.sibling(path.name)), cache_dir, progress, beside=first)
    return first


async def _fetch(file: WebFile, cache_dir: Path, progress: Progress, *, beside: Path | None = None) -> Path:
    async with aclosing(file.chunks(0, 1)) as chunks:  # how long it is, and which version
        async for _ in chunks:
            pass
    assert file.size_bytes is not None
    key = f"{file.location.url}\0{file.size_bytes}\0{file.etag}"
    version = hashlib.sha256(key.encode()).hexdigest()[:32]
    folder = cache_dir / "models" / version if beside is None else beside.parent
    name = file.location.file_name
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name or len(name.encode()) > 200:
        raise SourceUnusable(f"no file can be called so: got {name[:80]!r}")
    path = folder / name
    try:
        if beside is not None:
            await asyncio.to_thread(_forget_others, path, version)
        if file.etag is not None and path.is_file() and path.stat().st_size == file.size_bytes:
            return path
        download = await asyncio.to_thread(_Download, path, file, progress)
        try:
            await download.run()
        finally:
            download.close()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    return path


def _forget_others(path: Path, version: str) -> None:
    """Delete what is here of another version of a shard: its folder is called after the first one's, which may be the same."""
    mark = path.with_name(path.name + ".version")
    if mark.is_file() and mark.read_bytes() == version.encode():
        return
    for suffix in ("", ".part", ".parts"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    write_atomically(mark, version.encode())


class _Download:
    """One file on its way."""

    def __init__(self, path: Path, file: WebFile, progress: Progress) -> None:
        assert file.size_bytes is not None
        self._path = path
        self._file = file
        self._progress = progress
        self._size_bytes = size = file.size_bytes
        n_parts = -(-size // PART_BYTES)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._part = path.with_name(path.name + ".part")
        self._journal = path.with_name(path.name + ".parts")
        done = self._journal.read_bytes() if file.etag is not None and self._journal.is_file() else b""
        if len(done) != n_parts or not self._part.is_file() or self._part.stat().st_size != size:
            done = bytes(n_parts)
            self._part.unlink(missing_ok=True)
            self._journal.write_bytes(done)
        self._done = bytearray(done)
        n_missing = sum(self._length(part) for part in range(n_parts) if not done[part])
        free = shutil.disk_usage(path.parent).free
        if n_missing + SPARE_DISK_BYTES > free:
            raise UserError(
                f"not enough space in {path.parent}: got {decimal(free)} free, expected "
                f"{decimal(n_missing + SPARE_DISK_BYTES)}; set SWARM_HOME to a folder on another disk"
            )
        self._part.touch()
        self._data = self._part.open("rb+")
        self._marks = self._journal.open("rb+", buffering=0)
        self._data.truncate(size)
        self._lock = threading.Lock()

    def close(self) -> None:
        self._data.close()
        self._marks.close()

    def _length(self, part: int) -> int:
        return min(PART_BYTES, self._size_bytes - part * PART_BYTES)

    async def run(self) -> None:
        self._tell()
        missing = [part for part, is_done in enumerate(self._done) if not is_done]
        if self._file.has_ranges:
            todo = iter(missing)

            async def work() -> None:
                for part in todo:
                    await self._bring(part)

            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(N_CONNECTIONS, len(missing))):
                        workers.create_task(work())
            except* SwarmError as group:
                raise group.exceptions[0] from None
            except* OSError as group:
                raise group.exceptions[0] from None
        elif missing:
            await self._stream()
        await asyncio.to_thread(os.replace, self._part, self._path)
        self._journal.unlink(missing_ok=True)

    async def _bring(self, part: int) -> None:
        start = part * PART_BYTES
        for attempt in range(N_ATTEMPTS):
            try:
                data = await self._file.read(start, start + self._length(part))
            except SourceUnusable:
                raise
            except (NetworkError, RemoteProtocolError, Overloaded) as error:
                rest_s = min(MAX_REST_S, FIRST_REST_S * 2**attempt) * random.uniform(0.7, 1.3)
                if isinstance(error, Overloaded):
                    rest_s = max(rest_s, error.retry_after_s)
                if attempt == N_ATTEMPTS - 1 or rest_s > MAX_WAIT_S:
                    raise
                logger.info("%s; asked again in %.0f s", error, rest_s)
                await asyncio.sleep(rest_s)
            else:
                await asyncio.to_thread(self._keep, part, data)
                self._tell()
                return

    async def _stream(self) -> None:
        """Read all of it from a server that gives no parts."""
        part, data = 0, bytearray()
        async with aclosing(self._file.chunks(0, self._size_bytes)) as chunks:
            async for chunk in chunks:
                data += chunk
                while part < len(self._done) and len(data) >= self._length(part):
                    length = self._length(part)
                    await asyncio.to_thread(self._keep, part, data[:length])
                    del data[:length]
                    part += 1
                    self._tell()
        if part < len(self._done):
            raise NetworkError(f"{self._file.location.name} ends before it should; run again")

    def _keep(self, part: int, data: bytes | bytearray) -> None:
        with self._lock:
            self._data.seek(part * PART_BYTES)
            self._data.write(data)
            self._data.flush()
            os.fsync(self._data.fileno())
            self._done[part] = 1
            self._marks.seek(part)
            self._marks.write(b"\1")

    def _tell(self) -> None:
        self._progress(sum(self._length(part) for part, is_done in enumerate(self._done) if is_done), self._size_bytes)
