"""What a network does to packets: which are dropped, and when the others come out. Sans-IO: time and randomness are given.

    offer(packet at t) -> sender's access link -> the path's own link -> delay +- jitter, loss -> receiver's access link -> due

Links are shared: several paths of one host pass its access link, in the order in which their packets reach it. Times are
whole nanoseconds (see `link`). Drives nothing: `next_due_ns` says when to look again, `pop_due` hands out what is due then.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from swarm.emulation.link import NS_PER_S, Link, LinkSpec

MAX_HELD_BYTES = 64 << 20  # in a network at once; 1 Gbit/s for 0.5 s. More is dropped as OVERFLOW

T = TypeVar("T")


class Drop(StrEnum):
    """Why a packet did not come out."""

    LOSS = "loss"  # the spec's random loss
    QUEUE = "queue"  # a link's queue was full
    OVERFLOW = "overflow"  # the emulator holds MAX_HELD_BYTES
    SEND = "send"  # the receiver's socket or device refused it


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSpec:
    """One direction between two hosts; a round trip takes twice the delay.

    Attributes:
        delay_s: propagation, one way.
        jitter_s: each packet's delay is drawn from delay_s +- this, uniformly.
        loss: share of packets lost, each independently.
        rate_bit_s: a link of this path alone, beside the hosts' access links. Counts whole IP packets.
        queue_s, queue_bytes: bound of that link's queue, as in LinkSpec.
        reorders: whether jitter may let a packet overtake; else it comes out no earlier than the one before it.
        seed: of loss and jitter; together with the path's name and direction.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    rate_bit_s: float | None = None
    queue_s: float | None = None
    queue_bytes: int | None = None
    reorders: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter_s <= self.delay_s < 3600:
            raise ValueError(
                f"delay out of range: got {self.delay_s} +- {self.jitter_s} s, expected 0 <= jitter <= delay < 3600"
            )
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss out of range: got {self.loss}, expected a share from 0 to 1")
        _ = self.link  # checks the rest

    @property
    def link(self) -> LinkSpec:
        """The path's own link."""
        return LinkSpec(rate_bit_s=self.rate_bit_s, queue_s=self.queue_s, queue_bytes=self.queue_bytes)


class OneWay:
    """The state of one direction of a path. `spec` may be changed under way; packets in flight keep their times."""

    def __init__(
        self, spec: PathSpec, rng: Callable[[], float], *, up: Link | None = None, down: Link | None = None
    ) -> None:
        """Prepare one direction.

        Args:
            rng: draws from [0, 1); called twice for every packet, whatever the spec, so that the same packets are lost
                at any jitter.
            up, down: access links of the sender and of the receiver, shared with their other paths.
        """
        self._rng = rng
        self._up, self.down = up, down
        self._last_ns = 0
        self.n_offered = 0
        self.bytes_offered = 0
        self.n_delivered = 0
        self.bytes_delivered = 0
        self.drops: dict[Drop, int] = {}
        self.spec = spec

    @property
    def spec(self) -> PathSpec:
        """What this direction does."""
        return self._spec

    @spec.setter
    def spec(self, spec: PathSpec) -> None:
        self._spec = spec
        self._link = Link(spec.link)
        self._delay_ns = round(spec.delay_s * NS_PER_S)
        self._jitter_ns = spec.jitter_s * NS_PER_S

    def drop(self, cause: Drop) -> None:
        """Count a packet that did not come out."""
        self.drops[cause] = self.drops.get(cause, 0) + 1

    def arrive(self, size_bytes: int) -> None:
        """Count a packet that came out."""
        self.n_delivered += 1
        self.bytes_delivered += size_bytes

    def cross(self, size_bytes: int, now_ns: int) -> int | Drop:
        """Return when a packet that enters now reaches the receiver's access link, or why it does not."""
        self.n_offered += 1
        self.bytes_offered += size_bytes
        chance, stretch = self._rng(), self._rng()
        reached_ns: int | None = now_ns
        if self._up is not None:
            reached_ns = self._up.carry(size_bytes, now_ns)
        if reached_ns is not None:
            reached_ns = self._link.carry(size_bytes, reached_ns)
        if reached_ns is None:
            return Drop.QUEUE
        if chance < self._spec.loss:  # after the links: a lost packet has used them
            return Drop.LOSS
        reached_ns += self._delay_ns + round((2 * stretch - 1) * self._jitter_ns)
        if not self._spec.reorders:
            reached_ns = self._last_ns = max(reached_ns, self._last_ns)
        return reached_ns


@dataclass(slots=True, eq=False)
class Packet(Generic[T]):
    """A packet under way.

    Attributes:
        size_bytes: of the IP packet: what links carry.
        entered_ns: when it was offered.
        due_ns: when it is at the receiver.
    """

    way: OneWay
    payload: T
    size_bytes: int
    entered_ns: int
    due_ns: int = field(default=0)


class Network(Generic[T]):
    """All packets under way, of all paths, in the order in which something happens to them."""

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._counter = itertools.count()  # equal times: first in, first out
        self._heap: list[
            tuple[int, int, bool, Packet[T]]
        ] = []  # (when, counter, whether it is at the receiver, packet)

    def offer(self, way: OneWay, payload: T, size_bytes: int, now_ns: int) -> None:
        """Take a packet that enters `way` now; a dropped one is counted there and forgotten."""
        reached = way.cross(size_bytes, now_ns)
        if isinstance(reached, Drop):
            way.drop(reached)
        elif self._held_bytes + size_bytes > self._max_held_bytes:
            way.drop(Drop.OVERFLOW)
        else:
            self._held_bytes += size_bytes
            packet = Packet(way, payload, size_bytes, now_ns, reached)
            heapq.heappush(self._heap, (reached, next(self._counter), way.down is None, packet))

    def next_due_ns(self) -> int | None:
        """Return when `pop_due` should be called next; None: nothing is under way."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ns: int) -> Packet[T] | None:
        """Return the next packet that is at its receiver by now; None: there is none yet."""
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            when_ns, _, is_there, packet = heapq.heappop(heap)
            if not is_there and packet.way.down is not None:
                # The receiver's link serves packets in the order in which they reach it, not in which they were sent:
                # hence this second step, at the time of the event and not at the later time of looking.
                left_ns = packet.way.down.carry(packet.size_bytes, when_ns)
                if left_ns is None:
                    packet.way.drop(Drop.QUEUE)
                    self._held_bytes -= packet.size_bytes
                    continue
                packet.due_ns = left_ns
                if left_ns > when_ns:
                    heapq.heappush(heap, (left_ns, next(self._counter), True, packet))
                    continue
            self._held_bytes -= packet.size_bytes
            return packet
        return None
