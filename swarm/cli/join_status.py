"""A running peer's state as `swarm join` shows it: a few lines on a terminal, one in the log, fields for JSON. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass

from rich.filesize import decimal

from swarm.cli.live import Shown
from swarm.peer_report import PeerReport, Scarcity

RATE_S = 5.0  # rates are of the last so many seconds, or since the last look if that is longer ago; guessed
MAX_NAMED = 4  # backbones that are shown by themselves
REACHES = {
    "public": "others reach you directly",
    "hole-punchable": "others reach you through a relay at first, then directly",
    "relayed": "others reach you through a relay",
    "unknown": "too few others were there to try how they reach you",
}
WHYS = {  # by `swarm.wire.messages.Mapping`, small letters
    "none": "there is no NAT",
    "same": "your NAT keeps one port for all destinations, so holes can be punched",
    "varying": "your NAT uses another port for each destination",
    "blocked": "your network lets no UDP out",
}


@dataclass(frozen=True, slots=True)
class _Count:
    at: float
    n_rows: int
    bytes_sent: int
    bytes_received: int


class Rates:
    """What counters rise by in a second, lately."""

    def __init__(self) -> None:
        self._counts: deque[_Count] = deque()

    def update(self, report: PeerReport) -> tuple[float, float, float]:
        """Take a report in; return rows, bytes sent and bytes received a second."""
        now = _Count(report.uptime_s, report.n_rows, report.bytes_sent, report.bytes_received)
        self._counts.append(now)
        while len(self._counts) > 2 and self._counts[1].at <= now.at - RATE_S:
            self._counts.popleft()
        then = self._counts[0]
        seconds = now.at - then.at
        if seconds <= 0:
            return 0.0, 0.0, 0.0
        return (
            (now.n_rows - then.n_rows) / seconds,
            (now.bytes_sent - then.bytes_sent) / seconds,
            (now.bytes_received - then.bytes_received) / seconds,
        )


def shown(report: PeerReport, rates: tuple[float, float, float]) -> Shown:
    """Return what to show of a report; `rates` as `Rates.update` returns them."""
    rows_s, up_s, down_s = rates
    n_relayed = sum(each.is_relayed for each in report.backbones)
    relayed = f", {n_relayed} by relay" if n_relayed else ""
    why = f" ({report.why})" if report.why else ""
    n_backbones = len(report.backbones)
    why_reach = f": {WHYS[report.why_reach]}" if report.why_reach in WHYS and report.reach != "unknown" else ""
    first = (
        f"{report.standing}{why} for {duration(report.uptime_s)}: {report.n_rows:,} rows ({rows_s:.0f}/s), "
        f"{report.n_in_line} in line, {n_backbones} backbone{'s' * (n_backbones != 1)}{relayed}"
    )
    traffic = f"{decimal(round(up_s))}/s up, {decimal(round(down_s))}/s down"
    lines = [
        first,
        f"traffic   {traffic}; {decimal(report.bytes_sent)} and {decimal(report.bytes_received)} in all",
        f"path      {REACHES.get(report.reach, report.reach)}{why_reach}",
    ]
    if report.backbones:
        lines.append(f"backbones {_backbones(report)}")
    if report.scarcity is not None:
        lines.append(f"scarcity  {scarcity_text(report.scarcity)}")
    if report.points is not None:
        lines.append(f"today     {report.points:,.1f} points, signed by backbones")
    state = {
        "standing": report.standing.value,
        "why": report.why,
        "reach": report.reach,
        "why_reach": report.why_reach,
        "backbones": [
            {"node": each.node, "path": each.path, "is_relayed": each.is_relayed} for each in report.backbones
        ],
        "scarcity": None if report.scarcity is None else asdict(report.scarcity),
    }
    figures = {
        "uptime_s": round(report.uptime_s, 1),
        "n_rows": report.n_rows,
        "n_pairs": report.n_pairs,
        "n_in_line": report.n_in_line,
        "bytes_sent": report.bytes_sent,
        "bytes_received": report.bytes_received,
        "bytes_by_path": {kind: {"sent": sent, "received": got} for kind, (sent, got) in report.bytes_by_path.items()},
        "rows_per_s": round(rows_s, 1),
        "up_bytes_per_s": round(up_s),
        "down_bytes_per_s": round(down_s),
        "rtt_ms": {each.node: round(each.rtt_s * 1e3, 2) for each in report.backbones if each.rtt_s is not None},
        "points_today": report.points,
    }
    return Shown(lines=lines, line=f"{first}, {traffic}", state=state, figures=figures)


def scarcity_text(scarcity: Scarcity) -> str:
    """Return how scarce a peer's experts are, for people."""
    least, most = scarcity.n_others_least, scarcity.n_others_most
    if scarcity.n_alone == scarcity.n_blocks:
        return "nobody else holds what you hold"
    if scarcity.n_alone:
        return f"nobody else holds {scarcity.n_alone} of your {scarcity.n_blocks} blocks, {most} others the most common one"
    number = str(least) if least == most else f"{least} to {most}"
    return f"each of your blocks is held by {number} other{'s' * (number != '1')}"


def duration(seconds: float) -> str:
    """Return a time as people say it: `12 s`, `3 min`, `2 h 05 min`, `4 d 3 h`."""
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{int(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _backbones(report: PeerReport) -> str:
    named = []
    for each in report.backbones[:MAX_NAMED]:
        rtt = "" if each.rtt_s is None else f" {each.rtt_s * 1e3:.0f} ms"
        named.append(f"{each.node[:8]} {'relay' if each.is_relayed else 'direct'}{rtt}")
    if len(report.backbones) > MAX_NAMED:
        named.append(f"{len(report.backbones) - MAX_NAMED} more")
    return ", ".join(named)
