"""The peer map as a registry node sees it: what is announced, for every model. Pure.

A registry meets no peer itself, so it knows no round trips; that a model is covered is what its peers say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from swarm.ids import ModelId, format_index_set, parse_index_set
from swarm.registry.names import shown_name
from swarm.registry.records import ExpertAnnouncement, ModelOffer

Json = dict[str, Any]

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

_DIRECT, _RELAY = "direct", "relay"


def map_of_records(
    records: Iterable[object], *, wall_now: float, join: str = "", leaderboard: Json | None = None
) -> Json:
    """Return the map of announced peers and models; other records are passed over.

    `leaderboard`: see `swarm.registry.leaderboard`; None: nobody's receipts count here.
    """
    holders: list[ExpertAnnouncement] = []
    offers: dict[ModelId, ModelOffer] = {}
    for record in records:
        if isinstance(record, ExpertAnnouncement):
            holders.append(record)
        elif isinstance(record, ModelOffer):
            offers.setdefault(record.model, record)
    models = [
        _model(model, offers.get(model), [each for each in holders if each.model == model])
        for model in sorted({record.model for record in holders} | set(offers))
    ]
    of_node: dict[Any, list[ExpertAnnouncement]] = {}
    for record in holders:
        of_node.setdefault(record.node, []).append(record)
    return {
        "at": round(wall_now),
        "source": "registry",
        "servable": bool(models) and all(model["servable"] for model in models),
        "models": models,
        "n_used": sum(any(not each.is_loading for each in mine) for mine in of_node.values()),
        "tokens_per_s": None,
        "place": None,
        "join": join,
        "leaderboard": leaderboard,
        "peers": [_peer(of_node[node]) for node in sorted(of_node)],
    }


def _model(model: ModelId, offer: ModelOffer | None, holders: list[ExpertAnnouncement]) -> Json:
    ready = [record for record in holders if not record.is_loading]
    n_expert = (
        offer.n_expert
        if offer is not None
        else 1 + max((max(ids) for each in ready for ids in each.experts.by_layer.values()), default=0)
    )
    layers = (
        sorted(parse_index_set(offer.moe_layers, "layers"))
        if offer is not None
        else sorted({layer for record in ready for layer in record.experts.by_layer})
    )
    counts = {layer: np.zeros(n_expert, np.int64) for layer in layers}
    for record in ready:
        for layer, experts in record.experts.by_layer.items():
            if layer in counts:
                counts[layer][[expert for expert in experts if expert < n_expert]] += 1
    missing = {
        str(layer): format_index_set(np.flatnonzero(row == 0).tolist())
        for layer, row in counts.items()
        if not row.all()
    }
    name = offer.model_name if offer is not None else holders[0].model_name
    return {
        "model": name if "@" in name else f"{name}@{str(model)[:8]}",
        "model_id": str(model),
        "servable": bool(counts) and not missing and offer is not None,
        "missing": missing,
        "replicas": {str(layer): digits(row) for layer, row in counts.items()},
    }


def _peer(records: list[ExpertAnnouncement]) -> Json:
    first = records[0]
    return {
        "id": str(first.node),
        "short": first.node.short,
        "name": shown_name(first.name),
        "place": list(first.place) if first.place is not None else None,
        "models": [str(record.model) for record in records],
        "state": "loading" if all(record.is_loading for record in records) else "announced",
        "state_since": None,
        "seen_since": None,
        "experts": [list(group) for record in records for group in record.experts.grouped()],
        "n_blocks": sum(len(record.experts) for record in records),
        "exact": first.exact_kernels,
        "path": _DIRECT if first.is_public or not first.vouchers else _RELAY,
        "rtt_ms": None,
    }


def digits(counts: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> str:
    """Return counts as one character each: 0 to 9, a for 10 to z for 35 and more."""
    return "".join(DIGITS[min(int(count), len(DIGITS) - 1)] for count in counts)
