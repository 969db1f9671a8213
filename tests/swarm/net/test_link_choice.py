"""When a TLS link is opened beside QUIC, kept, and left alone."""

from __future__ import annotations

import pytest

from swarm.net import link_choice as c
from swarm.net.link_choice import LinkChoice, PathFacts


def facts(rtt_s: float | None = 0.001, *, is_relayed: bool = False, is_lossy: bool = False) -> PathFacts:
    return PathFacts(rtt_s=rtt_s, is_relayed=is_relayed, is_lossy=is_lossy)


def test_a_short_clean_direct_path_gets_one() -> None:
    assert LinkChoice().wants(facts(), 0.0)


@pytest.mark.parametrize(
    "other",
    [facts(None), facts(0.03), facts(is_relayed=True), facts(0.008, is_lossy=True)],
    ids=["unknown", "long", "relayed", "lossy"],
)
def test_any_other_path_gets_none(other: PathFacts) -> None:
    assert not LinkChoice().wants(other, 0.0)


def test_an_open_one_is_kept_where_a_new_one_would_not_be_opened() -> None:
    between = facts((c.MAX_RTT_S + c.KEEP_RTT_S) / 2)
    choice = LinkChoice()
    assert not choice.wants(between, 0.0)
    choice.opened(0.0)
    assert choice.wants(between, 1.0)
    assert not choice.wants(facts(2 * c.KEEP_RTT_S), 1.0)
    assert not choice.wants(facts(2 * c.LOSSY_MAX_RTT_S, is_lossy=True), 1.0)
    choice.closed()
    assert not choice.wants(between, 2.0)


def test_after_failures_it_is_tried_less_and_less_often_and_anew_after_a_long_life() -> None:
    choice, now = LinkChoice(), 0.0
    waits = []
    for _ in range(9):
        choice.failed(now)
        began = now
        while not choice.wants(facts(), now):
            now += 1.0
        waits.append(now - began)
    assert waits[:3] == [c.FIRST_RETRY_S, 2 * c.FIRST_RETRY_S, 4 * c.FIRST_RETRY_S]
    assert waits[-1] == c.LONGEST_RETRY_S
    choice.opened(now)
    now += c.FORGIVEN_AFTER_S
    choice.failed(now)
    assert not choice.wants(facts(), now + c.FIRST_RETRY_S - 1)
    assert choice.wants(facts(), now + c.FIRST_RETRY_S)


def test_on_the_shortest_paths_losses_do_not_matter() -> None:
    choice = LinkChoice()
    assert choice.wants(facts(c.LOSSY_MAX_RTT_S, is_lossy=True), 0.0)
    choice.opened(0.0)
    assert not choice.loses(100, 100, c.LOSSY_MAX_RTT_S)


def test_on_a_longer_path_a_link_that_loses_many_packets_is_given_up_for_long() -> None:
    choice, rtt_s, many = LinkChoice(), 2 * c.LOSSY_MAX_RTT_S, c.GIVEN_UP_LOSSES
    choice.opened(0.0)
    assert not choice.loses(c.COPIED_PACKETS // 2, many - 1, rtt_s)
    assert not choice.loses(2 * c.COPIED_PACKETS, many, rtt_s), "the others were long ago"
    assert choice.loses(2 * c.COPIED_PACKETS + 100, 2 * many - 1, rtt_s)
    choice.given_up(10.0)
    assert not choice.wants(facts(rtt_s), 10.0 + c.LONGEST_RETRY_S - 1)
    assert choice.wants(facts(rtt_s), 10.0 + c.LONGEST_RETRY_S)
    choice.opened(1000.0)
    assert not choice.loses(c.COPIED_PACKETS - 1, many - 1, rtt_s), "a new link is counted anew"


def test_what_a_link_tells_while_it_rests_takes_no_memory() -> None:
    choice = LinkChoice()
    for _ in range(100):
        choice.copies(500, 1)
    assert len(choice._told) == 2


def test_a_link_that_loses_much_is_doubled_until_it_loses_little() -> None:
    choice = LinkChoice()
    assert not choice.copies(1000, c.COPIED_LOSSES - 1)
    assert choice.copies(1001, c.COPIED_LOSSES)
    assert choice.copies(1000 + c.COPIED_PACKETS, c.COPIED_LOSSES + 1), "a few are enough to go on"
    assert not choice.copies(3000 + c.COPIED_PACKETS, c.COPIED_LOSSES + 1)
    assert not choice.copies(3001 + c.COPIED_PACKETS, c.COPIED_LOSSES + 2), "and too few to begin again"


def test_losses_that_are_far_apart_double_nothing() -> None:
    choice = LinkChoice()
    assert not any(choice.copies(n * 100, n * 100 // c.COPIED_PACKETS) for n in range(1, 200))


def test_a_new_link_begins_without_a_past() -> None:
    choice = LinkChoice()
    assert choice.copies(100, c.COPIED_LOSSES)
    choice.opened(0.0)
    assert not choice.copies(10, c.UNCOPIED_LOSSES)
