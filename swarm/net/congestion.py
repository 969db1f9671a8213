"""How much may be under way at once, for aioquic: a large first flight, no cut for random loss, none after silence.

A dispatch is a burst of 2 to 100 KB after a pause and is worth one round trip; aioquic's own controllers open with 10 packets
(six round trips for 100 KB), cubic forgets its window after silence, both take random loss for congestion, and the pacer
lets 16 packets go and spreads the rest over a round trip. Here congestion is what a full queue looks like: loss together with
delay, loss of a large share, or delay that stays; then the window falls and packets are spread, until 30 s have passed.

Knows nothing of streams or sockets. The private parts of aioquic that are touched are named in `attach` and nowhere else.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketSpace

from swarm.errors import UserError

ALGORITHM = "swarm"

# Packets. 100 KB in one flight is 82 of 1,232 bytes; 128 leave room for the dispatch behind it (157 KB).
INITIAL_WINDOW_PACKETS = 128
# A congested path still takes a 12 KB dispatch in one flight: 11 packets, and its answer's acknowledgements.
MIN_WINDOW_PACKETS = 16
MAX_WINDOW_BYTES = 8 << 20  # certificate.MAX_DATA: flow control stops there anyway
# Loss is congestion from this share of a round on, and so many packets. Beside a queue that grew; and without one, where 1 %
# random loss takes 6 of 41 packets (49 KB) once in 300,000 rounds (binomial), and a first flight of 100 KB into 64 KB at
# 20 Mbit/s loses 30 of 84 (simulated).
QUEUED_LOSS_SHARE, QUEUED_LOSS_PACKETS = 0.02, 2
PLAIN_LOSS_SHARE, PLAIN_LOSS_PACKETS = 0.10, 6
LOSS_CUT = 0.7  # cubic's factor (RFC 9438 section 4.6): half would idle a queue of under one round trip
# A queue is *standing* when even the fastest packet of several rounds waited this long. 64 KB at 20 Mbit/s are 26 ms: kept under
# half. The larger of seconds and share of the least round trip: jitter of +-5 ms is no queue, nor are the 8 ms that an
# acknowledgement may wait (quic_driver.ACK_DELAY_S).
QUEUE_S, QUEUE_SHARE = 0.010, 0.125
# Several rounds, so that a host's pause (15 to 40 ms on a machine that also computes) is none: one packet between two pauses
# tells. So many and so much time; fewer on a narrow path: one that lost packets to a queue, or where delay exceeds any pause.
QUEUE_ROUNDS, QUEUE_ROUNDS_S, NARROW_QUEUE_ROUNDS = 3, 0.060, 2
MAX_QUEUE_ROUNDS = 16
QUEUE_CUT = 0.85
LONG_QUEUE_S = (
    0.3  # 0.05 is reached by three transfers that begin at once on a clean 100 Mbit/s, and made them slow; guessed
)
# Delay alone takes the window no lower than this share of what the path delivered in a least round trip; nor, where it is not
# narrow, than the first window. 1.0 kept a queue of 20 ms, for 15 (simulated, 80 ms).
DELIVERED_SHARE, DELAY_FLOOR_PACKETS = 0.9, 128
REGROWTH = 0.125  # of the window per round without a queue, back to where delay cut it; not on a narrow path; guessed
MIN_SAMPLES = 3  # round trips measured before a round says anything of a queue: one may hold an acknowledgement's delay
GROWTH_PACKETS = 2  # per round when not in slow start: a halved window is back in 32 rounds
MEMORY_S = 30.0  # after the last sign of congestion a path counts as good again; guessed
PROBE_S = 5.0  # without a new least round trip, on a congested path, until one is looked for; half of BBR's
MIN_RTT_MEMORY_S = 60.0  # a least round trip older than this may be another route's; guessed
# Packets leave at this times window / round trip: RFC 9002 section 7.7, and slow start's doubling.
CONGESTED_GAIN, GAIN = 1.25, 2.0
# aioquic builds all packets of a flight before it returns the first; in slices the receiver works on the first ones while the
# others are built.
SLICE_PACKETS = 10


class _Round(NamedTuple):
    """What a round trip showed: times in seconds, and the bytes that were acknowledged in it."""

    started: float
    ended: float
    min_rtt: float
    n_bytes: int


class SwarmCongestionControl(QuicCongestionControl):
    """aioquic calls it for every packet of one connection, of all packet spaces."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._packet_bytes = max_datagram_size
        self._floor = MIN_WINDOW_PACKETS * max_datagram_size
        self.congestion_window = INITIAL_WINDOW_PACKETS * max_datagram_size
        self.n_packets = 0  # sent, and counted by congestion control
        self.n_lost = 0
        self.n_packets_at_loss: int | None = None  # `n_packets` at the last loss
        self.n_cuts = 0
        self._congested_at = -math.inf
        self._narrow_at = -math.inf  # the last cut for loss or for a long queue
        self._rounds: deque[_Round] = deque(maxlen=MAX_QUEUE_ROUNDS)
        self._regrow_to = 0  # the window before it was cut for delay
        self._recovery_start = -math.inf  # losses of packets sent before this belong to a cut already made
        self._min_rtt, self._min_rtt_at = math.inf, -math.inf
        self._grown = 0  # bytes acknowledged towards the next growth
        # The most bytes in flight in the last round, in which what is found lost now was sent, and in this one.
        self._peaks = (0, 0)
        self._probe: tuple[int, int] | None = None  # the window to return to, and after how many rounds
        self._start_round(-math.inf)

    def _start_round(self, now: float) -> None:
        """A round ends when a packet sent since its start is acknowledged: one round trip, or as many as give MIN_SAMPLES."""
        self._round_start = now
        self._round_min_rtt, self._n_samples = math.inf, 0
        self._n_acked = self._n_lost_in_round = self._bytes_acked = 0
        self._peaks = (self._peaks[1], self.bytes_in_flight)

    def is_congested(self, now: float, within_s: float = MEMORY_S) -> bool:
        """Return whether this path showed a full queue within the last seconds."""
        return now - self._congested_at < within_s

    @property
    def min_rtt_s(self) -> float:
        """The least round trip lately, seconds; 0 before the first."""
        return self._min_rtt if self._min_rtt < math.inf else 0.0

    def burst_bytes(self) -> int:
        """Return how much may leave at once, unpaced."""
        if self.ssthresh is None:
            return INITIAL_WINDOW_PACKETS * self._packet_bytes
        return max(self._floor, self.congestion_window // 4)

    def pacing_gain(self) -> float:
        """Return how many windows may leave in one round trip."""
        return GAIN if self.ssthresh is None else CONGESTED_GAIN

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        self.n_packets += 1
        self.bytes_in_flight += packet.sent_bytes
        if self.bytes_in_flight > self._peaks[1]:
            self._peaks = (self._peaks[0], self.bytes_in_flight)
        if self.ssthresh is not None and packet.sent_time is not None and not self.is_congested(packet.sent_time):
            self.ssthresh = None
            self.congestion_window = max(self.congestion_window, INITIAL_WINDOW_PACKETS * self._packet_bytes)

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        self.bytes_in_flight -= packet.sent_bytes
        self._n_acked += 1
        self._bytes_acked += packet.sent_bytes
        sent = packet.sent_time or 0.0
        if self._is_limited() and sent > self._recovery_start:
            self._grow(packet.sent_bytes)
        if sent >= self._round_start and self._n_samples >= MIN_SAMPLES:
            self._end_round(now, is_recovered=sent > self._recovery_start)
            self._look_for_the_bottom(now)
            self._start_round(now)

    def _end_round(self, now: float, *, is_recovered: bool) -> None:
        """Leave a queue that stands, or go back to where one was suspected.

        `is_recovered`: what this round tells was sent after the last cut.
        """
        self._rounds.append(_Round(self._round_start, now, self._round_min_rtt, self._bytes_acked))
        if not self._is_limited() or not is_recovered:
            return
        is_narrow = now - self._narrow_at < MEMORY_S
        if self._queue_s() < self._standing_queue_s() / 2:
            if self.congestion_window < self._regrow_to and not is_narrow:
                self.congestion_window = min(self._regrow_to, int((1 + REGROWTH) * self.congestion_window))
            return
        recent = self._recent_rounds(now, is_narrow)
        if not recent:
            return
        queue_s = min(one.min_rtt for one in recent) - self._min_rtt
        if queue_s <= self._standing_queue_s():
            return
        if queue_s > LONG_QUEUE_S:
            self._narrow_at, is_narrow = now, True
        rate = max(one.n_bytes / max(one.ended - one.started, self._min_rtt) for one in recent)
        floor = int(DELIVERED_SHARE * rate * self._min_rtt)
        if not is_narrow:
            floor = max(floor, DELAY_FLOOR_PACKETS * self._packet_bytes)
        window = max(floor, int(QUEUE_CUT * self.congestion_window))
        if window < self.congestion_window:
            self._regrow_to = max(self._regrow_to, self.congestion_window)
            self._cut(now, window)

    def _recent_rounds(self, now: float, is_narrow: bool) -> list[_Round]:
        """Return the rounds that together say whether a queue stands; empty: too few yet."""
        n_needed, needed_s = (NARROW_QUEUE_ROUNDS, 0.0) if is_narrow else (QUEUE_ROUNDS, QUEUE_ROUNDS_S)
        recent: list[_Round] = []
        for one in reversed(self._rounds):
            recent.append(one)
            if len(recent) >= n_needed and now - one.started >= needed_s:
                return recent
        return recent if len(recent) == MAX_QUEUE_ROUNDS else []  # a path of under 4 ms

    def _look_for_the_bottom(self, now: float) -> None:
        """Empty a queue that may have been there from the start: who came late takes it for the path's length, and too much.

        Two rounds with the least window, as BBR does; only on a path in use that showed congestion.
        """
        if self._probe is not None:
            window, n_rounds = self._probe
            if n_rounds:
                self._probe = (window, n_rounds - 1)
            else:
                self._probe = None
                self.congestion_window = max(self.congestion_window, window)
        elif self._is_limited() and self.is_congested(now) and now - self._min_rtt_at > PROBE_S:
            self._probe = (self.congestion_window, 1)
            self._min_rtt_at = now
            self.congestion_window = self._floor

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        n_lost, last_sent = 0, -math.inf
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            n_lost += 1
            last_sent = max(last_sent, packet.sent_time or 0.0)
        self.n_lost += n_lost
        self.n_packets_at_loss = self.n_packets
        self._n_lost_in_round += n_lost
        n = self._n_lost_in_round
        of = max(n + self._n_acked, max(self._peaks) // self._packet_bytes)
        # Who does not use its window did not fill a queue, and a busy machine's delays look like one.
        is_queued = self._is_limited() and self._queue_s() > self._standing_queue_s() / 2
        least, share = (QUEUED_LOSS_PACKETS, QUEUED_LOSS_SHARE) if is_queued else (PLAIN_LOSS_PACKETS, PLAIN_LOSS_SHARE)
        if n >= least and n > share * of and last_sent > self._recovery_start:
            self._narrow_at = now
            self._regrow_to = 0
            self._cut(now, int(LOSS_CUT * min(self.congestion_window, max(self._peaks))))

    def on_persistent_congestion(self) -> None:
        self.congestion_window = self.ssthresh = self._floor

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        if rtt <= self._min_rtt or now - self._min_rtt_at > MIN_RTT_MEMORY_S:
            self._min_rtt, self._min_rtt_at = rtt, now
        self._round_min_rtt = min(self._round_min_rtt, rtt)
        self._n_samples += 1

    def _is_limited(self) -> bool:
        """Whether the window is in use: at least half of it lately. One that is not says nothing (RFC 9002 section 7.8)."""
        return 2 * max(self._peaks) > self.congestion_window

    def _queue_s(self) -> float:
        return self._round_min_rtt - self._min_rtt if self._round_min_rtt < math.inf else 0.0

    def _standing_queue_s(self) -> float:
        return max(QUEUE_S, QUEUE_SHARE * self._min_rtt) if self._min_rtt < math.inf else QUEUE_S

    def _grow(self, n_bytes: int) -> None:
        if self.ssthresh is None or self.congestion_window < self.ssthresh:
            step = n_bytes
        else:
            self._grown += n_bytes
            if self._grown < self.congestion_window:
                return
            self._grown = 0
            step = GROWTH_PACKETS * self._packet_bytes
        self.congestion_window = min(MAX_WINDOW_BYTES, self.congestion_window + step)

    def _cut(self, now: float, window: int) -> None:
        self.n_cuts += 1
        self._congested_at = self._recovery_start = now
        self.congestion_window = self.ssthresh = max(self._floor, window)
        self._grown = 0


class Pacer:
    """Stands in for aioquic's: as much as the controller's burst leaves at once, the rest at its pace."""

    def __init__(self, controller: SwarmCongestionControl, *, max_datagram_size: int) -> None:
        self._controller = controller
        self._packet_bytes = max_datagram_size
        self._rate: float | None = None  # bytes per second; None until the first round trip is measured, as in aioquic
        self._credit = float(controller.burst_bytes())
        self._at = 0.0
        self._n_left: int = SLICE_PACKETS
        self.after_packet: Callable[[], None] = lambda: None  # called when a packet was built, before the next one is

    def start_slice(self) -> None:
        """Let the next SLICE_PACKETS leave, as far as the pace does."""
        self._n_left = SLICE_PACKETS

    @property
    def is_slice_full(self) -> bool:
        """Whether the slice's end held a packet back."""
        return self._n_left <= 0

    def next_send_time(self, now: float) -> float | None:
        """Return when the next packet may leave; None: now."""
        if self._n_left <= 0:
            return now  # of this call of datagrams_to_send; the driver calls again at once
        if self._rate is None:
            return None
        self._refill(now)
        if self._credit >= self._packet_bytes:
            return None
        return now + (self._packet_bytes - self._credit) / self._rate

    def update_after_send(self, now: float) -> None:
        """Count one packet."""
        if self._rate is not None:
            self._refill(now)
        self._n_left -= 1
        self._credit = max(0.0, self._credit - self._packet_bytes)
        self.after_packet()

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """Learn a new window or round trip, seconds."""
        self._rate = self._controller.pacing_gain() * congestion_window / max(smoothed_rtt, 1e-6)

    def _refill(self, now: float) -> None:
        if self._rate is not None and now > self._at:
            self._credit = min(self._controller.burst_bytes(), self._credit + (now - self._at) * self._rate)
            self._at = now


def attach(quic: QuicConnection, *, ack_delay_s: float) -> tuple[SwarmCongestionControl, Pacer]:
    """Let a new connection use `Pacer` and acknowledge after `ack_delay_s`; return its controller and its pacer.

    Raises:
        UserError: this aioquic keeps its pacer elsewhere than 1.7, or uses it otherwise: then nothing here holds.
    """
    _check()
    controller = quic._loss._cc
    if not isinstance(controller, SwarmCongestionControl):
        raise UserError(f"aioquic uses another congestion controller: got {type(controller).__name__}")
    pacer = Pacer(controller, max_datagram_size=quic.configuration.max_datagram_size)
    quic._loss._pacer = pacer  # type: ignore[assignment]
    quic._ack_delay = ack_delay_s
    return controller, pacer


def application_space(quic: QuicConnection) -> QuicPacketSpace | None:
    """Return where aioquic counts the packets that carry streams; None before the first packet."""
    spaces = quic._loss.spaces
    return spaces[-1] if spaces and spaces[-1].is_application_data else None


_is_checked = False


def _check() -> None:
    """Look once at what `attach`, `application_space` and the driver rely on, so that another aioquic fails by name."""
    global _is_checked
    if _is_checked:
        return
    for method in ("next_send_time", "update_after_send", "update_rate"):
        expected = list(inspect.signature(getattr(Pacer, method)).parameters)
        found = getattr(QuicPacketPacer, method, None)
        got = list(inspect.signature(found).parameters) if found is not None else None
        if got != expected:
            raise UserError(
                f"this aioquic paces in another way: got {method}{got}, expected {expected}; install aioquic~=1.7.0"
            )
    space = QuicPacketSpace(is_application_data=True)
    source = inspect.getsource(QuicConnection)
    missing = [name for name in ("ack_at", "ack_queue", "is_application_data", "loss_time") if not hasattr(space, name)]
    missing += [
        name
        for name in (
            "self._loss._pacer",
            "self._ack_delay",
            "self._pacing_at",
            "space.ack_at",
            "self._streams_queue",
            "self._events.popleft()",
        )
        if name not in source
    ]
    if missing:
        raise UserError(f"this aioquic lacks what swarm relies on: {', '.join(missing)}; install aioquic~=1.7.0")
    _is_checked = True


register_congestion_control(ALGORITHM, SwarmCongestionControl)
