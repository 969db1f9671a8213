"""A registry node: answers ANNOUNCE and LOOKUP from a table of leases. Carried by the relay daemon."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarm.errors import LocalProtocolError
from swarm.ids import NodeId
from swarm.registry.records import SignedRecord, Withdrawal, verify
from swarm.registry.table import PutResult, RegistryTable
from swarm.wire import messages as m

SERVES: tuple[type[m.Request], ...] = (m.Announce, m.Lookup)
MAX_ANSWER_BYTES = 8 << 20  # half of a RECORDS frame's limit: thousands of holders; the rest is left out


class RegistryNode:
    """Serves one table. `now` is monotonic seconds: leases must not follow the wall clock's jumps."""

    def __init__(self, table: RegistryTable | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self.table = RegistryTable() if table is None else table  # an empty table is falsy
        self._now = now

    def answer(self, asker: NodeId, request: m.Request) -> m.Response:
        """Return the answer to a request of the authenticated node `asker`.

        Raises:
            RemoteProtocolError: a record that is malformed, forged or another node's.
            Overloaded: the table is full.
        """
        if isinstance(request, m.Announce):
            signed = SignedRecord.from_bytes(request.record)
            result = self.table.put(signed, owner=asker, now=self._now())
            record = verify(signed)
            kind = record.withdraws if isinstance(record, Withdrawal) else record.kind
            highest = self.table.highest_seq(record.node, kind, record.model)
            is_new = result not in (PutResult.UNCHANGED, PutResult.STALE)
            return m.Accepted(is_new=is_new, highest_seq=record.seq if highest is None else highest)
        if isinstance(request, m.Lookup):
            return self._records(request)
        raise LocalProtocolError(f"a registry does not serve {type(request).__name__}")

    def _records(self, request: m.Lookup) -> m.Records:
        now = self._now()
        models = self.table.models(now) if request.model_id is None else [request.model_id]
        records: list[tuple[int, bytes]] = []
        n_bytes = 0
        for model in models:
            for signed, left_s in self.table.lookup(model, now):
                data = signed.to_bytes()
                n_bytes += len(data)
                if n_bytes > MAX_ANSWER_BYTES or len(records) >= 0xFFFF:
                    return m.Records(records=tuple(records))
                records.append((int(left_s * 1000), data))
        return m.Records(records=tuple(records))
