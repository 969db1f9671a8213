"""Two QUIC connections in memory: the key that the server shows is proved, whatever the clock says."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarm.errors import IdentityMismatch
from swarm.identity import Identity
from swarm.net.certificate import MAX_DATAGRAM_BYTES, make_certificate, presented_node_id, quic_configuration

SERVER = Identity.from_seed(b"server" + bytes(26))
CLIENT = Identity.from_seed(b"client" + bytes(26))
ADDRESS = ("192.0.2.1", 1)


def handshake(
    change_server: Callable[[QuicConfiguration], None] = lambda configuration: None,
) -> tuple[QuicConnection, list[events.QuicEvent], list[int]]:
    """Return the client, its events, and the sizes of the datagrams, after all that two sides say without a timer."""
    server_configuration = quic_configuration(SERVER, make_certificate(SERVER), is_client=False)
    change_server(server_configuration)
    client = QuicConnection(configuration=quic_configuration(CLIENT, make_certificate(CLIENT), is_client=True))
    server = QuicConnection(
        configuration=server_configuration,
        original_destination_connection_id=client.original_destination_connection_id,
    )
    client.connect(ADDRESS, now=0.0)
    sizes: list[int] = []
    for _ in range(10):
        for sender, receiver in ((client, server), (server, client)):
            for data, _ in sender.datagrams_to_send(0.0):
                sizes.append(len(data))
                receiver.receive_datagram(data, ADDRESS, now=0.0)
    seen: list[events.QuicEvent] = []
    while (event := client.next_event()) is not None:
        seen.append(event)
    return client, seen, sizes


def is_completed(seen: list[events.QuicEvent]) -> bool:
    return any(isinstance(event, events.HandshakeCompleted) for event in seen)


def test_the_client_learns_the_servers_node_id() -> None:
    client, seen, _ = handshake()
    assert is_completed(seen)
    assert presented_node_id(client) == SERVER.node_id


def test_no_datagram_is_larger_than_any_ipv6_path_carries() -> None:
    _, _, sizes = handshake()
    assert max(sizes) <= MAX_DATAGRAM_BYTES


def test_a_certificate_without_its_private_key_proves_nothing() -> None:
    """A thief shows another node's certificate, which anybody can copy, and signs with a key of its own."""
    thief = Identity.generate()

    def steal(configuration: QuicConfiguration) -> None:
        configuration.private_key = thief.private_key

    _, seen, _ = handshake(steal)
    assert not is_completed(seen)


def test_a_key_of_another_kind_is_refused() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    when = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(when)
        .not_valid_after(when + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )

    def use_ecdsa(configuration: QuicConfiguration) -> None:
        configuration.certificate, configuration.private_key = certificate, key

    client, seen, _ = handshake(use_ecdsa)
    assert is_completed(seen), "TLS itself is content with it"
    with pytest.raises(IdentityMismatch, match="ed25519"):
        presented_node_id(client)


def test_without_a_certificate_there_is_no_node_id() -> None:
    client = QuicConnection(configuration=quic_configuration(CLIENT, make_certificate(CLIENT), is_client=True))
    client.connect(ADDRESS, now=0.0)
    with pytest.raises(IdentityMismatch):
        presented_node_id(client)


@pytest.mark.parametrize("year", [1971, 2026, 9000])
def test_no_clock_matters(year: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioquic.tls.utcnow", lambda: datetime.datetime(year, 1, 1, tzinfo=datetime.UTC))
    client, seen, _ = handshake()
    assert is_completed(seen)
    assert presented_node_id(client) == SERVER.node_id


def test_the_certificate_is_valid_as_long_as_x509_can_say() -> None:
    certificate = make_certificate(SERVER)
    assert certificate.not_valid_before_utc.year == 1970
    assert certificate.not_valid_after_utc.year == 9999


def test_there_are_no_tickets_and_no_early_data() -> None:
    client, seen, _ = handshake()
    assert all(not event.session_resumed for event in seen if isinstance(event, events.HandshakeCompleted))
    assert client.configuration.session_ticket is None
