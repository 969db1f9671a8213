"""Asks peers for their receipts now and then, over connections that are there anyway, and keeps them in a `Ledger`.

For whoever shows a leaderboard: a relay or a backbone. A peer presents receipts only if its owner gave it a name for the public.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping

from swarm.errors import RemoteProtocolError, SwarmError
from swarm.ids import NodeId
from swarm.net.connection import Connection
from swarm.registry.leaderboard import Ledger
from swarm.wire import messages as m
from swarm.wire.receipts import day_of

logger = logging.getLogger(__name__)

LOOK_S = 2.0  # between two looks who is to be asked
LEAST_S = 10.0  # between two questions to one peer; more where there are many
MAX_ASKED = 16  # at one look: 2,000 peers are through in some four minutes
TIMEOUT_S = 3.0
MAX_STATUS_BYTES = 1 << 20  # a peer's takes some 20 KB; larger ones end the connection


class Gatherer:
    """Use `run` as a task; whoever is in `wanted` and connected is asked."""

    def __init__(
        self,
        ledger: Ledger,
        wanted: Callable[[], Mapping[NodeId, Connection]],
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`wanted`: the peers to ask, with their open connections."""
        self.ledger = ledger
        self._wanted = wanted
        self._now, self._wall = now, wall
        self._next: dict[NodeId, float] = {}  # when to ask

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Ask those whose turn it is, and return once they have answered or failed to."""
        now, wanted = self._now(), self._wanted()
        self._next = {node: self._next.get(node, now) for node in wanted}
        due = sorted((at, node) for node, at in self._next.items() if at <= now)[:MAX_ASKED]
        self._next |= {node: now + LEAST_S for _, node in due}
        await asyncio.gather(*(self._ask(node, wanted[node]) for _, node in due))

    async def _ask(self, node: NodeId, connection: Connection) -> None:
        try:
            answer = await connection.request(m.GetStatus(), timeout_s=TIMEOUT_S, max_answer_bytes=MAX_STATUS_BYTES)
            assert isinstance(answer, m.Status)  # the session checks an answer's type
            receipts = receipts_of(answer.data)
            if receipts is not None:
                self.ledger.present(node, receipts, day_of(self._wall()))
        except RemoteProtocolError as error:
            logger.info("peer %s presents bad receipts: %s", node.short, error)
        except SwarmError as error:
            logger.debug("peer %s tells no receipts: %s", node.short, error)


def receipts_of(status: bytes) -> object:
    """Return the untrusted `receipts` of a status, untrusted too; None if it has none. Raises RemoteProtocolError."""
    try:
        fields = json.loads(status)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a status is no JSON: {error}") from error
    return fields.get("receipts") if isinstance(fields, dict) else None
