"""Receipts: golden bytes, a round trip, damage, and what no order, repetition or old receipt can change."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.identity import Identity
from swarm.wire.receipts import (
    FULL_WEIGHT,
    MAX_DAY,
    MAX_PAIRS,
    RECEIPT_BYTES,
    RECEIPT_CHARACTERS,
    Receipt,
    Totals,
    day_of,
    highest,
    peek_receipt,
    read_receipt,
    receipt_bytes,
    sign_receipt,
    total,
)

BACKBONE, PEER, THIEF = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
PERIOD = b"period 1"


def receipt(
    n_pairs: int = 30,
    *,
    n_rows: int = 10,
    weight: int = 15_000,
    day: int = 20_000,
    period: bytes = PERIOD,
    by: Identity = BACKBONE,
) -> Receipt:
    totals = Totals(n_rows=n_rows, n_pairs=n_pairs, weight=weight)
    return sign_receipt(by, peer=PEER.node_id, period=period, day=day, totals=totals)


def test_a_receipt_reads_back_as_it_was_in_bytes_and_in_text() -> None:
    given = receipt()
    assert read_receipt(given.data) == given
    assert read_receipt(receipt_bytes(given.text)) == given
    assert (len(given.data), len(given.text)) == (RECEIPT_BYTES, RECEIPT_CHARACTERS)


def test_golden_bytes_never_change() -> None:
    body = BACKBONE.node_id.raw + PEER.node_id.raw + PERIOD + struct.pack("<IQQQ", 20_000, 10, 30, 15_000)
    assert receipt().data == BACKBONE.sign(b"swarm receipt 1\0" + body) + body


def test_days_are_of_utc() -> None:
    assert [day_of(wall) for wall in (0, 86_399.9, 86_400, -1)] == [0, 0, 1, -1]


def test_a_changed_or_cut_receipt_is_refused() -> None:
    data = receipt().data
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            read_receipt(data[:size])
    with pytest.raises(RemoteProtocolError):
        read_receipt(data + b"\0")
    for position in range(8 * len(data)):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(RemoteProtocolError):
            read_receipt(bytes(changed))


@given(st.binary(max_size=2 * RECEIPT_BYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_receipt(data)


@given(st.one_of(st.text(max_size=300), st.integers(), st.none(), st.lists(st.text(max_size=3), max_size=3)))
def test_whatever_stands_where_a_text_should_is_refused(value: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        read_receipt(receipt_bytes(value))


def test_a_receipt_has_one_spelling() -> None:
    text = receipt().text
    last = text[-1]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    other = alphabet[alphabet.index(last) ^ 1]  # the two lowest bits say nothing
    for changed in (text[:-1] + other, text + "=", text.replace("-", "+").replace("_", "/") + " "):
        with pytest.raises(RemoteProtocolError):
            receipt_bytes(changed)


def test_an_inflated_receipt_is_no_receipt() -> None:
    """A peer raises its counts and keeps the signature; or signs the higher ones itself, in the backbone's name."""
    given = receipt()
    body = bytearray(given.data[64:])
    struct.pack_into("<QQQ", body, 76, 100, 300, 150_000)
    with pytest.raises(RemoteProtocolError, match="signature is not that of backbone"):
        read_receipt(given.data[:64] + bytes(body))
    for domain in (b"swarm receipt 1\0", b"swarm record 1\0", b"swarm voucher 1\0"):
        with pytest.raises(RemoteProtocolError, match="signature is not that of backbone"):
            read_receipt(THIEF.sign(domain + bytes(body)) + bytes(body))


def test_a_backbones_signature_over_something_else_makes_no_receipt() -> None:
    body = receipt().data[64:]
    for domain in (b"", b"swarm record 1\0", b"swarm voucher 1\0", b"swarm hello 1\0"):
        with pytest.raises(RemoteProtocolError, match="signature is not that of backbone"):
            read_receipt(BACKBONE.sign(domain + body) + body)


BAD: list[dict[str, Any]] = [
    {"n_rows": 0, "n_pairs": 0, "weight": 0},
    {"n_rows": 11, "n_pairs": 10},
    {"n_rows": 1, "n_pairs": 256},
    {"weight": 30 * FULL_WEIGHT + 1},
    {"n_rows": MAX_PAIRS, "n_pairs": MAX_PAIRS + 1, "weight": 0},
    {"day": MAX_DAY + 1},
    {"day": -1},
    {"period": b"short"},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_counts_that_cannot_be_are_neither_signed_nor_read(fields: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="bad receipt"):
        receipt(**fields)
    if fields.get("day") == -1 or "period" in fields:
        return  # has no bytes
    whole = {"n_rows": 10, "n_pairs": 30, "weight": 15_000, "day": 20_000} | fields
    counts = struct.pack("<IQQQ", whole["day"], whole["n_rows"], whole["n_pairs"], whole["weight"])
    body = BACKBONE.node_id.raw + PEER.node_id.raw + PERIOD + counts
    with pytest.raises(RemoteProtocolError, match="bad receipt"):
        peek_receipt(BACKBONE.sign(b"swarm receipt 1\0" + body) + body)


def test_an_old_receipt_and_one_shown_twice_add_nothing() -> None:
    old, new = receipt(30), receipt(50, n_rows=20)
    expected = Totals(n_rows=20, n_pairs=50, weight=15_000)
    assert total([new]) == total([old, new]) == total([new, old]) == total([new, old, old, new]) == expected


def test_days_periods_and_backbones_add_up() -> None:
    parts = [receipt(), receipt(day=20_001), receipt(period=b"period 2"), receipt(by=THIEF)]
    assert total(parts) == Totals(n_rows=40, n_pairs=120, weight=60_000)
    assert total(parts).points == 60


_counts = st.integers(1, 40).flatmap(
    lambda rows: st.tuples(st.just(rows), st.integers(rows, 3 * rows), st.integers(0, 1000 * rows))
)
_given = st.lists(st.tuples(st.sampled_from([PERIOD, b"period 2"]), st.integers(20_000, 20_002), _counts), max_size=8)


@given(_given, st.randoms(use_true_random=False))
def test_no_order_and_no_repetition_changes_a_total(
    parts: list[tuple[bytes, int, tuple[int, int, int]]], rng: random.Random
) -> None:
    made = [
        receipt(pairs, n_rows=rows, weight=weight, period=period, day=day)
        for period, day, (rows, pairs, weight) in parts
    ]
    replayed = made + [rng.choice(made) for _ in range(5)] if made else made
    rng.shuffle(replayed)
    assert total(replayed) == total(made)
    assert highest(replayed) == highest(made)
    best: dict[tuple[bytes, int], int] = {}  # by hand
    for period, day, (_, pairs, _) in parts:
        best[period, day] = max(best.get((period, day), 0), pairs)
    assert total(made).n_pairs == sum(best.values())
