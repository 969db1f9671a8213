"""Relay packets: golden bytes, a round trip, and damage that may raise only RemoteProtocolError."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError
from swarm.net import relay_packets as p

KEY = b"K" * 32
HEAD = "43" * 8 + "02010000"
NUMBER = "0302000000000000"
# Written from the byte table by hand; the MAC follows where the table says so. They never change.
GOLDEN = {
    p.PacketType.BIND: "24" + HEAD + "01" + NUMBER + "63" * 16,
    p.PacketType.CHALLENGE: "25" + HEAD + "00" + "63" * 16,
    p.PacketType.BOUND: "26" + HEAD + "01" + NUMBER,
    p.PacketType.KEEPALIVE: "27" + HEAD + "01" + NUMBER,
    p.PacketType.ALIVE: "28" + HEAD + "01" + NUMBER,
}


def packet(
    kind: p.PacketType,
    channel: bytes = b"CCCCCCCC",
    generation: int = 258,
    side: int = p.CALLED,
    number: int = 515,
    cookie: bytes = b"c" * 16,
) -> p.Control:
    is_challenge = kind is p.PacketType.CHALLENGE
    return p.Control(
        type=kind,
        channel=channel,
        generation=generation,
        side=0 if is_challenge else side,
        number=0 if is_challenge else number,
        cookie=cookie if kind in (p.PacketType.BIND, p.PacketType.CHALLENGE) else b"",
    )


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_bytes_never_change(kind: p.PacketType) -> None:
    golden = bytes.fromhex(GOLDEN[kind])
    if kind is not p.PacketType.CHALLENGE:
        golden += hmac.digest(KEY, golden, "sha256")[:16]
    assert p.encode(packet(kind), KEY) == golden
    assert p.decode(golden) == packet(kind)
    assert len(golden) == p.SIZES[kind]


def test_every_type_has_golden_bytes() -> None:
    assert {*GOLDEN, p.PacketType.RELAY} == set(p.PacketType)


def test_a_relayed_packet_is_a_type_a_channel_and_the_payload() -> None:
    assert p.relayed(b"CCCCCCCC", b"ab") == bytes.fromhex("21" + "43" * 8 + "6162")
    assert p.RELAY_HEAD_BYTES == 9


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from([*p.SIZES]),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**32 - 1),
    st.integers(0, 1),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
)
def test_a_packet_reads_back_as_it_was(
    kind: p.PacketType, channel: bytes, generation: int, side: int, number: int, cookie: bytes
) -> None:
    sent = packet(kind, channel, generation, side, number, cookie)
    data = p.encode(sent, KEY)
    assert p.decode(data) == sent
    if kind is not p.PacketType.CHALLENGE:
        assert p.is_authentic(data, KEY)
        assert not p.is_authentic(data, b"k" * 32)


@pytest.mark.parametrize("kind", [kind for kind in GOLDEN if kind is not p.PacketType.CHALLENGE])
def test_a_flipped_bit_is_refused_or_found_by_the_mac(kind: p.PacketType) -> None:
    data = bytearray(p.encode(packet(kind), KEY))
    for position in range(8 * len(data)):
        data[position // 8] ^= 1 << position % 8
        try:
            p.decode(bytes(data))
        except RemoteProtocolError:
            pass
        assert not p.is_authentic(bytes(data), KEY)
        data[position // 8] ^= 1 << position % 8


@pytest.mark.parametrize("kind", GOLDEN)
def test_a_cut_or_longer_packet_is_refused(kind: p.PacketType) -> None:
    data = p.encode(packet(kind), KEY)
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            p.decode(data[:size])
    with pytest.raises(RemoteProtocolError):
        p.decode(data + b"\0")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=60))
def test_random_bytes_raise_only_remote_protocol_errors(data: bytes) -> None:
    try:
        p.decode(data)
    except RemoteProtocolError:
        pass


def test_a_challenge_is_smaller_than_a_bind_that_it_answers() -> None:
    assert p.SIZES[p.PacketType.CHALLENGE] < p.SIZES[p.PacketType.BIND]
    assert p.SIZES[p.PacketType.BOUND] < p.SIZES[p.PacketType.BIND]
    assert p.SIZES[p.PacketType.CHALLENGE] < p.SIZES[p.PacketType.KEEPALIVE]
