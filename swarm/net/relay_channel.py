"""One channel at a relay as this node uses it: `relay_leg`'s rules between a timer and an endpoint. Plumbing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from swarm.ids import NodeId
from swarm.net import relay_packets as p
from swarm.net.addresses import SocketAddress
from swarm.net.connection import clock
from swarm.net.relay_leg import LegBinder, LegState
from swarm.wire import messages as m


class RelayLeg:
    """This node's side of one channel. RELAY packets for it may be sent as soon as it exists: a BIND went before them.

    Attributes:
        channel: 8 bytes; `address`: the relay's, where they are sent.
        remote: the node at the other side; as the relay says, so only QUIC's handshake proves it. None: a reservation's own leg.
        on_lost: called once when the relay has forgotten the leg or is gone.
    """

    def __init__(
        self,
        leg: m.Leg,
        address: SocketAddress,
        remote: NodeId | None,
        *,
        keepalive_s: float,
        rng: random.Random,
        send: Callable[[Sequence[bytes], Any], None],
        on_moved: Callable[[RelayLeg], None],
        on_end: Callable[[RelayLeg, bool], None],
    ) -> None:
        self.address = address
        self.remote = remote
        self.on_lost: Callable[[], None] = lambda: None
        self._binder = LegBinder(leg, keepalive_s=keepalive_s, rng=rng)
        self._send = send
        self._on_moved = on_moved
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._put(self._binder.begin(clock()))

    @property
    def channel(self) -> bytes:
        """The channel's id."""
        return self._binder.leg.channel

    @property
    def is_bound(self) -> bool:
        """Whether the relay has said that it knows where we are."""
        return self._binder.state is LegState.BOUND

    @property
    def is_lost(self) -> bool:
        """Whether the relay has forgotten it, or it was closed."""
        return self._is_closed or self._binder.state is LegState.LOST

    @property
    def rtt_s(self) -> float | None:
        """The round trip to the relay, seconds."""
        return self._binder.rtt_s

    def close(self) -> None:
        """Give the channel up, and tell the relay."""
        self._end(is_wanted=False)

    def receive(self, packet: p.Control, data: bytes) -> None:
        """Take one of the relay's packets for this channel."""
        if self._is_closed:
            return
        n_moves = self._binder.n_moves
        self._put(self._binder.receive(packet, data, clock()))
        if self._binder.n_moves > n_moves:
            self._on_moved(self)

    def check(self) -> None:
        """Find out now whether the relay still knows where we are."""
        if not self._is_closed:
            self._put(self._binder.check(clock()))

    def _put(self, packets: list[bytes]) -> None:
        if packets:
            self._send(packets, self.address)
        at = self._binder.next_deadline()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is None:
            self._end(is_wanted=True)
        else:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._put(self._binder.handle_timeout(clock()))

    def _end(self, *, is_wanted: bool) -> None:
        """Stop; `is_wanted`: the relay has lost it, we have not given it up."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_end(self, is_wanted)
        if is_wanted:
            self.on_lost()
