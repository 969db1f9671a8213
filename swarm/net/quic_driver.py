"""A sans-IO QUIC connection, driven as dispatches need it: when to acknowledge, what to send twice, what the library hides.

`AioquicDriver` is the default. `driver_class` gives the one that SWARM_QUIC names: `aioquic`, or `qh3` (extra `fast`), which
speaks the same wire. All that `Connection` and `Endpoint` ask of a QUIC library is the class `QuicDriver`.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from aioquic.quic import events as aioquic_events
from aioquic.quic.connection import QuicConnection
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream
from cryptography import x509

from swarm.errors import UserError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.certificate import presented_node_id, quic_configuration
from swarm.net.congestion import application_space, attach
from swarm.net.flights import Flights, FlightSocket
from swarm.net.repair import PAUSE_S, Repair, needs_protection

# aioquic acknowledges 1 ms after the first packet, in a packet of its own (27 bytes, and a send, a receive and two AEADs). Eight
# let most acknowledgements ride on the answer, or on the next layer's dispatch; under the 25 ms that aioquic announces, and
# under what the congestion control takes for a queue.
ACK_DELAY_S = 0.008
# A long transfer is acknowledged this often without delay, so that its window moves. 16 would save both sides 3 to 4 % of their
# processor time in a prefill, but a sender that opens with 10 packets (qh3) would wait for ACK_DELAY_S each time.
ACK_EVERY_PACKETS = 8
# A datagram this small that wants an acknowledgement is a ping or a request of a few bytes: answered at once, so that round
# trips are measured without the delay. A ping is 31 bytes.
SMALL_BYTES = 64
# What a stream has left to send, up to which it goes before longer ones: a decode step's dispatch (12 KB exact) beside a prefill.
FIRST_BYTES = 16 << 10


class QuicDriver(ABC):
    """One connection of some QUIC library.

    Attributes:
        quic: the library's own connection: streams, pings, close.
        events: the library's module of event classes; `next_event` gives instances of these.
    """

    quic: Any
    events: ModuleType

    @staticmethod
    @abstractmethod
    def configuration(identity: Identity, certificate: x509.Certificate, *, is_client: bool) -> Any:
        """Return what all connections of one side share."""

    @staticmethod
    def flights(udp: socket.socket) -> Flights:
        """Return what an endpoint sends and receives with; the socket stays the caller's."""
        return FlightSocket(udp)

    @abstractmethod
    def __init__(self, configuration: Any, original_cid: bytes | None, retry_cid: bytes | None = None) -> None:
        """Make a client's connection, or, with the id that the client chose for us, a server's.

        `retry_cid`: as a server, the id that a Retry gave to the client, if there was one.
        """

    @abstractmethod
    def presented_node_id(self) -> NodeId:
        """Return whose key the server proved to hold; raises IdentityMismatch."""

    @abstractmethod
    def n_streams(self) -> int:
        """Return how many streams the library keeps an object for."""

    @abstractmethod
    def n_unsent_bytes(self) -> int:
        """Return how many bytes of streams the library holds."""

    def send_stream_data(self, stream: int, data: bytes, is_end: bool) -> None:
        """Give the library what a stream carries next; raises ValueError or RuntimeError on a stream that it has ended."""
        self.quic.send_stream_data(stream, data, is_end)

    def abandon_stream(self, stream: int) -> None:
        """End both directions of a stream; raises as `send_stream_data`."""
        self.quic.reset_stream(stream, 0)
        self.quic.stop_stream(stream, 0)

    def receive(self, flight: Sequence[bytes], address: Any, now: float) -> None:
        """Take in datagrams that came together. May raise anything: they are a stranger's."""
        for data in flight:
            self.quic.receive_datagram(data, address, now=now)

    def next_event(self) -> Any | None:
        """Return what has happened next; what one stream got in several packets at once is one event."""
        waiting = self.quic._events  # of either library: what its own method takes from
        if not waiting:
            return None
        event, data_received = waiting.popleft(), self.events.StreamDataReceived
        if event.__class__ is not data_received or event.end_stream or not waiting:
            return event
        pieces, stream = [event.data], event.stream_id
        while (
            waiting
            and not event.end_stream
            and waiting[0].__class__ is data_received
            and waiting[0].stream_id == stream
        ):
            event = waiting.popleft()
            pieces.append(event.data)
        return data_received(data=b"".join(pieces), end_stream=event.end_stream, stream_id=stream)

    def wants_flush(self) -> bool:
        """Return whether what was received since the last flush may have given the library something to send now.

        Asked only on a connection that is open. What is left for later goes with the next flush, at `next_deadline` at last.
        """
        return True

    def flush(self, now: float, *, has_data: bool) -> Iterator[list[bytes]]:
        """Yield the datagrams to send now, in flights that are made when they are asked for; none is empty.

        `has_data`: streams were written to since the last call.
        """
        flight = [data for data, _ in self.quic.datagrams_to_send(now)]
        if flight:
            yield flight

    def has_deadline_before(self, at: float, now: float) -> bool:
        """Return whether `next_deadline` may be before `at`; may be True in vain. Asked after each message, so it is cheap."""
        return True

    def is_lossy(self) -> bool:
        """Return whether the path has lost packets lately; False where the library does not tell."""
        return False

    def least_rtt_s(self) -> float | None:
        """Return the shortest round trip of the latest packets, the path without waits for a core; None: it is not known."""
        return None

    def copies(self, now: float) -> list[bytes]:
        """Return the datagrams to send a second time now."""
        return []

    def handle_timer(self, now: float) -> None:
        """Let the library act on its deadline, if that has passed."""
        at = self.quic.get_timer()
        if at is not None and now >= at:
            self.quic.handle_timer(now=now)

    def next_deadline(self) -> float | None:
        """Return when `handle_timer`, `copies` and `flush` should be called next."""
        return self.quic.get_timer()  # type: ignore[no-any-return]


class AioquicDriver(QuicDriver):
    """aioquic, with our congestion control, acknowledgements that wait for an answer, and repair."""

    events = aioquic_events
    configuration = staticmethod(quic_configuration)

    def __init__(self, configuration: Any, original_cid: bytes | None, retry_cid: bytes | None = None) -> None:
        self.quic: QuicConnection = QuicConnection(
            configuration=configuration,
            original_destination_connection_id=original_cid,
            retry_source_connection_id=retry_cid,
        )
        self.controller, self._pacer = attach(self.quic, ack_delay_s=ACK_DELAY_S)
        self._pacer.after_packet = self._keep_order
        self._first: QuicStream | None = None  # in order: the long stream to go on with; None: short ones come first
        self._repair = Repair()
        self._space: QuicPacketSpace | None = None  # of the packets that carry streams; known once one has come
        self._n_unacknowledged = 0
        self._is_ack_urgent = False
        self._n_lost = 0  # at the last flush
        # When the last flush ended. Asked then and not when an acknowledgement comes: from a busy host one can empty the window,
        # and what waits would then wait for a timer (layers of a prefill took 4 s instead of 0.4).
        self._was_window_full = False

    def presented_node_id(self) -> NodeId:
        return presented_node_id(self.quic)

    def n_streams(self) -> int:
        return len(self.quic._streams)

    def n_unsent_bytes(self) -> int:
        """aioquic 1.7 keeps what waits to be sent or acknowledged, without a bound of its own."""
        return sum(len(stream.sender._buffer) for stream in self.quic._streams.values())

    def receive(self, flight: Sequence[bytes], address: Any, now: float) -> None:
        for data in flight:
            self._receive(data, address, now)

    def _receive(self, data: bytes, address: Any, now: float) -> None:
        self.quic.receive_datagram(data, address, now=now)
        space = self._space
        if space is None:
            space = application_space(self.quic)
            if space is None or space.ack_at is None:
                return  # a Retry may still put another in its place
            self._space = space
        if space.ack_at is not None:
            self._n_unacknowledged += 1
            # A gap is told at once (RFC 9000 section 13.2.1): the sender repairs after 9/8 of a round trip from then.
            if len(data) < SMALL_BYTES or self._n_unacknowledged >= ACK_EVERY_PACKETS or len(space.ack_queue) > 1:
                self._is_ack_urgent = True

    def wants_flush(self) -> bool:
        """False for most received packets: to look for something to send costs aioquic half of what sending a packet does.

        Without a loss, and unless the window was full then, the last flush sent all there was, or the pacer set a deadline.
        """
        return self._is_ack_urgent or self._was_window_full or self.controller.n_lost != self._n_lost

    def flush(self, now: float, *, has_data: bool) -> Iterator[list[bytes]]:
        space = self._space
        if space is not None and space.ack_at is not None and (has_data or self._is_ack_urgent):
            space.ack_at = (
                now - 1e-6
            )  # due: rides on the first packet; a little ago, since one due now waits for the pacer
        datagrams: list[bytes] = []
        self._order_streams()
        while True:
            self._pacer.start_slice()
            flight = [data for data, _ in self.quic.datagrams_to_send(now)]
            if flight:
                yield flight
                datagrams += flight
            if not self._pacer.is_slice_full and not (flight and self._has_abandoned()):
                break
        if space is not None and space.ack_at is None:
            self._n_unacknowledged, self._is_ack_urgent = 0, False
        controller = self.controller
        self._n_lost = controller.n_lost
        packet_bytes = self.quic.configuration.max_datagram_size
        self._was_window_full = controller.bytes_in_flight + packet_bytes > controller.congestion_window
        if datagrams:
            is_protected = needs_protection(
                n_packets=controller.n_packets,
                n_packets_at_loss=controller.n_packets_at_loss,
                is_congested=controller.is_congested(now, within_s=PAUSE_S),
            )
            self._repair.sent(datagrams, now, rtt_s=controller.min_rtt_s, is_protected=is_protected)

    def _has_abandoned(self) -> bool:
        """Return whether the end of a stream is still to be told.

        aioquic 1.7 ends a call of `datagrams_to_send` where such a frame finds a packet full, however much else waits: with the
        end of a cancelled request behind a long one, a connection sent one packet for each timer.
        """
        return any(map(_is_abandoned, self.quic._streams_queue))

    def _order_streams(self) -> None:
        """Let what is abandoned and short streams go first, then the long ones one after the other, in order of opening.

        aioquic gives a packet to each in turn, so that all chunks of a batch arrive at its end, and none is computed before.
        """
        queue = self.quic._streams_queue  # those served last are at its end
        if len(queue) > 1:
            queue.sort(key=_turn)
            first = next((stream for stream in queue if _n_left(stream)), None)
            self._first = first if first is not None and _turn(first) else None

    def _keep_order(self) -> None:
        """Order the streams again after a packet: mostly the long one that was served, and is now last, simply goes on."""
        queue = self.quic._streams_queue
        if queue and queue[-1] is self._first and _turn(self._first):
            queue.insert(0, queue.pop())
        else:
            self._order_streams()

    def least_rtt_s(self) -> float | None:
        return self.controller.min_rtt_s or None

    def is_lossy(self) -> bool:
        controller = self.controller
        return needs_protection(
            n_packets=controller.n_packets, n_packets_at_loss=controller.n_packets_at_loss, is_congested=False
        )

    def has_deadline_before(self, at: float, now: float) -> bool:
        """True while the pacer, a copy or a packet that seems lost waits, and before the handshake is done.

        What else aioquic sets a time for is no nearer than ACK_DELAY_S: probes (25 ms and more), and acknowledgements. To ask
        it costs 12 us, and a layer would nine times (docs/performance.md).
        """
        space = self._space
        return (
            at > now + ACK_DELAY_S
            or space is None
            or space.loss_time is not None
            or self.quic._pacing_at is not None
            or self._repair.next_deadline() is not None
        )

    def copies(self, now: float) -> list[bytes]:
        return self._repair.due(now)

    def next_deadline(self) -> float | None:
        quic, repair = self.quic.get_timer(), self._repair.next_deadline()
        return repair if quic is None else quic if repair is None else min(quic, repair)


def _is_abandoned(stream: QuicStream) -> bool:
    return stream.receiver.stop_pending or stream.sender.reset_pending


def _n_left(stream: QuicStream) -> int:
    sender = stream.sender
    return 0 if sender._reset_error_code is not None else sender._buffer_stop - sender.next_offset


def _turn(stream: QuicStream) -> int:
    if _is_abandoned(stream):
        return -1
    return 0 if _n_left(stream) <= FIRST_BYTES else 1 + (stream.stream_id or 0)


def driver_class() -> type[QuicDriver]:
    """Return the driver that SWARM_QUIC asks for; raises UserError."""
    name = os.environ.get("SWARM_QUIC", "aioquic")
    if name == "aioquic":
        return AioquicDriver
    if name != "qh3":
        raise UserError(f"unknown QUIC library in SWARM_QUIC: got {name[:40]!r}, expected aioquic or qh3")
    try:
        from swarm.net.qh3_driver import Qh3Driver
    except ImportError as error:
        raise UserError("SWARM_QUIC=qh3, but qh3 is not installed; run pip install 'qh3~=2.1.0'") from error
    return Qh3Driver
