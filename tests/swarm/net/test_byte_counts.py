"""Bytes by the kind of path: what is added up, what is told apart, and that links count after they have ended."""

from __future__ import annotations

import pytest

from swarm.net.byte_counts import (
    MAX_RECORD_BYTES,
    RECORD_OVERHEAD_BYTES,
    Amount,
    ByteCounts,
    PathKind,
    n_tls_records,
    tls_bytes,
)


class Link:
    """One that has moved this many bytes."""

    def __init__(self, kind: PathKind, sent: int, received: int) -> None:
        self.path_kind = kind
        self.moved = Amount(sent, received)

    def wire_bytes(self) -> Amount:
        return self.moved


def test_what_goes_through_a_relay_is_no_longer_direct() -> None:
    counts = ByteCounts(
        udp_sent=100, udp_received=50, udp_repair=20, relayed_sent=30, relayed_received=10, relayed_repair=5
    )
    now = counts.now()
    assert now.by_kind[PathKind.DIRECT] == Amount(70, 40, 15)
    assert now.by_kind[PathKind.RELAY] == Amount(30, 10, 5)
    assert now.total == Amount(100, 50, 20)


def test_links_count_by_what_carries_them_and_go_on_counting_after_their_end() -> None:
    counts = ByteCounts()
    tls, unix = Link(PathKind.TLS, 10, 20), Link(PathKind.UNIX, 1, 2)
    counts.begin(tls)
    counts.begin(unix)
    assert (counts.links(PathKind.TLS), counts.links(PathKind.UNIX)) == (Amount(10, 20), Amount(1, 2))
    tls.moved = Amount(15, 25)
    counts.end(tls)
    counts.end(tls)
    tls.moved = Amount(99, 99)
    again = Link(PathKind.TLS, 5, 5)
    counts.begin(again)
    assert counts.links(PathKind.TLS) == Amount(20, 30)
    assert counts.links() == Amount(21, 32)


def test_the_difference_of_two_moments_is_what_moved_between_them() -> None:
    counts = ByteCounts()
    link = Link(PathKind.TLS, 1000, 1000)
    counts.begin(link)
    before = counts.now()
    counts.udp_sent += 40
    counts.udp_repair += 8
    link.moved = Amount(1200, 1400)
    moved = counts.now() - before
    assert moved.total == Amount(240, 400, 8)
    assert moved.shares(4) == {"direct": {"out": 10.0, "back": 0.0}, "tls": {"out": 50.0, "back": 100.0}}
    assert moved.both_ways() == {"direct": (48, 0), "tls": (200, 400)}, "what goes twice is paid for twice"
    assert (moved + moved).total == Amount(480, 800, 16)


@pytest.mark.parametrize(
    ("n_content", "n_records"), [(0, 0), (1, 1), (MAX_RECORD_BYTES, 1), (MAX_RECORD_BYTES + 1, 2), (1 << 20, 64)]
)
def test_tls_cuts_what_is_written_into_records_and_adds_to_each(n_content: int, n_records: int) -> None:
    assert n_tls_records(n_content) == n_records
    assert tls_bytes(n_content, n_records) == n_content + n_records * RECORD_OVERHEAD_BYTES
