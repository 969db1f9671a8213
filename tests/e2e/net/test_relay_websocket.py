"""The way to a relay by WebSocket goes to that relay only. What it carries is in tests/e2e/test_relay.py."""

from __future__ import annotations

import pytest
from aiohttp import web

from swarm.errors import ConnectionLost
from swarm.net.relay_websocket import WebSocketBridge


async def test_a_relay_that_sends_us_elsewhere_is_no_way_in() -> None:
    """Whose address it is, a peer's voucher says: else anybody could have pages of our own network fetched."""
    fetched: list[str] = []

    async def send_elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/secret")

    async def secret(request: web.Request) -> web.StreamResponse:
        fetched.append(request.path)
        return web.Response()

    app = web.Application()
    app.router.add_get("/relay", send_elsewhere)
    app.router.add_get("/secret", secret)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with pytest.raises(ConnectionLost, match="elsewhere"):
            await WebSocketBridge.open(runner.addresses[0], 1)
        assert fetched == []
    finally:
        await runner.cleanup()
