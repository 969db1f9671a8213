"""Who may use a gateway: API keys, web pages of other origins (CORS), names it may be called by."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from swarm.errors import UserError
from swarm.gateway.errors import RequestRefused
from swarm.net.addresses import is_loopback, parse_address
from swarm.web.map_server import MAP_PATHS

_CORS_ORIGIN = web.RequestKey("cors_origin", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Middleware = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 8 * 1024 * 1024  # guessed: over a million tokens of text
MIN_KEY_CHARS = 16  # guessed: shorter ones can be guessed
OPEN_PATHS = ("/health", "/ready", *MAP_PATHS)  # told to everybody: no text, no work
CORS_MAX_AGE_S = 600  # how long a browser may remember a preflight; most take no longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may use the gateway.

    Attributes:
        allowed_hosts: for a gateway that listens on loopback alone: names that a `Host` header may hold, besides `localhost`
            and loopback IP literals; a request with any other is refused. None takes every host.
        api_keys: one of them is needed; none: no key is.
        cors_origins: web pages that may use it; none: only those of its own origin.
        max_body_bytes: of a request.
    """

    allowed_hosts: Collection[str] | None = None
    api_keys: Collection[str] = ()
    cors_origins: Collection[str] = ()
    max_body_bytes: int = MAX_BODY_BYTES


def key_check(keys: Collection[str]) -> Middleware:
    """Return a middleware that lets nobody without one of the keys (`Authorization: Bearer KEY`) use the API."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = any(request.path == path or request.path.startswith(path + "/") for path in OPEN_PATHS)
        if is_open or request.method == "OPTIONS":
            return await handler(request)
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode(errors="replace")).digest()
        # All are compared, and digests of one length, so that the time tells nothing.
        matches = [hmac.compare_digest(given, digest) for digest in digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise RequestRefused(
                "this gateway needs an API key: send Authorization: Bearer KEY", code="invalid_api_key", status=401
            )
        return await handler(request)

    return check


def cors(origins: Collection[str]) -> Middleware:
    """Return a middleware that lets web pages of these origins (`https://host`, or `*`) use the API."""

    @web.middleware
    async def allow(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin", "")
        is_allowed = "*" in origins or origin in origins
        if not origin or not is_allowed:
            return await handler(request)
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(
                status=204,
                headers={
                    "Access-Control-Allow-Origin": origin,
                    "Access-Control-Allow-Methods": "GET, POST",
                    "Access-Control-Allow-Headers": "Authorization, Content-Type, *",
                    "Access-Control-Max-Age": str(CORS_MAX_AGE_S),
                    "Vary": "Origin",
                },
            )
        # A stream's headers leave while the handler runs: the signal sees every response first.
        request[_CORS_ORIGIN] = origin
        return await handler(request)

    return allow


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Name the origin that `cors` found allowed; for the application's `on_response_prepare`."""
    origin = request.get(_CORS_ORIGIN)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "Retry-After"
        response.headers.add("Vary", "Origin")


def host_check(allowed: frozenset[str]) -> Middleware:
    """Return a middleware that refuses requests whose `Host` names neither this machine nor one of `allowed`."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = request.headers.getall("Host", [])
        host = _without_port(hosts[0]) if len(hosts) == 1 else ""
        if not is_loopback(host) and host not in allowed:
            shown = ", ".join(hosts)[:100]
            raise RequestRefused(
                f"this gateway is not called {shown!r}: expected localhost; `swarm serve --allow-host` allows more",
                code="host_not_allowed",
                status=403,
            )
        return await handler(request)

    return check


def check_keys(keys: Collection[str]) -> None:
    """Raise UserError for keys that could be guessed."""
    for key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise UserError(f"an API key must be at least {MIN_KEY_CHARS} printable ASCII characters without spaces")


def _without_port(host: str) -> str:
    """Return a Host header's name or IP literal, lower case; empty if it is malformed."""
    has_port = host.rpartition(":")[2].isdigit() and not host.endswith("]")
    try:
        name = parse_address(host if has_port else f"{host}:80")[0]
    except UserError:
        return ""
    return name.lower().removesuffix(".")


def middlewares_for(access: Access) -> list[Any]:
    """Return the middlewares in the order that they apply."""
    found: list[Any] = []
    if access.allowed_hosts is not None:
        found.append(host_check(frozenset(host.lower().removesuffix(".") for host in access.allowed_hosts)))
    if access.cors_origins:
        found.append(cors(frozenset(access.cors_origins)))
    if access.api_keys:
        found.append(key_check(access.api_keys))
    return found
