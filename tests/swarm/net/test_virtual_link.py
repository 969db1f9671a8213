"""Two QUIC connections in a virtual clock over a simulated path: what the transport promises of round trips, loss and sharing.

RTT is 80 ms where nothing else is said. Seeds are fixed: the same packets are lost in every run.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from swarm.emulation.path import Drop, PathSpec
from tests.virtual_link import Side, VirtualLink, VirtualWorld

RTT = 0.080
PATH = PathSpec(delay_s=RTT / 2)


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def opened(path: PathSpec = PATH, **options: object) -> VirtualLink:
    link = VirtualWorld(seed=1).link(path, **options)  # type: ignore[arg-type]
    link.open()
    return link


@pytest.mark.parametrize(("size", "limit"), [(12_288, 1.01), (49_152, 1.01), (100_000, 1.01)])
def test_a_dispatch_costs_one_round_trip_from_the_first_on_and_after_silence(size: int, limit: float) -> None:
    link = opened()
    times = [link.dispatch(size, size) for _ in range(4)]
    link.world.run_for(5.0)
    times += [link.dispatch(size, size) for _ in range(3)]
    assert max(times) <= limit * RTT


@pytest.mark.parametrize("algorithm", ["reno", "cubic"])
def test_aioquics_own_controllers_do_not_pass_the_test_above(algorithm: str) -> None:
    link = opened(algorithm=algorithm)
    assert link.dispatch(100_000, 100_000) > 5 * RTT


@pytest.mark.parametrize(("size", "n"), [(3_300, 1000), (12_000, 500), (12_288, 1000), (49_152, 300)])
def test_at_1_percent_loss_the_99th_percentile_stays_near_one_round_trip(size: int, n: int) -> None:
    link = opened(PathSpec(delay_s=RTT / 2, loss=0.01))
    for _ in range(10):
        link.dispatch(size, size)  # until its first loss a path counts as clean
    times = [link.dispatch(size, size) for _ in range(n)]
    assert percentile(times, 0.5) <= 1.04 * RTT
    assert percentile(times, 0.99) <= 1.1 * RTT
    assert [controller.n_cuts for controller in link.controllers] == [0, 0]


def test_repair_is_counted_apart_and_only_paid_where_packets_are_lost() -> None:
    clean, lossy = opened(), opened(PathSpec(delay_s=RTT / 2, loss=0.01))
    for link in (clean, lossy):
        for _ in range(100):
            link.dispatch(12_288, 12_288)
    assert clean.client.repair_bytes == clean.server.repair_bytes == 0
    assert 0.5 < lossy.client.repair_bytes / lossy.client.bytes_sent <= 1.0
    assert lossy.client.bytes_sent < 1.1 * clean.client.bytes_sent


def test_a_dispatch_and_its_answer_need_no_packets_for_acknowledgements() -> None:
    link = opened()
    link.dispatch(3_300, 3_300)
    sent = link.client.n_sent, link.server.n_sent
    for _ in range(20):
        link.dispatch(3_300, 3_300)
    assert (link.client.n_sent - sent[0], link.server.n_sent - sent[1]) == (
        60,
        60,
    )  # three packets each way, and no more


def test_what_is_not_answered_is_acknowledged_in_time() -> None:
    link = opened()
    link.ask(3_300, 100, compute_s=0.5)
    link.world.run_for(RTT + 0.010)
    client, _ = link.controllers
    assert client.bytes_in_flight == 0


def test_jitter_is_not_taken_for_congestion() -> None:
    link = opened(PathSpec(delay_s=RTT / 2, jitter_s=0.005, loss=0.001))
    for _ in range(100):
        link.dispatch(49_152, 49_152)
    assert [controller.n_cuts for controller in link.controllers] == [0, 0]


@dataclass(frozen=True)
class Shared:
    """What flows did through one bottleneck of 20 Mbit/s with a queue of 64 KB (26 ms)."""

    mbit_s: list[float]
    loss: float
    waits_s: list[float]


def share_bottleneck(algorithms: tuple[str, ...], *, rtt_s: float, seconds: float = 4.0) -> Shared:
    """Let endless transfers start one second apart; measure for `seconds` after all had 7 s to settle."""
    world = VirtualWorld(seed=1)
    bottleneck = world.bottleneck(rate_bit_s=20e6, queue_bytes=64_000)
    got = [0] * len(algorithms)
    links = []
    for at, algorithm in enumerate(algorithms):
        link = world.link(PathSpec(delay_s=rtt_s / 2), through=bottleneck, algorithm=algorithm)

        def count(stream: int, size: int, is_end: bool, at: int = at) -> None:
            got[at] += size

        link.server.on_data = count
        links.append(link)
        link.open()
        link.client.send(0, 40_000_000)
        world.run_for(0.5)
    world.run_for(7.0)
    before, offered = (
        list(got),
        [(link.client.way.n_offered, link.client.way.drops.get(Drop.QUEUE, 0)) for link in links],
    )
    waits = []
    for _ in itertools.repeat(None, int(seconds / 0.005)):
        world.run_for(0.005)
        waits.append(max(0, bottleneck._free_ns - world.now_ns) / 1e9)
    n_offered = sum(link.client.way.n_offered - n for link, (n, _) in zip(links, offered, strict=True))
    n_dropped = sum(link.client.way.drops.get(Drop.QUEUE, 0) - n for link, (_, n) in zip(links, offered, strict=True))
    rates = [(now - then) * 8e-6 / seconds for now, then in zip(got, before, strict=True)]
    return Shared(rates, n_dropped / n_offered, waits)


# At 10 ms the least windows of two flows alone (2 x 20 KB) are 6 ms more than the path holds.
@pytest.mark.parametrize(("rtt_s", "queue_s"), [(0.010, 0.024), (0.040, 0.018), (0.080, 0.018)])
def test_two_flows_share_a_bottleneck_without_filling_its_queue(rtt_s: float, queue_s: float) -> None:
    ours = share_bottleneck(("swarm", "swarm"), rtt_s=rtt_s)
    assert sum(ours.mbit_s) > 17
    assert min(ours.mbit_s) > 0.25 * sum(ours.mbit_s)
    assert ours.loss < 0.005
    assert percentile(ours.waits_s, 0.95) < queue_s


def test_reno_fills_the_queue_that_we_leave_half_empty() -> None:
    ours, reno = (share_bottleneck((name, name), rtt_s=0.040) for name in ("swarm", "reno"))
    assert percentile(ours.waits_s, 0.95) < 0.75 * percentile(reno.waits_s, 0.95)
    assert ours.loss <= reno.loss


def test_we_yield_to_cubic_but_keep_a_dispatch_in_flight() -> None:
    shared = share_bottleneck(("cubic", "swarm"), rtt_s=0.080)
    assert shared.mbit_s[0] > shared.mbit_s[1] > 1.0
    assert shared.loss < 0.01


def test_a_first_flight_that_overflows_a_queue_costs_little_and_teaches() -> None:
    world = VirtualWorld(seed=1)
    bottleneck = world.bottleneck(rate_bit_s=20e6, queue_bytes=64_000)
    link = world.link(PATH, through=bottleneck)
    link.open()
    first = link.dispatch(100_000, 100)
    dropped = link.client.way.drops[Drop.QUEUE]
    assert first < 3 * RTT  # 1.5 if nothing were lost; 5.6 without the copy of the last packet
    later = [link.dispatch(100_000, 100) for _ in range(10)]
    assert max(later) < 2.5 * RTT
    assert link.client.way.drops[Drop.QUEUE] - dropped <= 5
    for _ in range(8):  # 40 s of keepalives: the path counts as good again
        world.run_for(5.0)
        link.dispatch(100, 100)
    client, _ = link.controllers
    assert client.congestion_window >= 128 * 1232


def test_copies_are_not_sent_into_a_full_queue() -> None:
    world = VirtualWorld(seed=1)
    link = world.link(PATH, through=world.bottleneck(rate_bit_s=20e6, queue_bytes=64_000))
    link.open()
    link.dispatch(100_000, 100)
    repaired = link.client.repair_bytes
    for _ in range(20):
        link.dispatch(12_288, 100)
    assert link.client.repair_bytes == repaired


class Busy:
    """A host that takes in nothing for 15 to 40 ms again and again, as one that computes does."""

    def __init__(self, side: Side, rng: random.Random) -> None:
        self._side, self._rng = side, rng
        self._held: list[bytes] = []
        self._is_paused = False
        self._arrive = side.arrive
        side.arrive = self.arrive  # type: ignore[method-assign]
        side.world.call_in(rng.uniform(0.0, 0.020), self._pause)

    def arrive(self, data: bytes) -> None:
        if self._is_paused:
            self._held.append(data)
        else:
            self._arrive(data)

    def _pause(self) -> None:
        self._is_paused = True
        self._side.world.call_in(self._rng.uniform(0.015, 0.040), self._wake)

    def _wake(self) -> None:
        self._is_paused = False
        held, self._held = self._held, []
        if held:
            self._side.receive(held)
        self._side.world.call_in(self._rng.uniform(0.0, 0.020), self._pause)


def busy_bulk(seconds: float, *, are_senders_busy: bool = False) -> float:
    """Return the Mbit/s of three endless transfers together over 100 Mbit/s at 20 ms, to hosts that pause."""
    world, rng = VirtualWorld(seed=1), random.Random(1)
    bottleneck = world.bottleneck(rate_bit_s=100e6, queue_bytes=250_000)
    got = 0

    def count(stream: int, size: int, is_end: bool) -> None:
        nonlocal got
        got += size

    links = [world.link(PathSpec(delay_s=0.010), through=bottleneck) for _ in range(3)]
    for link in links:
        link.server.on_data = count
        link.open()
        Busy(link.server, rng)
        if are_senders_busy:
            Busy(link.client, rng)
    for link in links:
        link.client.send(0, 40_000_000)
    world.run_for(1.0)
    before = got
    world.run_for(seconds)
    return (got - before) * 8e-6 / seconds


def test_busy_hosts_are_not_taken_for_a_queue() -> None:
    assert busy_bulk(2.0) >= 70  # Mbit/s: 82; none at all where an acknowledgement that empties the window woke nothing


def test_busy_hosts_at_both_ends_slow_a_transfer_and_do_not_stop_it() -> None:
    assert busy_bulk(2.0, are_senders_busy=True) >= 42  # 50 Mbit/s; 33 where one round of delay counted as a queue


def test_an_acknowledgement_of_the_whole_window_lets_the_next_one_leave() -> None:
    link = opened()
    client, _ = link.controllers
    link.client.send(0, 10_000_000)
    link.client.driver._n_lost = client.n_lost  # type: ignore[union-attr]
    assert client.bytes_in_flight + 1232 > client.congestion_window
    client.bytes_in_flight = 0
    assert link.client.driver is not None
    assert link.client.driver.wants_flush()


def sent_in_order(link: VirtualLink) -> list[tuple[int, int, bool]]:
    arrived: list[tuple[int, int, bool]] = []
    link.server.on_data = lambda stream, size, is_end: arrived.append((stream, size, is_end))
    return arrived


def test_long_streams_arrive_one_after_the_other() -> None:
    link = opened()
    arrived = sent_in_order(link)
    assert link.client.driver is not None
    for stream in (0, 4, 8):
        link.client.driver.quic.send_stream_data(stream, bytes(60_000), True)
    link.client.pump(has_data=True)
    link.world.run_for(1.0)
    assert [stream for stream, _, is_end in arrived if is_end] == [0, 4, 8]
    begins = [next(at for at, (stream, _, _) in enumerate(arrived) if stream == each) for each in (0, 4, 8)]
    ends = [
        next(at for at, (stream, _, is_end) in enumerate(arrived) if stream == each and is_end) for each in (0, 4, 8)
    ]
    assert begins[1] >= ends[0] - 14  # the last 16 KB of a stream count as a short one, as do those of the next
    assert begins[2] >= ends[1] - 14


def test_a_short_stream_goes_before_the_long_one_under_way() -> None:
    link = opened()
    arrived = sent_in_order(link)
    assert link.client.driver is not None
    for stream, size in ((0, 60_000), (4, 60_000), (8, 10_000)):
        link.client.driver.quic.send_stream_data(stream, bytes(size), True)
    link.client.pump(has_data=True)
    link.world.run_for(1.0)
    assert [stream for stream, _, is_end in arrived if is_end] == [8, 0, 4]
    assert {stream for stream, _, _ in arrived[:9]} == {8}
    arrived.clear()
    link.client.driver.quic.send_stream_data(12, bytes(60_000), True)  # those before it have nothing left
    link.client.driver.quic.send_stream_data(16, bytes(60_000), True)
    link.client.pump(has_data=True)
    link.world.run_for(1.0)
    assert {stream for stream, _, _ in arrived[:30]} == {12}


def test_a_small_request_overtakes_a_long_one() -> None:
    world = VirtualWorld(seed=1)
    link = world.link(PathSpec(delay_s=0.010), through=world.bottleneck(rate_bit_s=100e6, queue_bytes=250_000))
    link.open()
    link.ask(20_000_000, 100)
    world.run_for(1.0)
    times = [link.dispatch(2_000, 2_000) for _ in range(20)]
    assert (
        max(times) < 0.060
    )  # the path, and the queue that the transfer fills, and the pace of what is left of its burst
    assert percentile(times, 0.5) < 0.045
