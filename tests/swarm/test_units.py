"""Quantities with units, as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.units import parse_duration_s, parse_rate_bit_s, parse_size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30ms", 0.03),
        ("0.3ms", 0.0003),
        ("250us", 0.00025),
        ("1.5s", 1.5),
        ("2min", 120.0),
        ("1h", 3600.0),
        ("0ms", 0.0),
    ],
)
def test_a_duration_is_the_nearest_float(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100Mbit", 100_000_000), ("1.1kbit", 1100), ("10Gbit", 10**10), ("8bit", 8), ("100Mbit/s", 100_000_000)],
)
def test_rates_are_bits_per_second(text: str, rate: int) -> None:
    assert parse_rate_bit_s(text) == rate


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2MB", 2_000_000),
        ("2MiB", 2 << 20),
        ("1.1KB", 1100),
        ("8GB", 8 * 10**9),
        ("1TiB", 1 << 40),
        ("512B", 512),
        (" 64 KB ", 64_000),
    ],
)
def test_sizes_know_decimal_and_binary_prefixes(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("parse", [parse_duration_s, parse_rate_bit_s, parse_size_bytes])
@pytest.mark.parametrize("text", ["30", "0", "1.5"])
def test_a_number_alone_is_told_to_take_a_unit(parse: object, text: str) -> None:
    with pytest.raises(UserError, match=r"--x needs a unit: got '.*', expected something like"):
        parse(text, "--x")  # type: ignore[operator]


@pytest.mark.parametrize(
    "text", ["", "ms", "-3ms", "+3ms", "1e3ms", "nan", "inf", "3,5ms", "٣ms", "1.ms", "3 m s", "9" * 20 + "s"]
)
def test_what_is_no_number_with_a_unit_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError, match="cannot read --rtt"):
        parse_duration_s(text, "--rtt")


def test_a_unit_of_something_else_is_refused_with_the_list() -> None:
    with pytest.raises(UserError, match="expected one of us, ms, s, min, h"):
        parse_duration_s("30MB")
    with pytest.raises(UserError, match="expected one of bit, kbit, Mbit, Gbit"):
        parse_rate_bit_s("100Mb")  # bits or bytes?
    with pytest.raises(UserError, match="expected one of B, KB"):
        parse_size_bytes("100Mbit")


def test_a_wrong_case_is_refused_with_a_proposal() -> None:
    with pytest.raises(UserError, match="did you mean 2MB"):
        parse_size_bytes("2mb")
    with pytest.raises(UserError, match="did you mean 30ms"):
        parse_duration_s("30MS")


def test_a_rate_below_one_bit_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1bit"):
        parse_rate_bit_s("0Mbit")


@given(st.text(max_size=30))
def test_no_text_does_anything_but_parse_or_raise_a_user_error(text: str) -> None:
    for parse in (parse_duration_s, parse_rate_bit_s, parse_size_bytes):
        try:
            assert parse(text) >= 0
        except UserError:
            pass
