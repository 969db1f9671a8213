"""The page's parts, and its live events, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from swarm.web import map_server
from swarm.web.map_server import STATIC, add_map

DEADLINE_S = 5.0  # of things that take a few milliseconds


@contextlib.asynccontextmanager
async def serving(make_map: Callable[[], dict[str, Any]]) -> AsyncIterator[aiohttp.ClientSession]:
    app = web.Application()
    add_map(app, make_map)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}", auto_decompress=False) as client:
            yield client
    finally:
        await asyncio.wait_for(runner.cleanup(), DEADLINE_S)


def a_map() -> dict[str, Any]:
    return {"at": 0, "source": "test", "servable": True, "n_used": 0, "models": [], "peers": []}


async def test_every_part_comes_from_here_and_the_first_load_is_small() -> None:
    n_bytes = 0
    async with serving(a_map) as client:
        for path in ("/map", *(f"/map/static/{part.name}" for part in STATIC.iterdir())):
            async with client.get(path) as answer:
                assert answer.status == 200, path
                assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
                n_bytes += len(await answer.read())
                tag = answer.headers["ETag"]
            async with client.get(path, headers={"If-None-Match": tag}) as answer:
                assert answer.status == 304
        for path in ("/map/static/map_server.py", "/map/static/..%2fmap_server.py", "/map/static/"):
            async with client.get(path) as answer:
                assert answer.status == 404, path
    assert n_bytes < 200_000
    for part in STATIC.iterdir():
        if part.suffix != ".json":
            addresses = re.findall(r"(?:https?:)?//[\w.-]+", part.read_text().replace("// ", ""))
            assert addresses == [], f"{part.name} asks elsewhere"


async def read_event(answer: aiohttp.ClientResponse) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            line = await answer.content.readline()
            assert line, "the stream ended"
            if line.startswith(b"data: "):
                return json.loads(line[6:])


async def test_a_peer_that_joins_is_told_to_all_who_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_server, "TICK_S", 0.01)
    now = a_map()
    n_made = 0

    def make_map() -> dict[str, Any]:
        nonlocal n_made
        n_made += 1
        return now

    async with serving(make_map) as client:
        async with client.get("/map/events") as one, client.get("/map/events") as other:
            assert one.content_type == "text/event-stream"
            async with asyncio.timeout(DEADLINE_S):
                while n_made < 3:  # until the feed has begun  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            now["peers"] = [{"id": "a", "state": "in use"}]
            for answer in (one, other):
                assert (await read_event(answer))["peers"] == {"a": {"id": "a", "state": "in use"}}
        async with asyncio.timeout(DEADLINE_S):
            while True:  # nobody watches, so nobody looks
                before = n_made
                await asyncio.sleep(0.05)
                if n_made == before:
                    break


async def test_too_many_watchers_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_server, "MAX_WATCHERS", 1)
    async with serving(a_map) as client, client.get("/map/events"), client.get("/map/events") as second:
        assert second.status == 503
        assert "Retry-After" in second.headers


async def test_a_stream_has_no_head_alone() -> None:
    async with asyncio.timeout(DEADLINE_S), serving(a_map) as client, client.head("/map/events") as answer:
        assert answer.status == 405


async def test_closing_ends_the_streams() -> None:
    async with serving(a_map) as client:
        answer = await client.get("/map/events")
        assert answer.status == 200
    # `serving` ended within its deadline


async def test_a_map_that_is_the_same_object_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n_written = 0

    def dumps(*arguments: Any, **options: Any) -> str:
        nonlocal n_written
        n_written += 1
        return json.dumps(*arguments, **options)

    shown = a_map() | {"peers": [{"id": f"{number:052d}", "state": "in use"} for number in range(50)]}
    monkeypatch.setattr(map_server, "json", SimpleNamespace(dumps=dumps))
    async with serving(lambda: shown) as client:
        for encoding in ("gzip, br", "identity", "gzip", "br"):
            async with client.get("/map.json", headers={"Accept-Encoding": encoding}) as answer:
                body = await answer.read()
                assert answer.headers.get("Content-Encoding") == ("gzip" if "gzip" in encoding else None)
                assert json.loads(gzip.decompress(body) if "gzip" in encoding else body) == shown
        assert n_written == 1
        shown = shown | {"at": 1}
        async with client.get("/map.json", headers={"Accept-Encoding": "identity"}) as answer:
            assert json.loads(await answer.read())["at"] == 1
        assert n_written == 2
