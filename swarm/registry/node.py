"""A registry node: answers ANNOUNCE and LOOKUP from a table of leases. Carried by the relay daemon.

A node that announces a loopback address from another machine is refused: it would send the others to themselves. One that
announces it from this machine is taken, since a swarm on one machine is a swarm; others do not reach it.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

from swarm.errors import LocalProtocolError, UserError
from swarm.ids import NodeId
from swarm.net.addresses import is_loopback, parse_address, plain_ip
from swarm.registry.records import Record, SignedRecord, Withdrawal, verify
from swarm.registry.table import PutResult, RegistryTable
from swarm.wire import messages as m

SERVES: tuple[type[m.Request], ...] = (m.Announce, m.Lookup)
MAX_ANSWER_BYTES = 8 << 20  # half of a RECORDS frame's limit: thousands of holders; the rest is left out
# What one customer of a provider usually gets (RFC 6177: a site's /48). Guessed for IPv4: a host or a small network of hosts.
PREFIX_BITS_V4, PREFIX_BITS_V6 = 24, 48


class RegistryNode:
    """Serves one table. `now` is monotonic seconds: leases must not follow the wall clock's jumps."""

    def __init__(self, table: RegistryTable | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self.table = RegistryTable() if table is None else table  # an empty table is falsy
        self._now = now

    def answer(self, asker: NodeId, request: m.Request, *, host: str | None = None) -> m.Response:
        """Return the answer to a request of the authenticated node `asker`.

        Args:
            host: the IP address that the asker's connection comes from; None for an asker in this process.

        Raises:
            RemoteProtocolError: a record that is malformed, forged or another node's.
            UserError: another machine announces a loopback address.
            Overloaded: the table, or the asker's share of it, is full.
        """
        if isinstance(request, m.Announce):
            signed = SignedRecord.from_bytes(request.record)
            record = verify(signed)
            prefix = None if host is None else prefix_of(host)
            if prefix is not None:
                _refuse_loopback(record, host)
            result = self.table.put_verified(record, signed, owner=asker, now=self._now(), prefix=prefix)
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


def prefix_of(host: str) -> str | None:
    """Return the network that an IP address is counted under, as text; None for loopback, which is not counted."""
    address = plain_ip(host)
    if address.is_loopback:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return str(ipaddress.IPv4Network((int(address), PREFIX_BITS_V4), strict=False))
    return str(ipaddress.IPv6Network((int(address), PREFIX_BITS_V6), strict=False))


def _refuse_loopback(record: Record, host: str | None) -> None:
    for text in () if isinstance(record, Withdrawal) else record.addresses:
        if is_loopback(parse_address(text)[0]):
            raise UserError(
                f"nobody else reaches the announced address {text}: got it from {host}; give --advertise HOST:PORT"
            )
