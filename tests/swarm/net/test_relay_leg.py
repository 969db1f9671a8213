"""A leg is bound, kept alive, and known to be lost in time, against the relay's own switchboard. Time is the test's."""

from __future__ import annotations

import random

from relay.quotas import Limits
from relay.switchboard import Switchboard
from swarm.ids import NodeId
from swarm.net import relay_packets as p
from swarm.net.relay_leg import (
    JITTER,
    KEEPALIVE_RETRY_S,
    MAX_BINDS,
    MAX_KEEPALIVES,
    LegBinder,
    LegState,
)
from swarm.wire import messages as m

A, B = (NodeId(bytes([n]) * 32) for n in (1, 2))
CHANNEL, KEY, KEEPALIVE_S = b"CHANNEL0", b"k" * 32, 10.0
HERE, ELSEWHERE = ("192.0.2.1", 1000), ("198.51.100.1", 4000)
T0, RTT_S = 1000.0, 0.05


class World:
    """A leg and its relay, with a path between them that can be cut."""

    def __init__(self, *, has_cookie: bool = False, seed: int = 1, side: int = p.CALLER) -> None:
        """`side`: CALLED makes it a reservation's leg."""
        self.now = T0
        self.source = HERE
        self.is_cut = False
        self.n_sent = 0
        self.board = Switchboard(Limits(), generation=3, secret=b"s" * 32, now=T0)
        self.board.open(CHANNEL, caller=(A, KEY) if side == p.CALLER else None, called=(B, KEY), now=T0)
        leg = m.Leg(
            channel=CHANNEL,
            generation=3,
            side=side,
            key=KEY,
            cookie=self.board.cookie(CHANNEL, HERE, T0) if has_cookie else p.NO_COOKIE,
            idle_ms=60_000,
            rate_kbit_s=50_000,
        )
        self.binder = LegBinder(leg, keepalive_s=KEEPALIVE_S, rng=random.Random(seed))
        self.answers: list[bytes] = []

    def exchange(self, packets: list[bytes]) -> None:
        """Carry packets there and what comes back, until nobody has anything to say."""
        while packets:
            self.n_sent += len(packets)
            if self.is_cut:
                return
            answers = [
                data
                for data_ in packets
                for run, _ in self.board.receive([data_], self.source, self.now)
                for data in run
            ]
            self.now += RTT_S
            self.answers += answers
            packets = [out for data in answers for out in self.binder.receive(p.decode(data), data, self.now)]

    def run_until(self, at: float) -> None:
        while (deadline := self.binder.next_deadline()) is not None and deadline <= at:
            self.now = max(self.now, deadline)
            self.exchange(self.binder.handle_timeout(self.now))
        self.now = max(self.now, at)


def test_with_a_cookie_a_leg_is_bound_in_one_round_trip_and_without_in_two() -> None:
    for has_cookie, n_trips in ((True, 1), (False, 2)):
        world = World(has_cookie=has_cookie)
        world.exchange(world.binder.begin(T0))
        assert world.binder.state is LegState.BOUND
        assert world.n_sent == n_trips
        assert world.board.bound_to(CHANNEL, p.CALLER) == HERE
        assert world.binder.rtt_s is not None
        assert abs(world.binder.rtt_s - RTT_S) < 1e-9


def test_a_bind_that_gets_lost_is_repeated_and_given_up_in_the_end() -> None:
    world = World()
    world.is_cut = True
    world.exchange(world.binder.begin(T0))
    world.run_until(T0 + 1.0)
    assert world.binder.state is LegState.BINDING
    world.is_cut = False
    world.run_until(T0 + 2.0)
    assert world.binder.state is LegState.BOUND
    other = World()
    other.is_cut = True
    other.exchange(other.binder.begin(T0))
    other.run_until(T0 + 60.0)
    assert other.binder.state is LegState.LOST
    assert other.n_sent == MAX_BINDS
    assert other.binder.next_deadline() is None


def test_keepalives_go_on_and_cost_little() -> None:
    world = World(has_cookie=True, side=p.CALLED)
    world.exchange(world.binder.begin(T0))
    world.run_until(T0 + 10 * KEEPALIVE_S)
    assert world.binder.state is LegState.BOUND
    assert 8 <= world.n_sent - 1 <= 13
    assert not world.board.is_idle(CHANNEL, world.now)


def test_a_relay_that_has_forgotten_the_leg_is_noticed_in_time() -> None:
    world = World(has_cookie=True)
    world.exchange(world.binder.begin(T0))
    world.run_until(T0 + 1.0)
    world.board.close(CHANNEL)
    bound_s = KEEPALIVE_S * (1 + JITTER) + (MAX_KEEPALIVES + 1) * KEEPALIVE_RETRY_S
    world.run_until(world.now + bound_s)
    assert world.binder.state is LegState.LOST


def test_one_lost_keepalive_is_no_loss() -> None:
    world = World(has_cookie=True)
    world.exchange(world.binder.begin(T0))
    world.is_cut = True
    deadline = world.binder.next_deadline()
    assert deadline is not None
    world.run_until(deadline)
    world.is_cut = False
    world.run_until(deadline + 5.0)
    assert world.binder.state is LegState.BOUND


def test_a_new_address_is_told_to_the_relay_by_the_next_keepalive() -> None:
    world = World(has_cookie=True)
    world.exchange(world.binder.begin(T0))
    world.source = ELSEWHERE
    world.exchange(world.binder.check(world.now))
    assert world.board.bound_to(CHANNEL, p.CALLER) == ELSEWHERE
    assert world.binder.n_moves == 1
    assert world.binder.state is LegState.BOUND


def test_answers_that_are_played_back_keep_nothing_alive() -> None:
    world = World(has_cookie=True)
    world.exchange(world.binder.begin(T0))
    world.run_until(T0 + 30.0)
    world.is_cut = True
    until = world.now + 60.0
    while world.now < until and world.binder.state is not LegState.LOST:
        for data in world.answers:
            assert world.binder.receive(p.decode(data), data, world.now) == []
        world.run_until(world.now + 0.1)
    assert world.binder.state is LegState.LOST


def test_what_is_not_the_relays_answer_does_nothing() -> None:
    world = World(has_cookie=True)
    sent = world.binder.begin(T0)
    (bind,) = sent
    number = p.decode(bind).number

    def packet(kind: p.PacketType, key: bytes = KEY, generation: int = 3, side: int = 0, of: int = number) -> None:
        data = p.encode(p.Control(type=kind, channel=CHANNEL, generation=generation, side=side, number=of), key)
        assert world.binder.receive(p.decode(data), data, T0) == []
        assert world.binder.state is LegState.BINDING

    packet(p.PacketType.BOUND, key=b"x" * 32)
    packet(p.PacketType.BOUND, generation=2)
    packet(p.PacketType.BOUND, side=1)
    packet(p.PacketType.BOUND, of=number + 1)
    packet(p.PacketType.KEEPALIVE)
    world.exchange(sent)
    assert world.binder.state is LegState.BOUND


def test_a_flood_of_challenges_is_not_answered_by_a_flood() -> None:
    world = World(has_cookie=True)
    world.exchange(world.binder.begin(T0))
    data = p.encode(p.Control(type=p.PacketType.CHALLENGE, channel=CHANNEL, generation=3, cookie=b"z" * 16), b"")
    n = sum(len(world.binder.receive(p.decode(data), data, world.now + 0.001 * at)) for at in range(1000))
    assert n <= 51
