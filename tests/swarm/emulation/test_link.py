"""A link of finite rate with a bounded queue."""

from __future__ import annotations

import pytest

from swarm.emulation.link import DEFAULT_QUEUE_S, NS_PER_S, Link, LinkSpec

MS = NS_PER_S // 1000
START = 5 * NS_PER_S


def test_without_a_rate_a_packet_leaves_when_it_came() -> None:
    link = Link(LinkSpec())
    assert [link.carry(1500, START) for _ in range(1000)] == [START] * 1000


def test_back_to_back_packets_leave_their_own_length_apart() -> None:
    link = Link(LinkSpec(rate_bit_s=10_000_000, queue_s=10))
    left = [link.carry(1250, START) for _ in range(100)]
    assert left == [START + (i + 1) * MS for i in range(100)]


def test_an_idle_link_saves_nothing_up() -> None:
    link = Link(LinkSpec(rate_bit_s=10_000_000))
    assert link.carry(1250, START) == START + MS
    assert link.carry(1250, START + 100 * MS) == START + 101 * MS


def test_rounding_does_not_add_up() -> None:
    link = Link(LinkSpec(rate_bit_s=3_000_000_000, queue_s=10))  # 2.667 ns a byte
    for _ in range(9000):
        last = link.carry(1, START)
    assert last is not None
    assert abs(last - (START + 24_000)) <= 1


def test_another_rate_counts_for_what_comes_from_then_on() -> None:
    link = Link(LinkSpec(rate_bit_s=10_000_000))
    assert link.carry(1250, START) == START + MS
    link.spec = LinkSpec(rate_bit_s=1_000_000, queue_s=0.002)
    assert link.carry(1250, START) == START + 11 * MS, "it waits for the packet before, at the old rate"
    assert link.carry(1250, START) is None, "the new queue's bound"
    assert link.carry(1250, START + 20 * MS) == START + 30 * MS


def test_a_full_queue_drops_the_newcomer_and_keeps_the_rest() -> None:
    link = Link(LinkSpec(rate_bit_s=10_000_000, queue_s=0.003))
    left = [link.carry(1250, START) for _ in range(6)]
    assert left == [START + MS, START + 2 * MS, START + 3 * MS, START + 4 * MS, None, None]
    assert link.carry(1250, START + MS) == START + 5 * MS  # one has left


def test_a_bound_in_bytes_is_what_may_wait_ahead() -> None:
    link = Link(LinkSpec(rate_bit_s=20_000_000, queue_bytes=64_000))
    n_taken = sum(link.carry(1000, START) is not None for _ in range(200))
    assert n_taken == 65  # 64 KB ahead of the last


def test_an_idle_link_takes_a_packet_whatever_the_bound() -> None:
    link = Link(LinkSpec(rate_bit_s=1000, queue_bytes=0))
    assert link.carry(1500, START) == START + 12 * NS_PER_S
    assert link.carry(1, START) is None


def test_a_rate_without_a_bound_has_the_default_one() -> None:
    assert LinkSpec(rate_bit_s=1e6).longest_wait_ns == round(DEFAULT_QUEUE_S * NS_PER_S)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate_bit_s": 0},
        {"rate_bit_s": -1},
        {"rate_bit_s": float("nan")},
        {"queue_s": -1.0},
        {"queue_bytes": -1},
        {"queue_s": 1.0, "queue_bytes": 1},
    ],
)
def test_impossible_links_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        LinkSpec(**wrong)  # type: ignore[arg-type]
