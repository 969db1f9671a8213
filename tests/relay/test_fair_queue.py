"""The fair queue: turns by bytes, who seldom sends goes first, and a flow that must wait holds up nobody."""

from __future__ import annotations

import pytest

from relay.fair_queue import FairQueue, Flow
from relay.quotas import byte_bucket
from swarm.token_bucket import TokenBucket

T0 = 100.0
MBIT = 1_000_000


def bucket(rate_bit_s: float, burst: float = 3000.0) -> TokenBucket:
    return TokenBucket(rate_per_s=rate_bit_s / 8, burst=burst, now=T0)


def flow(rate_bit_s: float = 1000 * MBIT, queue_s: float = 0.03) -> Flow:
    return Flow((bucket(rate_bit_s, 1e6), bucket(1000 * MBIT, 1e6)), queue_s)


def passed(queue: FairQueue, now: float) -> list[tuple[Flow, list[bytes]]]:
    return queue.drain(now)


def test_what_is_within_the_rates_passes_at_once() -> None:
    queue = FairQueue(bucket(8 * MBIT))
    assert queue.offer(flow(), [b"x" * 1000] * 3, 3000, T0) == 3
    assert not queue.is_waiting
    assert queue.next_deadline() is None


def test_of_a_run_that_is_too_long_the_beginning_passes_and_the_rest_waits() -> None:
    queue, one = FairQueue(bucket(8 * MBIT)), flow()
    run = [bytes([at]) * 1000 for at in range(5)]
    assert queue.offer(one, run, 5000, T0) == 3
    assert queue.drain(T0) == []
    deadline = queue.next_deadline()
    assert deadline is not None
    assert T0 < deadline < T0 + 0.01
    out: list[bytes] = []
    while (deadline := queue.next_deadline()) is not None:
        for of, packets in queue.drain(deadline):
            assert of is one
            out += packets
    assert out == run[3:]


def test_what_comes_behind_waiting_packets_waits_too_so_that_the_order_stays() -> None:
    queue, one = FairQueue(bucket(8 * MBIT)), flow()
    queue.offer(one, [b"a" * 1000] * 4, 4000, T0)
    assert queue.offer(one, [b"b" * 10], 10, T0) == 0


def test_flows_that_always_send_get_equal_bytes_whatever_their_packets_size() -> None:
    queue = FairQueue(bucket(8 * MBIT, burst=3000))
    small, large = flow(queue_s=10), flow(queue_s=10)
    queue.offer(small, [b"s" * 100] * 3000, 300_000, T0)
    queue.offer(large, [b"l" * 1400] * 300, 420_000, T0)
    got = {small: 0, large: 0}
    now = T0
    while now < T0 + 0.2:
        now = max(now, queue.next_deadline() or now)
        for of, packets in queue.drain(now):
            got[of] += sum(map(len, packets))
    assert sum(got.values()) == pytest.approx(200_000, rel=0.05)
    assert got[small] == pytest.approx(got[large], rel=0.05)


def test_who_seldom_sends_goes_before_those_who_always_do() -> None:
    queue = FairQueue(bucket(8 * MBIT))
    heavy, light = [flow(queue_s=1) for _ in range(5)], flow()
    for each in heavy:
        queue.offer(each, [b"h" * 1000] * 50, 50_000, T0)
    now = T0
    for _ in range(30):
        now = queue.next_deadline() or now
        queue.drain(now)
    assert queue.offer(light, [b"quick" * 10], 50, now) == 0
    now = queue.next_deadline() or now
    order = [of for of, _ in queue.drain(now)]
    assert order[0] is light


def test_a_flow_that_waits_for_its_own_bucket_holds_up_nobody() -> None:
    queue = FairQueue(bucket(1000 * MBIT, 1e6))
    slow, other = Flow((bucket(1 * MBIT), bucket(1000 * MBIT, 1e6)), 1.0), flow()
    queue.offer(slow, [b"s" * 1000] * 10, 10_000, T0)
    queue.drain(T0)
    assert queue.is_waiting
    assert queue.offer(other, [b"o" * 1000], 1000, T0) == 1
    deadline = queue.next_deadline()
    assert deadline is not None
    assert [len(packets) for _, packets in queue.drain(deadline)] == [1]


def test_a_full_queue_drops_what_comes_last_and_counts_it() -> None:
    queue, one = FairQueue(bucket(8 * MBIT, 2944)), flow(8 * MBIT, queue_s=0.005)
    queue.offer(one, [b"x" * 1000] * 20, 20_000, T0)
    assert one.n_queued_bytes == 5000
    assert queue.n_dropped == 20 - 2 - 5


def test_a_cleared_flow_sends_nothing_more() -> None:
    queue, one = FairQueue(bucket(8 * MBIT)), flow()
    queue.offer(one, [b"x" * 1000] * 10, 10_000, T0)
    one.clear()
    assert queue.drain(T0 + 1) == []
    assert queue.next_deadline() is None


def test_a_rate_below_a_packet_still_lets_packets_through() -> None:
    queue, one = FairQueue(byte_bucket(1000, T0)), flow(queue_s=1)
    run = [b"x" * 1400] * 4
    n = queue.offer(one, run, 5600, T0)
    assert n == 2
    now, n_steps = T0, 0
    while (deadline := queue.next_deadline()) is not None:
        now, n_steps = max(now, deadline), n_steps + 1
        n += sum(len(packets) for _, packets in queue.drain(now))
        assert n_steps < 20, "it is asked again and again"
    assert n == 4


def test_what_comes_while_others_wait_does_not_jump_the_line_for_ever() -> None:
    queue, heavy, other = FairQueue(bucket(8 * MBIT)), flow(queue_s=1), flow(queue_s=1)
    queue.offer(heavy, [b"h" * 1000] * 300, 300_000, T0)
    got = {heavy: 0, other: 0}
    for step in range(1, 200):
        now = T0 + 0.001 * step
        got[other] += 1000 * queue.offer(other, [b"o" * 1000], 1000, now)
        for of, packets in queue.drain(now):
            got[of] += sum(map(len, packets))
    assert got[heavy] >= 0.4 * sum(got.values())
