"""Reads what registry nodes answer: untrusted records, verified, within bounds of number, memory and time at a stretch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from swarm.errors import RemoteProtocolError
from swarm.registry.records import ExpertAnnouncement, Record, RoutingHistogram, SignedRecord, verify
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

# A hostile registry node may answer with 16 MB of records that each cost up to 44 ms and 6 MB to read (measured: 65,536
# layers in 350 bytes). Both bounds are guessed: far above the first swarms, and at most a few hundred MB.
MAX_RECORDS_READ = 4096  # of one answer; the rest is left out
MAX_WEIGHT_READ = 2_000_000  # layers and experts named by all records of one answer together, as they lie in memory
MAX_BAD_READ = 16  # of one answer; guessed: an honest node has checked what it passes on, so one with more is dropped
READ_SLICE_S = 0.005  # then other callbacks get their turn: dispatches share this loop
MAX_VERIFIED = 8_192  # records that need no second look: each comes from five replicas, every few seconds


class AnswerReader:
    """Verifies records, each once as long as it is remembered."""

    def __init__(self, *, max_verified: int = MAX_VERIFIED, max_weight: int = MAX_WEIGHT_READ) -> None:
        """`max_verified`, `max_weight`: what is remembered at most; the weight also of one answer."""
        self._max_verified = max_verified
        self._max_weight = max_weight
        self._verified: dict[bytes, tuple[Record, SignedRecord]] = {}
        self._n_weight = 0  # of those, as `_weight` counts

    async def read(self, told: Sequence[m.Told]) -> list[tuple[Record, SignedRecord]]:
        """Return the good records of an untrusted answer, in its order, up to the bounds above."""
        records: list[tuple[Record, SignedRecord]] = []
        weight = n_bad = 0
        slice_ends = time.monotonic() + READ_SLICE_S
        for _, data in told[:MAX_RECORDS_READ]:
            if time.monotonic() >= slice_ends:
                await asyncio.sleep(0)
                slice_ends = time.monotonic() + READ_SLICE_S
            try:
                record, signed = self._verified.get(data) or _verify(data)
            except RemoteProtocolError as error:
                n_bad += 1
                if n_bad > MAX_BAD_READ:
                    logger.warning("the registry's answer is not used, it has too many bad records: %s", error)
                    return []
                logger.info("the registry passed on a bad record: %s", error)
                continue
            own_weight = _weight(record)
            weight += own_weight
            if weight > self._max_weight:
                logger.warning("the registry's answer is too large, using its first %d records", len(records))
                break
            records.append((record, signed))
            self._remember(data, record, signed, own_weight)
        return records

    def verify(self, signed: SignedRecord) -> Record:
        """Return what `records.verify` does, at once for a record that is remembered."""
        known = self._verified.get(signed.to_bytes())
        return verify(signed) if known is None else known[0]

    def _remember(self, data: bytes, record: Record, signed: SignedRecord, weight: int) -> None:
        """Keep a good record; when there are too many, all others are forgotten, for they change with each renewal anyway."""
        if data in self._verified:
            return
        if len(self._verified) >= self._max_verified or self._n_weight + weight > self._max_weight:
            self._verified.clear()
            self._n_weight = 0
        self._verified[data] = record, signed
        self._n_weight += weight


def _verify(data: bytes) -> tuple[Record, SignedRecord]:
    signed = SignedRecord.from_bytes(data)
    return verify(signed), signed


def _weight(record: Record) -> int:
    """Return how many layers and experts a record holds in memory; layers mostly share one set."""
    if isinstance(record, RoutingHistogram):
        return 1 + len(record.loads)
    if not isinstance(record, ExpertAnnouncement):
        return 1
    by_layer = record.experts.by_layer
    sets = {id(experts): len(experts) for experts in by_layer.values()}
    return 1 + len(by_layer) + sum(sets.values())
