"""Caps on a peer's traffic, by what its endpoint really sent and received."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from peer.limits import RateCap
from swarm.errors import Overloaded
from swarm.wire import messages as m
from swarm.wire.frames import RESULT_HEAD_BYTES
from swarm.wire.rows import RowCodec, row_bytes

# Of an answer's own bytes, what headers, acknowledgements and copies of lost datagrams add; the rest is seen afterwards.
OVERHEAD = 1.05
LOOK_S = 0.5  # between two looks while a fetch waits; guessed
MAX_RETRY_S = 2.0  # what a backbone is told at most: by then it has asked somebody else


class Counters(Protocol):
    """What an endpoint counts, bytes of payload of UDP and of its TLS links."""

    @property
    def bytes_sent(self) -> int:
        """Without repair."""
        ...

    @property
    def repair_bytes(self) -> int:
        """Of datagrams that were sent a second time."""
        ...

    @property
    def bytes_received(self) -> int:
        """All of them."""
        ...


class Traffic:
    """The caps of one endpoint."""

    def __init__(
        self,
        counters: Counters,
        *,
        max_upload_bytes_s: float | None,
        max_download_bytes_s: float | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count; a cap of None is none. Raises UserError: a cap is too low for anything."""
        self._counters = counters
        self._now = now
        self._n_web = 0  # bytes received besides the endpoint's
        self._up = self._down = None
        if max_upload_bytes_s is not None:
            self._up = RateCap(max_upload_bytes_s, now=now(), n_bytes=self._n_up)
        if max_download_bytes_s is not None:
            self._down = RateCap(max_download_bytes_s, now=now(), n_bytes=counters.bytes_received)

    @property
    def _n_up(self) -> int:
        return self._counters.bytes_sent + self._counters.repair_bytes

    @property
    def _n_down(self) -> int:
        return self._counters.bytes_received + self._n_web

    def received(self, n_bytes: int) -> None:
        """Count bytes that came from web servers."""
        self._n_web += n_bytes

    @property
    def max_download_bytes_s(self) -> float | None:
        """The cap on what comes in."""
        return None if self._down is None else self._down.rate_bytes_s

    def admit_bytes(self, n_bytes: int) -> None:
        """Raise Overloaded while so many bytes may not be sent."""
        wait_s = 0.0 if self._up is None else self._up.wait_s(self._now(), self._n_up, n_bytes)
        if wait_s > 0:
            raise Overloaded("this peer's share of its line is used up", retry_after_s=wait_s)

    def admit(self, request: m.Dispatch) -> int:
        """Return the bytes of a dispatch's answer; raises Overloaded while they, or what came in already, are too much."""
        if self._up is None and self._down is None:
            return 0
        now, wait_s = self._now(), 0.0
        n_bytes = 0
        if self._up is not None:
            codec = request.result_codec
            n_rows = len(request.expert_ids) if codec is RowCodec.EXACT else len(request.row_counts)
            n_bytes = round(OVERHEAD * (RESULT_HEAD_BYTES + n_rows * row_bytes(request.rows.shape[1], codec)))
            wait_s = self._up.wait_s(now, self._n_up, n_bytes)
        if self._down is not None:  # what has come has come: the next ones wait until it is made good
            wait_s = max(wait_s, self._down.wait_s(now, self._n_down, 0))
        if wait_s > 0:
            raise Overloaded("this peer's share of its line is used up", retry_after_s=min(wait_s, MAX_RETRY_S))
        return n_bytes

    async def made_good(self) -> None:
        """Wait until what came in is within the cap: before each block, or piece of a file, that is fetched."""
        cap = self._down
        while cap is not None:
            wait_s = cap.wait_s(self._now(), self._n_down, 0)
            if wait_s <= 0:
                return
            await asyncio.sleep(min(wait_s, LOOK_S))

    def promise(self, n_bytes: int) -> None:
        """Count an answer that was admitted."""
        if self._up is not None:
            self._up.promise(n_bytes)

    def settle(self, n_bytes: int) -> None:
        """Count it no more: it has gone, or never will."""
        if self._up is not None:
            self._up.settle(n_bytes)

    def settle_late(self, n_bytes: int) -> None:
        """Count it no more once it can have gone at this rate: of an answer that takes seconds to send."""
        if self._up is not None:
            asyncio.get_running_loop().call_later(n_bytes / self._up.rate_bytes_s, self._up.settle, n_bytes)
