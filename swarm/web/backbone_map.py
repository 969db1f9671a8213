"""The peer map: who holds what, what is covered, what can be served. As JSON (`/map.json`) and as a bare page (`/map`).

It says what this backbone would do with a request that came now, by what it requires of a request itself. Peers are shown by
their ids; addresses of volunteers are shown to nobody.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from aiohttp import web

from swarm.backbone.assembly import RunningBackbone
from swarm.dispatch.peer_states import PeerState, PeerView
from swarm.ids import NodeId, format_index_set

REFRESH_S = 10  # of the page
USED = (PeerState.IN_USE, PeerState.ON_TRIAL)
# Nothing is loaded from anywhere, and no script runs, whatever a name may hold.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
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

Json = dict[str, Any]


def add_map(app: web.Application, make_map: Callable[[], Json]) -> None:
    """Serve the map that `make_map` returns at each request."""

    async def as_json(_: web.Request) -> web.Response:
        return web.Response(body=json.dumps(make_map()).encode(), content_type="application/json", headers=HEADERS)

    async def as_page(_: web.Request) -> web.Response:
        return web.Response(text=page(make_map()), content_type="text/html", headers=HEADERS)

    app.router.add_get("/map.json", as_json)
    app.router.add_get("/map", as_page)


def map_of(running: RunningBackbone) -> Json:
    """Return the map of a running backbone."""
    holders = running.holders
    peers = holders.peers()  # first: what died since the last look is found out here
    return build_map(
        model_name=running.backbone.model_name,
        model_id=str(running.manifest.model_id),
        layers=holders.placement.layers,
        n_holders=holders.placement.holders.sum(axis=0),
        missing=holders.missing(),
        peers=peers,
        rtt_s=holders.rtt_s,
        now=holders.now(),
        wall_now=time.time(),
    )


def build_map(
    *,
    model_name: str,
    model_id: str,
    layers: Sequence[int],
    n_holders: np.ndarray[Any, np.dtype[np.int64]],
    missing: dict[int, tuple[int, ...]],
    peers: Sequence[PeerView],
    rtt_s: Callable[[NodeId], float | None],
    now: float,
    wall_now: float,
) -> Json:
    """Return the map as JSON values.

    Args:
        n_holders: of each expert, [L, E], L in the order of `layers`.
        missing: layer -> experts that nobody can compute.
        now, wall_now: the same moment, by the clock of `peers` and in seconds since 1970.
    """

    def wall(at: float) -> int:
        return round(wall_now - (now - at))

    return {
        "at": round(wall_now),
        "model": model_name,
        "model_id": model_id,
        "servable": not missing,
        "missing": {str(layer): format_index_set(experts) for layer, experts in missing.items()},
        "coverage": [
            {
                "layer": layer,
                "n_expert": len(row),
                "n_held": int((row > 0).sum()),
                "n_replicated": int((row > 1).sum()),
                "fewest_holders": int(row.min()),
            }
            for layer, row in zip(layers, n_holders, strict=True)
        ],
        "n_used": sum(view.state in USED for view in peers),
        "peers": [
            {
                "id": str(view.record.node),
                "short": view.record.node.short,
                "state": view.state.value,
                "state_since": wall(view.state_since),
                "seen_since": wall(view.seen_since),
                "experts": [list(group) for group in view.record.experts.grouped()],
                "n_blocks": len(view.record.experts),
                "exact": view.record.exact_kernels,
                "path": "direct" if view.state in USED else None,  # the only one there is yet
                "rtt_ms": None if (rtt := rtt_s(view.record.node)) is None else round(rtt * 1000, 2),
            }
            for view in peers
        ],
    }


def page(shown: Json) -> str:
    """Return the map as a page without scripts; it loads itself anew every REFRESH_S."""
    title = html.escape(shown["model"])
    if shown["servable"]:
        verdict = '<p class="yes"><b>Can be served</b>: every expert of every layer has somebody to compute it.</p>'
    else:
        lacks = "; ".join(f"layer {layer}: {experts}" for layer, experts in list(shown["missing"].items())[:8])
        more = " ..." if len(shown["missing"]) > 8 else ""
        verdict = f'<p class="no"><b>Cannot be served now</b>: nobody holds {html.escape(lacks)}{more}</p>'
    peers = _table(
        ("peer", "state", "since", "experts", "exact", "path", "round trip", "seen since"),
        [_peer_cells(peer, shown["at"]) for peer in shown["peers"]],
    )
    coverage = _table(
        ("layer", "held", "on two or more", "fewest holders"),
        [
            (
                str(each["layer"]),
                f"{each['n_held']} of {each['n_expert']}",
                str(each["n_replicated"]),
                str(each["fewest_holders"]),
            )
            for each in shown["coverage"]
        ],
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: peers</title>'
        f'<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="{REFRESH_S}">'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{verdict}"
        f"<h2>{shown['n_used']} of {len(shown['peers'])} peers in use</h2>{peers}<h2>Coverage</h2>{coverage}"
        f'<p><small>As this backbone sees it. The same as <a href="map.json">JSON</a>.</small></p></body></html>'
    )


def _peer_cells(peer: Json, at: int) -> tuple[str, ...]:
    experts = "; ".join(f"{ids} of layers {layers}" for layers, ids in peer["experts"][:3])
    if len(peer["experts"]) > 3:
        experts = f"{peer['n_blocks']} blocks, other ones in each layer"
    return (
        peer["short"],
        peer["state"],
        _ago(at - peer["state_since"]),
        experts,
        "yes" if peer["exact"] else "",
        peer["path"] or "",
        "" if peer["rtt_ms"] is None else f"{peer['rtt_ms']} ms",
        _ago(at - peer["seen_since"]),
    )


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
