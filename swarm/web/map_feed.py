"""What changed in a peer map since it was last told: small events for those who watch, within a budget of bytes. Pure.

An event holds absolute values, so one that is lost or applied twice does no harm:

    {"at": seconds, "top": {field: value}, "models": {model id: {field: value}}, "peers": {peer id: {field: value}}, "gone": [id],
     "gone_models": [id]}

What does not fit into the budget comes with the next event: first who came and went, then states, then round trips.
"""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

BUDGET_BYTES_S = 4_000  # an onlooker's phone is told no faster; of 5 KB/s with the framing
BURST_S = 3.0  # of the budget that may be saved up
# A round trip counts as changed when it moved by this share and this much: below, nobody sees it.
RTT_SHARE, RTT_MS = 0.15, 1.0
TOP_FIELDS = ("servable", "n_used", "tokens_per_s", "leaderboard")


class MapFeed:
    """The map as its watchers know it."""

    def __init__(self, first: Json, *, budget_bytes_s: float = BUDGET_BYTES_S) -> None:
        self._budget_bytes_s = budget_bytes_s
        self._room = budget_bytes_s * BURST_S
        self._top = {name: first.get(name) for name in TOP_FIELDS}
        self._models = {each["model_id"]: dict(each) for each in first["models"]}
        self._peers = {each["id"]: dict(each) for each in first["peers"]}

    def advance(self, now: Json, elapsed_s: float) -> Json | None:
        """Return the event that tells what changed, or None where nothing did.

        Args:
            elapsed_s: since the last call; earns the budget.
        """
        self._room = min(self._room + elapsed_s * self._budget_bytes_s, self._budget_bytes_s * BURST_S)
        event: Json = {"at": now["at"]}
        top = {name: now.get(name) for name in TOP_FIELDS if now.get(name) != self._top[name]}
        if top:
            event["top"] = top
            self._top |= top
        models = {}
        for each in now["models"]:
            known = self._models.setdefault(each["model_id"], {})
            if changed := {name: value for name, value in each.items() if known.get(name) != value}:
                models[each["model_id"]] = changed
                known |= changed
        if models:
            event["models"] = models
        gone_models = self._models.keys() - {each["model_id"] for each in now["models"]}
        for model in gone_models:
            del self._models[model]
        if gone_models:
            event["gone_models"] = sorted(gone_models)
        peers = {each["id"]: each for each in now["peers"]}
        gone = [peer for peer in self._peers if peer not in peers]
        for peer in gone:
            del self._peers[peer]
        if gone:
            event["gone"] = gone
        self._room -= len(_compact(event))
        if told := self._tell_peers(peers):
            event["peers"] = told
        return event if len(event) > 1 else None

    def _tell_peers(self, peers: dict[str, Json]) -> dict[str, Json]:
        changes = [
            (0 if "id" in changed else 1 if "state" in changed else 2, peer, changed)
            for peer, each in peers.items()
            if (changed := self._changed(self._peers.get(peer, {}), each))
        ]
        told: dict[str, Json] = {}
        for _, peer, changed in sorted(changes, key=lambda each: each[0]):
            size = len(_compact(changed)) + len(peer) + 4
            if size > self._room and told:
                break
            self._room -= size
            told[peer] = changed
            self._peers.setdefault(peer, {}).update(changed)
            if self._room <= 0:
                break
        return told

    @staticmethod
    def _changed(known: Json, now: Json) -> Json:
        changed = {name: value for name, value in now.items() if known.get(name, _NOTHING) != value}
        before, after = known.get("rtt_ms"), now.get("rtt_ms")
        if before is not None and after is not None and abs(after - before) < max(RTT_MS, RTT_SHARE * before):
            changed.pop("rtt_ms", None)
        return changed


_NOTHING = object()


def _compact(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"))
