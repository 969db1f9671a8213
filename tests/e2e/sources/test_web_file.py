"""Parts of a file from a server that keeps to the rules, and from servers that do not."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from yarl import URL

from swarm.errors import (
    DeadlineExceeded,
    NetworkError,
    Overloaded,
    RemoteProtocolError,
    SourceUnusable,
)
from swarm.sources import web as web_module
from swarm.sources.locations import Location, locate
from swarm.sources.web import Web
from swarm.sources.web_file import RangesIgnored, WebFile
from tests.e2e.sources.file_server import FileServer, serving

DATA = random.Random(1).randbytes(300_000)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FileServer]:
    async with serving(FileServer({"/f.gguf": DATA})) as server:
        yield server


@pytest_asyncio.fixture
async def web() -> AsyncIterator[Web]:
    async with Web() as web:
        yield web


@pytest.fixture
def file(server: FileServer, web: Web) -> WebFile:
    return WebFile(web, locate(server.url + "/f.gguf", is_asked=True))


async def drained(file: WebFile, start: int, end: int) -> bytes:
    return b"".join([chunk async for chunk in file.chunks(start, end)])


async def test_a_part_is_what_was_asked_for_and_no_more_is_sent(server: FileServer, file: WebFile) -> None:
    assert await file.read(1000, 250_000) == DATA[1000:250_000]
    assert (file.size_bytes, file.etag, file.has_ranges) == (300_000, '"one"', True)
    assert server.n_sent == 249_000
    assert await file.read(0, 1) == DATA[:1]
    assert server.headers_seen[1]["If-Range"] == '"one"'
    assert server.headers_seen[1]["Accept-Encoding"] == "identity"


async def test_a_part_beyond_the_end_is_cut_where_the_file_ends(file: WebFile) -> None:
    assert await drained(file, 0, 1_000_000) == DATA
    with pytest.raises(SourceUnusable, match="shorter than it was"):
        await file.read(300_000, 300_001)


async def test_what_comes_is_counted_and_waited_for(server: FileServer) -> None:
    n_bytes = n_waits = 0

    def received(n: int) -> None:
        nonlocal n_bytes
        n_bytes += n

    async def pace() -> None:
        nonlocal n_waits
        n_waits += 1

    async with Web(received=received, pace=pace, rate_bytes_s=1e6) as web:
        await WebFile(web, locate(server.url + "/f.gguf", is_asked=True)).read(0, 200_000)
    assert n_bytes == 200_000
    assert n_waits >= 2


async def test_a_connection_lost_in_mid_answer_costs_only_the_rest(server: FileServer, file: WebFile) -> None:
    server.cuts_after = [50_000, 10_000]
    assert await file.read(0, 200_000) == DATA[:200_000]
    assert len(server.asked) == 3
    assert server.n_sent <= 200_000 + 60_000, "what was on its way when a connection broke is all that may come twice"
    assert all(span.end == 200_000 for span in server.asked)


async def test_a_connection_lost_again_and_again_is_given_up(server: FileServer, file: WebFile) -> None:
    server.cuts_after = [1000] * 20
    with pytest.raises(NetworkError):
        await file.read(0, 200_000)
    assert len(server.asked) <= 4


@pytest.mark.parametrize(
    ("lies", "message"),
    [
        ({"Content-Range": "bytes 0-999/300000"}, "another part: got bytes 0 to 1000, expected 1000 to 2000"),
        ({"Content-Range": "bytes 1000-2999/300000"}, "another part: got bytes 1000 to 3000"),
        ({"Content-Range": "bytes 1000-999/300000"}, "another part"),
        ({"Content-Range": "bytes 1000-1998/300000"}, "another part"),
        ({"Content-Range": ""}, "does not say which part"),
        ({"Content-Range": "lines 1-2/3"}, "does not say which part"),
        ({"Content-Range": "bytes 1000-1999/" + "9" * 30}, "does not say which part"),
        ({"Content-Encoding": "gzip"}, "compressed"),
    ],
)
async def test_a_lie_about_the_part_is_refused(
    server: FileServer, file: WebFile, lies: dict[str, str], message: str
) -> None:
    server.lies = lies
    with pytest.raises(RemoteProtocolError, match=message):
        await file.read(1000, 2000)


@pytest.mark.parametrize("total", ["*", "0", "99999999999999999999"])
async def test_a_file_without_a_plausible_length_is_not_used(server: FileServer, file: WebFile, total: str) -> None:
    server.lies = {"Content-Range": f"bytes 0-99/{total}"}
    with pytest.raises(SourceUnusable, match="how long the file is"):
        await file.read(0, 100)


@pytest.mark.parametrize("has_etag", [True, False])
async def test_a_file_that_changed_meanwhile_is_said_to_have(server: FileServer, file: WebFile, has_etag: bool) -> None:
    server.etag = '"one"' if has_etag else ""
    await file.read(0, 100)
    server.files["/f.gguf"] = DATA[:-1]
    if has_etag:
        server.etag = '"two"'
    with pytest.raises(SourceUnusable, match="has changed"):
        await file.read(0, 100)


async def test_a_weak_etag_is_no_version(server: FileServer, file: WebFile) -> None:
    server.etag = 'W/"one"'
    await file.read(0, 100)
    await file.read(0, 100)
    assert "If-Range" not in server.headers_seen[1]


async def test_a_server_that_ignores_ranges_gives_the_beginning_and_nothing_else(
    server: FileServer, file: WebFile
) -> None:
    server.ignores_ranges = True
    assert await drained(file, 0, 1000) == DATA[:1000]
    assert not file.has_ranges
    with pytest.raises(RangesIgnored):
        await file.read(1000, 2000)


@pytest.mark.parametrize(
    ("status", "headers", "kind", "retry_after_s"),
    [
        (429, {"Retry-After": "7"}, Overloaded, 7.0),
        (503, {"Retry-After": "nonsense"}, Overloaded, web_module.DEFAULT_RETRY_AFTER_S),
        (503, {}, Overloaded, web_module.DEFAULT_RETRY_AFTER_S),
        (429, {"Retry-After": "999999999"}, Overloaded, web_module.MAX_RETRY_AFTER_S),
        (500, {}, NetworkError, None),
        (401, {}, SourceUnusable, None),
        (404, {}, SourceUnusable, None),
        (418, {}, SourceUnusable, None),
        (204, {}, SourceUnusable, None),
    ],
)
async def test_a_refusal_says_whether_and_when_to_come_again(
    server: FileServer, file: WebFile, status: int, headers: dict[str, str], kind: type, retry_after_s: float | None
) -> None:
    server.fails = [(status, headers)]
    with pytest.raises(kind, match=str(status)) as raised:
        await file.read(0, 100)
    assert isinstance(raised.value, SourceUnusable) == (kind is SourceUnusable)
    if retry_after_s is not None:
        assert raised.value.retry_after_s == retry_after_s


async def test_a_silent_server_is_given_up(server: FileServer, file: WebFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_module, "SILENCE_TIMEOUT_S", 0.2)
    server.rate_bytes_s = 100.0
    with pytest.raises(DeadlineExceeded, match="too slow"):
        await file.read(0, 100_000)


async def test_a_trickle_is_given_up(server: FileServer, file: WebFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.sources.web_file.deadline_s", lambda _: 0.3)
    server.rate_bytes_s = 100_000.0
    with pytest.raises(DeadlineExceeded, match="too slow"):
        await file.read(0, 300_000)


async def test_a_head_that_never_ends_is_given_up(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 206 Partial Content\r\nX: ")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    monkeypatch.setattr(web_module, "HEAD_TIMEOUT_S", 0.5)
    async with await asyncio.start_server(trickle, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        file = WebFile(web, locate(f"http://127.0.0.1:{port}/f.gguf", is_asked=True))
        with pytest.raises(DeadlineExceeded, match="too slow"):
            async with asyncio.timeout(30):
                await file.read(0, 100)


async def test_nobody_listening_is_a_network_error(web: Web) -> None:
    file = WebFile(web, locate("http://127.0.0.1:1/f.gguf", is_asked=True))
    with pytest.raises(NetworkError, match="cannot connect"):
        await file.read(0, 100)


# Redirects


async def test_a_redirect_is_followed_and_its_target_asked_directly_from_then_on(
    server: FileServer, file: WebFile
) -> None:
    server.redirects = {"/f.gguf": "/g.gguf?signature=1"}
    server.files = {"/g.gguf": DATA}
    for _ in range(3):
        await file.read(0, 100)
    assert len(server.headers_seen) == 4


async def test_a_target_that_refuses_later_is_looked_for_anew(server: FileServer, file: WebFile) -> None:
    server.redirects = {"/f.gguf": "/g.gguf"}
    server.files = {"/g.gguf": DATA}
    await file.read(0, 100)
    server.redirects = {"/f.gguf": "/h.gguf"}
    server.files = {"/h.gguf": DATA}
    assert await file.read(0, 100) == DATA[:100]


async def test_a_target_that_is_down_later_is_looked_for_anew(server: FileServer, file: WebFile) -> None:
    async with serving(FileServer({"/g.gguf": DATA})) as other:
        server.redirects = {"/f.gguf": other.url + "/g.gguf"}
        await file.read(0, 100)
    server.redirects = {"/f.gguf": "/h.gguf"}
    server.files = {"/h.gguf": DATA}
    with pytest.raises(NetworkError):
        await file.read(0, 100)
    assert await file.read(0, 100) == DATA[:100]


async def test_redirects_are_bounded(server: FileServer, file: WebFile) -> None:
    server.redirects = {"/f.gguf": "/f.gguf"}
    with pytest.raises(SourceUnusable, match="redirected more than 5 times"):
        await file.read(0, 100)
    assert len(server.headers_seen) == 6


@pytest.mark.parametrize(
    "target",
    [
        "ftp://127.0.0.1/f.gguf",
        "file:///etc/passwd",
        "http://u:p@127.0.0.1/f",
        "http://h:99999/",
        "http://h:port/",
        "http://xn--a/",
        "http://a..b/",
        "http://" + 64 * "a" + ".example/",
    ],
)
async def test_a_redirect_to_no_web_address_is_not_followed(server: FileServer, file: WebFile, target: str) -> None:
    server.redirects = {"/f.gguf": target}
    with pytest.raises(SourceUnusable, match=r"is redirected to|leads to no web address"):
        await file.read(0, 100)
    assert len(server.headers_seen) == 1


async def test_what_a_stranger_names_never_leads_into_a_private_network(server: FileServer, web: Web) -> None:
    port = URL(server.url).port
    for url in (f"{server.url}/f.gguf", f"http://localhost:{port}/f.gguf", f"http://[::1]:{port}/f.gguf"):
        with pytest.raises(SourceUnusable, match="private network"):
            await WebFile(web, Location(name="hf://o/r/f.gguf", url=URL(url))).read(0, 100)
    assert server.headers_seen == []


async def test_a_public_server_does_not_redirect_into_a_private_network(
    server: FileServer, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if this machine were public: what it redirects to is judged as a stranger's name is."""
    monkeypatch.setattr(web_module.Web, "_is_public", lambda _self, url: url.path == "/f.gguf")
    server.redirects = {"/f.gguf": server.url + "/g.gguf"}
    server.files = {"/g.gguf": DATA}
    with pytest.raises(SourceUnusable, match="private network"):
        await WebFile(web, locate(server.url + "/f.gguf", is_asked=True)).read(0, 100)


async def test_a_token_goes_to_its_own_server_alone(server: FileServer, web: Web) -> None:
    async with serving(FileServer({"/g.gguf": DATA})) as other:
        server.redirects = {"/f.gguf": other.url + "/g.gguf"}
        location = Location(
            name="hf://o/r/f.gguf", url=URL(server.url + "/f.gguf"), token="s3cret", may_be_private=True
        )
        await WebFile(web, location).read(0, 100)
        assert server.headers_seen[0]["Authorization"] == "Bearer s3cret"
        assert "Authorization" not in other.headers_seen[0]
        assert "s3cret" not in repr(location)
