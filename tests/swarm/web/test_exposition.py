"""The text format, by Prometheus's own rules."""

from __future__ import annotations

import re

import pytest
from aiohttp import web

from swarm.web.exposition import CONTENT_TYPE, Buckets, MetricsRegistry, add_metrics

SAMPLE = re.compile(r'[a-z_]+(\{[a-z_]+="(?:[^"\\\n]|\\["\\n])*"(,[a-z_]+="(?:[^"\\\n]|\\["\\n])*")*\})? [-+0-9.eInf]+')


def test_counters_and_gauges_are_read_when_asked_for() -> None:
    made = MetricsRegistry()
    counts = [3]
    made.counter("a_total", "Things.", lambda: counts[0])
    made.gauge("b", "Now.", lambda: 0.25)
    text = "# HELP a_total Things.\n# TYPE a_total counter\na_total 3.0\n# HELP b Now.\n# TYPE b gauge\nb 0.25\n"
    assert made.render().decode() == text
    counts[0] = 7
    assert b"a_total 7.0\n" in made.render()


def test_no_samples_yet_are_no_lines_and_no_error() -> None:
    made = MetricsRegistry()
    made.gauge("rtt", "By peer.", list)
    assert made.render() == b"# HELP rtt By peer.\n# TYPE rtt gauge\n"


def test_labels_are_escaped() -> None:
    made = MetricsRegistry()
    made.counter("c_total", "By name.", lambda: [({"peer": 'a"\\\n', "way": "out"}, 1)])
    line = made.render().decode().splitlines()[-1]
    assert line == r'c_total{peer="a\"\\\n",way="out"} 1.0'
    assert SAMPLE.fullmatch(line)


def test_a_histograms_buckets_are_cumulative() -> None:
    values = Buckets(bounds=(0.1, 1.0), counts=(2, 1, 1), total=2.65)
    made = MetricsRegistry()
    made.histogram("d_seconds", "Times.", lambda: values)
    assert made.render().decode().splitlines()[2:] == [
        'd_seconds_bucket{le="0.1"} 2.0',
        'd_seconds_bucket{le="1.0"} 3.0',
        'd_seconds_bucket{le="+Inf"} 4.0',
        "d_seconds_count 4.0",
        "d_seconds_sum 2.65",
    ]


def test_a_name_is_taken_once() -> None:
    made = MetricsRegistry()
    made.gauge("e", "One.", lambda: 1)
    with pytest.raises(ValueError, match="e is there already"):
        made.counter("e", "Two.", lambda: 2)


async def test_metrics_are_served() -> None:
    made = MetricsRegistry()
    made.gauge("f", "One.", lambda: 1)
    app = web.Application()
    add_metrics(app, made)
    (route,) = [route for route in app.router.routes() if route.method == "GET"]
    response = await route.handler(None)  # type: ignore[arg-type]
    assert isinstance(response, web.Response)
    assert response.headers["Content-Type"] == CONTENT_TYPE
    assert response.body == b"# HELP f One.\n# TYPE f gauge\nf 1.0\n"
