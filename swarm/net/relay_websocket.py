"""The way to a relay when UDP is blocked: a UDP port on this machine whose datagrams travel in a WebSocket.

The endpoint sends to `address` as if the relay were there, and hears it from there. What the WebSocket has no room for is
dropped, as UDP does. The link is not encrypted and need not be: what it carries is QUIC, and packets with MACs of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

import aiohttp

from swarm.errors import ConnectionLost
from swarm.net.addresses import SocketAddress, format_address

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
MAX_DATAGRAM_BYTES = 1472
QUEUE_PACKETS = 256  # not taken by the network yet; guessed: 300 KB
MAX_PER_WAKE = 32
HEARTBEAT_S = 15.0


class WebSocketBridge:
    """One WebSocket to one relay.

    Attributes:
        address: where the endpoint reaches the relay; only while `is_open`.
        n_dropped: datagrams that there was no room for.
    """

    def __init__(self, client: aiohttp.ClientSession, relay: aiohttp.ClientWebSocketResponse, port: int) -> None:
        self._client, self._relay, self._port = client, relay, port
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.setblocking(False)
        self._udp.bind(("127.0.0.1", 0))
        self.address: SocketAddress = self._udp.getsockname()
        self.n_dropped = 0
        self._endpoint: Any = None  # where it was heard from
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUE_PACKETS)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._udp, self._on_readable)
        self._carrying = asyncio.create_task(self._carry(), name="relay by WebSocket")

    @classmethod
    async def open(cls, relay: SocketAddress, port: int) -> WebSocketBridge:
        """Return a bridge to the relay whose web server listens at `relay`; `port`: the UDP port of our endpoint.

        Raises:
            ConnectionLost: there is no such way.
        """
        client = aiohttp.ClientSession(trace_configs=[_no_redirects()])
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                socket_ = await client.ws_connect(
                    f"http://{format_address(relay)}/relay",
                    heartbeat=HEARTBEAT_S,
                    max_msg_size=MAX_DATAGRAM_BYTES,
                    compress=0,
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await client.close()
            raise ConnectionLost(f"no way to relay {format_address(relay)} by WebSocket: {error}") from error
        except BaseException:
            await client.close()
            raise
        logger.info("relay %s is reached by WebSocket: UDP does not get there", format_address(relay))
        return cls(client, socket_, port)

    @property
    def is_open(self) -> bool:
        """Whether it still carries anything."""
        return not self._carrying.done()

    def close(self) -> None:
        """End it; the task that carries it tidies up."""
        self._carrying.cancel()

    def _on_readable(self) -> None:
        for _ in range(MAX_PER_WAKE):
            try:
                data, source = self._udp.recvfrom(MAX_DATAGRAM_BYTES)
            except OSError:  # nothing left
                return
            if source[1] != self._port:  # some other process of this machine
                continue
            self._endpoint = source
            try:
                self._queue.put_nowait(data)
            except asyncio.QueueFull:
                self.n_dropped += 1

    async def _carry(self) -> None:
        sending = asyncio.create_task(self._send())
        try:
            async for message in self._relay:
                if message.type is aiohttp.WSMsgType.BINARY and self._endpoint is not None:
                    try:
                        self._udp.sendto(message.data, self._endpoint)
                    except OSError:
                        self.n_dropped += 1
        finally:
            self._loop.remove_reader(self._udp)
            self._udp.close()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sending
            await self._relay.close()
            await self._client.close()

    async def _send(self) -> None:
        while True:
            await self._relay.send_bytes(await self._queue.get())


def _no_redirects() -> aiohttp.TraceConfig:
    """Return what ends a request that is sent elsewhere: whoever names a relay could have any page of our network fetched."""

    async def refuse(*_: object) -> None:
        raise aiohttp.ClientError("it sends us elsewhere, which no relay does")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return trace
