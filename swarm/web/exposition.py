"""What a node counts, in Prometheus's text format. The format is prometheus-client's; the counting is everybody's own.

Values are read when they are asked for, so nothing is counted twice and an idle node does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """A histogram's values: how many are at or below each bound and above the one before, and above all.

    Attributes:
        counts: one more than there are bounds.
        total: sum of the values.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


class MetricsRegistry:
    """Metrics in the order in which they were added."""

    def __init__(self) -> None:
        self._families: dict[str, Callable[[], Family]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def counter(self, name: str, help: str, read: Callable[[], float | Iterable[Sample]]) -> None:
        """Add a count that only grows; `name` ends in `_total`."""
        self._add(name, lambda: _filled(CounterMetricFamily, name, help, read()))

    def gauge(self, name: str, help: str, read: Callable[[], float | Iterable[Sample]]) -> None:
        """Add a value that may fall again."""
        self._add(name, lambda: _filled(GaugeMetricFamily, name, help, read()))

    def histogram(self, name: str, help: str, read: Callable[[], Buckets]) -> None:
        """Add a histogram."""

        def family() -> Family:
            buckets, n, counted = read(), 0, []
            for bound, count in zip((*buckets.bounds, float("inf")), buckets.counts, strict=True):
                n += count
                counted.append(("+Inf" if bound == float("inf") else repr(float(bound)), n))
            return HistogramMetricFamily(name, help, buckets=counted, sum_value=buckets.total)

        self._add(name, family)

    def collect(self) -> Iterator[Family]:
        """Yield what the library writes."""
        for family in self._families.values():
            yield family()

    def render(self) -> bytes:
        """Return the text of all of them."""
        return generate_latest(self._registry)

    def _add(self, name: str, family: Callable[[], Family]) -> None:
        if name in self._families:
            raise ValueError(f"the metric {name} is there already")
        self._families[name] = family


def add_metrics(app: web.Application, registry: MetricsRegistry) -> None:
    """Serve a registry at `/metrics`."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=registry.render(), headers={"Content-Type": CONTENT_TYPE})

    app.router.add_get("/metrics", metrics)


def _filled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, help: str, value: float | Iterable[Sample]
) -> Family:
    samples: list[Sample] = [({}, value)] if isinstance(value, int | float) else list(value)
    labels = tuple(samples[0][0]) if samples else ()
    family = kind(name, help, labels=labels)
    for given, each in samples:
        family.add_metric([given[label] for label in labels], each)
    return family
