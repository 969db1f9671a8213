"""Where a request's time went, from the spans of its layers."""

from __future__ import annotations

from collections.abc import Callable

from swarm.backbone.tracing import MAX_PASSES, Tracer
from swarm.dispatch.layer_counts import BatchSpan, LayerSpan
from swarm.dispatch.plan import HERE
from swarm.ids import NodeId

MS = 1_000_000
A, B = NodeId(b"a" * 32), NodeId(b"b" * 32)


class Dispatcher:
    def __init__(self) -> None:
        self.on_layer: Callable[[LayerSpan], None] | None = None


def span(layer: int, at_ms: int, *sequences: int, batches: tuple[BatchSpan, ...] | None = None) -> LayerSpan:
    """Return a layer that packs for 1 ms, waits 10 and combines for 2."""
    began = at_ms * MS
    default = (
        BatchSpan(node=A, n_rows=1, answered_ns=began + 4 * MS, queue_s=0.0, compute_s=0.001),
        BatchSpan(node=B, n_rows=1, answered_ns=began + 11 * MS, queue_s=0.002, compute_s=0.003),
    )
    return LayerSpan(
        layer=layer,
        n_tokens=1,
        n_destinations=2,
        n_batches=2,
        began_ns=began,
        planned_ns=began + MS,
        returned_ns=began + 11 * MS,
        ended_ns=began + 13 * MS,
        compute_s=0.003,
        queue_s=0.002,
        sequences=sequences or (7,),
        batches=default if batches is None else batches,
    )


def test_only_the_layers_of_a_traced_request_are_kept_and_only_while_it_lives() -> None:
    dispatcher = Dispatcher()
    tracer = Tracer(dispatcher)
    one, other = tracer.open(7, 0), tracer.open(8, 0)
    assert dispatcher.on_layer is not None
    for at, sequences in enumerate([(7,), (8,), (7, 8), (9,)]):
        dispatcher.on_layer(span(at, at * 20, *sequences))
    assert [len(each.as_json()["passes"][0]["layers"]) for each in (one, other)] == [2, 2]
    tracer.close(7)
    tracer.close(8)
    tracer.close(8)
    assert dispatcher.on_layer is None


def test_anothers_listener_is_left_in_place() -> None:
    dispatcher = Dispatcher()
    seen: list[LayerSpan] = []
    dispatcher.on_layer = seen.append
    tracer = Tracer(dispatcher)
    tracer.open(7, 0)
    tracer.close(7)
    assert dispatcher.on_layer == seen.append


def test_a_layers_wait_is_told_apart_by_the_answer_that_came_last() -> None:
    trace = Tracer(Dispatcher()).open(7, 0)
    trace._ended_ns = 0
    trace.add(span(0, 5))
    trace.add(span(1, 20))  # 2 ms after the layer before
    stages = trace._stages_ns
    assert stages["local"] == 7 * MS
    assert (stages["pack"], stages["combine"]) == (2 * MS, 4 * MS)
    assert (stages["peer_queue"], stages["peer_compute"], stages["network"]) == (4 * MS, 6 * MS, 10 * MS)
    (only,) = trace.as_json()["passes"]
    assert only["at_s"] == 0.005
    assert [peer["peer"] for peer in only["layers"][0]["peers"]] == [A.short, B.short]
    last = {"peer": B.short, "n_rows": 1, "s": 0.01, "queue_s": 0.002, "compute_s": 0.003}
    assert only["layers"][1]["peers"][1] == last


def test_a_peer_that_lies_about_its_time_cannot_make_the_network_negative() -> None:
    batches = (BatchSpan(node=HERE, n_rows=1, answered_ns=11 * MS, queue_s=9.0, compute_s=9.0),)
    trace = Tracer(Dispatcher()).open(7, 0)
    trace.add(span(0, 0, batches=batches))
    assert (trace._stages_ns["peer_queue"], trace._stages_ns["network"]) == (10 * MS, 0)
    assert trace.as_json()["passes"][0]["layers"][0]["peers"][0]["peer"] == "here"


def test_a_layer_that_is_not_deeper_begins_a_pass_and_only_the_latest_are_kept() -> None:
    trace = Tracer(Dispatcher()).open(7, 0)
    for number in range(MAX_PASSES + 3):
        for layer in (0, 1):
            trace.add(span(layer, 40 * number + 20 * layer))
    shown = trace.as_json()
    assert (shown["n_passes"], len(shown["passes"])) == (MAX_PASSES + 3, MAX_PASSES)
    assert {len(each["layers"]) for each in shown["passes"]} == {2}
