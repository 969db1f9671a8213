"""A model on the web, whole, in shards or a slice of it: its header here, its experts' planes there.

The header is fetched in growing pieces until it is whole, and kept in `<cache>/headers/` under a name made of where the file is
and which version, so that a download that was cut does not fetch it again. Nothing in it is believed but where planes lie: a
block counts by its hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar

from swarm.errors import RemoteProtocolError, SourceUnusable, SwarmError, UserError
from swarm.files import write_atomically
from swarm.ids import ExpertSet
from swarm.interruptible import run_interruptibly
from swarm.model.gguf_file import SHARD_COUNT_KEY, FileEnds, GgufFile, shard_paths
from swarm.model.manifest import Manifest
from swarm.model.ranges import Pair, Plane, cut_out, most_held, spans_of
from swarm.model.source import GgufSource
from swarm.sources.locations import Location
from swarm.sources.web import Web
from swarm.sources.web_file import WebFile

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_BYTES = 64 << 10  # of a header, asked for at first; guessed: holds a small model's
STEP_BYTES = 1 << 20  # asked for next, at least, or half of what is there
MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 256k tokens with merges takes about 20 MB
MAX_SHARD_HEADER_BYTES = 4 << 20  # of all but the first, which have no vocabulary; guessed: 40,000 tensors
MAX_WEB_SHARDS = 256  # guessed: the largest published models have about 40
N_SHARDS_AT_ONCE = 4
# From a server without ranges: how large a file is read to its end, and how much may wait for the rest of its block. Guessed.
MAX_STREAM_BYTES = 8_000_000_000
MAX_HELD_BYTES = 1_000_000_000


class WebModel:
    """A model file on the web whose header is here."""

    def __init__(self, source: GgufSource, file: GgufFile, files: dict[str, WebFile]) -> None:
        self.source = source
        self.name = file.text("general.name")
        self.size_bytes = file.size_bytes
        self._tensors = tuple(file.tensors[name] for name in sorted(file.tensors))
        self._files = files

    @classmethod
    async def open(cls, web: Web, location: Location, cache_dir: Path) -> WebModel:
        """Return the model at a location, its header fetched.

        Raises:
            SourceUnusable: the file is not there, or nothing that can be used.
            RemoteProtocolError: it is no GGUF file, or a damaged one; or the server lies.
            Overloaded, NetworkError: not now.
            UserError: the cache cannot be written.
        """
        first = WebFile(web, location)
        path = await _fetch_header(first, cache_dir)
        files = {path.name: first}
        with _open(path, {path.name: first.size_bytes or 0}, is_shard=True) as file:
            n_shards = _untrusted(file.integer, SHARD_COUNT_KEY) or 0
        if n_shards > MAX_WEB_SHARDS:
            raise RemoteProtocolError(f"{location.name} has too many shards: got {n_shards}, expected {MAX_WEB_SHARDS}")
        if n_shards > 1:
            names = [each.name for each in _untrusted(shard_paths, path, n_shards)]
            files |= {name: WebFile(web, location.sibling(name)) for name in names[1:]}
            limit = asyncio.Semaphore(N_SHARDS_AT_ONCE)

            async def fetch(shard: WebFile) -> None:
                async with limit:
                    await _fetch_header(shard, cache_dir, beside=path)

            await _all(fetch(files[name]) for name in names[1:])
        sizes = {name: each.size_bytes or 0 for name, each in files.items()}

        def index() -> tuple[GgufSource, GgufFile]:
            with _open(path, sizes) as file:
                return _untrusted(GgufSource, file), file

        source, file = await run_interruptibly(lambda _: index())
        model = cls(source, file, files)
        file.forget_metadata()
        return model

    @property
    def experts(self) -> ExpertSet:
        """Which blocks it has."""
        return self.source.experts

    @property
    def has_ranges(self) -> bool:
        """Whether parts of it can be asked for."""
        return all(file.has_ranges for file in self._files.values())

    def is_part_of(self, manifest: Manifest) -> bool:
        """Return whether these can be blocks of the manifest's model, by what the header says.

        A slice file's header must give blocks the sizes that they have: as much is read of a server as it says.
        """
        if self.source.model_id is not None:
            return self.source.model_id == manifest.model_id and all(
                layer in manifest.spec.moe_layers
                and sum(plane.size_bytes for plane in self.source.places(layer, min(ids)))
                == manifest.spec.block_size_bytes(layer)
                for layer, ids in self.source.experts.by_layer.items()
            )
        return self._tensors == manifest.tensors

    async def read_blocks(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Return (expert, block) of some of a layer's experts, unchecked, each put together when it is taken.

        Raises:
            SourceUnusable: the file does not have one of them, or has changed.
            RemoteProtocolError, Overloaded, NetworkError: as `WebFile.read`.
        """
        places = {expert: self._places(layer, expert) for expert in experts}
        spans = spans_of(plane for planes in places.values() for plane in planes)
        data = [await self._files[span.file].read(span.start, span.end) for span in spans]
        return (
            (expert, b"".join(cut_out(plane, spans, data) for plane in planes)) for expert, planes in places.items()
        )

    def why_no_stream(self, pairs: Collection[Pair]) -> str:
        """Return why these blocks cannot be had by reading all of the file; empty: they can."""
        if self.size_bytes > MAX_STREAM_BYTES:
            return (
                f"the server gives no parts of files, and all of it is too much: got {self.size_bytes} bytes, "
                f"expected at most {MAX_STREAM_BYTES}"
            )
        held = most_held(pairs, self._places)
        if held > MAX_HELD_BYTES:
            return (
                f"the server gives no parts of files, and {held} bytes would have to wait for the rest of their blocks"
            )
        return ""

    async def stream_blocks(self, pairs: Collection[Pair]) -> AsyncGenerator[tuple[Pair, bytes], None]:
        """Yield ((layer, expert), block) as one reading of the files from end to end brings them, unchecked.

        Raises: as `read_blocks`.
        """
        wanted: list[tuple[Plane, Pair, int]] = []
        parts: dict[Pair, list[bytes | None]] = {}
        for pair in pairs:
            planes = self._places(*pair)
            parts[pair] = [None] * len(planes)
            wanted += [(plane, pair, index) for index, plane in enumerate(planes)]
        for name in sorted({plane.file for plane, _, _ in wanted}):
            todo = sorted((each for each in wanted if each[0].file == name), key=lambda each: each[0].start)
            end = todo[-1][0].end
            position, data = 0, bytearray()  # `data` begins at `position`
            async with aclosing(self._files[name].chunks(0, end)) as chunks:
                async for chunk in chunks:
                    data += chunk
                    while todo and todo[0][0].end <= position + len(data):
                        plane, pair, index = todo.pop(0)
                        parts[pair][index] = bytes(data[plane.start - position : plane.end - position])
                        if None not in parts[pair]:
                            yield pair, b"".join(part or b"" for part in parts.pop(pair))
                    n_past = min(len(data), (todo[0][0].start if todo else end) - position)
                    if n_past > 0:
                        del data[:n_past]
                        position += n_past
            if todo:
                raise SourceUnusable(f"{self._files[name].location.name} ends before it should")

    def _places(self, layer: int, expert: int) -> list[Plane]:
        planes = self.source.places(layer, expert)
        if not planes:
            raise SourceUnusable(f"the file does not hold layer {layer}, expert {expert}")
        return planes


async def _fetch_header(file: WebFile, cache_dir: Path, *, beside: Path | None = None) -> Path:
    """Fetch a file's header, unless it is kept already, and return where it is; `beside`: in the folder of this one."""
    have = bytearray()
    async with aclosing(file.chunks(0, FIRST_BYTES)) as chunks:
        async for chunk in chunks:
            have += chunk
    size = file.size_bytes
    assert size is not None  # an answer without it was refused
    limit = min(size, MAX_HEADER_BYTES if beside is None else MAX_SHARD_HEADER_BYTES)
    key = f"{file.location.url}\0{size}\0{file.etag}"
    folder = cache_dir / "headers" / hashlib.sha256(key.encode()).hexdigest()[:32] if beside is None else beside.parent
    path = folder / _safe_name(file.location.file_name)
    try:
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        with suppress(RemoteProtocolError):  # damaged here: fetched anew
            if file.etag is not None and await asyncio.to_thread(_is_whole, path, size, bytes(have)):
                return path
        n_next = STEP_BYTES
        while True:
            await asyncio.to_thread(write_atomically, path, bytes(have))
            if await run_interruptibly(lambda _: _is_whole(path, size)):
                return path
            if len(have) >= limit:
                raise RemoteProtocolError(f"{file.location.name}: its header does not end within {len(have)} bytes")
            end = min(limit, len(have) + n_next)
            if file.has_ranges:
                have += await file.read(len(have), end)
            else:
                have = bytearray()  # without ranges there is only the beginning
                async with aclosing(file.chunks(0, end)) as chunks:
                    async for chunk in chunks:
                        have += chunk
            n_next = max(STEP_BYTES, len(have) // (2 if file.has_ranges else 1))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error


def _is_whole(path: Path, size_bytes: int, beginning: bytes = b"") -> bool:
    """Return whether a file begins with this and holds a whole header. Raises RemoteProtocolError: it is damaged."""
    try:
        with path.open("rb") as file:
            if file.read(len(beginning)) != beginning:
                return False
    except OSError:
        return False
    try:
        GgufFile(path, is_shard=True, sizes={path.name: size_bytes}).close()
    except UserError as error:
        if isinstance(error.__cause__, FileEnds):
            return False
        raise _damaged(path, error) from error
    return True


def _open(path: Path, sizes: dict[str, int], *, is_shard: bool = False) -> GgufFile:
    try:
        return GgufFile(path, is_shard=is_shard, sizes=sizes)
    except UserError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: UserError) -> RemoteProtocolError:
    return RemoteProtocolError(f"{path.name} on the web cannot be used: {error.__cause__ or error}")


def _untrusted(work: Callable[..., T], *arguments: object) -> T:
    """Return `work(*arguments)`; a UserError is about a file from the web."""
    try:
        return work(*arguments)
    except UserError as error:
        raise RemoteProtocolError(f"a file on the web cannot be used: {error}") from error


def _safe_name(name: str) -> str:
    """Return a file's name as it may stand in a folder of ours."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name or len(name.encode()) > 200:
        raise SourceUnusable(f"no file can be called so: got {name[:80]!r}")
    return name


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of it at once; the first failure ends the rest, and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for each in work:
                tasks.create_task(each)
    except* SwarmError as group:
        raise group.exceptions[0] from None
