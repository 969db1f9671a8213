"""Which datagrams are sent a second time, and when."""

from __future__ import annotations

import pytest

from swarm.net.repair import (
    LONG_FLIGHT_PACKETS,
    MAX_FLIGHT_PACKETS,
    MAX_WAITING,
    PROTECTED_PACKETS,
    Repair,
    needs_protection,
)


def flight(n: int, size: int = 1200) -> list[bytes]:
    return [bytes([at % 256]) * size for at in range(n)]


def test_a_small_flight_on_a_lossy_path_is_sent_again_whole_and_unchanged() -> None:
    repair = Repair()
    sent = flight(11)
    repair.sent(sent, 5.0, rtt_s=0.08, is_protected=True)
    at = repair.next_deadline()
    assert at is not None
    assert at == pytest.approx(5.0025)
    assert repair.due(5.0) == []
    assert repair.due(at) == sent
    assert repair.next_deadline() is None


@pytest.mark.parametrize(("rtt_s", "spacing_s"), [(0.0, 0.001), (0.001, 0.001), (0.08, 0.0025), (1.0, 0.004)])
def test_the_copies_follow_a_little_later(rtt_s: float, spacing_s: float) -> None:
    repair = Repair()
    repair.sent(flight(1), 1.0, rtt_s=rtt_s, is_protected=True)
    assert repair.next_deadline() == pytest.approx(1.0 + spacing_s)


def test_a_clean_path_gets_no_copies_of_small_flights() -> None:
    repair = Repair()
    repair.sent(flight(LONG_FLIGHT_PACKETS - 1), 1.0, rtt_s=0.08, is_protected=False)
    assert repair.next_deadline() is None


@pytest.mark.parametrize(("n", "is_protected"), [(LONG_FLIGHT_PACKETS, False), (MAX_FLIGHT_PACKETS + 1, True)])
def test_of_a_long_flight_the_last_packet_is_sent_again(n: int, is_protected: bool) -> None:
    repair = Repair()
    sent = flight(n)
    repair.sent(sent, 1.0, rtt_s=0.08, is_protected=is_protected)
    assert repair.due(2.0) == sent[-1:]


def test_bare_acknowledgements_are_not_repaired() -> None:
    repair = Repair()
    repair.sent(flight(1, size=40), 1.0, rtt_s=0.08, is_protected=True)
    assert repair.next_deadline() is None


def test_a_messages_last_few_bytes_are_repaired_like_the_rest() -> None:
    repair = Repair()
    sent = [*flight(10), *flight(1, size=55)]
    repair.sent(sent, 1.0, rtt_s=0.08, is_protected=True)
    assert repair.due(2.0) == sent
    long = [*flight(LONG_FLIGHT_PACKETS), *flight(1, size=55)]
    repair.sent(long, 1.0, rtt_s=0.08, is_protected=False)
    assert repair.due(2.0) == long[-1:]


def test_what_waits_is_bounded() -> None:
    repair = Repair()
    for _ in range(20):
        repair.sent(flight(MAX_FLIGHT_PACKETS), 1.0, rtt_s=0.08, is_protected=True)
    assert len(repair.due(2.0)) == MAX_WAITING


def test_protection_lasts_for_some_packets_after_a_loss() -> None:
    assert not needs_protection(n_packets=10, n_packets_at_loss=None, is_congested=False)
    assert needs_protection(n_packets=10, n_packets_at_loss=10, is_congested=False)
    assert needs_protection(n_packets=PROTECTED_PACKETS, n_packets_at_loss=1, is_congested=False)
    assert not needs_protection(n_packets=PROTECTED_PACKETS + 1, n_packets_at_loss=1, is_congested=False)


def test_a_full_queue_is_not_fed_with_copies() -> None:
    assert not needs_protection(n_packets=10, n_packets_at_loss=10, is_congested=True)
