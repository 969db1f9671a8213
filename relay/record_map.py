"""The peer map of what this relay's registry stores, made anew at most every KEPT_S however often it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from swarm.ids import NodeId
from swarm.registry.leaderboard import Leaderboard, Ledger
from swarm.registry.records import ExpertAnnouncement, Record, verify
from swarm.registry.table import RegistryTable
from swarm.web.registry_map import map_of_records
from swarm.wire.receipts import day_of

Json = dict[str, Any]

KEPT_S = 2.0  # guessed: people see no difference, and a flood of requests costs no more than one
MAX_MODELS = 50  # those with the most records; guessed: names that nobody serves must not make the map dear


class RecordMap:
    """Call it for the map as JSON values.

    Records were verified when they came; here they are read again, each once.
    """

    def __init__(
        self,
        table: RegistryTable,
        *,
        join: str,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        ledger: Ledger | None = None,
    ) -> None:
        """`join`: the command that a volunteer types; `ledger`: the receipts for the leaderboard, None: there is none."""
        self._table = table
        self._join = join
        self._now, self._wall = now, wall
        self._made_at = float("-inf")
        self._map: Json = {}
        self._leaderboard = None if ledger is None else Leaderboard(ledger)
        self._read: dict[bytes, Record] = {}  # by signature: those of the last map

    def __call__(self) -> Json:
        """Return the map; it is the same object until it is made anew."""
        now = self._now()
        if now >= self._made_at + KEPT_S:
            self._made_at = now
            records, leaderboard = self._records(now), None
            if self._leaderboard is not None:
                leaderboard = self._leaderboard(_names(records), now=now, today=day_of(self._wall()))
            self._map = map_of_records(records, wall_now=self._wall(), join=self._join, leaderboard=leaderboard)
        return self._map

    def named(self) -> set[NodeId]:
        """Return the peers that show a name now."""
        return {node for node, name in _names(self._records(self._now())).items() if name}

    def _records(self, now: float) -> list[Record]:
        of_models = [self._table.lookup(model, now) for model in self._table.models(now)]
        of_models.sort(key=len, reverse=True)
        read = {
            signed.signature: self._read.get(signed.signature) or verify(signed)
            for records in of_models[:MAX_MODELS]
            for signed, _ in records
        }
        self._read = read
        return list(read.values())


def _names(records: list[Record]) -> dict[NodeId, str]:
    return {record.node: record.name for record in records if isinstance(record, ExpertAnnouncement)}
