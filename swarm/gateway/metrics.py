"""What a backbone tells of itself at `/metrics`; the counting is elsewhere (`serving_stats`, `dispatcher`, `endpoint`)."""

from __future__ import annotations

from swarm.backbone.assembly import RunningBackbone
from swarm.backbone.serving_stats import Histogram
from swarm.net.byte_counts import Amounts, PathKind
from swarm.web.exposition import Buckets, MetricsRegistry, Sample


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
    made.histogram("swarm_queue_seconds", "From a request to its slot.", lambda: _buckets(stats.queue))
    made.histogram("swarm_ttft_seconds", "From a request to its first token.", lambda: _buckets(stats.ttft))
    made.histogram("swarm_inter_token_seconds", "Between two tokens of an answer.", lambda: _buckets(stats.inter_token))
    made.histogram("swarm_step_seconds", "Of a step.", lambda: _buckets(stats.step))
    made.histogram("swarm_batch_requests", "Requests in a step.", lambda: _buckets(stats.batch))
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
        "Payload of UDP and of TLS links of this node, by the kind of path that carried it.",
        lambda: network_bytes(endpoint.counts.now()),
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
    if (links := dispatcher.links) is not None:
        made.gauge(
            "swarm_links",
            "Open TLS links beside QUIC connections, by what carries them.",
            lambda: [({"path": kind.value}, n) for kind, n in links.n_by_kind().items()],
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


def network_bytes(counted: Amounts) -> list[Sample]:
    """Return what was sent and received, by direction, kind (data, or repair: copies of packets) and kind of path."""
    samples: list[Sample] = []
    for path, amount in counted.by_kind.items():
        samples.append(({"direction": "out", "kind": "data", "path": path.value}, amount.sent))
        samples.append(({"direction": "back", "kind": "data", "path": path.value}, amount.received))
        if path in (PathKind.DIRECT, PathKind.RELAY):  # TCP repairs itself, and counts that as data
            samples.append(({"direction": "out", "kind": "repair", "path": path.value}, amount.repair))
    return samples


def _buckets(histogram: Histogram) -> Buckets:
    return Buckets(bounds=histogram.bounds, counts=histogram.counts, total=histogram.total)
