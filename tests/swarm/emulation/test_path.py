"""When packets come out of an emulated network, and which do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from swarm.emulation.link import NS_PER_S, Link, LinkSpec
from swarm.emulation.path import Drop, Network, OneWay, Packet, PathSpec

MS = NS_PER_S // 1000
START = 3 * NS_PER_S


def never() -> float:
    """A draw that loses nothing and leaves the delay as it is."""
    return 0.5


def way(rng: Callable[[], float] = never, up: Link | None = None, down: Link | None = None, **spec: float) -> OneWay:
    return OneWay(PathSpec(**spec), rng, up=up, down=down)  # type: ignore[arg-type]


def drain(network: Network[int]) -> Iterator[Packet[int]]:
    """Yield what comes out, looked at exactly when the network asks for it."""
    while (due_ns := network.next_due_ns()) is not None:
        while (packet := network.pop_due(due_ns)) is not None:
            yield packet


def send(one_way: OneWay, entered: list[int], size: int = 1000) -> list[tuple[int, int]]:
    """Return (number, due) of what comes out when packet i enters at entered[i]."""
    network: Network[int] = Network()
    for i, at in enumerate(entered):
        network.offer(one_way, i, size, at)
    return [(packet.payload, packet.due_ns) for packet in drain(network)]


def test_the_delay_is_exact() -> None:
    assert send(way(delay_s=0.02), [START, START + 1, START + 7 * MS]) == [
        (0, START + 20 * MS),
        (1, START + 20 * MS + 1),
        (2, START + 27 * MS),
    ]


def test_a_packet_comes_out_at_its_time_and_not_a_nanosecond_before() -> None:
    network: Network[int] = Network()
    network.offer(way(delay_s=0.1), 0, 1000, START)
    assert network.next_due_ns() == START + 100 * MS
    assert network.pop_due(START + 100 * MS - 1) is None
    packet = network.pop_due(START + 100 * MS)
    assert packet is not None
    assert (packet.entered_ns, packet.due_ns) == (START, START + 100 * MS)
    assert network.next_due_ns() is None


def test_what_is_next_due_can_always_be_taken_then() -> None:
    """In floats `sent + delay == now` and `sent <= now - delay` can disagree: the loop would spin or sleep for nothing."""
    rng = random.Random(1)
    network: Network[int] = Network()
    down = Link(LinkSpec(rate_bit_s=123_456_789, queue_s=1))
    for i in range(2000):
        one_way = way(rng.random, down=down, delay_s=rng.random(), rate_bit_s=rng.uniform(1e6, 1e9))
        network.offer(one_way, i, rng.randrange(20, 1500), START + rng.randrange(NS_PER_S))
    n_looks = 0
    while (due_ns := network.next_due_ns()) is not None:
        assert network.pop_due(due_ns - 1) is None
        network.pop_due(due_ns)
        n_looks += 1
        assert network.next_due_ns() != due_ns or n_looks < 4000
    assert n_looks <= 4000  # one at the far link, one at the receiver


def test_a_rate_spaces_packets_by_their_length() -> None:
    out = send(way(delay_s=0.02, rate_bit_s=8_000_000, queue_s=10), [START] * 50)
    assert out == [(i, START + 20 * MS + (i + 1) * MS) for i in range(50)]


def test_paths_of_one_host_share_its_access_link() -> None:
    up = Link(LinkSpec(rate_bit_s=8_000_000, queue_s=10))
    near, far = way(up=up, delay_s=0.01), way(up=up, delay_s=0.03)
    network: Network[int] = Network()
    for i in range(10):
        network.offer((near, far)[i % 2], i, 1000, START)
    due = {packet.payload: packet.due_ns for packet in drain(network)}
    assert due == {i: START + (i + 1) * MS + (10, 30)[i % 2] * MS for i in range(10)}


def test_the_receivers_link_serves_in_the_order_of_arrival_there() -> None:
    """The far sender's packets, sent first, must not keep the link busy before they are there."""
    down = Link(LinkSpec(rate_bit_s=8_000_000, queue_s=10))
    near, far = way(down=down, delay_s=0.01), way(down=down, delay_s=0.04)
    network: Network[int] = Network()
    for i in range(5):
        network.offer(far, i, 1000, START)
    for i in range(5, 10):
        network.offer(near, i, 1000, START + MS)
    out = [(packet.payload, packet.due_ns) for packet in drain(network)]
    assert out == [(i, START + (11 + i - 4) * MS) for i in range(5, 10)] + [
        (i, START + (41 + i) * MS) for i in range(5)
    ]


def test_looking_late_changes_no_packets_time() -> None:
    def run(looks: list[int]) -> list[tuple[int, int]]:
        down = Link(LinkSpec(rate_bit_s=8_000_000, queue_s=10))
        network: Network[int] = Network()
        for i in range(20):
            network.offer(way(down=down, delay_s=0.01 + i % 3 * 0.001), i, 1000, START + i * 100_000)
        out = []
        for look in looks:
            while (packet := network.pop_due(look)) is not None:
                out.append((packet.payload, packet.due_ns))
        return out

    assert run([START + NS_PER_S]) == run([START + i * 10_000 for i in range(10_000)])


def test_both_access_links_of_a_star_bind() -> None:
    """Ten peers answer a backbone at once: its own link spaces what their links let through together."""
    down = Link(LinkSpec(rate_bit_s=8_000_000, queue_s=10))
    network: Network[int] = Network()
    for i in range(10):
        up = Link(LinkSpec(rate_bit_s=80_000_000))
        network.offer(way(up=up, down=down, delay_s=0.02), i, 1000, START)
    due = [packet.due_ns for packet in drain(network)]
    assert due == [START + 20 * MS + MS // 10 + (i + 1) * MS for i in range(10)]


@pytest.mark.parametrize("side", ["own", "up", "down"])
def test_a_full_queue_drops_the_last_and_counts_them(side: str) -> None:
    link = Link(LinkSpec(rate_bit_s=8_000_000, queue_s=0.004))
    one_way = {
        "own": lambda: way(rate_bit_s=8_000_000, queue_s=0.004),
        "up": lambda: way(up=link),
        "down": lambda: way(down=link),
    }[side]()
    out = send(one_way, [START] * 20)
    assert [number for number, _ in out] == [0, 1, 2, 3, 4]
    assert one_way.drops == {Drop.QUEUE: 15}
    assert one_way.n_offered == 20


def test_jitter_is_uniform_around_the_delay() -> None:
    rng = random.Random(2)
    out = send(way(rng.random, delay_s=0.03, jitter_s=0.005), [START + i * 20 * MS for i in range(4000)])
    delays = [due - (START + i * 20 * MS) for i, due in out]
    assert 25 * MS <= min(delays) < 25.1 * MS
    assert 34.9 * MS < max(delays) <= 35 * MS
    assert abs(sum(delays) / len(delays) / MS - 30) < 0.2  # 4 sigma of the mean: 5 / sqrt(3) / sqrt(4000) * 4


def test_jitter_reorders_only_when_asked() -> None:
    entered = [START + i * MS for i in range(500)]
    ordered = send(way(random.Random(3).random, delay_s=0.03, jitter_s=0.005), entered)
    assert [number for number, _ in ordered] == list(range(500))
    assert [due for _, due in ordered] == sorted(due for _, due in ordered)
    overtaking = send(way(random.Random(3).random, delay_s=0.03, jitter_s=0.005, reorders=True), entered)
    assert [number for number, _ in overtaking] != list(range(500))
    assert sorted(number for number, _ in overtaking) == list(range(500))


def test_packets_due_at_the_same_time_come_out_as_they_came_in() -> None:
    assert [number for number, _ in send(way(delay_s=0.01), [START] * 100)] == list(range(100))


def test_loss_is_the_share_asked_for() -> None:
    one_way = way(random.Random(4).random, loss=0.1)
    n_lost = 10_000 - len(send(one_way, [START] * 10_000))
    assert 880 < n_lost < 1120  # 4 sigma
    assert one_way.drops == {Drop.LOSS: n_lost}


def test_a_lost_packet_has_used_the_link() -> None:
    out = send(way(iter([0.0, 0.5, 0.9, 0.5]).__next__, loss=0.5, rate_bit_s=8_000_000), [START, START])
    assert out == [(1, START + 2 * MS)]


def test_a_cut_path_lets_nothing_through() -> None:
    assert send(way(random.Random(5).random, loss=1.0), [START] * 1000) == []


def test_the_same_seed_gives_the_same_network() -> None:
    def run(seed: int, jitter_s: float = 0.005) -> list[tuple[int, int]]:
        spec = {"delay_s": 0.03, "jitter_s": jitter_s, "loss": 0.05}
        return send(way(random.Random(seed).random, **spec), [START + i * MS for i in range(1000)])

    assert run(6) == run(6)
    assert run(6) != run(7)
    assert [number for number, _ in run(6)] == [number for number, _ in run(6, 0.0)]  # jitter changes no loss


def test_a_changed_path_holds_for_later_packets() -> None:
    one_way = way(delay_s=0.02)
    network: Network[int] = Network()
    network.offer(one_way, 0, 1000, START)
    one_way.spec = PathSpec(delay_s=0.08)
    network.offer(one_way, 1, 1000, START)
    one_way.spec = PathSpec(delay_s=0.01)
    network.offer(one_way, 2, 1000, START)
    out = [(packet.payload, packet.due_ns - START) for packet in drain(network)]
    assert out == [(0, 20 * MS), (1, 80 * MS), (2, 80 * MS)]  # no overtaking, even then


def test_the_network_holds_a_bounded_number_of_bytes() -> None:
    network: Network[int] = Network(max_held_bytes=10_000)
    one_way = way(delay_s=1)
    for i in range(20):
        network.offer(one_way, i, 1000, START)
    assert one_way.drops == {Drop.OVERFLOW: 10}
    assert len(list(drain(network))) == 10
    for i in range(20):
        network.offer(one_way, i, 1000, START)
    assert one_way.drops == {Drop.OVERFLOW: 20}


def test_what_a_receivers_full_queue_drops_is_held_no_more() -> None:
    network: Network[int] = Network(max_held_bytes=10_000)
    one_way = way(down=Link(LinkSpec(rate_bit_s=1000, queue_bytes=0)))
    for _ in range(50):
        for i in range(10):
            network.offer(one_way, i, 1000, START)
        list(drain(network))
    assert Drop.OVERFLOW not in one_way.drops


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay_s": -1.0},
        {"delay_s": 0.01, "jitter_s": 0.02},
        {"jitter_s": -0.1},
        {"loss": 1.1},
        {"loss": -0.1},
        {"delay_s": float("nan")},
        {"delay_s": float("inf")},
        {"rate_bit_s": 0.0},
        {"queue_s": 1.0, "queue_bytes": 1},
    ],
)
def test_impossible_paths_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        PathSpec(**wrong)  # type: ignore[arg-type]
