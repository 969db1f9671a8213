"""The server's half of mutual authentication: a self-signed certificate of the node's own key, compared, never chained."""

from __future__ import annotations

import datetime
import ssl

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import NameOID

from swarm.errors import IdentityMismatch
from swarm.identity import Identity, node_id_of
from swarm.ids import NodeId
from swarm.net.congestion import ALGORITHM
from swarm.wire.session import ALPN

# Validity must not depend on anyone's clock (an hour of skew is common on volunteers' machines).
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)

IDLE_TIMEOUT_S = 30.0
# Largest QUIC packet, bytes of UDP payload: 1280 (the least IPv6 link) - 40 (IPv6) - 8 (UDP), so that no path fragments.
MAX_DATAGRAM_BYTES = 1232
# Flow-control windows. aioquic opens them again as data is read, so they bound what is under way, not a message's size;
# the session bounds what is kept. 2 MB is 80 ms at 200 Mbit/s.
MAX_STREAM_DATA = 2 << 20
MAX_DATA = 8 << 20


def make_certificate(identity: Identity) -> x509.Certificate:
    """Return a self-signed X.509 certificate of the node's ed25519 key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(identity.node_id))])
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=identity.private_key.public_key(),
        serial_number=1,
        not_valid_before=_NOT_BEFORE,
        not_valid_after=_NOT_AFTER,
    )
    return builder.sign(identity.private_key, None)


def quic_configuration(identity: Identity, certificate: x509.Certificate, *, is_client: bool) -> QuicConfiguration:
    """Return aioquic's configuration for one side. No tickets, no 0-RTT."""
    configuration = QuicConfiguration(
        is_client=is_client,
        congestion_control_algorithm=ALGORITHM,
        alpn_protocols=[ALPN],
        idle_timeout=IDLE_TIMEOUT_S,
        max_data=MAX_DATA,
        max_stream_data=MAX_STREAM_DATA,
        max_datagram_size=MAX_DATAGRAM_BYTES,
        server_name="swarm.invalid" if is_client else None,
        verify_mode=ssl.CERT_NONE,  # the key itself is compared: see presented_node_id
    )
    if not is_client:
        configuration.certificate = certificate
        configuration.private_key = identity.private_key
    return configuration


def presented_node_id(quic: QuicConnection) -> NodeId:
    """Return whose key the server proved to hold in a completed handshake.

    With CERT_NONE aioquic still checks the CertificateVerify signature (RFC 8446 section 4.4.3), so the key is proved;
    only the chain is not looked at. There is no public accessor for the certificate in aioquic 1.7.

    Raises:
        IdentityMismatch: the key is not an ed25519 key.
    """
    certificate = quic.tls._peer_certificate
    key = certificate.public_key() if certificate is not None else None
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityMismatch(f"the server's key is of the wrong kind: got {type(key).__name__}, expected ed25519")
    return node_id_of(key)
