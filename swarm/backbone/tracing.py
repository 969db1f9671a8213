"""Where one request's time went: passes through the model, layer by layer, and of each layer what its peers did.

A *pass* is one graph that llama.cpp ran with rows of the request in it: a step, or a part of a long prompt. Between two layers
the backbone computes by itself; inside one it packs, waits, and combines:

    | local | pack | out, queue, compute, back | combine | local | pack ...
                   `-- of the peer whose answer came last
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from swarm.dispatch.layer_counts import BatchSpan, LayerSpan
from swarm.dispatch.plan import HERE

Json = dict[str, Any]

# Passes whose layers are kept, the latest; the totals are of all. Guessed: of 48 layers and 8 peers they are 1.5 MB of JSON.
MAX_PASSES = 32
STAGES = ("queue", "local", "pack", "network", "peer_queue", "peer_compute", "combine")


class TracedDispatcher(Protocol):
    """What spans come from: `swarm.dispatch.dispatcher.Dispatcher`."""

    on_layer: Callable[[LayerSpan], None] | None


@dataclass(slots=True)
class _Pass:
    n_rows: int
    n_sequences: int
    spans: list[LayerSpan] = field(default_factory=list)


class RequestTrace:
    """Of one request; nanoseconds of `time.monotonic_ns`."""

    def __init__(self, began_ns: int) -> None:
        """`began_ns`: when the request came."""
        self._began_ns = began_ns
        self._seated_ns = time.monotonic_ns()
        self._n_passes = 0
        self._passes: deque[_Pass] = deque(maxlen=MAX_PASSES)
        self._stages_ns = dict.fromkeys(STAGES, 0)
        self._stages_ns["queue"] = self._seated_ns - began_ns
        self._ended_ns = self._seated_ns  # of the last layer

    def add(self, span: LayerSpan) -> None:
        """Take in a layer that held rows of this request."""
        last = self._passes[-1].spans[-1] if self._passes else None
        if last is None or span.layer <= last.layer:
            self._n_passes += 1
            self._passes.append(_Pass(span.n_tokens, len(span.sequences)))
        self._passes[-1].spans.append(span)
        stages = self._stages_ns
        stages["local"] += max(0, span.began_ns - self._ended_ns)
        stages["pack"] += span.planned_ns - span.began_ns
        stages["combine"] += span.ended_ns - span.returned_ns
        waited = span.returned_ns - span.planned_ns
        queue, compute = _slowest(span)
        queue = min(queue, waited)  # what peers say of themselves may be wrong
        compute = min(compute, waited - queue)
        stages["peer_queue"] += queue
        stages["peer_compute"] += compute
        stages["network"] += waited - queue - compute
        self._ended_ns = span.ended_ns

    def as_json(self) -> Json:
        """Return it as it stands now; times in seconds, those called `at_s` since the request came."""
        now = time.monotonic_ns()
        stages = {name: round(value / 1e9, 6) for name, value in self._stages_ns.items()}
        stages["local"] = round(stages["local"] + (now - self._ended_ns) / 1e9, 6)
        return {
            "total_s": round((now - self._began_ns) / 1e9, 6),
            "stages": stages,
            "n_passes": self._n_passes,
            "passes": [self._pass(each) for each in self._passes],
        }

    def _pass(self, each: _Pass) -> Json:
        return {
            "at_s": self._at(each.spans[0].began_ns),
            "n_rows": each.n_rows,
            "n_sequences": each.n_sequences,
            "layers": [self._layer(span) for span in each.spans],
        }

    def _layer(self, span: LayerSpan) -> Json:
        return {
            "layer": span.layer,
            "at_s": self._at(span.began_ns),
            "pack_s": _seconds(span.planned_ns - span.began_ns),
            "wait_s": _seconds(span.returned_ns - span.planned_ns),
            "combine_s": _seconds(span.ended_ns - span.returned_ns),
            "peers": [
                {
                    "peer": "here" if batch.node == HERE else batch.node.short,
                    "n_rows": batch.n_rows,
                    "s": _seconds(batch.answered_ns - span.planned_ns),
                    "queue_s": round(batch.queue_s, 6),
                    "compute_s": round(batch.compute_s, 6),
                }
                for batch in span.batches
            ],
        }

    def _at(self, at_ns: int) -> float:
        return _seconds(at_ns - self._began_ns)


class Tracer:
    """Gives each traced request its spans; costs nothing while there is none."""

    def __init__(self, dispatcher: TracedDispatcher) -> None:
        self._dispatcher = dispatcher
        self._traces: dict[int, RequestTrace] = {}

    def open(self, sequence: int, began_ns: int) -> RequestTrace:
        """Trace a sequence from here on, until `close`."""
        if self._dispatcher.on_layer is None:
            self._dispatcher.on_layer = self._take
        trace = self._traces[sequence] = RequestTrace(began_ns)
        return trace

    def close(self, sequence: int) -> None:
        """Trace a sequence no more."""
        self._traces.pop(sequence, None)
        if not self._traces and self._dispatcher.on_layer == self._take:
            self._dispatcher.on_layer = None

    def _take(self, span: LayerSpan) -> None:
        for sequence in span.sequences:
            if (trace := self._traces.get(sequence)) is not None:
                trace.add(span)


def _slowest(span: LayerSpan) -> tuple[int, int]:
    """Return queue and compute, in nanoseconds, of the answer that came last."""
    last: BatchSpan | None = max(span.batches, key=lambda batch: batch.answered_ns, default=None)
    return (0, 0) if last is None else (int(last.queue_s * 1e9), int(last.compute_s * 1e9))


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 6)
