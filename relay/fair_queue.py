"""Who sends next when there is more than may pass: deficit round robin, those that seldom send first. Pure, explicit clock.

As in FQ-CoDel (RFC 8290 section 4.1): a flow that had nothing waiting is served before those that always have, one quantum of
bytes a turn. Each flow also has buckets of its own (its channel's, its node's); one that must wait for them is out of the round
until then, so a flood costs the others nothing. A flow's queue is bounded; what does not fit is dropped, as a router would.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence

from relay.quotas import MAX_PACKET_BYTES
from swarm.token_bucket import TokenBucket

QUANTUM_BYTES = MAX_PACKET_BYTES
# A flow waits until its buckets hold as many seconds of their rate (or all that it has waiting), so that a flood costs a
# wake-up for some ten packets and not for each. Guessed: a fifteenth of the queue.
PACE_S = 0.002


class Flow:
    """What one side of one channel sends.

    Attributes:
        buckets: its channel's and its node's.
    """

    __slots__ = ("_deficit", "_is_listed", "_queue", "buckets", "max_queued_bytes", "n_queued_bytes")

    def __init__(self, buckets: tuple[TokenBucket, TokenBucket], queue_s: float) -> None:
        self.buckets = buckets
        self.max_queued_bytes = max(queue_s * buckets[0].rate_per_s, MAX_PACKET_BYTES)
        self.n_queued_bytes = 0
        self._queue: deque[bytes] = deque()
        self._deficit = 0
        self._is_listed = False

    def clear(self) -> None:
        """Drop what waits: its channel is gone."""
        self._queue.clear()
        self.n_queued_bytes = 0


class FairQueue:
    """All flows of a relay, and the bucket that they share."""

    def __init__(self, total: TokenBucket) -> None:
        self._total = total
        self._new: deque[Flow] = deque()
        self._old: deque[Flow] = deque()
        self._blocked: list[tuple[float, int, Flow]] = []  # a heap: until when, in order of coming
        self._order = itertools.count()
        self._total_ready_at = 0.0
        self.n_dropped = 0  # packets

    def offer(self, flow: Flow, run: Sequence[bytes], n_bytes: int, now: float) -> int:
        """Return how many of a run of packets, the last of which may be the smallest, may pass at once: from the first on.

        The others wait until `drain` returns them in their turn, and what does not fit is dropped.
        """
        n_now = 0
        if not flow._is_listed and not self._new and not self._old:
            channel, node = flow.buckets
            total = self._total
            n_tokens = min(channel.level(now), node.level(now), total.level(now))
            if n_tokens < n_bytes:
                n_now = min(int(n_tokens // len(run[0])), len(run) - 1)
                n_bytes = n_now * len(run[0])
            else:
                n_now = len(run)
            channel.spend(n_bytes)
            node.spend(n_bytes)
            total.spend(n_bytes)
            if n_now == len(run):
                return n_now
        for at in range(n_now, len(run)):
            size = len(run[at])
            if flow.n_queued_bytes + size > flow.max_queued_bytes:
                self.n_dropped += len(run) - at
                break
            flow._queue.append(run[at])
            flow.n_queued_bytes += size
        if flow._queue and not flow._is_listed:
            flow._is_listed = True
            flow._deficit = QUANTUM_BYTES
            self._new.append(flow)
        return n_now

    @property
    def is_waiting(self) -> bool:
        """Whether any flow has something waiting."""
        return bool(self._new or self._old or self._blocked)

    def next_deadline(self) -> float | None:
        """Return when `drain` may have something; None while nothing waits."""
        at = self._blocked[0][0] if self._blocked else None
        if self._new or self._old:
            return self._total_ready_at if at is None else min(at, self._total_ready_at)
        return at

    def drain(self, now: float) -> list[tuple[Flow, list[bytes]]]:
        """Return what may pass now, in order: runs of packets of one flow."""
        passed: list[tuple[Flow, list[bytes]]] = []
        while self._blocked and self._blocked[0][0] <= now:
            self._old.append(heapq.heappop(self._blocked)[2])
        while self._new or self._old:
            flows = self._new or self._old
            flow = flows[0]
            if not flow._queue:
                flows.popleft()
                if flows is self._new and self._old:
                    self._old.append(
                        flow
                    )  # once round with the others: else who sends a little at a time always goes first
                else:
                    flow._is_listed = False
                continue
            if flow._deficit <= 0:
                flow._deficit += QUANTUM_BYTES
                flows.popleft()
                self._old.append(flow)
                continue
            if not self._pass_one(flows, flow, now, passed):
                break
        return passed

    def _pass_one(self, flows: deque[Flow], flow: Flow, now: float, passed: list[tuple[Flow, list[bytes]]]) -> bool:
        """Pass the flow's first packet, or take the flow out of the round; return False if nobody may send now."""
        size = len(flow._queue[0])
        channel, node = flow.buckets
        if channel.level(now) < size or node.level(now) < size:
            wait_s = max(
                bucket.wait_s(max(size, min(flow.n_queued_bytes, PACE_S * bucket.rate_per_s)))
                for bucket in flow.buckets
            )
            flows.popleft()
            heapq.heappush(self._blocked, (now + wait_s, next(self._order), flow))
            return True
        if self._total.level(now) < size:
            self._total_ready_at = now + self._total.wait_s(max(size, PACE_S * self._total.rate_per_s))
            return False
        for bucket in (channel, node, self._total):
            bucket.spend(size)
        flow._deficit -= size
        flow.n_queued_bytes -= size
        if not passed or passed[-1][0] is not flow:
            passed.append((flow, []))
        passed[-1][1].append(flow._queue.popleft())
        return True
