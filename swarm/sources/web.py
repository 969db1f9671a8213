"""HTTP requests for parts of files: redirects followed with care, every byte counted, waits bounded, refusals put into words.

What a server says is believed only as far as the request asked for it. Messages name files as people wrote them: the URL behind
one may carry a signature, and a token is never in any.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Self

import aiohttp
from yarl import URL

from swarm import __version__
from swarm.errors import DeadlineExceeded, NetworkError, Overloaded, RemoteProtocolError, SourceUnusable
from swarm.sources.locations import Location
from swarm.sources.public_only import GuardedResolver, PrivateAddress, is_public, is_public_literal

logger = logging.getLogger(__name__)

MAX_REDIRECTS = 5  # huggingface.co takes one or two
CONNECT_TIMEOUT_S = 15.0
SILENCE_TIMEOUT_S = 30.0  # without a byte; guessed: longer than a mobile line's hiccup
HEAD_TIMEOUT_S = 60.0  # for an answer's head, the connection included: a server may send it a byte at a time; guessed
MIN_RATE_BYTES_S = (
    10_000  # of one answer, on the whole, beside SILENCE_TIMEOUT_S: below, the server only keeps us busy; guessed
)
MAX_CHUNK_BYTES = 1 << 18
DIRECT_FOR_S = 300.0  # how long a redirect's target is asked directly; guessed: signed URLs hold for an hour
MAX_RETRY_AFTER_S = 3600.0
DEFAULT_RETRY_AFTER_S = 1.0
MOVED = frozenset({301, 302, 303, 307, 308})
LATER = frozenset({408, 425, 429, 503})
REFUSED = frozenset({401, 403, 404, 410, 451})


async def at_once() -> None:
    """Wait for nothing."""


class CutShort(NetworkError):
    """A connection was lost in the middle of an answer; aiohttp may have dropped the last that came of it."""


class Web:
    """The connections to web servers of one process. Use as an async context manager."""

    def __init__(
        self,
        *,
        received: Callable[[int], None] = lambda n_bytes: None,
        pace: Callable[[], Awaitable[None]] = at_once,
        rate_bytes_s: float | None = None,
    ) -> None:
        """Prepare.

        Args:
            received: told how many bytes of answers came, as they come.
            pace: waited for before more is read: a cap on traffic.
            rate_bytes_s: that cap: the system takes in no more than a quarter of a second of it ahead of us. None: no cap.
        """
        self._received = received
        self.pace = pace
        self._rate_bytes_s = rate_bytes_s
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether private addresses are allowed
        self._resolvers: dict[bool, GuardedResolver] = {}
        self._direct: dict[URL, tuple[float, URL, bool]] = {}  # until when; where to; may it be private

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            await session.close()

    def count(self, n_bytes: int) -> None:
        """Count bytes that were read of an answer."""
        self._received(n_bytes)

    @contextlib.asynccontextmanager
    async def get(self, location: Location, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the server's answer, 200, 206 or 416, once its head is there.

        Raises:
            SourceUnusable: the file is not there, not for us, or the way to it is one that we do not go.
            Overloaded: the server wants to be asked later.
            NetworkError: it cannot be reached, or fails.
        """
        with _in_words(location):
            response = await self._follow(location, headers)
            try:
                yield response
            finally:
                response.close()  # which keeps the connection where all of it was read

    async def _follow(self, location: Location, headers: dict[str, str]) -> aiohttp.ClientResponse:
        direct = self._direct.get(location.url)
        if direct is not None and time.monotonic() < direct[0]:
            try:
                response = await self._ask(location, direct[1], headers, may_be_private=direct[2])
            except BaseException:
                self._direct.pop(location.url, None)  # it may be down: the next redirect may lead elsewhere
                raise
            if response.status in (200, 206, 416):
                return response
            response.close()  # a signature that has run out, perhaps
        self._direct.pop(location.url, None)

        url, may_be_private = location.url, location.may_be_private
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._ask(location, url, headers, may_be_private=may_be_private)
            if response.status not in MOVED:
                break
            target = response.headers.get("Location")
            response.close()
            may_be_private = may_be_private and not self._is_public(url)
            url = _target(location, url, target)
        else:
            raise SourceUnusable(f"{location.name} is redirected more than {MAX_REDIRECTS} times")
        if response.status in (200, 206, 416):
            if url != location.url:
                self._direct[location.url] = (time.monotonic() + DIRECT_FOR_S, url, may_be_private)
            return response
        response.close()
        raise _refusal(location, response)

    async def _ask(
        self, location: Location, url: URL, headers: dict[str, str], *, may_be_private: bool
    ) -> aiohttp.ClientResponse:
        if not may_be_private and not is_public_literal(url):
            raise SourceUnusable(f"{location.name} leads into a private network")
        headers = {"Accept-Encoding": "identity", "User-Agent": f"swarm/{__version__}", **headers}
        if location.token is not None and url.origin() == location.url.origin():
            headers["Authorization"] = f"Bearer {location.token}"
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                return await self._session(may_be_private).get(url, headers=headers, allow_redirects=False)
        except ValueError as error:  # such as a host with an empty label, which no name server is asked for
            raise SourceUnusable(f"{location.name} leads to no web address") from error

    def _session(self, may_be_private: bool) -> aiohttp.ClientSession:
        if may_be_private not in self._sessions:
            resolver = GuardedResolver(aiohttp.DefaultResolver(), is_public_only=not may_be_private)
            self._resolvers[may_be_private] = resolver
            self._sessions[may_be_private] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=resolver, socket_factory=self._socket),
                timeout=aiohttp.ClientTimeout(
                    total=None, connect=CONNECT_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._sessions[may_be_private]

    def _socket(self, info: tuple[Any, ...]) -> socket.socket:
        family, type_, protocol, _, _ = info
        made = socket.socket(family=family, type=type_, proto=protocol)
        if self._rate_bytes_s is not None:
            size = max(64 << 10, min(4 << 20, int(self._rate_bytes_s / 4)))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        return made

    def _is_public(self, url: URL) -> bool:
        """Return whether a server that has answered is a public one."""
        host = url.host or ""
        return is_public(host) or any(host in each.public_hosts for each in self._resolvers.values())


def _target(location: Location, url: URL, target: str | None) -> URL:
    """Return where a redirect leads. Raises SourceUnusable: nowhere that we go."""
    try:
        found = url.join(URL(target or "", encoded=True))
        _ = found.host, found.port  # which are looked at only now
    except ValueError:
        found = URL()
    if target is None or found.scheme not in ("http", "https") or not found.host:
        raise SourceUnusable(f"{location.name} is redirected to no web address")
    if found.user is not None or found.password is not None:
        raise SourceUnusable(f"{location.name} is redirected to an address with a password in it")
    if url.scheme == "https" and found.scheme == "http":
        raise SourceUnusable(f"{location.name} is redirected from https to http")
    return found


def _refusal(location: Location, response: aiohttp.ClientResponse) -> NetworkError | Overloaded:
    status = response.status
    reason = (response.reason or "")[:40]
    said = f"{location.name}: the server answers {status}"
    if reason.isascii() and reason.isprintable():  # it goes to a terminal
        said = f"{said} {reason}".rstrip()
    if status in LATER:
        return Overloaded(said, retry_after_s=retry_after_s(response.headers.get("Retry-After"), time.time()))
    if status in REFUSED:
        is_hf = location.name.startswith("hf://") and status in (401, 403)
        return SourceUnusable(said + ("; a gated repository needs HF_TOKEN" if is_hf else ""))
    if status >= 500:
        return NetworkError(said)
    return SourceUnusable(said)


def retry_after_s(text: str | None, now: float) -> float:
    """Return the seconds that a Retry-After header (RFC 9110, 10.2.3: seconds, or a date) asks for; `now`: Unix time."""
    if text is None:
        return DEFAULT_RETRY_AFTER_S
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        at = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return DEFAULT_RETRY_AFTER_S
    return min(max(0.0, at - now), MAX_RETRY_AFTER_S)


@contextlib.contextmanager
def _in_words(location: Location) -> Iterator[None]:
    """Turn what aiohttp raises into our errors."""
    try:
        yield
    except aiohttp.ClientConnectorDNSError as error:
        if isinstance(error.os_error, PrivateAddress):
            raise SourceUnusable(f"{location.name} leads into a private network") from error
        raise NetworkError(f"{location.name}: no such host, or no name server") from error
    except (TimeoutError, aiohttp.ServerTimeoutError) as error:
        raise DeadlineExceeded(f"{location.name}: the server is silent, or too slow") from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise NetworkError(f"{location.name}: the server's certificate is not valid") from error
    except aiohttp.ClientConnectorError as error:
        raise NetworkError(f"{location.name}: cannot connect: {error.strerror}") from error
    except aiohttp.ClientPayloadError as error:
        raise CutShort(f"{location.name}: the connection was lost in mid-answer") from error
    except aiohttp.ServerDisconnectedError as error:
        raise NetworkError(f"{location.name}: the server hung up") from error
    except aiohttp.ClientResponseError as error:
        raise RemoteProtocolError(f"{location.name}: the answer is no HTTP") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise NetworkError(f"{location.name}: {type(error).__name__}") from error


async def read_some(web: Web, response: aiohttp.ClientResponse) -> bytes:
    """Return the next bytes of an answer, within the cap on traffic; empty at its end."""
    await web.pace()
    data = await response.content.read(MAX_CHUNK_BYTES)
    web.count(len(data))
    return data


def deadline_s(n_bytes: int) -> float:
    """Return how long an answer of `n_bytes` may take."""
    return SILENCE_TIMEOUT_S + n_bytes / MIN_RATE_BYTES_S
