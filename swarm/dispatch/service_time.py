"""How long peers take to answer, learned from their answers: what placement compares, and how long failover waits.

Pure; `now` is given. A *service time* is all there is between sending a batch and having its answer: path, queue at the peer,
compute. It is measured here; what a peer says of itself is not used, since it may be wrong.

Kept for each peer and for each order of magnitude of work (pairs, by powers of two), because a step of one token and a prompt
have little in common. Work that has not been seen is scaled from the nearest that has.

    estimate  mean, faded towards the ping's round trip while nothing is sent there, so that a peer that was slow once is tried
              again some time; never less than how long the oldest batch there has been waiting: a hang shows before any answer
    hedge     mean + 4 deviations (as TCP's retransmission timer, RFC 6298): the slow tail. A copy may go to a replica
    overdue   twice that: the peer hangs or is gone. A copy must go to a replica
    deadline  the batch has failed, whoever waits
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from swarm.ids import NodeId

GAIN, DEVIATION_GAIN = 0.125, 0.25  # RFC 6298, section 2
N_DEVIATIONS = 4  # RFC 6298's K: for a bell curve p99.9, for the long tails of real paths about p95 to p99
# A batch is not hedged earlier. Guessed: what a busy machine's scheduler costs now and then; a person does not see it.
HEDGE_FLOOR_S = 0.02
# Below this nobody is called overdue. Guessed: a quarter of the second that a killed peer may cost.
OVERDUE_FLOOR_S = 0.25
UNSEEN_S = 0.5  # hedge and overdue, beside 3 round trips, of a peer that has not answered anything yet; guessed
N_DEADLINE, DEADLINE_FLOOR_S = 20, 10.0  # a batch fails after that many estimates, but not earlier than this; guessed
# The longest wait for one batch, and for a peer without measurements. Guessed: 512 rows of a large model on a slow CPU.
BATCH_TIMEOUT_S = 60.0
# What a peer's mean is above its round trip halves in this time while nothing is sent there. Guessed: a replica that
# is ten times as slow as another costs a slow batch every half minute, and one that has recovered is found as soon.
FADE_S = 10.0
# A peer that refuses, whenever it is asked, is taken to be busy for this, twice this, and so on, however soon it wants to be
# asked again: else one that never answers has no measurement, and the bare ping makes it the first choice for ever. Guessed.
BACKOFF_S, LONGEST_BACKOFF_S = 0.02, 5.0


class _Measured:
    """Mean and mean deviation of the service time of one size of work, seconds."""

    __slots__ = ("deviation_s", "mean_s")

    def __init__(self, first_s: float) -> None:
        self.mean_s = first_s
        self.deviation_s = first_s / 2

    def add(self, elapsed_s: float) -> None:
        self.deviation_s += DEVIATION_GAIN * (abs(elapsed_s - self.mean_s) - self.deviation_s)
        self.mean_s += GAIN * (elapsed_s - self.mean_s)


class ServiceTime:
    """One peer's.

    Attributes:
        rtt_s: of its path, by pings; None: unknown.
    """

    __slots__ = ("_busy_until", "_last_at", "_measured", "_n_refused", "_outstanding", "rtt_s")

    def __init__(self) -> None:
        self.rtt_s: float | None = None
        self._measured: dict[int, _Measured] = {}  # by bit length of the number of pairs
        self._outstanding: dict[Hashable, float] = {}  # when each was sent, oldest first
        self._last_at = -math.inf  # when something was last sent or answered
        self._busy_until = -math.inf
        self._n_refused = 0  # in a row

    @property
    def n_outstanding(self) -> int:
        """Batches without an answer."""
        return len(self._outstanding)

    def sent(self, key: Hashable, now: float) -> None:
        """A batch has left; `key` names it until it is answered or dropped."""
        self._outstanding[key] = now
        self._last_at = now

    def answered(self, key: Hashable, n_pairs: int, now: float) -> None:
        """The answer to a batch is there, late or not."""
        sent_at = self._outstanding.pop(key, None)
        if sent_at is None:
            return
        self._last_at = now
        self._n_refused = 0
        size = n_pairs.bit_length()
        measured = self._measured.get(size)
        if measured is None:
            self._measured[size] = _Measured(now - sent_at)
        else:
            measured.add(now - sent_at)

    def dropped(self, key: Hashable) -> None:
        """Nobody waits for a batch any more."""
        self._outstanding.pop(key, None)

    def refused(self, key: Hashable, retry_after_s: float, now: float) -> None:
        """The peer is too busy for a batch, and says when to come back.

        What it refuses while it is known to be busy (the other chunks of a batch) makes the time no longer than it says.
        """
        self._outstanding.pop(key, None)
        if now >= self._busy_until:
            self._n_refused += 1
            backoff_s = min(LONGEST_BACKOFF_S, BACKOFF_S * 2.0 ** min(self._n_refused - 1, 30))
            retry_after_s = max(retry_after_s, backoff_s)
        self._busy_until = max(self._busy_until, now + retry_after_s)

    def estimate_s(self, n_pairs: int, now: float) -> float:
        """Return what an answer to so much work should take; optimistic where nothing is known."""
        estimate_s = self._expected(n_pairs)[0] + max(0.0, self._busy_until - now)
        if not self._outstanding:
            path_s = min(self.rtt_s or 0.0, estimate_s)
            idle_s = now - self._last_at
            if idle_s > 0 and estimate_s > path_s:
                estimate_s = path_s + (estimate_s - path_s) * 0.5 ** (idle_s / FADE_S)
            return estimate_s
        return max(estimate_s, now - next(iter(self._outstanding.values())))

    def pair_s(self, n_pairs: int) -> float | None:
        """Return what each (row, expert) pair of so much work adds; None: unknown."""
        if not self._measured:
            return None
        return max(0.0, self._expected(n_pairs)[0] - self._path_s()) / max(1, n_pairs)

    def waits_s(self, n_pairs: int) -> tuple[float, float, float]:
        """Return after how long a batch is to be hedged, is overdue, and has failed."""
        if not self._measured:
            unseen_s = UNSEEN_S + 3 * (self.rtt_s or 0.0)
            return unseen_s, unseen_s, BATCH_TIMEOUT_S
        mean_s, deviation_s = self._expected(n_pairs)
        hedge_s = max(HEDGE_FLOOR_S, mean_s + N_DEVIATIONS * deviation_s)
        deadline_s = max(DEADLINE_FLOOR_S, N_DEADLINE * mean_s, 3 * hedge_s)
        return hedge_s, max(OVERDUE_FLOOR_S, 2 * hedge_s), min(BATCH_TIMEOUT_S, deadline_s)

    def _path_s(self) -> float:
        least_s = min(measured.mean_s for measured in self._measured.values())
        return least_s if self.rtt_s is None else min(self.rtt_s, least_s)

    def _expected(self, n_pairs: int) -> tuple[float, float]:
        """Return mean and deviation of so much work."""
        size = n_pairs.bit_length()
        measured = self._measured.get(size)
        if measured is not None:
            return measured.mean_s, measured.deviation_s
        if not self._measured:
            return self.rtt_s or 0.0, 0.0
        nearest = min(self._measured, key=lambda known: (abs(known - size), -known))
        path_s = self._path_s()
        mean_s = path_s + (self._measured[nearest].mean_s - path_s) * 2.0 ** (size - nearest)
        return mean_s, mean_s / 2


class ServiceTimes:
    """Every peer's, made when first asked for; the user forgets those that are gone."""

    def __init__(self) -> None:
        self._times: dict[NodeId, ServiceTime] = {}

    def of(self, node: NodeId) -> ServiceTime:
        """Return what is known of a peer."""
        known = self._times.get(node)
        if known is None:
            known = self._times[node] = ServiceTime()
        return known

    def forget(self, node: NodeId) -> None:
        """A peer's connection has ended: what comes back under its name may be another machine on another path."""
        self._times.pop(node, None)

    def keep_only(self, nodes: frozenset[NodeId]) -> None:
        """Forget all peers but these."""
        for node in self._times.keys() - nodes:
            del self._times[node]
