"""When a peer rests: outside its hours, or while somebody else needs the machine."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable
from typing import Protocol

import psutil

from peer.limits import BusyMeter, Schedule

LOOK_S = 2.0  # between two looks at clock and processors


class Reason(Protocol):
    """Why to rest now."""

    def __call__(self) -> str:
        """Return it for people; empty: there is none."""
        ...


def outside_hours(schedule: Schedule, now: Callable[[], datetime.datetime] = datetime.datetime.now) -> Reason:
    """Return a reason that holds outside the schedule."""
    return lambda: "" if schedule.is_open(now().time()) else "it is outside its hours"


def while_busy(others_share: Callable[[], float], now: Callable[[], float] = time.monotonic) -> Reason:
    """Return a reason that holds while others use much of the machine."""
    meter = BusyMeter()
    return lambda: "others need the machine" if meter.update(now(), others_share()) else ""


class OthersLoad:
    """The share of all cores that other processes use, since the last look."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._me.cpu_percent()
        psutil.cpu_percent()

    def __call__(self) -> float:
        """Return it, 0 to 1."""
        n_cores = psutil.cpu_count() or 1
        mine = self._me.cpu_percent() / 100 / n_cores
        return max(0.0, psutil.cpu_percent() / 100 - mine)


class Pauses:
    """Watches the reasons. Its owner runs `run`."""

    def __init__(self, reasons: list[Reason], *, look_s: float = LOOK_S) -> None:
        self._reasons = reasons
        self._look_s = look_s
        self.why = ""
        """Why the peer rests; empty while it serves."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Look now and then, for ever."""
        while True:
            self.look()
            await asyncio.sleep(self._look_s)

    def look(self) -> None:
        """Take in how things are."""
        whys = [reason() for reason in self._reasons]  # all: some measure what has been since they were asked last
        why = next(filter(None, whys), "")
        if bool(why) != bool(self.why):
            self._changed.set()
        self.why = why

    async def changed(self) -> None:
        """Wait until a rest begins or ends."""
        await self._changed.wait()
        self._changed.clear()
