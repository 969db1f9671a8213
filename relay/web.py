"""The relay's web server: metrics, health, the map, and the way in for nodes whose UDP is blocked (`web_socket`).

GET /metrics              for Prometheus
GET /health               200 with {"status": "ok"}; 503 with "draining" once it is to end
GET /map, /map.json, ...  who is there (swarm.web)
GET /relay                WebSocket: one datagram in each message
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from aiohttp import web

from relay.metrics import Metric
from relay.web_socket import SocketBridges
from swarm.errors import UserError
from swarm.net.addresses import format_address
from swarm.web.exposition import CONTENT_TYPE, MetricsRegistry

logger = logging.getLogger(__name__)

SHUTDOWN_S = 1.0


@contextlib.asynccontextmanager
async def serve_http(
    *,
    host: str,
    port: int,
    metrics: Callable[[], Sequence[Metric]],
    is_draining: Callable[[], bool],
    bridges: SocketBridges,
    add_pages: Callable[[web.Application], None] | None = None,
) -> AsyncIterator[int]:
    """Serve until left; yields the bound TCP port.

    Args:
        port: 0 lets the system choose.
        add_pages: adds further routes.

    Raises:
        UserError: the port is taken.
    """

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=render(metrics()), headers={"Content-Type": CONTENT_TYPE})

    async def show_health(_: web.Request) -> web.Response:
        if is_draining():
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=1024)  # nobody has anything to upload
    app.router.add_get("/metrics", show_metrics)
    app.router.add_get("/health", show_health)
    app.router.add_get("/relay", bridges.serve)
    app.on_shutdown.append(_closer(bridges))
    if add_pages is not None:
        add_pages(app)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
            if host == "::" and port:  # asyncio takes that for IPv6 alone
                await web.TCPSite(runner, "0.0.0.0", port).start()
        except OSError as error:
            raise UserError(
                f"cannot use TCP {format_address((host, port))}: {error.strerror}; choose another --http port, or off"
            ) from error
        bound: Any = runner.addresses[0]
        logger.info("web pages on TCP %s", format_address(bound))
        yield int(bound[1])
    finally:
        await runner.cleanup()


def _closer(bridges: SocketBridges) -> Callable[[web.Application], Any]:
    async def close(_: web.Application) -> None:
        await bridges.close()

    return close


def render(metrics: Sequence[Metric]) -> bytes:
    """Return the text of a scrape."""
    made = MetricsRegistry()
    for metric in metrics:
        samples = [({metric.label: value} if metric.label else {}, number) for value, number in metric.values.items()]
        add = made.counter if metric.kind == "counter" else made.gauge
        add(metric.name, metric.help, lambda samples=samples: samples)  # type: ignore[misc]
    return made.render()
