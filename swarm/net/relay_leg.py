"""One leg of a channel at a relay, from the node's side: binds it, keeps it alive, notices when the relay has lost it. No I/O.

    state     event                         next state
    BINDING   BOUND comes                -> BOUND
    BINDING   MAX_BINDS without answer   -> LOST
    BOUND     MAX_KEEPALIVES unanswered  -> LOST
    any       CHALLENGE comes               as it was: answered with a BIND from wherever we are now

A keepalive proves the way there and back: a relay that passes our packets on but has forgotten us does not go unnoticed.
"""

from __future__ import annotations

import random
from enum import Enum, auto

from swarm.net import relay_packets as p
from swarm.wire import messages as m

BIND_RETRY_S = 0.3  # guessed: above most round trips
MAX_BINDS = 10
# Between keepalives that have no answer yet; or two round trips, if that is longer. Guessed.
KEEPALIVE_RETRY_S = 0.4
MAX_KEEPALIVES = 3
JITTER = 0.25  # of an interval, either way: those that a relay's restart brought together drift apart
CHALLENGE_REST_S = 0.02  # between two CHALLENGEs that are answered: whoever sees a channel's id can send them
RTT_GAIN = 0.125  # RFC 6298's smoothing


class LegState(Enum):
    """Where a leg stands."""

    BINDING = auto()
    BOUND = auto()
    LOST = auto()


class LegBinder:
    """Keeps one leg bound.

    Attributes:
        rtt_s: to the relay and back; None before the first answer.
        n_moves: how often the relay has seen this node at another address than before.
    """

    def __init__(self, leg: m.Leg, *, keepalive_s: float, rng: random.Random) -> None:
        self.leg = leg
        self.state = LegState.BINDING
        self.rtt_s: float | None = None
        self.n_moves = 0
        self._keepalive_s = keepalive_s
        self._rng = rng
        self._cookie = leg.cookie
        self._number = -1
        self._sent_at = 0.0  # the packet with that number
        self._n_unanswered = 0
        self._deadline = 0.0
        self._challenged_at = float("-inf")

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` is due; None once the leg is lost."""
        return None if self.state is LegState.LOST else self._deadline

    def begin(self, now: float) -> list[bytes]:
        """Return the first packet to send."""
        return [self._bind(now)]

    def handle_timeout(self, now: float) -> list[bytes]:
        """Return what is to be sent now that the deadline has passed; the leg may be lost by it."""
        if self.state is LegState.LOST or now < self._deadline:
            return []
        limit = MAX_BINDS if self.state is LegState.BINDING else MAX_KEEPALIVES
        if self._n_unanswered >= limit:
            self.state = LegState.LOST
            return []
        return [self._bind(now) if self.state is LegState.BINDING else self._keepalive(now)]

    def check(self, now: float) -> list[bytes]:
        """Return a keepalive to send at once: something suggests that this node has another address now."""
        return [self._keepalive(now)] if self.state is LegState.BOUND and not self._n_unanswered else []

    def receive(self, packet: p.Control, data: bytes, now: float) -> list[bytes]:
        """Return what to send after one of the relay's packets for this channel; `data` is the packet as it came."""
        leg = self.leg
        if packet.generation != leg.generation or self.state is LegState.LOST:
            return []
        if packet.type is p.PacketType.CHALLENGE:
            if now < self._challenged_at + CHALLENGE_REST_S:
                return []
            self._challenged_at = now
            self._cookie = packet.cookie
            self.n_moves += self.state is LegState.BOUND
            return [self._bind(now)]
        if (
            packet.type not in (p.PacketType.BOUND, p.PacketType.ALIVE)
            or packet.side != leg.side
            or not p.is_authentic(data, leg.key)
        ):
            return []
        if not self._number - self._n_unanswered < packet.number <= self._number:
            return []  # the answer to an earlier one, late or played back: it says nothing about now
        if packet.number == self._number:
            rtt_s = now - self._sent_at
            self.rtt_s = rtt_s if self.rtt_s is None else self.rtt_s + RTT_GAIN * (rtt_s - self.rtt_s)
        if packet.type is p.PacketType.BOUND:
            self.state = LegState.BOUND
        self._n_unanswered = 0
        self._deadline = now + self._keepalive_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
        return []

    def _bind(self, now: float) -> bytes:
        self._deadline = now + (BIND_RETRY_S if self.state is LegState.BINDING else self._retry_s())
        return self._next(p.PacketType.BIND, now, self._cookie)

    def _keepalive(self, now: float) -> bytes:
        self._deadline = now + self._retry_s()
        return self._next(p.PacketType.KEEPALIVE, now)

    def _retry_s(self) -> float:
        return max(KEEPALIVE_RETRY_S, 2 * (self.rtt_s or 0.0))

    def _next(self, kind: p.PacketType, now: float, cookie: bytes = b"") -> bytes:
        self._number += 1
        self._n_unanswered += 1
        self._sent_at = now
        packet = p.Control(
            type=kind,
            channel=self.leg.channel,
            generation=self.leg.generation,
            side=self.leg.side,
            number=self._number,
            cookie=cookie,
        )
        return p.encode(packet, self.leg.key)
