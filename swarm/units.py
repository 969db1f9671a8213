"""Quantities as people type them on the command line: `30ms`, `100Mbit`, `2MB`. A unit is always required.

Decimal prefixes are powers of 1000, as networks and disks are sold; KiB, MiB and GiB are there for memory. Case counts:
`Mb` could be meant as bits or as bytes, so it is neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from swarm.errors import UserError

# As fractions, so that 0.3ms is the float nearest to 0.0003 and 1.1KB is 1,100 bytes.
_DURATIONS: Mapping[str, Fraction] = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86_400),
}
_RATES: Mapping[str, Fraction] = {
    "bit": Fraction(1),
    "kbit": Fraction(1000),
    "Mbit": Fraction(1000**2),
    "Gbit": Fraction(1000**3),
}
_SIZES: Mapping[str, Fraction] = {
    "B": Fraction(1),
    "KB": Fraction(1000),
    "MB": Fraction(1000**2),
    "GB": Fraction(1000**3),
    "TB": Fraction(1000**4),
    "KiB": Fraction(1024),
    "MiB": Fraction(1024**2),
    "GiB": Fraction(1024**3),
    "TiB": Fraction(1024**4),
}
_NUMBER_AND_UNIT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,12})?) ?([A-Za-z]*)")


def parse_duration_s(text: str, what: str = "a duration") -> float:
    """Return the seconds of `30ms`, `1.5s`, `5min`. Raises UserError; `what` names the quantity in it."""
    return float(_parse(text, what, _DURATIONS, "30ms"))


def parse_rate_bit_s(text: str, what: str = "a rate") -> int:
    """Return the bits per second of `100Mbit`, at least 1. Raises UserError."""
    rate = _parse(text.removesuffix("/s"), what, _RATES, "100Mbit")
    if rate < 1:
        raise UserError(f"{what} must be at least 1bit a second: got {text!r}")
    return round(rate)


def parse_size_bytes(text: str, what: str = "a size") -> int:
    """Return the bytes of `2MB` (2,000,000) or `2MiB` (2,097,152), rounded to the nearest. Raises UserError."""
    return round(_parse(text, what, _SIZES, "2MB"))


def _parse(text: str, what: str, units: Mapping[str, Fraction], example: str) -> Fraction:
    known = ", ".join(units)
    found = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if found is None:
        raise UserError(f"cannot read {what}: got {text[:80]!r}, expected a number and a unit like {example}")
    number, unit = found.groups()
    if not unit:
        raise UserError(f"{what} needs a unit: got {text!r}, expected something like {example} (units: {known})")
    if unit not in units:
        close = [each for each in units if each.lower() == unit.lower()]
        hint = f"; did you mean {number}{close[0]}?" if close else ""
        raise UserError(f"unknown unit of {what}: got {unit[:80]!r}, expected one of {known}{hint}")
    return Fraction(number) * units[unit]
