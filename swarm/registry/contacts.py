"""A client's connections to registry nodes: dialled once however many ask, kept while they live."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Protocol

from swarm.errors import ConnectionLost, DeadlineExceeded, NetworkError, RemoteProtocolError, SwarmError
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress, format_address
from swarm.net.connection import Connection
from swarm.net.endpoint import DIAL_TIMEOUT_S
from swarm.wire import messages as m

SUSPECT_S = 30.0  # for so long others are asked in place of a node that failed; guessed
N_MISSES = 2  # look-ups in a row that had to wait for a node in vain, until it counts as failed; guessed
# Of a member's addresses: one for each of its protocols. A hostile record's eight take 4 s each to dial in vain.
MAX_DIALLED = 2
RTT_GAIN = 1 / 8  # of a new measurement: RFC 6298


class Dialler(Protocol):
    """What opens connections: an endpoint, or what also knows ways around a network that blocks UDP (`PathFinder`)."""

    async def dial(
        self, address: SocketAddress, *, expected: NodeId | None, timeout_s: float = DIAL_TIMEOUT_S
    ) -> Connection:
        """Return an open connection; raises NetworkError or RemoteProtocolError."""
        ...


class Contact:
    """One registry node, and how it is reached.

    Attributes:
        key: its id, or a stand-in made of its address as long as nobody has said which node it must be.
        avoid_until: on the loop's clock; it failed lately, others are asked first.
        rtt_s: smoothed time from a request to its answer; None before the first.
    """

    def __init__(self, endpoint: Dialler, addresses: Sequence[SocketAddress], node: NodeId | None) -> None:
        self.addresses = list(addresses)
        self.node = node
        self.key = node or NodeId(hashlib.sha256(format_address(self.addresses[0]).encode()).digest())
        self.avoid_until = float("-inf")
        self.rtt_s: float | None = None
        self._n_missed = 0
        self._endpoint = endpoint
        self._connection: Connection | None = None
        self._dialling: asyncio.Task[Connection] | None = None  # owned here: `close` cancels and awaits it

    @property
    def connection(self) -> Connection | None:
        """The open connection, if there is one."""
        return self._connection if self._connection is not None and self._connection.is_open else None

    async def request(self, request: m.Request, *, timeout_s: float) -> m.Response:
        """Return the answer, over a connection that may have to be dialled first; dialling counts into `timeout_s`, too.

        Raises:
            NetworkError, RemoteProtocolError: it cannot be reached, or did not answer.
            RemoteRefused: it refused.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._request(request, timeout_s)
        except TimeoutError:  # dialling goes on, for whoever asks next
            self._suspect()
            raise DeadlineExceeded(f"no answer from registry node {self.key.short} within {timeout_s:g} s") from None
        except (NetworkError, RemoteProtocolError):
            self._suspect()
            raise
        self.avoid_until = float("-inf")
        self._n_missed = 0
        return answer

    def missed(self) -> None:
        """A look-up has waited for this node in vain and goes on without.

        A dead node would not be noticed otherwise: a connection counts as lost after a silence that is longer than a look-up.
        """
        self._n_missed += 1
        if self._n_missed >= N_MISSES:
            self._n_missed = 0
            self._suspect()
            if self.connection is not None:
                self.connection.close(ConnectionLost("it did not answer"))

    async def _request(self, request: m.Request, timeout_s: float) -> m.Response:
        known = self._connection
        connection = await self.connect()
        asked_at = asyncio.get_running_loop().time()
        try:
            answer = await connection.request(request, timeout_s=timeout_s)
            if not isinstance(request, m.Watch):  # whose answer takes its time
                sample_s = asyncio.get_running_loop().time() - asked_at
                self.rtt_s = sample_s if self.rtt_s is None else self.rtt_s + RTT_GAIN * (sample_s - self.rtt_s)
            return answer
        except ConnectionLost:
            if connection is not known:
                raise
        # A registry that was restarted shows only now. Asking and telling may be repeated: the same record changes nothing.
        connection = await self.connect()
        return await connection.request(request, timeout_s=timeout_s)

    async def connect(self) -> Connection:
        """Return an open connection, shared with everybody who waits for it."""
        if self.connection is not None:
            return self.connection
        if self._dialling is None:
            self._dialling = asyncio.create_task(self._dial(), name=f"dial registry node {self.key.short}")
            self._dialling.add_done_callback(self._forget_dialling)
        task = self._dialling
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                raise ConnectionLost(
                    "the client is closed"
                ) from None  # its caller was not cancelled, only the dialling
            raise

    async def close(self) -> None:
        """End dialling and the connection."""
        task = self._dialling
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()

    async def _dial(self) -> Connection:
        error: SwarmError = ConnectionLost("the registry node has no address")
        for address in self.addresses:
            try:
                self._connection = await self._endpoint.dial(address, expected=self.node)
                return self._connection
            except (NetworkError, RemoteProtocolError) as failure:
                error = failure
        self._suspect()  # whoever asked may be gone: a look-up does not wait for a dial that hangs
        raise error

    def _suspect(self) -> None:
        self.avoid_until = asyncio.get_running_loop().time() + SUSPECT_S

    def _forget_dialling(self, task: asyncio.Task[Connection]) -> None:
        self._dialling = None
        if not task.cancelled():
            task.exception()  # seen: the callers may all have gone
