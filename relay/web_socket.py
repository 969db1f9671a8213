"""The way in for nodes whose UDP is blocked: a WebSocket whose binary messages are datagrams.

Each socket gets a UDP port of its own on this machine, from which its datagrams reach the relay's own port as any node's do. So
nothing else here knows of WebSockets: QUIC, binding, rates and bounds are the same. Like UDP, it drops what there is no room for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter

from aiohttp import WSMsgType, web

from relay.quotas import MAX_PACKET_BYTES
from swarm.net.addresses import is_loopback
from swarm.net.admission import host_of

logger = logging.getLogger(__name__)

MAX_SOCKETS = 1024  # guessed: a quarter of an endpoint's connections
MAX_SOCKETS_PER_HOST = 32  # from one host that is not this machine; guessed: a household of nodes
QUEUE_PACKETS = 256  # to one node that has not taken them yet; 300 KB, 50 ms at a channel's default rate
MAX_PER_WAKE = 32  # datagrams taken from a port at once
HEARTBEAT_S = 15.0  # proxies drop quiet connections after 30 s and more


class SocketBridges:
    """All WebSockets of a relay.

    Attributes:
        n_dropped: packets that there was no room for, either way.
    """

    def __init__(self, udp_address: tuple[str, int]) -> None:
        """`udp_address`: where this machine reaches the relay's UDP port."""
        self._udp_address = udp_address
        self._open: set[web.WebSocketResponse] = set()
        self._n_of_host: Counter[str] = Counter()
        self._host_of_port: dict[int, str] = {}  # of our own ends: whose packets come from there
        self.n_dropped = 0

    @property
    def n_open(self) -> int:
        """How many nodes use one."""
        return len(self._open)

    def host_behind(self, port: int) -> str | None:
        """Return the host whose packets come from this port of ours; None: it is none of these, or on this machine."""
        return self._host_of_port.get(port)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Carry one node's datagrams until it leaves."""
        remote = request.remote or ""
        host = "" if is_loopback(remote) else host_of(remote)
        if len(self._open) >= MAX_SOCKETS or (host and self._n_of_host[host] >= MAX_SOCKETS_PER_HOST):
            raise web.HTTPServiceUnavailable(text="too many nodes use this way in", headers={"Retry-After": "30"})
        node = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, max_msg_size=MAX_PACKET_BYTES, compress=False, autoclose=True
        )
        await node.prepare(request)
        family = socket.AF_INET6 if ":" in self._udp_address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as udp:
            udp.setblocking(False)
            udp.connect(self._udp_address)
            port = udp.getsockname()[1]
            self._open.add(node)
            self._n_of_host[host] += 1
            if host:
                self._host_of_port[port] = remote
            logger.info("a node came in by WebSocket")
            try:
                await self._carry(node, udp)
            finally:
                self._open.discard(node)
                self._host_of_port.pop(port, None)
                self._n_of_host[host] -= 1
                if not self._n_of_host[host]:
                    del self._n_of_host[host]
        return node

    async def close(self) -> None:
        """Tell every node that this way in ends."""
        for node in list(self._open):
            await node.close(code=1001, message=b"the relay restarts")

    async def _carry(self, node: web.WebSocketResponse, udp: socket.socket) -> None:
        queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUE_PACKETS)

        def on_readable() -> None:
            for _ in range(MAX_PER_WAKE):
                try:
                    data = udp.recv(MAX_PACKET_BYTES)
                except OSError:  # nothing left, or an ICMP error of an earlier one
                    return
                try:
                    queue.put_nowait(data)
                except asyncio.QueueFull:  # the node's line is slower: as a router would, drop what comes last
                    self.n_dropped += 1

        async def send() -> None:
            while True:
                await node.send_bytes(await queue.get())

        loop = asyncio.get_running_loop()
        loop.add_reader(udp, on_readable)
        sending = asyncio.create_task(send())
        try:
            async for message in node:
                if message.type is not WSMsgType.BINARY:
                    await node.close(code=1003, message=b"binary messages only")
                    return
                try:
                    udp.send(message.data)
                except OSError:
                    self.n_dropped += 1
        finally:
            loop.remove_reader(udp)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sending
