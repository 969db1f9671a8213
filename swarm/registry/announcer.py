"""Keeps one record alive: publishes it, renews it early with a higher seq, withdraws it at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from swarm.errors import SwarmError, UserError
from swarm.files import write_atomically
from swarm.identity import Identity
from swarm.registry.client import Registry
from swarm.registry.records import MAX_SEQ, Record, Withdrawal, sign

logger = logging.getLogger(__name__)

TTL_S = 60  # a lease; a node that dies silently is listed at most this long
RENEW_S = TTL_S / 4  # three renewals may get lost
RETRY_S = 1.0  # after a renewal that failed
WITHDRAW_TIMEOUT_S = 1.0
_MAX_JUMP = 10**12  # 31 years in milliseconds
_MAX_FLOOR = MAX_SEQ // 2  # a file with more is damaged: numbers must go on rising from it


class SequenceNumbers:
    """Rising numbers for a node's records. They survive restarts even if the clock is set back."""

    _RESERVED = 100_000  # numbers taken from the file at a time, so that it is not written at every renewal

    def __init__(self, path: Path | None, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        """Go on above what the file says, or above the clock, whichever is higher; `path` None keeps nothing.

        Raises:
            UserError: the file is there but cannot be read.
        """
        self._path = path
        self._next = max(_kept_floor(path), clock_ns() // 1_000_000)
        self._limit = self._next

    def go_above(self, seq: int) -> None:
        """Make the next number higher than `seq`, unless that is absurdly far: nobody may use up our numbers."""
        if self._next <= seq <= self._next + _MAX_JUMP:
            self._next = seq + 1

    def next(self) -> int:
        """Return the next number."""
        if self._next >= self._limit:
            self._limit = self._next + self._RESERVED
            self._keep(self._limit)
        self._next += 1
        return self._next - 1

    def _keep(self, limit: int) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, str(limit).encode())
        except OSError as error:  # a full disk must not end a peer that serves; the clock is the second guard
            logger.warning("cannot write %s: %s", self._path, error.strerror)


def _kept_floor(path: Path | None) -> int:
    """Return the lowest number that was never used, by the file; 0 if it is not there or damaged."""
    if path is None:
        return 0
    try:
        text = path.read_bytes()[:32].decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    floor = int(text) if text.isdigit() else 0
    return floor if floor <= _MAX_FLOOR else 0


class Announcer:
    """Publishes what `make_record(seq, address)` returns until `run` is cancelled, then withdraws it."""

    def __init__(
        self,
        registry: Registry,
        identity: Identity,
        numbers: SequenceNumbers,
        make_record: Callable[[int, str], Record],
    ) -> None:
        self._registry = registry
        self._identity = identity
        self._numbers = numbers
        self._make_record = make_record
        self._last: Record | None = None
        self._soon = asyncio.Event()
        self.is_announced = asyncio.Event()

    def announce_soon(self) -> None:
        """Let `run` publish at once what is to be said now; `is_announced` is cleared until it has."""
        self.is_announced.clear()
        self._soon.set()

    async def announce(self) -> None:
        """Publish the record once, with a new seq; raises NetworkError when no registry node took it."""
        self._soon.clear()
        address = await self._registry.observed_address()
        for _ in range(2):
            record = self._make_record(self._numbers.next(), address)
            self._last = record  # before it is known to have arrived: what a registry may hold must be withdrawn
            highest = await self._registry.publish(sign(record, self._identity))
            if highest <= record.seq:
                break
            self._numbers.go_above(highest)  # we lost our count, and the clock was set back: the registry remembers
        else:
            logger.warning(
                "a registry holds a newer record of this node: got seq %d, expected at most %d", highest, record.seq
            )
        if not self._soon.is_set():  # else what was published is out of date already
            self.is_announced.set()

    async def run(self) -> None:
        """Announce for ever; a registry that is away is asked again every second."""
        was_lost = False
        try:
            while True:
                try:
                    await self.announce()
                except SwarmError as error:
                    if not was_lost:
                        logger.warning("cannot announce, trying again every %.0f s: %s", RETRY_S, error)
                    was_lost = True
                    await asyncio.sleep(RETRY_S)
                    continue
                if was_lost:
                    logger.info("announced again")
                was_lost = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RENEW_S):
                        await self._soon.wait()
        finally:
            await self._withdraw()

    async def _withdraw(self) -> None:
        last = self._last
        if last is None or isinstance(last, Withdrawal):
            return
        record = Withdrawal(node=last.node, seq=self._numbers.next(), model=last.model, withdraws=last.kind)
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._registry.publish(sign(record, self._identity))
        except (SwarmError, TimeoutError) as error:
            logger.info("left without a withdrawal, the lease will run out: %s", error)
