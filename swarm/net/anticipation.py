"""When to get ready for what is about to arrive, learned from how long such waits took. Pure; times are given.

A process that sleeps for a round trip wakes up cold: the processor's caches hold what others did meanwhile, and a virtual
machine's idle processor has to be woken first. Measured (2 cores of a virtual machine, 30 ms, one peer): encoding, sending,
receiving and decoding one dispatch and its answer takes 250 us in a loop, 546 after 15 ms of sleep, 289 if the same was done
just before, and 380 if that was a millisecond ago. So shortly before an answer is expected its way is gone through once
(`rehearsal`), and then the socket is watched without sleeping until it is there.

Only where that is known to within a millisecond: not on a path with jitter, not while several wait at once, and not where
waits are so short that being awake would be most of them.

    began(now)  -> when to wake, or None
    window(now) -> until when to stay awake, or None
    ended(now)     it has arrived
"""

from __future__ import annotations

MIN_WAIT_S = 0.008  # of shorter ones more than a third would be spent awake; guessed
MAX_DEVIATION_S = 0.001  # of what is expected: else most of the time awake is in vain
LEAD_S = 0.0026  # to wake before: uvloop's timers move in whole milliseconds, and a rehearsal takes 0.6 ms (measured)
LEAST_PATIENCE_S = (
    0.0004  # to stay awake beyond what is expected; guessed: twice the emulator's and the kernel's lateness
)
MAX_PATIENCE_S = 0.002
N_DEVIATIONS = 3
N_LEARN = 4  # waits to learn from before the first
GAIN, DEVIATION_GAIN = 0.125, 0.25  # RFC 6298's, as everywhere


class Anticipation:
    """The waits of one kind, one at a time."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._n = 0
        self._began: float | None = None

    def began(self, now: float) -> float | None:
        """A wait begins; return when to get ready, None: do not."""
        self._began = now
        if self._n < N_LEARN or self._mean_s < MIN_WAIT_S or self._deviation_s > MAX_DEVIATION_S:
            return None
        return now + self._mean_s - LEAD_S

    def window(self, now: float) -> float | None:
        """Return until when to stay awake for the wait under way; None: it is over, or its time is."""
        if self._began is None:
            return None
        patience_s = min(MAX_PATIENCE_S, LEAST_PATIENCE_S + N_DEVIATIONS * self._deviation_s)
        until = self._began + self._mean_s + patience_s
        return until if now < until else None

    def ended(self, now: float) -> None:
        """What was waited for is there; without `began` it teaches nothing."""
        if self._began is None:
            return
        waited_s, self._began = now - self._began, None
        if not self._n:
            self._mean_s = waited_s
        else:
            # A pause between two requests is no news of the path: it would take a dozen waits to be forgotten.
            error_s = min(waited_s - self._mean_s, max(4 * MAX_DEVIATION_S, self._mean_s))
            self._deviation_s += DEVIATION_GAIN * (abs(error_s) - self._deviation_s)
            self._mean_s += GAIN * error_s
        self._n += 1

    def cancelled(self) -> None:
        """The wait has no end that would teach anything."""
        self._began = None
