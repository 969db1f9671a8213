"""The choice of paths in virtual time: two policies, a leader and a follower, over paths that come, go, slow down and lose."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass

import pytest

from swarm.net import paths as p
from swarm.net.paths import Path, PathPolicy, SendProbe, Standing, Switch

RELAY = Path(address=("192.0.2.1", 7440), channel=b"channel1")
RELAY_2 = Path(address=("192.0.2.2", 7440), channel=b"channel2")
DIRECT = Path(address=("198.51.100.1", 5000))
DIRECT_6 = Path(address=("2001:db8::1", 5000))
START_S = 1000.0


@dataclass
class Wire:
    """What one path does now: the same both ways."""

    delay_s: float
    loss: float = 0.0
    jitter_s: float = 0.0
    is_open: bool = True


class World:
    """A leader and a follower; both call the paths by the same names."""

    def __init__(self, wires: dict[Path, Wire], *, active: Path, seed: int = 1, is_busy: bool = True) -> None:
        self.now = START_S
        self.wires = wires
        self.rng = random.Random(seed)
        self.leader = PathPolicy(active, leads=True, now=self.now)
        self.follower = PathPolicy(active, leads=False, now=self.now)
        self.leader.set_busy(is_busy, self.now)
        self.switches: list[tuple[float, bool, Switch]] = []
        self.n_probes = 0
        self._under_way: list[tuple[float, int, bool, Path, bool, int, bool]] = []
        self._count = itertools.count()

    def add(self, path: Path) -> None:
        self.leader.add(path, self.now)
        self._do(True)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            times = [end]
            if self._under_way:
                times.append(self._under_way[0][0])
            for policy in (self.leader, self.follower):
                deadline = policy.next_deadline()
                if deadline is not None:
                    times.append(max(self.now, deadline) + 1e-6)
            self.now = min(times)
            if self.now >= end:
                self.now = end
                return
            if self._under_way and self._under_way[0][0] <= self.now:
                _, _, to_leader, path, is_pong, number, flag = heapq.heappop(self._under_way)
                policy = self.leader if to_leader else self.follower
                if is_pong:
                    policy.on_pong(path, number, self.now)
                else:
                    is_used = policy.on_probe(path, number, is_nominating=flag, now=self.now)
                    self._offer(not to_leader, path, True, number, is_used)
                self._do(to_leader)
            for is_leader, policy in ((True, self.leader), (False, self.follower)):
                policy.handle_timeout(self.now)
                self._do(is_leader)

    def _do(self, is_leader: bool) -> None:
        policy = self.leader if is_leader else self.follower
        for action in policy.take_actions():
            if isinstance(action, SendProbe):
                self.n_probes += 1
                self._offer(not is_leader, action.path, False, action.number, action.is_nominating)
            else:
                self.switches.append((self.now, is_leader, action))

    def _offer(self, to_leader: bool, path: Path, is_pong: bool, number: int, flag: bool) -> None:
        wire = self.wires[path]
        if wire.is_open and self.rng.random() >= wire.loss:
            at = self.now + wire.delay_s + self.rng.random() * wire.jitter_s
            heapq.heappush(self._under_way, (at, next(self._count), to_leader, path, is_pong, number, flag))

    @property
    def active(self) -> tuple[Path, Path]:
        return self.leader.active, self.follower.active


def upgraded(delay_s: float = 0.02, **more: float) -> World:
    """Return a world on its direct path, with a relay beside it."""
    world = World({RELAY: Wire(0.03), DIRECT: Wire(delay_s, **more)}, active=RELAY)
    world.add(DIRECT)
    world.run(2.0)
    assert world.active == (DIRECT, DIRECT)
    return world


def test_one_path_is_never_probed() -> None:
    world = World({RELAY: Wire(0.03)}, active=RELAY)
    assert world.leader.next_deadline() is None
    world.run(100.0)
    assert world.n_probes == 0


def test_direct_comes_before_relayed_even_if_it_is_slower() -> None:
    world = World({RELAY: Wire(0.01), DIRECT: Wire(0.05)}, active=RELAY)
    world.add(DIRECT)
    world.run(1.0)
    assert world.active == (DIRECT, DIRECT)
    assert [switch.reason for _, is_leader, switch in world.switches if is_leader] == ["a direct path works"]


def test_the_move_takes_a_round_trip_and_the_follower_goes_only_where_it_was_answered_itself() -> None:
    world = World({RELAY: Wire(0.03), DIRECT: Wire(0.02)}, active=RELAY)
    world.add(DIRECT)
    world.run(0.041)
    assert world.active == (DIRECT, RELAY)
    world.run(0.06)
    assert world.active == (DIRECT, DIRECT)


def test_a_path_that_never_answers_is_never_used() -> None:
    world = World({RELAY: Wire(0.03), DIRECT: Wire(0.02, is_open=False)}, active=RELAY)
    world.add(DIRECT)
    world.run(300.0)
    assert not world.switches
    assert world.n_probes < 30 * 300, "a hopeless path costs little"


@pytest.mark.parametrize(("gain_s", "moves"), [(0.004, False), (0.006, True)])
def test_within_a_kind_another_path_must_be_five_milliseconds_faster(gain_s: float, moves: bool) -> None:
    world = World({DIRECT: Wire(0.02), DIRECT_6: Wire(0.02 - gain_s / 2)}, active=DIRECT)
    world.add(DIRECT_6)
    world.run(20.0)
    assert (world.leader.active == DIRECT_6) is moves


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.05, 0.1])
def test_a_blackholed_path_is_left_in_time(delay_s: float) -> None:
    """At most a probe's interval, max(3 srtt, srtt + 200 ms), and the way of the news to the follower."""
    for wait_s in (0.0, 0.07, 0.13, 0.21):
        world = upgraded(delay_s)
        world.run(wait_s)
        world.wires[DIRECT].is_open = False
        rtt_s = 2 * delay_s
        limit_s = p.BUSY_PROBE_S + max(3 * rtt_s, rtt_s + 0.2) + 0.03
        world.run(limit_s + 0.02)
        assert world.leader.active == RELAY
        world.run(0.031)
        assert world.follower.active == RELAY
        assert limit_s < 1.0


def test_it_comes_back_to_direct_once_that_has_answered_for_a_while() -> None:
    world = upgraded()
    world.wires[DIRECT].is_open = False
    world.run(5.0)
    world.wires[DIRECT].is_open = True
    world.run(0.4)
    assert world.active == (RELAY, RELAY)
    world.run(2.0)
    assert world.active == (DIRECT, DIRECT)


def test_a_path_that_fails_again_and_again_is_left_alone_for_longer() -> None:
    world = upgraded()
    for _ in range(60):
        world.wires[DIRECT].is_open = not world.wires[DIRECT].is_open
        world.run(2.0)
    n_moves = sum(1 for _, is_leader, _ in world.switches if is_leader)
    assert 3 <= n_moves <= 14, f"{n_moves} moves in 120 s"
    world.wires[DIRECT].is_open = True
    world.run(45.0)
    assert world.active == (DIRECT, DIRECT)


def test_twenty_seconds_of_silence_keep_it_direct() -> None:
    world = upgraded()
    for _ in range(10):
        world.leader.set_busy(False, world.now)
        world.run(20.0)
        world.leader.set_busy(True, world.now)
        world.run(0.5)
    assert world.active == (DIRECT, DIRECT)
    assert len(world.switches) == 2


def test_a_quiet_connection_sends_a_probe_a_path_every_few_seconds() -> None:
    world = upgraded()
    world.leader.set_busy(False, world.now)
    world.run(5.0)
    n_probes = world.n_probes
    world.run(100.0)
    assert world.n_probes - n_probes <= 2 * 2 * (100 / p.QUIET_PROBE_S + 1)


def test_random_loss_is_no_failure() -> None:
    world = upgraded(loss=0.02, jitter_s=0.01)
    world.switches.clear()
    world.run(600.0)
    assert len(world.switches) <= 2, world.switches


def test_without_another_path_that_works_it_stays() -> None:
    world = upgraded()
    world.wires[DIRECT].is_open = world.wires[RELAY].is_open = False
    world.run(20.0)
    world.switches.clear()
    world.wires[RELAY].is_open = True
    world.run(1.5)
    assert world.leader.active == RELAY, "what answers at all is taken at once"


def test_a_relay_that_ends_its_channel_is_left_at_once() -> None:
    world = World({RELAY: Wire(0.03), RELAY_2: Wire(0.03)}, active=RELAY)
    world.add(RELAY_2)
    world.run(1.0)
    world.leader.remove(RELAY, world.now, reason="the relay restarts")
    world._do(True)
    assert world.leader.active == RELAY_2
    world.leader.remove(RELAY_2, world.now, reason="the relay restarts")
    assert world.leader.active == RELAY_2, "the last one stays"


def test_answers_spare_probes_but_not_for_long() -> None:
    policy = PathPolicy(DIRECT, leads=True, now=START_S)
    policy.add(RELAY, START_S)
    for action in policy.take_actions():
        assert isinstance(action, SendProbe)
        policy.on_pong(action.path, action.number, START_S + 0.01)
    policy.set_busy(True, START_S + 1.0)
    probed: list[float] = []
    for step in range(1, 100):
        now = START_S + 1.0 + step * 0.01
        policy.answered(now)
        policy.handle_timeout(now)
        for action in policy.take_actions():
            assert isinstance(action, SendProbe)
            policy.on_pong(action.path, action.number, now)
            if action.path == DIRECT:
                probed.append(now)
    assert 3 <= len(probed) <= 5, probed


def test_an_old_nomination_moves_nothing() -> None:
    world = upgraded()
    used = world.follower.active
    world.follower.on_probe(RELAY, 1, is_nominating=True, now=world.now)
    assert world.follower.active == used


def test_an_answer_counts_once_and_only_on_the_path_of_its_probe() -> None:
    policy = PathPolicy(RELAY, leads=True, now=START_S)
    policy.add(DIRECT, START_S)
    probes = {action.path: action.number for action in policy.take_actions() if isinstance(action, SendProbe)}
    assert not policy.on_pong(RELAY, probes[DIRECT], START_S + 0.01)
    assert not policy.is_up(DIRECT)
    assert policy.on_pong(DIRECT, probes[DIRECT], START_S + 0.02)
    assert not policy.on_pong(DIRECT, probes[DIRECT], START_S + 0.03)
    assert policy.active == DIRECT


def test_an_answer_from_elsewhere_makes_that_address_a_candidate() -> None:
    policy = PathPolicy(RELAY, leads=True, now=START_S)
    policy.add(DIRECT, START_S)
    probes = {action.path: action.number for action in policy.take_actions() if isinstance(action, SendProbe)}
    policy.on_pong(DIRECT_6, probes[DIRECT], START_S + 0.02)
    assert DIRECT_6 in [action.path for action in policy.take_actions() if isinstance(action, SendProbe)]
    assert policy.active == RELAY


def test_a_follower_goes_to_a_new_address_once_that_is_proved() -> None:
    policy = PathPolicy(DIRECT, leads=False, now=START_S)
    policy.heard(DIRECT_6, START_S)
    assert policy.active == DIRECT
    probes = {action.path: action.number for action in policy.take_actions() if isinstance(action, SendProbe)}
    policy.on_pong(DIRECT_6, probes[DIRECT_6], START_S + 0.04)
    assert policy.active == DIRECT_6


def test_a_timer_that_comes_late_judges_nothing_before_the_socket_was_read() -> None:
    policy = PathPolicy(DIRECT, leads=True, now=START_S)
    policy.add(RELAY, START_S)
    for action in policy.take_actions():
        assert isinstance(action, SendProbe)
        policy.on_pong(action.path, action.number, START_S + 0.01)
    policy.handle_timeout(START_S + p.QUIET_PROBE_S)  # probes, which nobody answers
    late = START_S + p.QUIET_PROBE_S + 2.0
    policy.handle_timeout(late)
    assert policy.is_up(DIRECT)
    policy.handle_timeout(late + p.GRACE_S + 0.001)
    assert not policy.is_up(DIRECT), "but if still nothing came, it is down"


def test_paths_are_bounded_and_the_one_in_use_is_kept() -> None:
    policy = PathPolicy(RELAY, leads=True, now=START_S)
    for port in range(1, 100):
        policy.on_probe(Path(address=("203.0.113.1", port)), port, is_nominating=True, now=START_S)
        assert policy.n_paths <= p.MAX_PATHS
    assert policy.knows(RELAY)
    assert policy.active == RELAY


@pytest.mark.parametrize("seed", range(40))
def test_in_any_weather_a_path_that_works_is_found_even_if_several_fail_at_once(seed: int) -> None:
    """Paths open, close, slow down and lose at random; what is found first may have failed at the same moment."""
    rng = random.Random(seed)
    wires = {path: Wire(rng.uniform(0.002, 0.08)) for path in (RELAY, RELAY_2, DIRECT, DIRECT_6)}
    world = World(wires, active=RELAY, seed=seed)
    for path in (RELAY_2, DIRECT, DIRECT_6):
        world.add(path)
    world.run(1.0)
    for _ in range(25):
        for wire in wires.values():
            wire.is_open = rng.random() < 0.6
            wire.delay_s = rng.uniform(0.002, 0.08)
            wire.loss = rng.choice((0.0, 0.0, 0.01, 0.05))
        if not any(wire.is_open for wire in wires.values()):
            wires[RELAY].is_open = True
        busy = rng.random() < 0.7
        world.leader.set_busy(busy, world.now)
        world.run(1.7 if busy else p.QUIET_PROBE_S + 1.0)
        is_up = {view.path: view.standing is Standing.UP for view in world.leader.views()}
        usable = [path for path, wire in wires.items() if wire.is_open and is_up[path]]
        if usable:
            assert wires[world.leader.active].is_open, f"seed {seed}"
            if any(not path.is_relayed for path in usable):
                assert not world.leader.active.is_relayed, f"seed {seed}"
            before = world.leader.active
            world.run(0.5)
            assert world.leader.active != before or world.follower.active == before or wires[before].loss, (
                f"seed {seed}"
            )
