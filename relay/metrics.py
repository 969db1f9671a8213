"""What a relay counts, as Prometheus reads it (text format 0.0.4). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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


def render(metrics: Sequence[Metric]) -> str:
    """Return the text of a scrape. Names and labels are ours, so nothing needs to be escaped."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for value_of_label, number in metric.values.items():
            labels = f'{{{metric.label}="{value_of_label}"}}' if metric.label else ""
            lines.append(f"{metric.name}{labels} {number:.15g}")
    return "\n".join(lines) + "\n"
