"""The probes' bytes: golden ones, a round trip, and that nothing but the other side's own packets counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError
from swarm.ids import NodeId
from swarm.net.path_probes import PROBE_BYTES, PathKey, decode_probe

NONCE = bytes(range(32))
SERVER, CLIENT = NodeId(b"s" * 32), NodeId(b"c" * 32)

GOLDEN_PROBE = "224c8d336de9a577c30201000000000000012342547aaf18b93f9074f507ad3f2377"
GOLDEN_PONG = "234c8d336de9a577c302010000000000000036d39be012b4a5e569f4f1e05449e969"


def keys(nonce: bytes = NONCE) -> tuple[PathKey, PathKey]:
    """Return the server's and the client's."""
    return (
        PathKey(nonce, server=SERVER, client=CLIENT, is_client=False),
        PathKey(nonce, server=SERVER, client=CLIENT, is_client=True),
    )


def test_golden_bytes() -> None:
    _, client = keys()
    assert client.encode(is_pong=False, number=258, flag=True).hex() == GOLDEN_PROBE
    assert client.encode(is_pong=True, number=258, flag=False).hex() == GOLDEN_PONG


@given(st.booleans(), st.integers(0, 2**64 - 1), st.booleans())
def test_what_one_side_sends_the_other_reads(is_pong: bool, number: int, flag: bool) -> None:
    for ours, theirs in (keys(), keys()[::-1]):
        data = ours.encode(is_pong=is_pong, number=number, flag=flag)
        probe = decode_probe(data)
        assert (probe.is_pong, probe.number, probe.flag, probe.tag) == (is_pong, number, flag, theirs.tag)
        assert theirs.is_authentic(data)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_probe_or_refused(data: bytes) -> None:
    try:
        decode_probe(data)
    except RemoteProtocolError:
        pass


@given(st.integers(0, PROBE_BYTES * 8 - 1))
def test_a_changed_bit_is_no_longer_authentic(bit: int) -> None:
    server, client = keys()
    data = bytearray(client.encode(is_pong=False, number=1, flag=True))
    data[bit // 8] ^= 1 << bit % 8
    assert not server.is_authentic(bytes(data))


def test_nothing_can_be_sent_back_to_its_sender_or_to_another_connection() -> None:
    server, client = keys()
    data = client.encode(is_pong=False, number=1, flag=True)
    assert decode_probe(data).tag == server.tag != client.tag
    others = keys(bytes(32))
    assert others[0].tag != server.tag
    assert not others[0].is_authentic(data)


@pytest.mark.parametrize("data", [b"", b"\x22", bytes(PROBE_BYTES), b"\x22" + bytes(PROBE_BYTES)])
def test_a_wrong_size_or_type_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_probe(data)
