"""Gets a process ready for what is about to arrive: the shell of `anticipation` and `rehearsal` at one endpoint."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Protocol

from swarm.net.anticipation import Anticipation
from swarm.net.connection import clock
from swarm.net.rehearsal import Rehearsal
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

OFF_VARIABLE = "SWARM_READINESS"  # `off`: never


def n_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_worthwhile() -> bool:
    """Return whether there is a core to stay awake on beside one that computes, and nobody turned it off."""
    return n_cores() > 1 and os.environ.get(OFF_VARIABLE) != "off"


class Watch(Protocol):
    """What is needed of an Endpoint."""

    def watch(self, until: float) -> bool:
        """Read the socket without sleeping until something has come, and return True, or until that time."""
        ...

    def rehearsal(self) -> Rehearsal:
        """Return an exchange's way to go through without a socket."""
        ...


class Readiness:
    """Told of each wait's beginning and end; in between, shortly before the end, it rehearses and watches the socket.

    It holds up the event loop for at most a rehearsal (0.6 ms) and LEAD_S + MAX_PATIENCE_S, once in a wait
    of at least MIN_WAIT_S, and only while a single wait is under way.
    """

    def __init__(
        self,
        endpoint: Watch,
        *,
        also: Callable[[m.Request], None] | None = None,
        now: Callable[[], float] = clock,
    ) -> None:
        """`also`: goes through what else a request like the latest takes; before the exchange."""
        self._endpoint = endpoint
        self._also = also
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._waits = Anticipation()
        self._n_waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._rehearsal: Rehearsal | None = None
        self._exchange: tuple[m.Request, m.Response] | None = None
        self.n_rehearsed = 0
        self.n_met = 0  # waits that ended while it was awake for them

    def began(self, exchange: tuple[m.Request, m.Response] | None = None) -> None:
        """A wait begins; `exchange`: of its kind, to rehearse with."""
        self._n_waiting += 1
        if exchange is not None:
            self._exchange = exchange
        if self._n_waiting > 1:
            self._waits.cancelled()
            self._stop()
            return
        now = self._now()
        at = self._waits.began(now)
        if at is not None and self._exchange is not None:
            self._timer = self._loop.call_later(max(0.0, at - now), self._get_ready)

    def ended(self, exchange: tuple[m.Request, m.Response] | None = None, *, is_measured: bool = True) -> None:
        """A wait ends; `exchange`: of its kind, to rehearse the next with."""
        self._n_waiting = max(0, self._n_waiting - 1)
        self._stop()
        if is_measured and not self._n_waiting:
            self._waits.ended(self._now())
        else:
            self._waits.cancelled()
        if exchange is not None:
            self._exchange = exchange

    def close(self) -> None:
        """Rehearse no more."""
        self._stop()
        self._exchange = None
        if self._rehearsal is not None:
            self._rehearsal.close()
            self._rehearsal = None

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _get_ready(self) -> None:
        self._timer = None
        assert self._exchange is not None
        if self._waits.window(self._now()) is None:
            return
        if self._rehearsal is None:
            self._rehearsal = self._endpoint.rehearsal()  # ready for the next wait
            return
        if self._also is not None:
            self._also(self._exchange[0])
        self.n_rehearsed += self._rehearsal.run(*self._exchange)
        until = self._waits.window(self._now())
        if until is not None:
            self.n_met += self._endpoint.watch(until)
