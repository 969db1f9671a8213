"""A running backbone's state as `swarm serve` shows it on a terminal: two lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from swarm.backbone.assembly import RunningBackbone
from swarm.cli.live import Shown

RATE_S = 5.0  # tokens a second are of the last so many seconds, or since the last look if that is longer ago; guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """What is going on in a backbone.

    Attributes:
        n_active, n_waiting: requests that have a slot, and that wait for one.
        n_direct, n_relayed: connected peers, by their path; n_by_tls: of the direct ones, over a TLS link for dispatches.
        n_missing, n_experts: (layer, expert) pairs that nobody holds, of how many.
        n_audits, n_caught, n_disagreed: answers asked of others too; peers found to lie; audits that disagreed. None: no audits.
    """

    tokens_per_s: float
    n_tokens: int
    n_active: int
    n_waiting: int
    n_slots: int
    n_direct: int
    n_relayed: int
    n_by_tls: int
    n_missing: int
    n_experts: int
    n_audits: int | None = None
    n_caught: int = 0
    n_disagreed: int = 0


class TokenRate:
    """By how much a counter rises in a second, lately."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()

    def update(self, n_tokens: int, now: float) -> float:
        """Take a count in and return the rate."""
        self._counts.append((now, n_tokens))
        while len(self._counts) > 2 and self._counts[1][0] <= now - RATE_S:
            self._counts.popleft()
        then, n_then = self._counts[0]
        return (n_tokens - n_then) / (now - then) if now > then else 0.0


def shown(report: ServeReport) -> Shown:
    """Return what to show of a report."""
    n_peers = report.n_direct + report.n_relayed
    ways = [f"{n} by {way}" for n, way in ((report.n_by_tls, "TLS"), (report.n_relayed, "relay")) if n]
    by = f" ({', '.join(ways)})" if ways else ""
    if report.n_missing == 0:
        coverage = "every expert has a holder"
    else:
        share = 1 - report.n_missing / report.n_experts
        coverage = f"{share:.1%} of experts have a holder, {report.n_missing} have none"
    audits = "no audits"
    if report.n_audits is not None:
        audits = f"{report.n_audits:,} audits"
        if report.n_disagreed:
            audits += f", {report.n_disagreed} disagreed"
        if report.n_caught:
            audits += f", {report.n_caught} peer{'s' * (report.n_caught != 1)} caught"
    return Shown(
        lines=[
            f"{report.tokens_per_s:.1f} tokens/s, {report.n_tokens:,} in all; "
            f"{report.n_active} of {report.n_slots} slots busy, {report.n_waiting} waiting",
            f"{n_peers} peer{'s' * (n_peers != 1)}{by}; {coverage}; {audits}",
        ]
    )


def reporter(running: RunningBackbone, now: Callable[[], float] = time.monotonic) -> Callable[[], ServeReport]:
    """Return what reports of a backbone: each call looks anew."""
    rate = TokenRate()
    spec = running.manifest.spec

    def report() -> ServeReport:
        backbone = running.backbone
        paths = [path.is_relayed for path in running.pool.reports().values()]
        audits = running.dispatcher.audits.stats if running.dispatcher.audits is not None else None
        n_tokens = backbone.stats.n_completion_tokens
        return ServeReport(
            tokens_per_s=rate.update(n_tokens, now()),
            n_tokens=n_tokens,
            n_active=sum(len(lane.jobs) for lane in backbone.lanes),
            n_waiting=backbone.line.length,
            n_slots=backbone.n_slots,
            n_direct=paths.count(False),
            n_relayed=paths.count(True),
            n_by_tls=0 if (links := running.dispatcher.links) is None else links.n_open,
            n_missing=sum(map(len, running.holders.missing().values())),
            n_experts=len(spec.moe_layers) * spec.n_expert,
            n_audits=None if audits is None else audits.n_passed + audits.n_disagreed,
            n_caught=0 if audits is None else audits.n_caught,
            n_disagreed=0 if audits is None else audits.n_disagreed,
        )

    return report
