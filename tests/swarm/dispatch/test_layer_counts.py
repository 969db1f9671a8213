"""A layer's times; what is counted of it, and when, is test_dispatcher's."""

from __future__ import annotations

from swarm.dispatch.layer_counts import EndedLayer


def test_a_layer_without_rows_has_times_but_no_slowest_peer() -> None:
    span = EndedLayer(3, 0, 0, (10, 20, 20, 30), [], None).span()
    assert (span.began_ns, span.planned_ns, span.returned_ns, span.ended_ns) == (10, 20, 20, 30)
    assert (span.compute_s, span.queue_s, span.n_destinations, span.batches) == (0.0, 0.0, 0, ())
