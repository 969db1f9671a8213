"""`/metrics`: what a backbone has done so far, in Prometheus's text format.

A metric reads its value when it is asked for; the counting itself is elsewhere (`serving_stats`, `dispatcher`, `endpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from aiohttp import web

from swarm.backbone.assembly import RunningBackbone
from swarm.backbone.serving_stats import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus's exposition format

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One name in the output.

    Attributes:
        kind: counter or gauge, or histogram.
        read: returns its samples, or its histogram.
    """

    name: str
    kind: str
    help: str
    read: Callable[[], Iterable[Sample] | Histogram]


class MetricsRegistry:
    """Metrics in the order in which they were added."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def counter(self, name: str, help: str, read: Callable[[], float | Iterable[Sample]]) -> None:
        """Add a count that only grows; `name` ends in `_total`."""
        self._add(Metric(name=name, kind="counter", help=help, read=_samples(read)))

    def gauge(self, name: str, help: str, read: Callable[[], float | Iterable[Sample]]) -> None:
        """Add a value that may fall again."""
        self._add(Metric(name=name, kind="gauge", help=help, read=_samples(read)))

    def histogram(self, name: str, help: str, read: Callable[[], Histogram]) -> None:
        """Add a histogram."""
        self._add(Metric(name=name, kind="histogram", help=help, read=read))

    def render(self) -> str:
        """Return the text of all of them."""
        return "".join(_render(metric) for metric in self._metrics.values())

    def _add(self, metric: Metric) -> None:
        if metric.name in self._metrics:
            raise ValueError(f"the metric {metric.name} is there already")
        self._metrics[metric.name] = metric


def add_metrics(app: web.Application, registry: MetricsRegistry) -> None:
    """Serve a registry at `/metrics`."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=registry.render().encode(), headers={"Content-Type": CONTENT_TYPE})

    app.router.add_get("/metrics", metrics)


def backbone_metrics(running: RunningBackbone) -> MetricsRegistry:
    """Return what a backbone tells of itself."""
    backbone, dispatcher, endpoint = running.backbone, running.dispatcher, running.endpoint
    stats, sent = backbone.stats, dispatcher.stats
    made = MetricsRegistry()
    made.counter("swarm_requests_total", "Requests, refused ones too.", lambda: stats.n_requests)
    made.counter("swarm_requests_cancelled_total", "Requests whose client left.", lambda: stats.n_cancelled)
    made.counter("swarm_prompt_tokens_total", "Tokens of prompts.", lambda: stats.n_prompt_tokens)
    made.counter("swarm_prompt_tokens_kept_total", "Of these, computed before.", lambda: stats.n_kept_tokens)
    made.counter("swarm_cache_hits_total", "Requests whose beginning was computed before.", lambda: stats.n_cache_hits)
    made.counter("swarm_completion_tokens_total", "Tokens of answers.", lambda: stats.n_completion_tokens)
    made.gauge("swarm_requests_running", "Requests that have a slot.", lambda: sum(len(x.jobs) for x in backbone.lanes))
    made.gauge("swarm_requests_waiting", "Requests that wait for a slot.", lambda: backbone.line.length)
    made.gauge("swarm_slots", "Requests that can run at once.", lambda: backbone.n_slots)
    made.gauge("swarm_prefix_cache_bytes", "Of texts kept in memory.", lambda: backbone.cache.size_bytes)
    made.gauge("swarm_prefix_cache_entries", "Texts kept in memory.", lambda: len(backbone.cache))
    made.counter("swarm_prefix_cache_evicted_total", "Texts given up for others.", lambda: backbone.cache.n_evicted)
    made.histogram("swarm_queue_seconds", "From a request to its slot.", lambda: stats.queue)
    made.histogram("swarm_ttft_seconds", "From a request to its first token.", lambda: stats.ttft)
    made.histogram("swarm_inter_token_seconds", "Between two tokens of an answer.", lambda: stats.inter_token)
    made.histogram("swarm_step_seconds", "Of a step.", lambda: stats.step)
    made.histogram("swarm_batch_requests", "Requests in a step.", lambda: stats.batch)
    made.counter("swarm_rows_total", "Rows computed in steps.", lambda: stats.n_rows)
    made.counter("swarm_draft_tokens_total", "Tokens drafted.", lambda: stats.drafts.n_drafted)
    made.counter("swarm_draft_tokens_accepted_total", "Of these, accepted.", lambda: stats.drafts.n_accepted)
    made.gauge("swarm_accept_length", "Mean tokens that a request's step adds.", lambda: stats.drafts.accept_length)
    if (drafting := running.drafting) is not None:
        made.counter(
            "swarm_drafter_tokens_total",
            "Tokens drafted, by who drafted them and whether they were accepted.",
            lambda: [
                ({"drafter": name, "accepted": accepted}, n)
                for name, (n_drafted, n_accepted) in drafting.counts().items()
                for accepted, n in (("yes", n_accepted), ("no", n_drafted - n_accepted))
            ],
        )
    if (local := running.local) is not None:
        made.gauge("swarm_local_experts", "Experts kept in this process.", lambda: len(local.experts))
        made.gauge("swarm_local_expert_bytes", "Memory of these.", lambda: local.n_bytes)
    made.counter("swarm_local_assignments_total", "Pairs computed here.", lambda: sent.n_local_assignments)
    made.counter("swarm_skipped_trips_total", "Layers that needed no peer.", lambda: sent.n_skipped_trips)
    made.counter("swarm_round_trips_total", "Layers that waited for the network.", lambda: sent.n_round_trips)
    made.gauge(
        "swarm_round_trips_per_token",
        "Layers that waited for the network, for each token of all answers.",
        lambda: sent.n_round_trips / max(stats.n_completion_tokens, 1),
    )
    made.counter("swarm_dispatch_seconds_total", "Spent in dispatches of layers.", lambda: sent.wait_s)
    made.counter(
        "swarm_dispatch_bytes_total",
        "Rows sent to peers and got back, without headers.",
        lambda: [({"direction": "out"}, sent.bytes_out), ({"direction": "back"}, sent.bytes_back)],
    )
    made.counter(
        "swarm_network_bytes_total",
        "UDP payload of this node, by where it goes.",
        lambda: [
            ({"direction": "out", "kind": "data"}, endpoint.bytes_sent),
            ({"direction": "out", "kind": "repair"}, endpoint.repair_bytes),
            ({"direction": "back", "kind": "data"}, endpoint.bytes_received),
        ],
    )
    made.counter(
        "swarm_assignments_total",
        "Pairs of a row and an expert, by the peer that computed them.",
        lambda: [({"peer": node.short}, n) for node, n in sent.assignments.items()],
    )
    attempts = ("hedged", "overdue", "resent", "busy", "local", "rescued")
    made.counter(
        "swarm_attempts_total",
        "What was done about slow and lost answers.",
        lambda: [({"kind": kind}, getattr(sent.attempts, f"n_{kind}")) for kind in attempts],
    )
    made.gauge(
        "swarm_sequence_stickiness",
        "Share of pairs with several holders that went where the last of their sequence, layer and expert went.",
        lambda: dispatcher.replicas.sequence_stickiness,
    )
    if (audits := dispatcher.audits) is not None:
        outcomes = ("passed", "disagreed", "dropped", "unaudited")
        made.counter(
            "swarm_audits_total",
            "Answers of peers that were asked of others as well, by what came of it.",
            lambda: [({"outcome": outcome}, getattr(audits.stats, f"n_{outcome}")) for outcome in outcomes],
        )
        made.counter("swarm_peers_caught_total", "Peers found to return wrong numbers.", lambda: audits.stats.n_caught)
    made.gauge(
        "swarm_peer_rtt_seconds",
        "Round trips to connected peers, by the kind of path that each is reached on.",
        lambda: [
            ({"peer": node.short, "path": "relay" if report.is_relayed else "direct"}, report.rtt_s)
            for node, report in running.pool.reports().items()
            if report.rtt_s is not None
        ],
    )
    made.counter(
        "swarm_path_switches_total",
        "Changes of path of connected peers.",
        lambda: sum(report.n_switches for report in running.pool.reports().values()),
    )
    made.gauge(
        "swarm_experts_missing",
        "Experts of all layers that nobody holds.",
        lambda: sum(map(len, running.holders.missing().values())),
    )
    return made


def _samples(read: Callable[[], float | Iterable[Sample]]) -> Callable[[], Iterable[Sample]]:
    def samples() -> Iterable[Sample]:
        value = read()
        return [({}, value)] if isinstance(value, int | float) else value

    return samples


def _render(metric: Metric) -> str:
    value = metric.read()
    lines = [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
    if isinstance(value, Histogram):
        n = 0
        for bound, count in zip((*value.bounds, float("inf")), value.counts, strict=True):
            n += count
            lines.append(f'{metric.name}_bucket{{le="{_number(bound)}"}} {n}')
        lines += [f"{metric.name}_sum {_number(value.total)}", f"{metric.name}_count {n}"]
    else:
        lines += [f"{metric.name}{_labels(labels)} {_number(each)}" for labels, each in value]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)
