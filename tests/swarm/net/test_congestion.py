"""The controller and the pacer alone, fed with packets as aioquic would; how they fare on paths is test_virtual_link."""

from __future__ import annotations

import math

import pytest
from aioquic.quic import recovery
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.tls import Epoch

from swarm.errors import UserError
from swarm.identity import Identity
from swarm.net import congestion
from swarm.net.certificate import make_certificate, quic_configuration
from swarm.net.congestion import MEMORY_S, MIN_WINDOW_PACKETS, Pacer, SwarmCongestionControl, application_space, attach

PACKET = 1232
RTT = 0.08


def fresh() -> SwarmCongestionControl:
    return SwarmCongestionControl(max_datagram_size=PACKET)


def send(controller: SwarmCongestionControl, n: int, now: float) -> list[QuicSentPacket]:
    packets = [
        QuicSentPacket(
            Epoch.ONE_RTT, True, True, False, number, QuicPacketType.ONE_RTT, sent_time=now, sent_bytes=PACKET
        )
        for number in range(n)
    ]
    for packet in packets:
        controller.on_packet_sent(packet=packet)
    return packets


def acknowledge(controller: SwarmCongestionControl, packets: list[QuicSentPacket], now: float) -> None:
    """Eight to an acknowledgement, each of which measures the round trip."""
    for at in range(0, len(packets), 8):
        for packet in packets[at : at + 8]:
            controller.on_packet_acked(now=now, packet=packet)
        controller.on_rtt_measurement(now=now, rtt=now - (packets[at].sent_time or 0.0))


def full_round(controller: SwarmCongestionControl, now: float, rtt: float = RTT, n_lost: int = 0) -> int:
    """A window's worth of packets, of which the last `n_lost` are lost; returns how many there were."""
    packets = send(controller, controller.congestion_window // PACKET, now)
    acknowledge(controller, packets[: len(packets) - n_lost], now + rtt)
    if n_lost:
        controller.on_packets_lost(now=now + rtt, packets=packets[-n_lost:])
    assert controller.bytes_in_flight == 0
    return len(packets)


def test_the_first_flight_holds_100_kb() -> None:
    controller = fresh()
    assert controller.congestion_window >= 128 * PACKET > 100_000
    assert controller.burst_bytes() > 100_000


def test_an_unused_window_does_not_grow_and_a_used_one_doubles() -> None:
    controller = fresh()
    start = controller.congestion_window
    for at in range(20):
        acknowledge(controller, send(controller, 10, at * RTT), (at + 1) * RTT)
    assert controller.congestion_window == start
    full_round(controller, 10.0)
    full_round(controller, 11.0)
    assert controller.congestion_window >= 2 * start


def test_the_window_has_a_ceiling() -> None:
    controller = fresh()
    for at in range(12):
        full_round(controller, float(at))
    assert controller.congestion_window == congestion.MAX_WINDOW_BYTES


def test_random_loss_cuts_nothing_and_turns_repair_on() -> None:
    controller = fresh()
    assert controller.n_packets_at_loss is None
    for at in range(200):
        packets = send(controller, 40, at * 1.0)
        acknowledge(controller, packets[1:], at + RTT)
        controller.on_packets_lost(now=at + RTT, packets=packets[:1])
    assert controller.n_lost == 200
    assert controller.n_cuts == 0
    assert controller.n_packets_at_loss == controller.n_packets
    assert not controller.is_congested(200.0)


def test_a_large_share_lost_is_congestion_even_without_a_queue() -> None:
    controller = fresh()
    n = full_round(controller, 0.0, n_lost=40)
    assert controller.n_cuts == 1
    assert controller.congestion_window == pytest.approx(0.7 * n * PACKET, abs=PACKET)
    assert controller.is_congested(1.0)


def test_a_small_share_lost_beside_a_queue_is_congestion() -> None:
    controller = fresh()
    full_round(controller, 0.0)
    before = controller.congestion_window
    full_round(controller, 1.0, rtt=RTT + 0.009, n_lost=12)  # under the standing queue, above its half
    assert controller.n_cuts == 1
    assert controller.congestion_window < before


def test_a_small_share_lost_of_an_unused_window_is_no_congestion_however_late_the_machine_is() -> None:
    controller = fresh()
    acknowledge(controller, send(controller, 40, 0.0), RTT)
    for at in range(1, 50):
        packets = send(controller, 12, float(at))
        acknowledge(controller, packets[2:], at + RTT + 0.009)
        controller.on_packets_lost(now=at + RTT + 0.009, packets=packets[:2])
    assert controller.n_cuts == 0


def test_one_cut_for_all_losses_of_a_flight() -> None:
    controller = fresh()
    packets = send(controller, 120, 0.0)
    for at in range(20, 120, 20):
        controller.on_packets_lost(now=RTT, packets=packets[at : at + 20])
    assert controller.n_cuts == 1


def test_a_standing_queue_is_left_before_anything_is_lost() -> None:
    controller = fresh()
    full_round(controller, 0.0)
    for at in range(1, 6):
        full_round(controller, float(at), rtt=RTT + 0.015)
    assert controller.n_cuts >= 2
    assert controller.n_lost == 0


def test_one_undelayed_packet_in_three_rounds_shows_that_there_is_no_queue() -> None:
    controller = fresh()
    full_round(controller, 0.0)
    for at in range(1, 30):
        full_round(controller, float(at), rtt=RTT + (0.001 if at % 3 == 0 else 0.040))
    assert controller.n_cuts == 0


def test_delay_alone_leaves_the_first_window_and_what_the_path_delivers() -> None:
    controller = fresh()
    full_round(controller, 0.0, rtt=0.020)
    for at in range(1, 100):
        full_round(controller, float(at), rtt=0.045)
    assert controller.n_cuts > 3
    assert controller.congestion_window >= congestion.DELAY_FLOOR_PACKETS * PACKET


def test_a_delay_longer_than_a_hosts_pauses_is_a_narrow_link() -> None:
    controller = fresh()
    full_round(controller, 0.0, rtt=0.020)
    for at in range(1, 100):
        full_round(controller, float(at), rtt=0.400)
    assert controller.congestion_window <= 20 * PACKET


def test_once_the_delay_is_gone_the_window_is_back_within_some_rounds() -> None:
    controller = fresh()
    full_round(controller, 0.0, rtt=0.020)
    windows = []
    for at in range(1, 30):
        full_round(controller, at / 10, rtt=0.045)
        windows.append(controller.congestion_window)
    assert windows[-1] < max(windows) / 2
    for at in range(30, 60):
        full_round(controller, at / 10, rtt=0.021)
    assert controller.congestion_window >= 0.9 * max(windows)


def test_jitter_of_5_ms_is_no_queue() -> None:
    controller = fresh()
    for at in range(50):
        packets = send(controller, 60, float(at))
        for place, late in ((0, 0.004), (20, -0.001), (40, 0.009)):
            for packet in packets[place : place + 20]:
                controller.on_packet_acked(now=at + RTT + late, packet=packet)
            controller.on_rtt_measurement(now=at + RTT + late, rtt=RTT + late)
    assert controller.n_cuts == 0


def test_one_delayed_acknowledgement_is_no_queue() -> None:
    controller = fresh()
    full_round(controller, 0.0)
    cuts = controller.n_cuts
    packets = send(controller, 100, 1.0)
    acknowledge(controller, packets[:8], 1.0 + RTT + 0.05)  # one sample, far above
    assert controller.n_cuts == cuts


def test_the_window_never_falls_below_one_dispatch() -> None:
    controller = fresh()
    for at in range(30):
        packets = send(controller, 16, float(at))
        controller.on_packets_lost(now=at + RTT, packets=packets)
    controller.on_persistent_congestion()
    assert controller.congestion_window == MIN_WINDOW_PACKETS * PACKET
    assert controller.congestion_window > 12_288


def test_congestion_is_forgotten_after_its_time_and_not_before() -> None:
    controller = fresh()
    full_round(controller, 0.0, n_lost=100)
    small = controller.congestion_window
    send(controller, 1, MEMORY_S - 1)
    assert controller.congestion_window == small
    assert controller.burst_bytes() < 100_000
    send(controller, 1, MEMORY_S + 1)
    assert controller.congestion_window >= 128 * PACKET
    assert controller.burst_bytes() > 100_000


def test_silence_changes_nothing() -> None:
    controller = fresh()
    full_round(controller, 0.0)
    before = controller.congestion_window
    send(controller, 1, 3600.0)
    assert controller.congestion_window == before


def test_expired_packets_leave_the_flight_without_a_cut() -> None:
    controller = fresh()
    controller.on_packets_expired(packets=send(controller, 5, 0.0))
    assert controller.bytes_in_flight == 0
    assert controller.n_lost == 0


def leave(pacer: Pacer, n: int, now: float) -> tuple[int, float | None]:
    """Send up to n packets as aioquic does; returns how many left, and when the next may."""
    for at in range(n):
        pacer.start_slice()
        later = pacer.next_send_time(now)
        if later is not None:
            return at, later
        pacer.update_after_send(now)
    return n, None


def test_100_kb_leave_at_once_and_again_a_round_trip_later() -> None:
    pacer = Pacer(fresh(), max_datagram_size=PACKET)
    pacer.update_rate(128 * PACKET, RTT)
    assert leave(pacer, 82, 1.0) == (82, None)
    assert leave(pacer, 82, 1.0 + RTT) == (82, None)


def test_more_than_the_burst_is_paced() -> None:
    pacer = Pacer(fresh(), max_datagram_size=PACKET)
    pacer.update_rate(128 * PACKET, RTT)
    n, later = leave(pacer, 1000, 1.0)
    assert n == 128
    assert later == pytest.approx(1.0 + RTT / 128 / congestion.GAIN)
    n, _ = leave(pacer, 1000, 1.0 + RTT / 4)
    assert n == pytest.approx(128 * congestion.GAIN / 4, abs=1)


def test_after_congestion_bursts_are_a_quarter_of_the_window() -> None:
    controller = fresh()
    for at in range(3):
        full_round(controller, float(at))
    full_round(controller, 3.0, n_lost=300)
    pacer = Pacer(controller, max_datagram_size=PACKET)
    pacer.update_rate(controller.congestion_window, RTT)
    n, later = leave(pacer, 10_000, 4.0)
    assert later is not None
    assert n == controller.congestion_window // 4 // PACKET


def test_a_slice_ends_without_a_wait() -> None:
    pacer = Pacer(fresh(), max_datagram_size=PACKET)
    pacer.start_slice()
    for _ in range(congestion.SLICE_PACKETS):
        assert pacer.next_send_time(1.0) is None
        pacer.update_after_send(1.0)
    assert pacer.next_send_time(1.0) == 1.0
    assert pacer.is_slice_full
    pacer.start_slice()
    assert pacer.next_send_time(1.0) is None


def connection(algorithm: str = congestion.ALGORITHM) -> QuicConnection:
    identity = Identity.from_seed(bytes(32))
    configuration = quic_configuration(identity, make_certificate(identity), is_client=True)
    configuration.congestion_control_algorithm = algorithm
    return QuicConnection(configuration=configuration)


def test_attach_puts_our_pacer_and_delay_where_aioquic_looks() -> None:
    quic = connection()
    controller, pacer = attach(quic, ack_delay_s=0.005)
    assert quic._loss._cc is controller
    assert quic._loss._pacer is pacer  # type: ignore[comparison-overlap]
    assert quic._ack_delay == 0.005
    assert application_space(quic) is None
    quic.connect(("192.0.2.1", 1), now=0.0)
    space = application_space(quic)
    assert space is not None
    assert space.is_application_data


def test_attach_refuses_another_controller() -> None:
    with pytest.raises(UserError, match="another congestion controller: got RenoCongestionControl"):
        attach(connection("reno"), ack_delay_s=0.005)


def test_another_aioquic_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherPacer:
        def next_send_time(self, now: float, size: int) -> float:
            return math.inf

    monkeypatch.setattr(congestion, "QuicPacketPacer", OtherPacer)
    monkeypatch.setattr(congestion, "_is_checked", False)
    with pytest.raises(UserError, match=r"paces in another way.*install aioquic~=1\.7"):
        attach(connection(), ack_delay_s=0.005)


def test_an_aioquic_without_what_is_relied_on_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherSpace:
        def __init__(self, is_application_data: bool) -> None:
            self.is_application_data = is_application_data

    assert recovery.QuicPacketSpace is congestion.QuicPacketSpace
    monkeypatch.setattr(congestion, "QuicPacketSpace", OtherSpace)
    monkeypatch.setattr(congestion, "_is_checked", False)
    with pytest.raises(UserError, match="lacks what swarm relies on: ack_at, ack_queue"):
        attach(connection(), ack_delay_s=0.005)
