"""A web server of files that misbehaves as it is told, and counts what it sends."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web

from swarm.model.ranges import Span


@dataclass
class FileServer:
    """Files by path, and how they are served.

    Attributes:
        fails: (status, headers) of the next answers, before any file is sent.
        ignores_ranges: answer 200 with the whole file.
        lies: a change of the headers of every part.
        cuts_after: bytes of a body after which the connection is closed, for each of the next requests.
        garbles: of each body the first byte is flipped.
        redirects: path -> where to.
        etag: of all files; empty: none is sent.
        rate_bytes_s: of one answer; None: as fast as it goes.
        holds_after: answer so many requests, and leave the next ones waiting for ever.
        asked: what was asked for.
        n_sent: bytes of bodies.
        headers_seen: of every request.
    """

    files: dict[str, bytes]
    fails: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    ignores_ranges: bool = False
    lies: dict[str, str] = field(default_factory=dict)
    cuts_after: list[int] = field(default_factory=list)
    garbles: bool = False
    redirects: dict[str, str] = field(default_factory=dict)
    etag: str = '"one"'
    rate_bytes_s: float | None = None
    holds_after: int | None = None
    asked: list[Span] = field(default_factory=list)
    n_sent: int = 0
    headers_seen: list[dict[str, str]] = field(default_factory=list)
    n_now: int = 0
    n_most: int = 0
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.headers_seen.append(dict(request.headers))
        path = request.path
        if path in self.redirects:
            return web.Response(status=302, headers={"Location": self.redirects[path]})
        if self.fails:
            status, headers = self.fails.pop(0)
            return web.Response(status=status, headers=headers)
        if path not in self.files:
            return web.Response(status=404)
        self.n_now += 1
        self.n_most = max(self.n_most, self.n_now)
        try:
            return await self._send(request, self.files[path])
        finally:
            self.n_now -= 1

    async def is_quiet(self) -> None:
        """Return once nothing is being sent: what has gone was counted."""
        async with asyncio.timeout(30):
            while self.n_now:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _send(self, request: web.Request, data: bytes) -> web.StreamResponse:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        assert match is not None
        start, end = int(match[1]), min(int(match[2]) + 1, len(data))
        self.asked.append(Span(request.path, start, end))
        if self.holds_after is not None and len(self.asked) > self.holds_after:
            await asyncio.Event().wait()  # until the client hangs up
        has_changed = request.headers.get("If-Range", self.etag) != self.etag
        response = web.StreamResponse(headers={"ETag": self.etag} if self.etag else {})
        if self.ignores_ranges or has_changed:
            body = data
        else:
            if start >= len(data):
                return web.Response(status=416)
            body = data[start:end]
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        response.content_length = len(body)
        for name, value in self.lies.items():
            if value:
                response.headers[name] = value
            else:
                del response.headers[name]
        if self.garbles:
            body = bytes([body[0] ^ 1]) + body[1:]
        n_most = self.cuts_after.pop(0) if self.cuts_after else len(body)
        await response.prepare(request)
        step = 1 << 16 if self.rate_bytes_s is None else 1 << 12
        for at in range(0, min(n_most, len(body)), step):
            piece = body[at : min(at + step, n_most)]
            self.n_sent += len(piece)  # before: who reads it may look at once
            await response.write(piece)
            if self.rate_bytes_s is not None:
                await asyncio.sleep(len(piece) / self.rate_bytes_s)
        if n_most < len(body):
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write_eof()
        return response


@contextlib.asynccontextmanager
async def serving(server: FileServer) -> AsyncIterator[FileServer]:
    """Serve on a free port of this machine; `server.url` has no slash at its end."""
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
