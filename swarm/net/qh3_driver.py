"""qh3 (Rust) in aioquic's place: less processor time per packet, the same wire. Import it only if it is installed.

It has no hook for congestion control, so nothing of `congestion` and `repair` applies: for short, clean, busy links. Its core
would acknowledge every second packet at once; since it does so only when it is asked for datagrams, it is asked later, so that
acknowledgements ride on the answer or the next dispatch, as with aioquic. Figures in docs/transport.md.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from qh3 import _hazmat
from qh3.quic import events as qh3_events
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection, QuicConnectionError
from qh3.tls import SignatureAlgorithm, load_pem_private_key, load_pem_x509_certificates

from swarm.errors import IdentityMismatch
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.certificate import IDLE_TIMEOUT_S, MAX_DATA, MAX_DATAGRAM_BYTES, MAX_STREAM_DATA
from swarm.net.congestion import SLICE_PACKETS
from swarm.net.flights import CANNOT_CUT, Flights, FlightSocket
from swarm.net.quic_driver import ACK_DELAY_S, ACK_EVERY_PACKETS, SMALL_BYTES, QuicDriver
from swarm.wire.session import ALPN

logger = logging.getLogger(__name__)

# The raw 32 bytes of an ed25519 key are the end of its SubjectPublicKeyInfo (RFC 8410 section 4).
_ED25519_PREFIX = bytes.fromhex("302a300506032b6570032100")


class Qh3Socket:
    """A bound, non-blocking UDP socket, owned by whoever made it: as `FlightSocket`, in one native call each way.

    It also forbids routers to cut datagrams, as RFC 9000 section 14 wants it.

    Attributes:
        is_cutting: whether flights leave in few calls; ends for good when the kernel refuses that.
    """

    def __init__(self, udp: socket.socket) -> None:
        self._state = _hazmat.UdpSocketState(udp.fileno())
        self.is_cutting = True

    def send(self, flight: Sequence[bytes], address: Any) -> None:
        datagrams = list(flight)
        try:
            self._state.send(datagrams, address)
        except OSError as error:
            if error.errno not in CANNOT_CUT or not self.is_cutting or len(datagrams) == 1:  # of one none was cut
                raise
            logger.debug("datagrams leave one by one from here on: %s", error)
            self.is_cutting = False
            self._state.disable_gso()
            self._state.send(datagrams[getattr(error, "datagrams_sent", 0) :], address)

    def receive(self) -> list[tuple[bytes, Any]]:
        try:
            return self._state.recv()
        except OSError as error:  # an ICMP error of an earlier send; QUIC notices by its timers
            logger.debug("receive failed: %s", error)
            return []


class Qh3Driver(QuicDriver):
    """One qh3 connection."""

    events = qh3_events

    @staticmethod
    def configuration(identity: Identity, certificate: x509.Certificate, *, is_client: bool) -> QuicConfiguration:
        configuration = QuicConfiguration(
            is_client=is_client,
            alpn_protocols=[ALPN],
            idle_timeout=IDLE_TIMEOUT_S,
            max_data=MAX_DATA,
            max_stream_data=MAX_STREAM_DATA,
            max_datagram_size=MAX_DATAGRAM_BYTES,
            probe_datagram_size=False,
            initial_rtt=0.1,  # as aioquic
            server_name="swarm.invalid" if is_client else None,
            verify_mode=ssl.CERT_NONE,  # the key itself is compared
            signature_algorithms=[SignatureAlgorithm.ED25519] if is_client else None,
        )
        if not is_client:
            key = identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            configuration.certificate = load_pem_x509_certificates(certificate.public_bytes(Encoding.PEM))[0]
            configuration.private_key = load_pem_private_key(key)
        return configuration

    @staticmethod
    def flights(udp: socket.socket) -> Flights:
        return Qh3Socket(udp) if hasattr(_hazmat, "UdpSocketState") else FlightSocket(udp)  # not on Windows

    def __init__(self, configuration: Any, original_cid: bytes | None, retry_cid: bytes | None = None) -> None:
        self.quic = QuicConnection(
            configuration=configuration,
            original_destination_connection_id=original_cid,
            retry_source_connection_id=retry_cid,
        )
        self._parity = (
            0 if self.quic.configuration.is_client else 1
        )  # of the streams that we open (RFC 9000 section 2.1)
        self._n_allowed = 0  # of these, as far as it was asked; never less later
        self._held: deque[tuple[int, bytes, bool]] = deque()  # bounded by the session's MAX_EXCHANGES
        self._n_received = 0  # datagrams since the last flush
        self._is_ack_urgent = False
        self._ack_at: float | None = None  # when what came since then is acknowledged at the latest

    def presented_node_id(self) -> NodeId:
        certificate = self.quic.get_peercert()  # whose key signed the handshake: checked with CERT_NONE too
        key = certificate.public_key() if certificate is not None else b""
        if len(key) != len(_ED25519_PREFIX) + 32 or not key.startswith(_ED25519_PREFIX):
            raise IdentityMismatch(f"the server's key is of the wrong kind: got {key[:16].hex()}, expected ed25519")
        return NodeId(key[len(_ED25519_PREFIX) :])

    def n_streams(self) -> int:
        return 0  # not told by its core, which bounds them itself: 100 that the other side may have open

    def n_unsent_bytes(self) -> int:
        return int(self.quic.get_send_buffer_size()) + sum(len(data) for _, data, _ in self._held)

    def send_stream_data(self, stream: int, data: bytes, is_end: bool) -> None:
        """qh3 2.1 forgets what is sent on a stream that the other side does not allow yet, so it is kept here."""
        if self._held or not self._is_allowed(stream):
            self._held.append((stream, data, is_end))
        elif self.quic._handshake_complete:
            # Without what its own method does besides: numbers for streams that it opens itself.
            self.quic._core.send_stream(stream, data, is_end)
        else:
            self._call(self.quic.send_stream_data, stream, data, is_end)

    def abandon_stream(self, stream: int) -> None:
        n_held = len(self._held)
        self._held = deque(each for each in self._held if each[0] != stream)
        if len(self._held) == n_held:
            self._call(self.quic.reset_stream, stream, 0)
            self._call(self.quic.stop_stream, stream, 0)

    def receive(self, flight: Sequence[bytes], address: Any, now: float) -> None:
        quic = self.quic
        if (
            quic._handshake_complete
        ):  # what its own method does then, without the address parsed and a log that there is not
            quic._core.receive_many_datagrams(list(flight), address, now)
            quic._drain_core()
        else:
            quic.receive_many_datagrams(list(flight), address, now)
        self._n_received += len(flight)
        if self._n_received >= ACK_EVERY_PACKETS or min(map(len, flight)) < SMALL_BYTES:
            self._is_ack_urgent = True
        if self._ack_at is None:
            self._ack_at = now + ACK_DELAY_S

    def wants_flush(self) -> bool:
        """False while all that waits is an acknowledgement that may wait. So a gap is told up to ACK_DELAY_S late."""
        return self._is_ack_urgent or bool(self._held) or int(self.quic._core.get_send_buffer_size(None)) > 0

    def next_deadline(self) -> float | None:
        at = self._library_deadline()
        return at if at is None or self._ack_at is None else max(at, self._ack_at)

    def _library_deadline(self) -> float | None:
        core = self.quic._core
        timer = None if core is None else core.get_timer()
        return None if timer is None else float(timer[1])

    def has_deadline_before(self, at: float, now: float) -> bool:
        if self._ack_at is not None:
            return self._ack_at < at
        due = self._library_deadline()
        return due is not None and due < at

    def flush(self, now: float, *, has_data: bool) -> Iterator[list[bytes]]:
        self._n_received, self._is_ack_urgent, self._ack_at = 0, False, None
        while self._held and self._is_allowed(self._held[0][0]):
            self._call(self.quic.send_stream_data, *self._held.popleft())
        core = self.quic._core  # straight: `datagrams_to_send` parses each packet again for a log that there is not
        if core is None:
            return
        flight: list[bytes] = []
        try:
            while (transmit := core.poll_transmit(now)) is not None:
                flight.append(transmit[0])
                if len(flight) == SLICE_PACKETS:
                    yield flight
                    flight = []
        except RuntimeError as error:
            # "packet builder capacity exhausted", now and then under many streams; the next call goes on from there.
            logger.debug("qh3 sent nothing: %s", error)
        if flight:
            yield flight

    def _is_allowed(self, stream: int) -> bool:
        if stream % 2 != self._parity or stream // 4 < self._n_allowed:
            return True
        self._n_allowed = self.quic.max_concurrent_bidi_streams
        return stream // 4 < self._n_allowed

    @staticmethod
    def _call(operation: Callable[..., None], *arguments: Any) -> None:
        try:
            operation(*arguments)
        except (QuicConnectionError, AssertionError) as error:
            raise RuntimeError(str(error)) from error
