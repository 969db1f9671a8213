"""Metrics as Prometheus reads them."""

from __future__ import annotations

from relay.metrics import Metric, counter, gauge
from relay.web import render


def test_each_number_has_its_help_its_type_and_its_labels() -> None:
    text = render(
        [
            gauge("channels", "Open channels.", 3),
            counter("bytes_total", "Bytes.", 1234567890123),
            Metric(
                name="drops_total", kind="counter", help="Dropped.", values={"forged": 1, "unbound": 0.5}, label="why"
            ),
        ]
    )
    assert text.decode() == (
        "# HELP channels Open channels.\n# TYPE channels gauge\nchannels 3.0\n"
        "# HELP bytes_total Bytes.\n# TYPE bytes_total counter\nbytes_total 1.234567890123e+12\n"
        "# HELP drops_total Dropped.\n# TYPE drops_total counter\n"
        'drops_total{why="forged"} 1.0\ndrops_total{why="unbound"} 0.5\n'
    )
