"""Vouchers: golden bytes, a round trip, and damage that may raise only RemoteProtocolError."""

from __future__ import annotations

import random

import pytest

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.identity import Identity
from swarm.wire.vouchers import MAX_VOUCHER_BYTES, Voucher, read_voucher, sign_voucher

RELAY, PEER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
ADDRESSES = ("192.0.2.1:7440", "[2001:db8::1]:7440")


def voucher(addresses: tuple[str, ...] = ADDRESSES) -> bytes:
    return sign_voucher(RELAY, node=PEER.node_id, ends_at_ms=258, addresses=addresses)


def test_a_voucher_reads_back_as_it_was() -> None:
    assert read_voucher(voucher()) == Voucher(
        relay=RELAY.node_id, node=PEER.node_id, ends_at_ms=258, addresses=ADDRESSES
    )


def test_golden_bytes_never_change() -> None:
    data = voucher(("192.0.2.1:7440",))
    body = RELAY.node_id.raw + PEER.node_id.raw + bytes([2, 1, 0, 0, 0, 0, 0, 0]) + b"192.0.2.1:7440"
    assert data == RELAY.sign(b"swarm voucher 1\0" + body) + body


def test_a_changed_or_cut_voucher_is_refused() -> None:
    data = voucher()
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            read_voucher(data[:size])
    rng = random.Random(1)
    for position in rng.sample(range(8 * len(data)), 300):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(RemoteProtocolError):
            read_voucher(bytes(changed))


def test_random_bytes_are_refused() -> None:
    rng = random.Random(2)
    for _ in range(300):
        with pytest.raises(RemoteProtocolError):
            read_voucher(rng.randbytes(rng.randrange(MAX_VOUCHER_BYTES + 50)))


@pytest.mark.parametrize("addresses", [(), ("relay.example:7440",), ("192.0.2.1:0",), ADDRESSES * 3])
def test_only_a_few_ip_literals_may_stand_in_a_voucher(addresses: tuple[str, ...]) -> None:
    with pytest.raises(LocalProtocolError):
        voucher(addresses)
