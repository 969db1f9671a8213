"""Who can be called through this relay, and which channels there are: the rules. Pure; time and randomness are the caller's.

A node's reservation is bound to the connection that asked for it: calls are announced on it. If that connection ends, the
reservation stays until its time is up, so that a node that comes back in time finds it again; a node that reserves on another
connection while the first one is still there takes its place, and the first is told.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from relay.quotas import Limits
from relay.switchboard import Switchboard
from swarm.errors import Overloaded, Refused
from swarm.ids import NodeId
from swarm.net import relay_packets as p

# Granted at most. A node renews at a third of it. Guessed: two renewals may fail, and a node that died is forgotten soon after
# its announcement is.
RESERVATION_TTL_S = 120.0
MIN_TTL_S = 10.0
MAX_CHANNELS_PER_PAIR = 4  # guessed: a caller that starts again finds room while its old channels grow idle
# From one IPv4 address or IPv6 /64 that is not this machine's. Guessed: a large household, a small company.
MAX_RESERVATIONS_PER_NETWORK = 64

C = TypeVar("C")  # hashable


@dataclass(slots=True, kw_only=True)
class Reservation(Generic[C]):
    """A node that can be called.

    Attributes:
        connection: where calls are announced; `network`: whence it came, "" from this machine.
        channel, key: of its own leg, for keepalives.
        ends_at: by the caller's clock.
    """

    node: NodeId
    connection: C
    network: str
    channel: bytes
    key: bytes
    ends_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelEntry:
    """A channel: whose it is, and the keys of its legs."""

    channel: bytes
    caller: NodeId
    called: NodeId
    keys: tuple[bytes, bytes]


class Reservations(Generic[C]):
    """All reservations and channels of a relay, above its switchboard."""

    def __init__(
        self, switchboard: Switchboard, limits: Limits, *, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._switchboard = switchboard
        self._limits = limits
        self._random_bytes = random_bytes
        self._by_node: dict[NodeId, Reservation[C]] = {}
        self._n_of_network: Counter[str] = Counter()
        self._channels: dict[bytes, ChannelEntry] = {}
        self._n_of_pair: Counter[tuple[NodeId, NodeId]] = Counter()

    @property
    def n_reservations(self) -> int:
        """How many nodes can be called."""
        return len(self._by_node)

    @property
    def n_channels(self) -> int:
        """How many channels there are."""
        return len(self._channels)

    def connections(self) -> set[C]:
        """Return those on which calls are announced."""
        return {each.connection for each in self._by_node.values()}

    def reserve(
        self, node: NodeId, connection: C, *, network: str, lifetime_s: float, is_open: Callable[[C], bool], now: float
    ) -> tuple[Reservation[C], C | None]:
        """Return a new or renewed reservation, and the connection that lost it by that, if one did that is still open.

        Args:
            network: what all addresses of one line have in common; "": this machine, which is not bounded.

        Raises:
            Overloaded: too many reservations, in all or from that network.
        """
        ends_at = now + min(max(lifetime_s, MIN_TTL_S), RESERVATION_TTL_S)
        held = self._by_node.get(node)
        if held is not None and (held.connection == connection or not is_open(held.connection)):
            held.connection, held.ends_at = connection, ends_at
            return held, None
        if held is not None:
            self._drop(held)
        elif len(self._by_node) >= self._limits.n_reservations:
            raise Overloaded("this relay has no room for more reservations", retry_after_s=MIN_TTL_S)
        elif network and self._n_of_network[network] >= MAX_RESERVATIONS_PER_NETWORK:
            raise Overloaded("too many reservations from this network", retry_after_s=MIN_TTL_S)
        channel, key = self._random_bytes(p.CHANNEL_BYTES), self._random_bytes(p.KEY_BYTES)
        made = Reservation(node=node, connection=connection, network=network, channel=channel, key=key, ends_at=ends_at)
        self._by_node[node] = made
        self._n_of_network[network] += 1
        self._switchboard.open(channel, caller=None, called=(node, key), now=now)
        return made, None if held is None else held.connection

    def find(self, node: NodeId) -> Reservation[C] | None:
        """Return a node's reservation."""
        return self._by_node.get(node)

    def connect(self, caller: NodeId, called: NodeId, now: float) -> ChannelEntry:
        """Return a new channel, open at the switchboard, its legs unbound.

        Raises:
            LookupError: that node has no reservation.
            Refused: it is the caller itself.
            Overloaded: one of the nodes has as many channels as it may.
        """
        if caller == called:
            raise Refused("a node cannot call itself")
        if called not in self._by_node:
            raise LookupError(f"node {called.short} has no reservation at this relay")
        for node in (caller, called):
            if self._switchboard.n_channels_of(node) >= self._limits.n_channels_per_node:
                raise Overloaded(f"node {node.short} has {self._limits.n_channels_per_node} channels, and no more")
        if self._n_of_pair[caller, called] >= MAX_CHANNELS_PER_PAIR:
            raise Overloaded(f"there are {MAX_CHANNELS_PER_PAIR} channels between these nodes, and no more")
        channel = self._random_bytes(p.CHANNEL_BYTES)
        keys = self._random_bytes(p.KEY_BYTES), self._random_bytes(p.KEY_BYTES)
        entry = ChannelEntry(channel=channel, caller=caller, called=called, keys=keys)
        self._channels[channel] = entry
        self._n_of_pair[caller, called] += 1
        self._switchboard.open(channel, caller=(caller, keys[p.CALLER]), called=(called, keys[p.CALLED]), now=now)
        return entry

    def release(self, node: NodeId, channel: bytes) -> None:
        """Forget a channel that the node is an end of, or its reservation; does nothing if there is none."""
        entry = self._channels.get(channel)
        if entry is not None and node in (entry.caller, entry.called):
            self._end(entry)
        held = self._by_node.get(node)
        if held is not None and held.channel == channel:
            self._drop(held)

    def expire(self, now: float) -> None:
        """Forget the reservations whose time is up and the channels on which nothing comes."""
        for held in [each for each in self._by_node.values() if each.ends_at <= now]:
            self._drop(held)
        for entry in [each for each in self._channels.values() if self._switchboard.is_idle(each.channel, now)]:
            self._end(entry)

    def _drop(self, held: Reservation[C]) -> None:
        del self._by_node[held.node]
        self._n_of_network[held.network] -= 1
        if not self._n_of_network[held.network]:
            del self._n_of_network[held.network]
        self._switchboard.close(held.channel)

    def _end(self, entry: ChannelEntry) -> None:
        del self._channels[entry.channel]
        pair = entry.caller, entry.called
        self._n_of_pair[pair] -= 1
        if not self._n_of_pair[pair]:
            del self._n_of_pair[pair]
        self._switchboard.close(entry.channel)
