"""Nodes in memory that can be dialled and asked, with the same errors as the real ones. Needs tests.virtual_time.

`FakeEndpoint` stands in for swarm.net.endpoint.Endpoint, below the real Pool, RegistryClient, Holders and Dispatcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    IdentityMismatch,
    Overloaded,
    Refused,
    RemoteProtocolError,
    RemoteRefused,
    SwarmError,
)
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress
from swarm.net.endpoint import DIAL_TIMEOUT_S
from swarm.net.paths import Path
from swarm.wire import messages as m

Answer = Callable[[NodeId, m.Request], m.Response | None]


@dataclass(kw_only=True, eq=False)
class FakeNode:
    """A server.

    Attributes:
        answer: returns the answer, None for never; what it raises becomes what the asker of the real endpoint would see.
        latency_s, handshake_s: between request and answer; of a dial.
        refusal: the error code that it answers every request with; None: it does not.
        is_up: False: it ignores everything, and connections do not notice.
    """

    node_id: NodeId
    answer: Answer
    latency_s: float = 0.01
    handshake_s: float = 0.02
    refusal: m.ErrorCode | None = None
    is_up: bool = True
    observed_address: str = "192.0.2.9:5000"
    connections: list[FakeConnection] = field(default_factory=list)

    def lose_connections(self) -> None:
        """End every connection as if it had gone silent."""
        for connection in self.connections:
            connection.lose(ConnectionLost("silent for 3.0 s"))


class FakeConnection:
    """The client's side of a connection to a FakeNode."""

    def __init__(self, network: FakeNetwork, server: FakeNode, address: SocketAddress, asker: NodeId) -> None:
        self.remote = server.node_id
        self.address = address
        self.path, self.monitor = Path(address=address), None
        self.observed_address: str | None = server.observed_address
        self.rtt_s: float | None = None
        self.error: SwarmError | None = None
        self.close_error: SwarmError | None = None  # what our side closed it with
        self.outstanding: list[asyncio.Future[m.Response]] = []
        self._network, self._server, self._asker = network, server, asker

    @property
    def is_open(self) -> bool:
        return self.error is None

    async def request(self, message: m.Request, *, timeout_s: float, max_answer_bytes: int | None = None) -> m.Response:
        return await self.start(message, timeout_s=timeout_s, max_answer_bytes=max_answer_bytes)

    def start(
        self, message: m.Request, *, timeout_s: float, max_answer_bytes: int | None = None
    ) -> asyncio.Future[m.Response]:
        if self.error is not None:
            raise self.error
        self._network.log.append(("request", self.remote))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[m.Response] = loop.create_future()
        self.outstanding.append(future)
        late = loop.call_later(timeout_s, self._fail, future, DeadlineExceeded("no answer within the deadline"))
        loop.call_later(self._server.latency_s, self._settle, future, message)

        def is_done(_: asyncio.Future[m.Response]) -> None:
            late.cancel()
            self.outstanding.remove(future)
            if future.cancelled():
                self._network.log.append(("cancel", self.remote))
            else:
                future.exception()  # seen, as the real one does

        future.add_done_callback(is_done)
        return future

    def close(self, error: SwarmError | None = None) -> None:
        self.close_error = error
        self.lose(error or ConnectionLost("closed by this side"))

    def lose(self, error: SwarmError) -> None:
        self.error = self.error or error
        for future in self.outstanding:
            self._fail(future, error)

    def _fail(self, future: asyncio.Future[m.Response], error: SwarmError) -> None:
        if not future.done():
            future.set_exception(error)

    def _settle(self, future: asyncio.Future[m.Response], message: m.Request) -> None:
        if future.done() or not self._server.is_up:
            return
        if self._server.refusal is not None:
            future.set_exception(RemoteRefused("refused", remote_code=self._server.refusal))
            return
        try:
            answer = self._server.answer(self._asker, message)
        except RemoteProtocolError as error:
            self.lose(ConnectionLost(f"the connection ended: {error}"))
        except Overloaded as error:
            refused = RemoteRefused(
                f"refused: {error}", remote_code=m.ErrorCode.BUSY, retry_after_s=error.retry_after_s
            )
            future.set_exception(refused)
        except LookupError as error:
            future.set_exception(RemoteRefused(f"refused: {error}", remote_code=m.ErrorCode.NOT_FOUND))
        except Refused as error:
            future.set_exception(RemoteRefused(f"refused: {error}", remote_code=m.ErrorCode.INTERNAL))
        except SwarmError:
            future.set_exception(RemoteRefused("refused: internal error", remote_code=m.ErrorCode.INTERNAL))
        else:
            if answer is not None:
                self._network.log.append(("answer", self.remote))
                future.set_result(answer)


class FakeNetwork:
    """Who listens where, and what happened.

    Attributes:
        log: ("dial" | "request" | "answer" | "cancel", node), in order; a dial of an empty address has the node expected.
    """

    def __init__(self) -> None:
        self.nodes: dict[SocketAddress, FakeNode] = {}
        self.log: list[tuple[str, NodeId | None]] = []

    def count(self, what: str, node: NodeId | None = None) -> int:
        """Return how often something happened, with one node or with any."""
        return sum(1 for kind, who in self.log if kind == what and node in (None, who))


class FakeEndpoint:
    """One client on a FakeNetwork."""

    def __init__(self, network: FakeNetwork, identity: Identity) -> None:
        self.identity = identity
        self._network = network

    async def dial(
        self, address: SocketAddress, *, expected: NodeId | None, timeout_s: float = DIAL_TIMEOUT_S
    ) -> FakeConnection:
        self._network.log.append(("dial", expected))
        server = self._network.nodes.get(address)
        if server is None or not server.is_up:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded(f"no answer from {address[0]}:{address[1]} within {timeout_s:g} s")
        await asyncio.sleep(server.handshake_s)
        if expected is not None and server.node_id != expected:
            raise IdentityMismatch(f"another node answered: got {server.node_id.short}, expected {expected.short}")
        connection = FakeConnection(self._network, server, address, self.identity.node_id)
        server.connections.append(connection)
        return connection
