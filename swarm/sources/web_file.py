"""One file on a web server, read in ranges: what the server says of it, and whether an answer is what was asked for.

asked                        answered
Range: bytes=A-B, If-Range   206, Content-Range: bytes A-C/SIZE, C <= B     the bytes, perhaps fewer
                             206 with anything else                         a lie: RemoteProtocolError
                             200, another length or ETag                    the file has changed: SourceUnusable
                             200                                            the server ignores ranges: the whole file, from 0
                             416                                            the file is shorter: SourceUnusable
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

import aiohttp

from swarm.errors import DeadlineExceeded, NetworkError, RemoteProtocolError, SourceUnusable
from swarm.sources.locations import Location
from swarm.sources.web import CutShort, Web, deadline_s, read_some

N_RESUMES = 3  # of one range whose connection was lost in the middle, or of which the server gave less; guessed
MAX_FILE_BYTES = 1 << 44  # 16 TiB; guessed: ten times the largest published model
_CONTENT_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20}|\*)")
_STRONG_ETAG = re.compile(r'"[\x21\x23-\x7e]{1,200}"')


class RangesIgnored(RemoteProtocolError):
    """The server sends the whole file whatever is asked for: legal, and of no use for a part in the middle."""


class WebFile:
    """A file on a web server.

    Attributes:
        size_bytes: what the server said at first; None: it was not asked yet.
        etag: the file's version, where the server tells a strong one.
        has_ranges: whether parts can be asked for, as far as is known.
    """

    def __init__(self, web: Web, location: Location) -> None:
        self._web = web
        self.location = location
        self.size_bytes: int | None = None
        self.etag: str | None = None
        self.has_ranges = True

    async def chunks(self, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield bytes `start` to `end` (exclusive) as one answer brings them; it may end early.

        Raises:
            SourceUnusable: the file is not there, or has changed.
            RangesIgnored: the server sends all of it, and `start` is not 0.
            RemoteProtocolError: the answer is not what was asked for.
            Overloaded, NetworkError: not now.
        """
        assert 0 <= start < end
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if self.etag is not None:
            headers["If-Range"] = self.etag
        async with self._web.get(self.location, headers) as response:
            n_promised = self._check_head(response, start, end)
            until = asyncio.get_running_loop().time() + deadline_s(end - start)
            n_left = end - start
            while n_left and (data := await self._next(response, until)):
                if n_promised is not None and len(data) > n_promised:
                    raise RemoteProtocolError(f"{self.location.name}: the server sends more than it said")
                if n_promised is not None:
                    n_promised -= len(data)
                yield data[:n_left]
                n_left -= min(n_left, len(data))
            if not n_left and n_promised == 0:
                await self._next(response, until)  # its end, so that the connection can be used again

    async def _next(self, response: aiohttp.ClientResponse, until: float) -> bytes:
        try:
            async with asyncio.timeout_at(until):
                return await read_some(self._web, response)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.location.name}: the server is too slow") from error

    async def read(self, start: int, end: int) -> bytearray:
        """Return bytes `start` to `end` (exclusive); where a connection is lost, the rest is asked for anew.

        Raises: as `chunks`.
        """
        data = bytearray()
        for n_left in range(N_RESUMES, -1, -1):
            n_before = len(data)
            try:
                async with aclosing(self.chunks(start + n_before, end)) as chunks:
                    async for chunk in chunks:
                        data += chunk
            except CutShort:
                if not n_left:
                    raise
                if len(data) < end - start:
                    continue
            if len(data) == end - start:
                return data
            if len(data) == n_before:
                break
        raise NetworkError(
            f"{self.location.name}: the answer was cut short: got {len(data)} bytes, expected {end - start}"
        )

    def _check_head(self, response: aiohttp.ClientResponse, start: int, end: int) -> int | None:
        """Take in what the server says of the file; return how many bytes this answer has, None: it does not say."""
        name, headers = self.location.name, response.headers
        if headers.get("Content-Encoding", "identity") != "identity":
            raise RemoteProtocolError(f"{name}: the server sends it compressed, which was not asked for")
        etag = headers.get("ETag", "")
        etag_now = etag if _STRONG_ETAG.fullmatch(etag) else None
        if response.status == 416:
            raise SourceUnusable(f"{name} is shorter than it was: nothing at bytes {start} to {end}")
        if response.status == 200:
            self._learn(response.content_length, etag_now)
            self.has_ranges = False
            if start:
                raise RangesIgnored(f"{name}: the server sends the whole file, not bytes {start} to {end}")
            return response.content_length
        match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        if match is None:
            raise RemoteProtocolError(f"{name}: the answer does not say which part of the file it is")
        first, last = int(match[1]), int(match[2])
        n_bytes = last - first + 1
        if first != start or not 0 < n_bytes <= end - start or response.content_length not in (None, n_bytes):
            raise RemoteProtocolError(
                f"{name}: the server sends another part: got bytes {first} to {last + 1}, expected {start} to {end}"
            )
        self._learn(None if match[3] == "*" else int(match[3]), etag_now)
        return n_bytes

    def _learn(self, size_bytes: int | None, etag: str | None) -> None:
        name = self.location.name
        if self.size_bytes is None:
            if size_bytes is None or not 0 < size_bytes <= MAX_FILE_BYTES:
                raise SourceUnusable(f"{name}: the server does not say how long the file is")
            self.size_bytes, self.etag = size_bytes, etag
        elif size_bytes not in (None, self.size_bytes):
            raise SourceUnusable(f"{name} has changed: got {size_bytes} bytes, expected {self.size_bytes}")
        elif etag is not None and self.etag is not None and etag != self.etag:
            raise SourceUnusable(f"{name} has changed: its ETag is another one now")
