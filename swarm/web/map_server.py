"""Serves the peer map: the page, what it shows as JSON, and what changes as server-sent events.

    GET /map          the page; its parts below /map/static, all of them from here
    GET /map/plain    the same without scripts
    GET /map.json     the map
    GET /map/events   what changes in it (`map_feed`)
    GET /chat         at a gateway: a page to try the model

Nothing is loaded from anywhere else, and nobody is counted or followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from swarm.web.map_feed import MapFeed
from swarm.web.plain_page import page

Json = dict[str, Any]

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
TICK_S = 1.0  # between two looks at the map while somebody watches
KEEPALIVE_S = 15.0  # of a quiet stream: proxies drop those that say nothing
MAX_WATCHERS = 256  # more are told to come back; guessed
MAX_BACKLOG = 8  # events that a slow watcher may owe; then it is dropped, and its page connects again
COMPRESS_FROM_BYTES = 1024
ZIP_LEVEL = 3  # measured, 2,000 peers, 690 KB: 2 ms and 72 KB; level 9: 17 ms and 57 KB
# Scripts and styles from here alone, whatever a name may hold.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY + "; frame-ancestors 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
PLAIN_HEADERS = {**HEADERS, "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
MAP_PATHS = ("/chat", "/map", "/map/plain", "/map.json", "/map/events", "/map/static")


def add_map(app: web.Application, make_map: Callable[[], Json], *, has_chat: bool = False) -> None:
    """Serve the map that `make_map` returns; it is called at each request, and each TICK_S while somebody watches.

    It may return the same object again, which is then not written anew; it must not change one that it has returned.
    `has_chat`: serve a page to try the model, too; the application then answers OpenAI's requests.
    """
    server = _MapServer(make_map)
    if has_chat:
        app.router.add_get("/chat", server.chat)
    app.router.add_get("/map", server.page)
    app.router.add_get("/map/plain", server.plain)
    app.router.add_get("/map.json", server.as_json)
    app.router.add_get("/map/events", server.events, allow_head=False)  # a stream has no head alone
    app.router.add_get("/map/static/{name}", server.static)
    app.on_shutdown.append(server.close)


@dataclass(frozen=True, slots=True)
class _Part:
    content: bytes
    content_type: str
    tag: str


def _read_parts() -> dict[str, _Part]:
    parts = {}
    for path in STATIC.iterdir():
        if path.suffix in TYPES:
            content = path.read_bytes()
            tag = hashlib.sha256(content).hexdigest()[:16]
            parts[path.name] = _Part(content, TYPES[path.suffix], tag)
    return parts


class _MapServer:
    def __init__(self, make_map: Callable[[], Json]) -> None:
        self._make_map = make_map
        self._parts = _read_parts()
        self._written_of: Json | None = None  # the map that was written last, and its two forms
        self._written = self._zipped = b""
        self._watchers: set[asyncio.Queue[bytes]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._is_closing = asyncio.Event()

    async def page(self, request: web.Request) -> web.Response:
        return self._part(request, "map.html")

    async def chat(self, request: web.Request) -> web.Response:
        return self._part(request, "chat.html")

    async def static(self, request: web.Request) -> web.Response:
        return self._part(request, request.match_info["name"])

    async def plain(self, request: web.Request) -> web.Response:
        return web.Response(text=page(self._make_map()), content_type="text/html", headers=PLAIN_HEADERS)

    async def as_json(self, request: web.Request) -> web.Response:
        shown = self._make_map()
        if shown is not self._written_of:
            self._written = json.dumps(shown, separators=(",", ":")).encode()
            self._zipped = gzip.compress(self._written, ZIP_LEVEL) if len(self._written) >= COMPRESS_FROM_BYTES else b""
            self._written_of = shown
        headers = {**HEADERS, "Cache-Control": "no-store", "Vary": "Accept-Encoding"}
        if self._zipped and "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return web.Response(body=self._zipped, content_type="application/json", headers=headers)
        return web.Response(body=self._written, content_type="application/json", headers=headers)

    async def events(self, request: web.Request) -> web.StreamResponse:
        if len(self._watchers) >= MAX_WATCHERS:
            return web.Response(status=503, text="too many watch already", headers={"Retry-After": "60"})
        response = web.StreamResponse(
            headers={
                **HEADERS,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",  # nginx would collect them
            }
        )
        await response.prepare(request)
        backlog: asyncio.Queue[bytes] = asyncio.Queue(maxsize=MAX_BACKLOG)
        self._watchers.add(backlog)
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        try:
            while backlog in self._watchers and not self._is_closing.is_set():
                event = b": still here\n\n"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEPALIVE_S):
                        event = await backlog.get()
                async with asyncio.timeout(KEEPALIVE_S):
                    await response.write(event)
        except (ConnectionError, TimeoutError):
            pass  # gone, or it does not read
        finally:
            self._watchers.discard(backlog)
        return response

    async def close(self, _: web.Application) -> None:
        self._is_closing.set()
        self._watchers.clear()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])

    def _part(self, request: web.Request, name: str) -> web.Response:
        part = self._parts.get(name)
        if part is None:
            raise web.HTTPNotFound
        headers = {**HEADERS, "ETag": f'"{part.tag}"', "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == f'"{part.tag}"':
            return web.Response(status=304, headers=headers)
        response = web.Response(body=part.content, content_type=part.content_type, charset="utf-8", headers=headers)
        response.enable_compression()
        return response

    async def _tick(self) -> None:
        """Tell the watchers what changes, until there are none."""
        try:
            feed, told_at = MapFeed(self._make_map()), time.monotonic()
            while self._watchers:
                await asyncio.sleep(TICK_S)
                now = time.monotonic()
                event = feed.advance(self._make_map(), now - told_at)
                told_at = now
                if event is None:
                    continue
                data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
                for backlog in list(self._watchers):
                    try:
                        backlog.put_nowait(data)
                    except asyncio.QueueFull:
                        self._watchers.discard(backlog)
        finally:
            self._ticking = None
            self._watchers.clear()  # where making the map failed: the pages connect again
