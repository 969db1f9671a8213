"""What a relay counts, as values; `web` writes them out for Prometheus. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number, or one for each value of a label.

    Attributes:
        kind: `counter` (its name ends in `_total`) or `gauge`.
        values: by the label's value; "" alone where there is no label.
    """

    name: str
    kind: str
    help: str
    values: Mapping[str, float]
    label: str = field(default="")


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a number that goes up and down."""
    return Metric(name=name, kind="gauge", help=text, values={"": value})


def counter(name: str, text: str, value: float) -> Metric:
    """Return a number that only rises."""
    return Metric(name=name, kind="counter", help=text, values={"": value})
