"""Passes opaque packets between the two legs of a channel: a flight of datagrams in, flights to send out. No I/O, explicit clock.

Knows where each leg's node is (`net/relay_packets` says how it learns that), and nothing of what the packets hold. What is above
a rate waits in a fair queue or is dropped; binding and keepalives are answered at once and never wait. Who may have a channel is
for `reservations` to say.

    packet     from the leg's source       from another source          channel unknown
    RELAY      passed on as it came        CHALLENGE                    dropped
    BIND       BOUND again                 BOUND if its cookie is that  dropped
                                           source's, else CHALLENGE
    KEEPALIVE  ALIVE                       CHALLENGE                    dropped

A BIND or KEEPALIVE with a wrong MAC or an old number is dropped before that.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from relay.fair_queue import FairQueue, Flow
from relay.quotas import MAX_PACKET_BYTES, Limits, byte_bucket
from swarm.errors import RemoteProtocolError
from swarm.ids import NodeId
from swarm.net import relay_packets as p
from swarm.token_bucket import TokenBucket

Address = Any  # a socket's address, compared as a whole
Flight = tuple[Sequence[bytes], Address]

# Half the life of a cookie: one of this period or the last is good. Guessed; above any round trip, and a NAT's address is
# hardly given to somebody else within it.
COOKIE_PERIOD_S = 60.0
CHALLENGES_PER_S, CHALLENGE_BURST = 20.0, 20.0  # of one channel; guessed: a rebound NAT needs one or two
_CHALLENGE_BYTES = p.SIZES[p.PacketType.CHALLENGE]
_PERIOD = struct.Struct("<q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    """Why packets were not passed on, since the start."""

    unknown_channel: int
    unknown_source: int
    unbound: int
    malformed: int
    forged: int
    over_rate: int


class _Leg:
    __slots__ = ("address", "flow", "heard", "key", "node", "number")

    def __init__(self, node: NodeId, key: bytes, flow: Flow, now: float) -> None:
        self.node = node
        self.key = key
        self.flow = flow
        self.heard = now
        self.address: Address = None
        self.number = -1  # the highest of its BINDs and KEEPALIVEs


class _Channel:
    __slots__ = ("challenges", "legs")

    def __init__(self, legs: tuple[_Leg | None, _Leg], now: float) -> None:
        self.legs = legs  # by side; a reservation has no caller
        self.challenges = TokenBucket(rate_per_s=CHALLENGES_PER_S, burst=CHALLENGE_BURST, now=now)


class _Node:
    __slots__ = ("bucket", "n_channels", "n_legs")

    def __init__(self, bucket: TokenBucket) -> None:
        self.bucket = bucket
        self.n_channels = 0
        self.n_legs = 0  # of channels and reservations


class Switchboard:
    """The channels of one relay, in one of its lives."""

    def __init__(self, limits: Limits, *, generation: int, secret: bytes, now: float) -> None:
        """`generation` is higher than in any earlier life, below 2**32; `secret`: 32 random bytes, for cookies."""
        self.limits = limits
        self.generation = generation
        self._secret = secret
        self._channels: dict[bytes, _Channel] = {}
        self._nodes: dict[NodeId, _Node] = {}
        self._queue = FairQueue(byte_bucket(limits.total_bit_s, now))
        self._leg_of: dict[Flow, tuple[_Channel, _Leg]] = {}  # to find where a queued packet goes
        self._drops: Counter[str] = Counter()
        self.n_passed = self.n_passed_bytes = self.n_challenges = 0
        self.on_bound: Callable[[bytes, int, Address], None] | None = None

    @property
    def n_open(self) -> int:
        """How many channels and reservations there are."""
        return len(self._channels)

    @property
    def drops(self) -> Drops:
        """What was dropped until now."""
        return Drops(
            **{name: self._drops[name] for name in Drops.__slots__ if name != "over_rate"},
            over_rate=self._queue.n_dropped,
        )

    # Channels

    def n_channels_of(self, node: NodeId) -> int:
        """Return how many channels the node has, reservations left out."""
        entry = self._nodes.get(node)
        return 0 if entry is None else entry.n_channels

    def open(
        self, channel: bytes, *, caller: tuple[NodeId, bytes] | None, called: tuple[NodeId, bytes], now: float
    ) -> None:
        """Begin a channel between two nodes, each given with its leg's key; with no caller, a reservation's leg."""
        assert channel not in self._channels
        legs = (None if caller is None else self._make_leg(*caller, now), self._make_leg(*called, now))
        entry = self._channels[channel] = _Channel(legs, now)
        for leg in legs:
            if leg is not None:
                self._leg_of[leg.flow] = entry, leg
                node = self._nodes[leg.node]
                node.n_legs += 1
                node.n_channels += caller is not None

    def close(self, channel: bytes) -> bool:
        """Forget a channel and what waits in it; return whether it was there."""
        entry = self._channels.pop(channel, None)
        if entry is None:
            return False
        is_reservation = entry.legs[0] is None
        for leg in entry.legs:
            if leg is None:
                continue
            leg.flow.clear()
            del self._leg_of[leg.flow]
            node = self._nodes[leg.node]
            node.n_legs -= 1
            node.n_channels -= not is_reservation
            if not node.n_legs:
                del self._nodes[leg.node]
        return True

    def is_idle(self, channel: bytes, now: float) -> bool:
        """Return whether nothing has come from one side of a channel for too long, or it is gone.

        Both sides send keepalives, so one that is silent is dead; the other would keep the channel for ever.
        """
        entry = self._channels.get(channel)
        return entry is None or any(leg is not None and now - leg.heard > self.limits.idle_s for leg in entry.legs)

    def bound_to(self, channel: bytes, side: int) -> Address | None:
        """Return where a leg's node is, if that is known."""
        entry = self._channels.get(channel)
        leg = None if entry is None else entry.legs[side]
        return None if leg is None else leg.address

    def cookie(self, channel: bytes, address: Address, now: float) -> bytes:
        """Return what lets a node bind its leg of a channel from an address that it was seen at."""
        return self._cookie(channel, address, int(now // COOKIE_PERIOD_S))

    # Packets

    def receive(self, datagrams: Sequence[bytes], address: Address, now: float) -> list[Flight]:
        """Return what is to be sent after datagrams that came together from one address, first bytes below 64."""
        flights: list[Flight] = []
        head = b""
        run: list[bytes] = []
        for data in datagrams:
            if not data.startswith(head) or not run:
                if run:
                    self._take(head, run, address, now, flights)
                head, run = data[: p.RELAY_HEAD_BYTES], []
            run.append(data)
        if run:
            self._take(head, run, address, now, flights)
        if self._queue.is_waiting:
            flights += self.poll(now)
        return flights

    def poll(self, now: float) -> list[Flight]:
        """Return what waited and may be sent now; to be called at `next_deadline`."""
        flights: list[Flight] = []
        for flow, run in self._queue.drain(now):
            channel, leg = self._leg_of[flow]
            other = channel.legs[0] if channel.legs[1] is leg else channel.legs[1]
            assert other is not None  # a reservation's leg passes nothing on
            self._count(run, sum(map(len, run)))
            flights.append((run, other.address))
        return flights

    def next_deadline(self) -> float | None:
        """Return when `poll` has something to do, if anything waits."""
        return self._queue.next_deadline()

    # Inside

    def _make_leg(self, node: NodeId, key: bytes, now: float) -> _Leg:
        entry = self._nodes.get(node)
        if entry is None:
            entry = self._nodes[node] = _Node(byte_bucket(self.limits.node_bit_s, now))
        bucket = byte_bucket(self.limits.channel_bit_s, now)
        return _Leg(node, key, Flow((bucket, entry.bucket), self.limits.queue_s), now)

    def _take(self, head: bytes, run: list[bytes], address: Address, now: float, flights: list[Flight]) -> None:
        if head[0] != p.RELAY:
            for data in run:
                self._take_control(data, address, now, flights)
            return
        channel = self._channels.get(head[1:])
        if channel is None:
            self._drops["unknown_channel"] += len(run)
            return
        caller, called = channel.legs
        if caller is None:
            self._drops["malformed"] += len(run)
            return
        if address == caller.address:
            leg, other = caller, called
        elif address == called.address:
            leg, other = called, caller
        else:
            self._drops["unknown_source"] += len(run)
            self._challenge(head[1:], channel, address, len(run[0]), now, flights)
            return
        if other.address is None:
            self._drops["unbound"] += len(run)
            return
        if len(run[0]) > MAX_PACKET_BYTES:
            self._drops["malformed"] += len(run)
            return
        leg.heard = now
        n_bytes = len(run[0]) if len(run) == 1 else sum(map(len, run))
        n_now = self._queue.offer(leg.flow, run, n_bytes, now)
        if n_now:
            if n_now < len(run):
                run = run[:n_now]
                n_bytes = n_now * len(run[0])
            self._count(run, n_bytes)
            flights.append((run, other.address))

    def _count(self, run: Sequence[bytes], n_bytes: int) -> None:
        self.n_passed += len(run)
        self.n_passed_bytes += n_bytes

    def _take_control(self, data: bytes, address: Address, now: float, flights: list[Flight]) -> None:
        try:
            packet = p.decode(data)
        except RemoteProtocolError:
            self._drops["malformed"] += 1
            return
        channel = self._channels.get(packet.channel)
        leg = None if channel is None else channel.legs[packet.side]
        if channel is None or leg is None or packet.generation != self.generation:
            self._drops["unknown_channel"] += 1
            return
        if packet.type not in (p.PacketType.BIND, p.PacketType.KEEPALIVE):
            self._drops["malformed"] += 1
            return
        if not p.is_authentic(data, leg.key) or packet.number < leg.number:
            self._drops["forged"] += 1
            return
        if packet.type is p.PacketType.KEEPALIVE:
            is_good = address == leg.address
            answer = p.PacketType.ALIVE
            if is_good and packet.number == leg.number:
                self._drops["forged"] += 1
                return
        else:
            is_good = self._bind(packet, channel, leg, address, now)
            answer = p.PacketType.BOUND
        if not is_good:
            self._challenge(packet.channel, channel, address, len(data), now, flights)
            return
        leg.number = packet.number
        leg.heard = now
        reply = p.Control(
            type=answer,
            channel=packet.channel,
            generation=self.generation,
            side=packet.side,
            number=packet.number,
        )
        flights.append(((p.encode(reply, leg.key),), address))

    def _bind(self, packet: p.Control, channel: _Channel, leg: _Leg, address: Address, now: float) -> bool:
        """Return whether the leg is bound to this address, from now on if it was not."""
        if address == leg.address:
            return True
        other = channel.legs[1 - packet.side]
        period = int(now // COOKIE_PERIOD_S)
        is_proved = packet.cookie in (
            self._cookie(packet.channel, address, period),
            self._cookie(packet.channel, address, period - 1),
        )
        if not is_proved or packet.number == leg.number or (other is not None and other.address == address):
            return False
        leg.address = address
        if self.on_bound is not None:
            self.on_bound(packet.channel, packet.side, address)
        return True

    def _challenge(
        self, channel_id: bytes, channel: _Channel, address: Address, size: int, now: float, flights: list[Flight]
    ) -> None:
        """Ask a source to prove itself, never with more bytes than it sent."""
        if size < _CHALLENGE_BYTES or channel.challenges.take(now):
            return
        self.n_challenges += 1
        packet = p.Control(
            type=p.PacketType.CHALLENGE,
            channel=channel_id,
            generation=self.generation,
            cookie=self.cookie(channel_id, address, now),
        )
        flights.append(((p.encode(packet, b""),), address))

    def _cookie(self, channel: bytes, address: Address, period: int) -> bytes:
        where = f"{address[0]} {address[1]}".encode()
        return hashlib.blake2b(
            _PERIOD.pack(period) + channel + where, key=self._secret, digest_size=p.COOKIE_BYTES
        ).digest()
