"""The peer map as a page without scripts, for text browsers and old machines."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

REFRESH_S = 10  # of the page
MAX_ROWS = 500  # of peers; the JSON has all
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; }
tr { border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
th { font-weight: 600; } td.n { font-variant-numeric: tabular-nums; }
.yes { color: light-dark(#17663a, #6fd39b); } .no { color: light-dark(#a3261c, #ff8f85); }
.scroll { overflow-x: auto; } code { font-size: .95em; } small { opacity: .7; }
"""


def page(shown: Json) -> str:
    """Return the map as a page without scripts; it loads itself anew every REFRESH_S."""
    peers = _table(
        ("peer", "name", "state", "since", "experts", "exact", "path", "round trip", "seen since"),
        [_peer_cells(peer, shown["at"]) for peer in shown["peers"][:MAX_ROWS]],
    )
    models = "".join(_model(model) for model in shown["models"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Swarm: peers</title>'
        f'<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="{REFRESH_S}">'
        f"<style>{STYLE}</style></head><body><h1>Swarm</h1>{models}"
        f"{_board(shown.get('leaderboard'))}"
        f"<h2>{shown['n_used']} of {len(shown['peers'])} peers in use</h2>{peers}"
        f'<p><small>As this {html.escape(shown["source"])} sees it. The same as <a href="/map.json">JSON</a>.</small></p>'
        "</body></html>"
    )


def _board(board: Json | None) -> str:
    if not board or not board["rows"]:
        return ""
    rows = [
        (str(place), row["name"], row["short"], f"{row['points']:,}", f"{row['rows']:,}")
        for place, row in enumerate(board["rows"], 1)
    ]
    by = html.escape(", ".join(node[:8] for node in board["counted_by"]))
    return (
        f"<h2>Contributions of the last {board['days']} days</h2>"
        f"{_table(('place', 'name', 'peer', 'points', 'rows'), rows)}<p><small>Counted by {by}.</small></p>"
    )


def _model(model: Json) -> str:
    if model["servable"]:
        verdict = '<p class="yes"><b>Can be served</b>: every expert of every layer has somebody to compute it.</p>'
    else:
        lacks = "; ".join(f"layer {layer}: {experts}" for layer, experts in list(model["missing"].items())[:8])
        more = " ..." if len(model["missing"]) > 8 else ""
        verdict = f'<p class="no"><b>Cannot be served now</b>: nobody holds {html.escape(lacks)}{more}</p>'
    rows = [
        (layer, f"{sum(c != '0' for c in held)} of {len(held)}", str(sum(c not in "01" for c in held)), min(held))
        for layer, held in model["replicas"].items()
    ]
    coverage = _table(("layer", "held", "on two or more", "fewest holders"), rows)
    return f"<h2>{html.escape(model['model'])}</h2>{verdict}{coverage}"


def _peer_cells(peer: Json, at: int) -> tuple[str, ...]:
    experts = "; ".join(f"{ids} of layers {layers}" for layers, ids in peer["experts"][:3])
    if len(peer["experts"]) > 3:
        experts = f"{peer['n_blocks']} blocks, other ones in each layer"
    return (
        peer["short"],
        peer["name"],
        peer["state"],
        _since(peer["state_since"], at),
        experts,
        "yes" if peer["exact"] else "",
        peer["path"] or "",
        "" if peer["rtt_ms"] is None else f"{peer['rtt_ms']} ms",
        _since(peer["seen_since"], at),
    )


def _since(moment: int | None, now: int) -> str:
    return "" if moment is None else _ago(now - moment)  # a registry does not know


def _ago(seconds: int) -> str:
    """Return a time span for people: `12 s`, `5 min`, `3 h`, `2 d`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{max(0, seconds)} s"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f'<td class="n">{html.escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
