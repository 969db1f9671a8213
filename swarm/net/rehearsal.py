"""Two connections of this process with each other, in memory: an exchange on them is one on the wire, but for the socket.

What it is for is `anticipation`. The code, not the bytes, is what the caches lack: the library, the session, the codecs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.connection import Connection, clock
from swarm.net.paths import Path
from swarm.net.quic_driver import QuicDriver
from swarm.wire import messages as m
from swarm.wire import session as s

logger = logging.getLogger(__name__)

_PATH = Path(address=("127.0.0.1", 1))  # nothing is sent there
TIMEOUT_S = 1.0  # of an exchange, whose answer is there when it has been asked


class Rehearsal:
    """Make it on a running loop; ready a few ticks later."""

    def __init__(self, driver: type[QuicDriver], configurations: Mapping[bool, Any], identity: Identity) -> None:
        """`configurations`: the endpoint's, by whether it is a client's."""
        self._driver = driver
        self._configurations = configurations
        self._identity = identity
        self._answer: m.Response | None = None
        self._server: Connection | None = None
        self._client = self._connection(driver(configurations[True], None), is_client=True)
        self._client.connect()

    def run(self, request: m.Request, answer: m.Response) -> bool:
        """Go through one exchange now; return whether it was done, which it is not before the handshake."""
        if not self._client.is_open or self._server is None:
            return False
        self._answer = answer
        try:
            future = self._client.start(request, timeout_s=TIMEOUT_S)
        except SwarmError:
            return False
        return future.done() and not future.cancelled() and future.exception() is None

    def close(self) -> None:
        """End both sides at once."""
        for connection in (self._client, self._server):
            if connection is not None:
                connection.close()
                connection._finish()

    def _connection(self, driver: QuicDriver, *, is_client: bool) -> Connection:
        def make_session(remote: NodeId | None) -> s.Session:
            return s.Session(
                self._identity,
                is_client=is_client,
                now=clock(),
                expected=remote,
                nonce=b"" if is_client else os.urandom(32),
                observed_address="",
                serves=() if is_client else (m.Dispatch,),
            )

        return Connection(
            driver,
            None,
            make_session=make_session,
            expected=self._identity.node_id if is_client else None,
            path=_PATH,
            send=self._to_server if is_client else self._to_client,
            send_copy=lambda path, data: None,
            on_request=self._on_request,
            on_cancel=lambda connection, exchange: None,
            on_open=lambda connection: None,
            on_gone=lambda connection: None,
            on_unsent=lambda connection, n_given, n_held: None,
            on_cid=lambda connection, cid, is_issued: None,
        )

    def _to_server(self, path: Path, flight: list[bytes]) -> None:
        if self._server is None:
            first = flight[0]
            cid = first[
                6 : 6 + first[5]
            ]  # of a long header (RFC 9000 section 17.2): what the client chose for the server
            self._server = self._connection(self._driver(self._configurations[False], cid), is_client=False)
        self._arrive(self._server, flight)

    def _to_client(self, path: Path, flight: list[bytes]) -> None:
        self._arrive(self._client, flight)

    def _arrive(self, connection: Connection, flight: list[bytes]) -> None:
        now = clock()
        connection.receive(flight, now)
        connection.received(now)

    def _on_request(self, connection: Connection, exchange: int, request: m.Request) -> None:
        if self._answer is not None:
            connection.respond(exchange, self._answer)
